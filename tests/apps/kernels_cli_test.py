"""`ullage kernels` and ULLAGE_FORCE_KERNEL, as a shell sees them: kernels_cli_test.py PROGRAM."""

import json
import os
import subprocess
import sys
import unittest

PROGRAM = sys.argv[1]
CASE = {"logits": [[1, 2, 3]], "labels": [0], "losses": [{"kind": "cross_entropy"}]}


def run(*arguments, kernel=None, stdin=None):
    environment = dict(os.environ)
    environment.pop("ULLAGE_FORCE_KERNEL", None)
    if kernel is not None:
        environment["ULLAGE_FORCE_KERNEL"] = kernel
    return subprocess.run(
        [PROGRAM, *arguments], input=stdin, env=environment, capture_output=True, text=True, timeout=60
    )


class Kernels(unittest.TestCase):
    def test_the_table(self):
        table = json.loads(run("kernels", "--json").stdout)
        self.assertTrue(table)
        for kernel in table:
            self.assertEqual(set(kernel), {"name", "operation", "supported", "required", "missing"})
        text = run("kernels").stdout
        for kernel in table:
            self.assertIn(kernel["name"], text)

    def test_each_cpu_kernel_can_be_pinned_and_gives_the_same_bits(self):
        table = json.loads(run("kernels", "--json").stdout)
        names = [k["name"] for k in table if k["name"].startswith("head_cpu_") and not k["missing"]]
        self.assertTrue(names)
        answers = {run("head-loss", "-", kernel=name, stdin=json.dumps(CASE)).stdout for name in names}
        self.assertEqual(len(answers), 1)

    def test_an_unknown_kernel_is_refused_with_the_names(self):
        done = run("head-loss", "-", kernel="head_magic", stdin=json.dumps(CASE))
        self.assertIn("698", done.stdout + done.stderr)
        self.assertIn("head_magic", done.stdout + done.stderr)
        self.assertIn("head_cpu_", done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

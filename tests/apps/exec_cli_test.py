"""`ullage exec` and `ullage functions`, as a shell sees them: exec_cli_test.py PROGRAM SOURCE_DIR."""

import json
import math
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

PROGRAM, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2])


def ullage(*args, stdin=""):
    return subprocess.run([PROGRAM, *args], input=stdin, capture_output=True, text=True, timeout=60)


class Exec(unittest.TestCase):
    def result(self, *args, stdin=""):
        done = ullage("exec", *args, stdin=stdin)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        answer = json.loads(done.stdout)
        self.assertEqual(list(answer), ["module", "function", "result"])
        return answer["result"]

    def error(self, *args, stdin=""):
        done = ullage("exec", *args, stdin=stdin)
        self.assertEqual(done.returncode, 2, done.stdout)
        return json.loads(done.stdout)["error"]

    def test_prints_the_call_and_its_result(self):
        done = ullage("exec", "residentk.contract", "residentk_dispatch_budget", "[28]")
        self.assertEqual(
            done.stdout,
            '{"module":"residentk.contract","function":"residentk_dispatch_budget","result":171}\n',
        )

    def test_a_refusal_is_a_result(self):
        self.assertEqual(self.result("lossk.contract", "loss_chunk_check", "[2048, 151936]"), 587)

    def test_uniform_logits_from_standard_input(self):
        args = json.dumps([[0.25] * 54, [0, 3, 6, 0, 3, 6], 6, 9])
        for dash in (["-"], ["--args-file", "-"]):
            out = self.result("lossk.cross_entropy", "ce_from_logits_flat", *dash, stdin=args)
            self.assertEqual(out["mean_loss"], math.log(9))

    def test_golden_values_from_a_file(self):
        cases = json.loads((SOURCE / "tests/data/fused_linear_ce.json").read_text())["cases"]
        for case in cases:
            shape = [case[key] for key in ("hidden", "weight", "targets", "n_tok", "d_model", "vocab")]
            with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                json.dump(shape, file)
                file.flush()
                out = self.result("lossk.cross_entropy", "fused_linear_ce_bwd_flat", "--args-file", file.name)
            self.assertAlmostEqual(out["mean_loss"], case["mean_loss"], delta=1e-12 * max(1, case["mean_loss"]))
            for ours, theirs in zip(out["d_weight"], case["d_weight"], strict=True):
                self.assertAlmostEqual(ours, theirs, delta=1e-12)

    def test_no_arguments_need_no_list(self):
        self.assertIsInstance(self.result("residentk.probe", "resident_gpu_kernels_compiled"), bool)

    def test_errors_exit_2_and_name_what_was_expected(self):
        self.assertEqual(self.error("nope", "f", "[]")["kind"], "unknown_module")
        self.assertEqual(self.error("lossk.contract", "f", "[]")["kind"], "unknown_function")
        self.assertEqual(self.error("lossk.contract", "loss_dims_check", "[1]")["kind"], "arity")
        self.assertEqual(self.error("lossk.contract", "loss_dims_check", "[1,1,true]")["kind"], "type")
        self.assertEqual(self.error("lossk.contract", "loss_dims_check", "[1,1")["kind"], "json")
        self.assertEqual(self.error("lossk.contract", "loss_dims_check", "--args-file", "/nonexistent")["kind"], "args_file")
        self.assertEqual(self.error("lossk.contract", "loss_dims_check", "--args-file", "/")["kind"], "args_file")

    def test_a_command_line_that_is_no_call_exits_2(self):
        for args in ([], ["exec"], ["exec", "lossk.contract"], ["nope"], ["exec", "a", "b", "[]", "more"]):
            done = ullage(*args)
            self.assertEqual((done.returncode, done.stdout), (2, ""), args)
            self.assertNotEqual(done.stderr, "")


class Functions(unittest.TestCase):
    def test_the_table_as_json_names_all_functions(self):
        table = json.loads(ullage("functions", "--json").stdout)
        names = {f["function"] for module in table["modules"] for f in module["functions"]}
        self.assertEqual(len(names), 29)
        listing = ullage("functions").stdout
        for name in names:
            self.assertIn(name + "(", listing)

    def test_the_documentation_is_what_the_program_writes(self):
        written = ullage("functions", "--markdown").stdout
        self.assertEqual(
            (SOURCE / "docs/functions.md").read_text(),
            written,
            "out of date: run `build/bin/ullage functions --markdown > docs/functions.md`",
        )

    def test_the_documents_show_what_the_program_prints(self):
        for name in ("functions.md", "residentk.md"):
            blocks = re.findall(r"```console\n(.*?)```", (SOURCE / "docs" / name).read_text(), re.DOTALL)
            self.assertTrue(blocks, name)
            for command, shown in (c.split("\n", 1) for b in blocks for c in b.split("$ ullage ")[1:]):
                self.assertEqual(ullage(*shlex.split(command)).stdout, shown)

    def test_version_and_help_exit_0(self):
        self.assertRegex(ullage("--version").stdout, r"^ullage \d+\.\d+\.\d+\n$")
        self.assertIn("exec", ullage("--help").stdout)
        self.assertEqual(ullage("exec", "--help").returncode, 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

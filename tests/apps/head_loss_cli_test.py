"""`ullage head-loss`, as a shell sees it: head_loss_cli_test.py PROGRAM SOURCE_DIR."""

import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2])


def head_loss(case, *options):
    done = subprocess.run(
        [PROGRAM, "head-loss", "-", *options], input=json.dumps(case), capture_output=True, text=True, timeout=60
    )
    assert done.stderr == "", done.stderr
    return done.returncode, json.loads(done.stdout)


FROM_LOGITS = {
    "logits": [[1, 2, 3], [3, 2, 1]],
    "labels": [0, -100],
    "losses": [{"kind": "cross_entropy"}, {"kind": "z_loss", "weight": 0.01}],
}
FROM_HIDDEN = {
    "hidden": [[1, 0], [0, 1], [1, 1], [2, -1]],
    "weight": [[1, 0], [0, 1], [-1, 2]],
    "labels": [0, 1, -100, 2],
    "upstream_rows": [2, -1, 5, 0.5],
    "losses": [{"name": "ce", "kind": "cross_entropy", "divisor": 1}],
}


class HeadLoss(unittest.TestCase):
    def test_from_logits(self):
        code, out = head_loss(FROM_LOGITS)
        self.assertEqual((code, out["status"], out["n_valid"]), (0, 680, 1))
        self.assertAlmostEqual(out["losses"]["cross_entropy"], 2.407606, places=6)
        self.assertAlmostEqual(out["total"], 2.523724, places=6)
        self.assertEqual(out["grad_logits"][1], [0, 0, 0])

    def test_from_hidden_at_every_chunk_and_implementation(self):
        code, whole = head_loss(FROM_HIDDEN)
        self.assertEqual(code, 0)
        for got, right in zip(whole["d_weight"], [[0.280812, -0.565196], [0.536771, 0.731614], [-0.817583, -0.166419]]):
            for a, b in zip(got, right):
                self.assertAlmostEqual(a, b, places=6)
        for chunk in "1", "2", "3", "4":
            for implementation in "auto", "fused", "per_term":
                options = ("--chunk", chunk, "--implementation", implementation)
                self.assertEqual(head_loss(FROM_HIDDEN, *options), (0, whole))
        reference = head_loss(FROM_HIDDEN, "--reference")[1]
        self.assertAlmostEqual(reference["total"], whole["total"], places=12)

    def test_types_round_inputs_and_gradients(self):
        for dtype, ulp in ("f32", 2**-24), ("bf16", 2**-8), ("f16", 2**-11):
            code, out = head_loss(FROM_LOGITS, "--dtype", dtype)
            self.assertEqual(code, 0)
            right = -0.903834
            self.assertLess(abs(out["grad_logits"][0][0] - right), ulp + 1e-6, dtype)

    def test_rows_and_metrics_on_request(self):
        case = dict(
            FROM_LOGITS,
            losses=[{"kind": "grpo"}],
            advantages=[1, 0],
            old_log_probs=[-2, 0],
        )
        self.assertNotIn("lse", head_loss(case)[1])
        out = head_loss(case, "--rows", "--metrics")[1]
        self.assertAlmostEqual(out["lse"][0], 3.407606, places=6)
        self.assertEqual((out["argmax"], out["correct"]), ([2, -1], [0, 0]))
        self.assertEqual(out["metrics"]["grpo"]["n_tokens"], 1)
        self.assertAlmostEqual(out["metrics"]["grpo"]["ratio"], math.exp(-0.407606), places=6)

    def test_a_refused_case_stays_in_its_place(self):
        bad = dict(FROM_LOGITS, labels=[3, 0])
        code, out = head_loss({"cases": [FROM_LOGITS, bad, FROM_HIDDEN]})
        self.assertEqual(code, 0)
        self.assertEqual([case["status"] for case in out["cases"]], [680, 586, 680])
        self.assertIn("labels[0] is 3", out["cases"][1]["message"])

    def test_what_is_no_document_is_an_error(self):
        for text in "", "[1]", "{", '{"cases": 1}':
            with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                file.write(text)
                file.flush()
                done = subprocess.run([PROGRAM, "head-loss", file.name], capture_output=True, text=True)
            self.assertEqual((done.returncode, json.loads(done.stdout)["status"]), (2, 699), text)
        for path in "/nonexistent", "/":
            done = subprocess.run([PROGRAM, "head-loss", path], capture_output=True, text=True)
            self.assertEqual((done.returncode, json.loads(done.stdout)["status"]), (2, 699))
        self.assertEqual(head_loss(FROM_LOGITS, "--dtype", "f8")[0], 2)
        self.assertEqual(head_loss(FROM_LOGITS, "--implementation", "fussed")[0], 2)

    def test_golden_cases(self):
        path = SOURCE / "tests/data/monolithic_losses.json"
        done = subprocess.run([PROGRAM, "head-loss", path], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0)
        for case, out in zip(json.loads(path.read_text())["cases"], json.loads(done.stdout)["cases"], strict=True):
            right = case["expected"]["total"]
            self.assertLessEqual(abs(out["total"] - right), 1e-11 * abs(right))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

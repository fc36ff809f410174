"""`ullage plan`, `loss` and `probe`, as a shell sees them: model_verbs_test.py PROGRAM SOURCE_DIR."""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM, SOURCE = sys.argv[1], pathlib.Path(sys.argv[2])
MODELS = SOURCE / "tests/data/models"
TEXT = SOURCE / "examples/text/pride_and_prejudice.txt"


def ullage(*args):
    return subprocess.run([PROGRAM, *map(str, args)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)


def answer(*args):
    done = ullage(*args, "--json")
    assert (done.returncode, done.stderr) == (0, ""), (done.stdout, done.stderr)
    return json.loads(done.stdout)


def refusal(*args):
    """The code, the same from both faces of the verb."""
    done, plain = ullage(*args, "--json"), ullage(*args)
    assert (done.returncode, plain.returncode, plain.stdout) == (2, 2, ""), (done.stdout, plain.stdout)
    error = json.loads(done.stdout)["error"]
    assert plain.stderr == f"ullage: {error['code']} {error['name']}: {error['message']}\n", plain.stderr
    return error["code"]


class Plan(unittest.TestCase):
    QWEN3 = dict(
        model_type="qwen3", num_hidden_layers=28, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, intermediate_size=3072, vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_theta=1000000, tie_word_embeddings=True,
    )

    def config(self, **changes):
        folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        (folder / "config.json").write_text(json.dumps(self.QWEN3 | changes))
        return folder / "config.json"

    def test_a_configuration_alone(self):
        plan = answer("plan", self.config(), "--context", 4096, "--train-tokens", 2048, "--memory", "140.4GiB")
        self.assertEqual(plan["parameters"], 596049920)
        self.assertEqual(plan["weights"]["resident_bytes"], 2 * 596049920)
        self.assertTrue(plan["weights"]["assumed"])
        self.assertEqual((plan["kv_cache"]["bucket"], plan["kv_cache"]["bytes"]), (4096, 448 << 20))
        self.assertEqual((plan["token"]["dispatches"], plan["token"]["dispatches_deep"]), (171, 199))
        self.assertEqual((plan["fits"], plan["largest_context"]), (True, 65536))
        head = plan["loss_head"]
        self.assertEqual((head["chunk"], head["n_chunks"]), (256, 8))
        self.assertEqual(head["materialized_bytes"], 8 * head["chunk_bytes"])

    def test_kv_types_and_bucket_waste(self):
        for kv, total in ("f16", 4697620480), ("q8_0", 2495610880), ("q4_0", 1321205760):
            cache = answer("plan", self.config(), "--context", 40960, "--kv", kv)["kv_cache"]
            self.assertEqual(cache["bytes"] - cache["waste_bytes"], total)
            self.assertEqual(cache["bucket"], 65536)

    def test_prefill_logits(self):
        head = answer("plan", self.config(), "--train-tokens", 512)["loss_head"]
        self.assertEqual(head["materialized_bytes"], 311164928)
        self.assertEqual(answer("plan", self.config(), "--train-tokens", 1)["loss_head"]["chunk_bytes"], 607744)

    def test_head_geometries_of_other_engines_are_sized_and_refused(self):
        plan = answer("plan", self.config(head_dim=96))
        self.assertEqual(plan["session"]["status"], 603)
        self.assertIn("d_head = 96", plan["session"]["reason"])
        self.assertEqual(plan["kv_cache"]["position_bytes"], 28 * 2 * 8 * 96 * 2)

    def test_stored_weights_count(self):
        plan = answer("plan", MODELS / "llama-tiny-untied-sharded")
        self.assertEqual(plan["parameters"], 317856)
        self.assertEqual(plan["weights"]["resident_bytes"], 4 * 317856)
        self.assertFalse(plan["weights"]["assumed"])
        bf16 = answer("plan", MODELS / "llama3-rope-tiny-bf16")
        self.assertEqual((bf16["weights"]["type"], bf16["weights"]["resident_bytes"]), ("BF16", 2 * 86336))

    def test_refusals(self):
        self.assertEqual(refusal("plan", "no/such/model"), 641)
        self.assertEqual(refusal("plan", self.config(), "--context", 65537), 602)
        self.assertEqual(refusal("plan", self.config(), "--context", 0), 601)
        self.assertEqual(refusal("plan", self.config(), "--budget", "607743"), 587)
        self.assertEqual(refusal("plan", self.config(), "--budget", "much"), 587)
        self.assertEqual(refusal("plan", self.config(), "--memory", "-1GiB"), 602)
        self.assertEqual(refusal("plan", self.config(model_type="gemma3")), 658)
        self.assertEqual(refusal("plan", self.config(head_dim=0)), 656)
        self.assertEqual(ullage("plan", self.config(), "--kv", "q3").returncode, 2)

    def test_text_is_plain_and_says_the_same(self):
        done = ullage("plan", self.config(), "--context", 513)
        self.assertIn("596,049,920", done.stdout)
        self.assertIn("bucket 1,024", done.stdout)
        self.assertNotIn("\033", done.stdout + done.stderr)


class Loss(unittest.TestCase):
    MODEL = MODELS / "qwen3-tiny"

    def test_the_same_bits_whatever_the_chunk_or_the_threads(self):
        losses = {
            answer("loss", self.MODEL, "--text", TEXT, "--chunk", chunk, "--threads", threads)["result"]["mean_loss"]
            for chunk, threads in ((1000, 2), (64, 1), (100000, 3))
        }
        self.assertEqual(len(losses), 1)

    def test_the_plan_and_the_memory(self):
        out = answer("loss", self.MODEL, "--text", TEXT, "--window", 100, "--chunk", 128, "--verify")
        plan, result = out["plan"], out["result"]
        n = plan["n_tokens"]
        self.assertEqual(plan["n_scored"], n - plan["n_windows"])
        self.assertEqual(result["n_scored"], plan["n_scored"])
        self.assertEqual(plan["n_chunks"], -(-plan["n_scored"] // 128))
        self.assertEqual(plan["peak_logit_bytes"], 128 * 512 * 4)
        self.assertEqual(plan["materialized_logit_bytes"], plan["n_scored"] * 512 * 4)
        self.assertEqual(plan["allocated_bytes"], sum(b["bytes"] for b in plan["bookings"]))
        self.assertEqual((result["verify_chunk"], result["verify_mismatches"]), (65, 0))
        self.assertGreater(out["measured"]["peak_resident_bytes"], plan["peak_logit_bytes"])

    def test_a_budget_gives_the_chunk(self):
        plan = answer("loss", self.MODEL, "--text", TEXT, "--budget", "300kB")["plan"]
        self.assertEqual(plan["chunk"], 128)  # 146 rows of 2 KiB fit; the power of two below

    def test_losses_of_a_configuration(self):
        losses = {"losses": [{"kind": "cross_entropy"}, {"kind": "z_loss", "weight": 0.5}]}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(losses, file)
            file.flush()
            result = answer("loss", self.MODEL, "--text", TEXT, "--losses", file.name)["result"]
            terms = result["losses"]
            self.assertAlmostEqual(terms["cross_entropy"], result["mean_loss"], places=12)
            self.assertAlmostEqual(result["total"], terms["cross_entropy"] + 0.5 * terms["z_loss"], places=12)
            done = ullage("loss", self.MODEL, "--text", TEXT, "--losses", file.name)
            self.assertIn("z_loss", done.stdout)
            file.write("{")
            file.flush()
            self.assertEqual(ullage("loss", self.MODEL, "--text", TEXT, "--losses", file.name).returncode, 2)

    def test_an_empty_text(self):
        out = answer("loss", self.MODEL, "--text", "/dev/null")
        self.assertEqual((out["result"]["mean_loss"], out["result"]["n_scored"]), (0, 0))

    def test_quiet_in_pipes(self):
        done = ullage("loss", self.MODEL, "--text", TEXT, "--verify")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertNotIn("\r", done.stdout)
        self.assertLess(done.stdout.index("plan"), done.stdout.index("measured"))

    def test_refusals(self):
        self.assertEqual(refusal("loss", self.MODEL, "--text", "no/such/text"), 641)
        self.assertEqual(refusal("loss", self.MODEL, "--text", MODELS), 641)
        self.assertEqual(refusal("loss", MODELS / "qwen2-tiny-bias", "--text", TEXT), 659)
        self.assertEqual(refusal("loss", self.MODEL, "--text", TEXT, "--chunk", 0), 581)
        self.assertEqual(refusal("loss", self.MODEL, "--text", TEXT, "--chunk", (1 << 27) // 512 + 1), 587)
        self.assertEqual(refusal("loss", self.MODEL, "--text", TEXT, "--budget", 2047), 587)
        self.assertEqual(refusal("loss", self.MODEL, "--text", TEXT, "--window", 1), 581)
        self.assertEqual(ullage("loss", self.MODEL, "--text", TEXT, "--chunk", 8, "--budget", "1MiB").returncode, 2)


class Probe(unittest.TestCase):
    def test_says_what_is_here(self):
        out = answer("probe")
        self.assertGreaterEqual(out["cpu"]["threads"], 1)
        self.assertGreater(out["memory_bytes"], 1 << 28)
        self.assertGreaterEqual(out["memory_bytes"], out["available_bytes"])
        self.assertIn("SCALAR", out["instruction_sets"])
        self.assertIn("memory", ullage("probe").stdout)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])

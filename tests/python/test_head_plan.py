"""Plans and runs of the losses at the head over NumPy and DLPack arrays."""

import json

import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ullage

CE = [{"kind": "cross_entropy"}]


def softmax_row(z):
    shifted = z - z.max()
    return shifted - numpy.log(numpy.exp(shifted).sum())


def test_plan_prints_and_serialises():
    plan = ullage.plan_head(CE, n_tok=2048, d_model=4096, vocab=151936, gradients=["d_hidden", "d_weight"])
    assert sum(plan.bookings.values()) == plan.workspace_bytes <= 256 << 20
    assert plan.n_chunks == -(-2048 // plan.chunk)
    assert "vocab 151,936" in str(plan) and "logit chunk" in str(plan)
    again = json.loads(plan.to_json())
    assert again["workspace_bytes"] == plan.workspace_bytes and again["materialized_bytes"] == 2048 * 151936 * 4


@pytest.mark.parametrize(
    "arguments, code, named",
    [
        (dict(n_tok=1, vocab=0), 581, "vocab"),
        (dict(n_tok=1, vocab=3, dtype="f8"), 681, "f8"),
        (dict(n_tok=64, vocab=1 << 20, d_model=8, chunk=64, budget_bytes=1 << 20), 587, "allowed"),
        (dict(n_tok=1, vocab=3, gradients=["d_weight"]), 695, "d_weight"),
        (dict(n_tok=1, vocab=3, device="tpu"), 681, "tpu"),
    ],
)
def test_refusals_carry_code_and_name(arguments, code, named):
    with pytest.raises(ullage.UllageError, match=named) as caught:
        ullage.plan_head(CE, **arguments)
    assert caught.value.code == code and caught.value.name == ullage.Runtime().status_name(code)


def test_a_plan_for_cuda_needs_no_device():
    hidden = ullage.plan_head(
        CE, n_tok=8192, d_model=4096, vocab=128256, dtype="bf16", gradients=["d_hidden", "d_weight"],
        budget_bytes=1 << 30, device="cuda",
    )  # fmt: skip
    logits = ullage.plan_head(CE, n_tok=8192, vocab=151936, dtype="bf16", gradients=["d_logits"], device="cuda")
    for plan in (hidden, logits):
        assert plan.workspace_bytes == sum(plan.bookings.values()) and plan.workspace_alignment == 256
        assert "on cuda" in str(plan)
        with pytest.raises(ValueError, match="cuda"):
            plan.run()
    with pytest.raises(ullage.UllageError, match="bf16") as caught:
        ullage.plan_head(CE, n_tok=8, d_model=64, vocab=512, dtype="f64", device="cuda")
    assert caught.value.code == 696


def test_z_loss_r20():
    plan = ullage.plan_head([*CE, {"kind": "z_loss", "weight": 0.01}], n_tok=1, vocab=3, gradients=["d_logits"])
    found = plan.run(logits=numpy.array([[1, 2, 3]], numpy.float32), labels=numpy.array([0]), outputs=["lse", "argmax"])
    assert found.total == pytest.approx(2.523724, abs=1e-6)
    assert found.terms["cross_entropy"] == pytest.approx(2.407606, abs=1e-6)
    assert found.terms["z_loss"] * 0.01 == pytest.approx(0.116118, abs=1e-6)
    assert found.d_logits == pytest.approx(numpy.array([[-0.903834, 0.261407, 0.710579]]), abs=1e-6)
    assert found.lse[0] == pytest.approx(3.407606) and found.argmax[0] == 2


class OnlyDLPack:
    """An array that speaks DLPack and nothing else."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16"])
def test_dlpack_reads_and_writes_the_same_memory(dtype):
    kind = {"f64": numpy.float64, "f32": numpy.float32, "f16": numpy.float16}[dtype]
    rng = numpy.random.default_rng(0)
    logits = rng.standard_normal((4, 10)).astype(kind)[:, :7]  # rows 10 apart
    labels = numpy.array([0, 6, -1, 3])
    plan = ullage.plan_head(CE, n_tok=4, vocab=7, dtype=dtype, gradients=["d_logits"])
    plain = plan.run(logits=logits, labels=labels, outputs=["token_loss"])
    d_logits = numpy.zeros((4, 7), kind)
    through = plan.run(
        logits=OnlyDLPack(logits),
        labels=OnlyDLPack(labels),
        outputs=["token_loss"],
        out={"d_logits": OnlyDLPack(d_logits)},
    )
    assert through.total == plain.total
    numpy.testing.assert_array_equal(through.token_loss, plain.token_loss)
    numpy.testing.assert_array_equal(d_logits, plain.d_logits)
    assert numpy.abs(d_logits).sum() > 0
    numpy.testing.assert_array_equal(numpy.from_dlpack(plain.token_loss), plain.token_loss)


def test_bf16_as_bits_and_as_ml_dtypes():
    rng = numpy.random.default_rng(1)
    logits = rng.standard_normal((3, 9)).astype(ml_dtypes.bfloat16)
    labels = numpy.array([1, 2, 3], numpy.int32)
    plan = ullage.plan_head(CE, n_tok=3, vocab=9, dtype="bf16", gradients=["d_logits"])
    typed, bits = plan.run(logits=logits, labels=labels), plan.run(logits=logits.view(numpy.uint16), labels=labels)
    assert typed.total == bits.total
    assert typed.d_logits.dtype == numpy.uint16
    exact = [-softmax_row(row.astype(numpy.float64))[label] for row, label in zip(logits, labels)]
    assert typed.total == pytest.approx(numpy.mean(exact), rel=1e-6)


def test_refusals_of_arrays():
    plan = ullage.plan_head(CE, n_tok=2, vocab=3)
    labels = numpy.array([0, 1])
    good = numpy.zeros((2, 3), numpy.float32)
    lse = numpy.full(2, 7.0, numpy.float32)
    for logits, error, named in [
        (good.astype(numpy.complex64), TypeError, "complex64"),
        (numpy.zeros((3, 2), numpy.float32).T, ValueError, "column stride"),
        (good.astype(numpy.float64), ullage.UllageError, "logits is f64"),
        (good[0], ValueError, "two dimensions"),
    ]:
        with pytest.raises(error, match=named):
            plan.run(logits=logits, labels=labels, out={"lse": lse})
    with pytest.raises(TypeError, match="logit"):
        plan.run(logit=good, labels=labels)
    with pytest.raises(ullage.UllageError, match=r"labels\[1\] is 3") as caught:
        plan.run(logits=good, labels=numpy.array([0, 3]), out={"lse": lse})
    assert caught.value.code == 586
    assert (lse == 7).all(), "outputs are untouched on refusal"


def test_runs_of_one_plan_from_several_threads_take_turns():
    from concurrent.futures import ThreadPoolExecutor

    plan = ullage.plan_head(CE, n_tok=16, vocab=33, d_model=8, gradients=["d_hidden", "d_weight"])
    rng = numpy.random.default_rng(2)
    hidden = rng.standard_normal((16, 8)).astype(numpy.float32)
    weight = rng.standard_normal((33, 8)).astype(numpy.float32)
    labels = rng.integers(0, 33, 16)
    one = plan.run(hidden=hidden, weight=weight, labels=labels)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: plan.run(hidden=hidden, weight=weight, labels=labels), range(16)):
            assert found.total == one.total
            numpy.testing.assert_array_equal(found.d_weight, one.d_weight)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 12), st.integers(1, 9), st.randoms(use_true_random=False))
def test_any_shape_any_chunk_against_plain_loops(n_tok, vocab, d_model, chunk, random):
    rng = numpy.random.default_rng(random.getrandbits(32))
    hidden, weight = rng.standard_normal((n_tok, d_model)), rng.standard_normal((vocab, d_model))
    labels = rng.integers(-1, vocab, n_tok)
    plan = ullage.plan_head(
        CE, n_tok=n_tok, vocab=vocab, d_model=d_model, dtype="f64", gradients=["d_hidden", "d_weight"], chunk=chunk
    )
    found = plan.run(hidden=hidden, weight=weight, labels=labels, outputs=["token_loss"])
    grad = numpy.zeros((n_tok, vocab))
    losses = numpy.zeros(n_tok)
    valid = labels >= 0
    for i in numpy.flatnonzero(valid):
        log_q = softmax_row(hidden[i] @ weight.T)
        losses[i] = -log_q[labels[i]]
        grad[i] = numpy.exp(log_q)
        grad[i, labels[i]] -= 1
    count = max(valid.sum(), 1)
    assert found.n_valid == valid.sum()
    numpy.testing.assert_allclose(found.token_loss, losses, atol=1e-13)
    numpy.testing.assert_allclose(found.total, losses.sum() / count, atol=1e-13)
    numpy.testing.assert_allclose(found.d_hidden, grad @ weight / count, atol=1e-13)
    numpy.testing.assert_allclose(found.d_weight, grad.T @ hidden / count, atol=1e-13)

"""What users of other fused losses complained of, each with the input that showed it and the right answer.

The numbers are those of an independent float64 computation; R1 to R23 are this project's names for the complaints.
R2, R7, R15, R16 and R21's float16 are in test_operations.py, R8 in test_policy.py, R9 in test_distillation.py.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from ullage.torch import cross_entropy, head_loss, linear_cross_entropy, token_logprobs


def close(found, wanted, atol=2e-6):
    torch.testing.assert_close(found.double(), torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=atol)


@pytest.mark.parametrize("poison", [1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_per_token_weights_r1(poison, dtype):
    hidden = torch.tensor([[1, 0], [0, 1], [1, 1], [2, -1]], dtype=dtype)
    hidden[2] *= poison
    hidden.requires_grad_()
    weight = torch.tensor([[1, 0], [0, 1], [-1, 2]], dtype=dtype, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, -100, 2]), reduction="none")
    loss.backward(torch.tensor([2, -1, 5, 0.5], dtype=loss.dtype))
    close(loss.detach(), [0.407606, 1.407606, 0, 6.050946])
    close(hidden.grad, [[-0.849579, 0.849579], [0.575210, -0.575210], [0, 0], [0.973987, -0.973987]])
    close(weight.grad, [[0.280812, -0.565196], [0.536771, 0.731614], [-0.817583, -0.166419]])
    assert weight.grad.sum(0).abs().max() < 1e-6


@pytest.mark.parametrize("reduction, scale", [("sum", 1), ("mean", 4096)])
def test_weight_gradient_does_not_stall_in_bf16_r3(reduction, scale):
    n, d, v = 4096, 16, 32768
    hidden = torch.ones(n, d, dtype=torch.bfloat16)
    weight = torch.zeros(v, d, dtype=torch.bfloat16, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(n, dtype=torch.int64), reduction=reduction)
    loss.backward()
    assert (weight.grad[1:] == 0.125 / scale).all()
    assert (weight.grad[0] == torch.tensor(-4095.875 / scale).bfloat16()).all()


def test_no_block_is_filtered_away_r3():
    """Every probability off the target is 2^-15, below what a filter of small gradients drops."""
    n, d, v = 8, 8, 32768
    hidden = torch.zeros(n, d, dtype=torch.bfloat16)
    hidden[:, 0] = 1
    hidden.requires_grad_()
    weight = torch.zeros(v, d, dtype=torch.bfloat16)
    weight[:, 1] = 2.0
    weight[0, 1] = 3.0
    linear_cross_entropy(hidden, weight, torch.zeros(n, dtype=torch.int64), reduction="sum").backward()
    close(hidden.grad[:, 1], [2 * (1 - 2**-15) + 3 * (2**-15 - 1)] * n, atol=2**-8)


@pytest.mark.parametrize(
    "z, right", [(9.125, -0.098124), (11.5, -0.0100186), (13.8125, -0.00100101), (16.125, -9.92028e-5)]
)
def test_target_gradient_is_not_cancelled_r4(z, right):
    logits = torch.zeros(1, 1000, dtype=torch.bfloat16)
    logits[0, 7] = z
    logits.requires_grad_()
    cross_entropy(logits, torch.tensor([7])).backward()
    # One rounding to bf16, and the rounding of a float32 sum of exponentials near 1.
    assert abs(logits.grad[0, 7].item() - right) <= abs(right) * 2**-8 + 8 * 2**-24


def test_index_overflow_r6():
    """n * v is 2^31 + 4194304, and the values that matter are past it."""
    n, d, v = 16416, 1, 131072
    hidden, weight = torch.zeros(n, d), torch.zeros(v, d)
    hidden[-1], weight[-1] = 1, 10
    targets = torch.zeros(n, dtype=torch.int64)
    targets[: n - 33] = -100  # the rows in between cost time and show nothing more
    targets[-1] = v - 1
    loss = linear_cross_entropy(hidden, weight, targets, reduction="none")
    close(loss[-33:-1], [math.log(v)] * 32, atol=1e-5)
    close(loss[-1], math.log(math.exp(10) + v - 1) - 10, atol=1e-5)


def test_rows_past_a_grid_dimension_r6():
    n, v = 65537, 3
    logits = torch.zeros(n, v)
    loss = cross_entropy(logits, torch.zeros(n, dtype=torch.int64), reduction="none")
    assert (loss == loss[0]).all() and abs(loss[0].item() - math.log(3)) < 1e-6


def test_bias_r10():
    hidden, weight = torch.zeros(1, 2), torch.randn(2, 2)
    bias = torch.tensor([0, math.log(3)], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0]), bias=bias)
    loss.backward()
    close(loss.detach(), math.log(4))
    close(bias.grad, [-0.75, 0.75])


def test_a_banned_token_r10():
    """A bias of -inf: probability 0, and no NaN from 0 * inf in the entropy or the gradient."""
    hidden = torch.randn(3, 2, requires_grad=True)
    weight = torch.randn(4, 2, requires_grad=True)
    bias = torch.tensor([0.0, -math.inf, 0.5, 1.0], requires_grad=True)
    log_prob, entropy = token_logprobs(hidden, weight, torch.tensor([0, 2, 3]), bias=bias, return_entropy=True)
    wanted = F.log_softmax((hidden @ weight.T)[:, [0, 2, 3]] + bias[[0, 2, 3]], -1)
    torch.testing.assert_close(log_prob, wanted.diagonal())
    torch.testing.assert_close(entropy, -(wanted.exp() * wanted).sum(-1))
    log_prob.sum().backward()
    assert bias.grad[1] == 0 and all(torch.isfinite(t.grad).all() for t in (hidden, weight, bias))


@pytest.mark.parametrize("v", [1, 2, 63, 64, 65, 1023, 1025, 8003])
def test_a_vocabulary_is_never_padded(v):
    """Phantom columns of exp(0) made log-probabilities wrong, even positive."""
    hidden, weight = torch.randn(5, 4), torch.randn(v, 4) - 3
    log_prob = token_logprobs(hidden, weight, torch.full((5,), v - 1))
    assert (log_prob <= 0).all()
    torch.testing.assert_close(log_prob, F.log_softmax(hidden @ weight.T, -1)[:, -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours_r17(dtype):
    hidden, weight = torch.randn(300, 24, dtype=dtype), torch.randn(517, 24, dtype=dtype)
    targets = torch.randint(0, 517, (300,))

    def rows(begin, end, budget):
        x = hidden[begin:end].clone().requires_grad_()
        loss = linear_cross_entropy(x, weight, targets[begin:end], reduction="none", budget_bytes=budget)
        (d_x,) = torch.autograd.grad(loss.sum(), x)
        return loss.detach(), d_x, token_logprobs(x.detach(), weight, targets[begin:end], budget_bytes=budget)

    whole = rows(0, 300, None)
    for begin, end in ((0, 1), (7, 14), (100, 228), (299, 300)):
        for budget in (None, 1 << 20):
            for part, full in zip(rows(begin, end, budget), whole):
                assert torch.equal(part, full[begin:end])


def test_the_weight_gradient_does_not_depend_on_the_chunk_r17():
    hidden, targets = torch.randn(300, 24), torch.randint(0, 517, (300,))
    found = []
    for budget in (None, 1 << 20, 900_000):
        weight = torch.randn(517, 24, generator=torch.Generator().manual_seed(5)).requires_grad_()
        linear_cross_entropy(hidden, weight, targets, budget_bytes=budget).backward()
        found.append(weight.grad)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("offset", [0.0, 1e4, 3e4, -1e4])
def test_a_common_offset_costs_nothing_r19(offset):
    # Multiples of 1/64: the differences are exact in float32 at any of these offsets.
    logits = (torch.randn(8, 100) * 64).round() / 64
    targets = torch.randint(0, 100, (8,))
    wanted = F.cross_entropy(logits.double(), targets, reduction="none")
    found = cross_entropy(logits + offset, targets, reduction="none")
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


def test_a_target_far_below_the_maximum_r19():
    loss = cross_entropy(torch.tensor([[0.0, -100.0], [0.0, -3e4]]), torch.tensor([1, 1]), reduction="none")
    close(loss, [100.0, 3e4], atol=0)


def test_z_loss_r20():
    logits = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    loss, lse = cross_entropy(logits, torch.tensor([0]), z_loss=0.01, return_lse=True)
    loss.backward()
    close(loss.detach(), 2.523724)
    close(lse, [3.407606])
    close(logits.grad, [[-0.903834, 0.261407, 0.710579]])
    out = head_loss(
        {"losses": [{"kind": "cross_entropy"}, {"kind": "z_loss", "weight": 0.0}]},
        logits=logits,
        labels=torch.tensor([0]),
    )
    close(out.terms, [2.407606, 11.611779])
    plain = cross_entropy(logits, torch.tensor([0]))
    assert torch.equal(out.total, plain), "a z-loss that is only reported changes nothing"
    assert torch.equal(cross_entropy(logits, torch.tensor([0]), z_loss=0.0), plain)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("n, ignored", [(0, False), (3, True)])
def test_nothing_to_count_r21(reduction, n, ignored):
    """No rows, or every row ignored: 0, with gradients of 0 and the graph connected."""
    hidden = torch.full((n, 4), float("nan")).requires_grad_()
    weight = torch.randn(5, 4, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    targets = torch.full((n,), -100)
    loss = linear_cross_entropy(
        hidden, weight, targets, bias=bias, reduction=reduction, z_loss=0.1, label_smoothing=0.1
    )
    assert loss.shape == ((n,) if reduction == "none" else ())
    assert (loss == 0).all() and loss.requires_grad
    loss.sum().backward()
    assert all((t.grad == 0).all() for t in (hidden, weight, bias))


def test_one_class_r21():
    hidden, weight = torch.randn(3, 2, requires_grad=True), torch.randn(1, 2, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(3, dtype=torch.int64))
    loss.backward()
    assert loss == 0 and (hidden.grad == 0).all() and (weight.grad == 0).all()


@pytest.mark.parametrize("label", [5, 6, 2**31, 2**40])
def test_a_label_past_the_vocabulary_is_refused_r21(label):
    with pytest.raises(ValueError, match=rf"586.*labels\[1\] is {label}"):
        linear_cross_entropy(torch.randn(3, 2), torch.randn(5, 2), torch.tensor([0, label, 1]))


def test_any_negative_label_is_ignored_r21():
    hidden, weight = torch.randn(3, 2), torch.randn(5, 2)
    found = linear_cross_entropy(hidden, weight, torch.tensor([0, -1, 1]))
    assert torch.equal(found, linear_cross_entropy(hidden, weight, torch.tensor([0, -100, 1])))


def test_a_nan_in_a_counted_row_surfaces():
    hidden = torch.tensor([[1.0, 0.0], [float("nan"), 0.0]])
    loss = linear_cross_entropy(hidden, torch.randn(5, 2), torch.tensor([0, 1]), reduction="none")
    assert torch.isfinite(loss[0]) and torch.isnan(loss[1])

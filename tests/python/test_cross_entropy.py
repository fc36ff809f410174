"""linear_cross_entropy and cross_entropy against torch.nn.functional.cross_entropy, option by option."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.torch import LinearCrossEntropyLoss, cross_entropy, linear_cross_entropy, token_logprobs

N, D, V = 12, 7, 23


def make(dtype=torch.float64, n=N, d=D, v=V):
    hidden = torch.randn(n, d, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, d, dtype=dtype, requires_grad=True)
    bias = torch.randn(v, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, v, (n,))
    targets[::5] = -100
    return hidden, weight, bias, targets


def eager(hidden, projection, targets, *, bias=None, softcap=0.0, logits_scale=1.0, z_loss=0.0, **options):
    z = hidden @ projection.T
    if bias is not None:
        z = z + bias
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    z = z * logits_scale
    loss = F.cross_entropy(z, targets, **options)
    if z_loss:
        counted = targets != options.get("ignore_index", -100)
        squares = torch.logsumexp(z, -1) ** 2 * counted
        reduced = {"none": squares, "sum": squares.sum(), "mean": squares.sum() / counted.sum()}
        loss = loss + z_loss * reduced[options.get("reduction", "mean")]
    return loss


def assert_same(ours, theirs, inputs, rtol=1e-11):
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol, check_dtype=False)
    upstream = torch.randn_like(theirs)
    found = torch.autograd.grad(ours, inputs, upstream.to(ours.dtype))
    wanted = torch.autograd.grad(theirs, inputs, upstream)
    for f, w in zip(found, wanted):
        torch.testing.assert_close(f, w, rtol=rtol, atol=rtol)


OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"z_loss": 1e-2},
    {"softcap": 2.0},
    {"logits_scale": 0.3},
    {"ignore_index": 3},
    {"ignore_index": 0},
    {"softcap": 2.0, "logits_scale": 3.0, "label_smoothing": 0.2, "z_loss": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_every_option(options, reduction, with_bias, weighted):
    hidden, weight, bias, targets = make()
    if "ignore_index" in options:
        targets = targets.clamp(min=0)
    classes = torch.rand(V, dtype=torch.float64) + 0.1 if weighted else None
    bias = bias if with_bias else None
    inputs = [t for t in (hidden, weight, bias) if t is not None]
    ours = linear_cross_entropy(
        hidden, weight, targets, bias=bias, reduction=reduction, class_weight=classes, **options
    )
    theirs = eager(hidden, weight, targets, bias=bias, reduction=reduction, weight=classes, **options)
    assert_same(ours, theirs, inputs)
    if not with_bias:
        logits = (hidden @ weight.T).detach().requires_grad_()
        identity = torch.eye(V, dtype=torch.float64)
        ours = cross_entropy(logits, targets, reduction=reduction, class_weight=classes, **options)
        assert_same(ours, eager(logits, identity, targets, reduction=reduction, weight=classes, **options), [logits])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 17), st.integers(1, 9), st.integers(1, 70), st.sampled_from(["mean", "sum", "none"]), st.booleans()
)
def test_shapes(n, d, v, reduction, smooth):
    hidden, weight, _, targets = make(n=n, d=d, v=v)
    options = {"reduction": reduction, "label_smoothing": 0.1 if smooth else 0.0}
    ours = linear_cross_entropy(hidden, weight, targets, **options)
    theirs = eager(hidden, weight, targets, **options)
    if reduction == "mean" and not (targets >= 0).any():
        theirs = hidden.sum() * 0 + weight.sum() * 0  # a policy: PyTorch's is 0 / 0
    assert_same(ours, theirs, [hidden, weight])


# Bounds: one rounding of the gradient to the input's type, and float32 sums of D or N terms.
@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 2e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-9)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_low_precision_against_float64(dtype, rtol, reduction):
    hidden, weight, bias, targets = make(dtype, n=40, d=16, v=300)
    ours = linear_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction)
    assert ours.dtype == torch.float32
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    theirs = eager(*wide[:2], targets, bias=wide[2], reduction=reduction)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    upstream = torch.rand_like(theirs) + 0.5
    found = torch.autograd.grad(ours, (hidden, weight, bias), upstream.float())
    for f, w in zip(found, torch.autograd.grad(theirs, wide, upstream)):
        assert f.dtype == dtype
        assert (f.double() - w).norm() <= rtol * w.norm()


def test_leading_dimensions_and_shift():
    hidden = torch.randn(2, 3, 5, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, V, (2, 3, 5))
    targets[0, 0, 2] = -100
    logits = hidden @ weight.T
    flat = F.cross_entropy(logits.reshape(-1, V), targets.reshape(-1))
    assert_same(linear_cross_entropy(hidden, weight, targets), flat, [hidden, weight])
    moved = F.cross_entropy((hidden @ weight.T)[..., :-1, :].reshape(-1, V), targets[..., 1:].reshape(-1))
    assert_same(linear_cross_entropy(hidden, weight, targets, shift=True), moved, [hidden, weight])
    rows = linear_cross_entropy(hidden, weight, targets, shift=True, reduction="none")
    theirs = F.cross_entropy(
        (hidden @ weight.T)[..., :-1, :].reshape(-1, V), targets[..., 1:].reshape(-1), reduction="none"
    )
    assert_same(rows, theirs.view(2, 3, 4), [hidden, weight])
    assert cross_entropy(logits.detach(), targets, shift=True) == moved.detach()


def test_returns():
    hidden, weight, bias, targets = make()
    log_q = F.log_softmax(hidden @ weight.T + bias, -1)
    counted = targets >= 0
    lse = torch.logsumexp(hidden @ weight.T + bias, -1) * counted
    picked = log_q.gather(1, targets.clamp(min=0)[:, None])[:, 0] * counted
    entropy = -(log_q.exp() * log_q).sum(-1) * counted
    loss, *more = linear_cross_entropy(
        hidden, weight, targets, bias=bias, return_lse=True, return_logprobs=True, return_entropy=True
    )
    for found, wanted in zip(more, (lse, picked, entropy)):
        torch.testing.assert_close(found, wanted.detach())
        assert not found.requires_grad
    assert loss.requires_grad
    assert len(linear_cross_entropy(hidden, weight, targets, return_lse=True)) == 2
    rows, entropy_again = linear_cross_entropy(
        hidden, weight, targets, bias=bias, reduction="none", return_entropy=True
    )
    assert rows.requires_grad and torch.equal(entropy_again, more[2])


@pytest.mark.parametrize("softcap, temperature", [(0.0, 1.0), (3.0, 0.7)])
def test_token_logprobs_and_entropy_are_differentiable(softcap, temperature):
    hidden, weight, bias, targets = make()

    def theirs(hidden, weight, bias):
        z = hidden @ weight.T + bias
        z = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature
        log_q = F.log_softmax(z, -1)
        counted = targets >= 0
        return log_q.gather(1, targets.clamp(min=0)[:, None])[:, 0] * counted, -(log_q.exp() * log_q).sum(-1) * counted

    options = {"bias": bias, "softcap": softcap, "temperature": temperature}
    ours = token_logprobs(hidden, weight, targets, return_entropy=True, **options)
    for kinds in ([0], [1], [0, 1]):
        upstream = [torch.randn(N, dtype=torch.float64) for _ in kinds]
        wanted = theirs(hidden, weight, bias)
        for f, w in zip(
            torch.autograd.grad([ours[k] for k in kinds], (hidden, weight, bias), upstream, retain_graph=True),
            torch.autograd.grad([wanted[k] for k in kinds], (hidden, weight, bias), upstream),
        ):
            torch.testing.assert_close(f, w, rtol=1e-11, atol=1e-11)
    assert torch.equal(token_logprobs(hidden, weight, targets, **options), ours[0])


def test_gradcheck():
    hidden, weight, bias, targets = make(n=4, d=3, v=5)
    for reduction, smoothing in itertools.product(("mean", "none"), (0.0, 0.1)):
        assert torch.autograd.gradcheck(
            lambda h, w, b: linear_cross_entropy(
                h, w, targets, bias=b, reduction=reduction, label_smoothing=smoothing, z_loss=0.1, softcap=4.0
            ),
            (hidden, weight, bias),
        )
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, w, targets, bias=b, return_entropy=True), (hidden, weight, bias)
    )


def test_module():
    hidden, weight, bias, targets = make()
    module = LinearCrossEntropyLoss(reduction="sum", z_loss=0.1)
    assert module(hidden, weight, targets, bias) == linear_cross_entropy(
        hidden, weight, targets, bias=bias, reduction="sum", z_loss=0.1
    )
    assert "z_loss=0.1" in repr(module)
    with pytest.raises(TypeError, match="bias"):
        LinearCrossEntropyLoss(bias=bias)


@pytest.mark.parametrize(
    "change, error, named",
    [
        ({"filter_tolerance": 1e-3}, ValueError, "681.*filter_tolerance.*accepted on cpu: 0"),
        ({"reduction": "avg"}, ValueError, "avg"),
        ({"label_smoothing": 1.5}, ValueError, "689"),
        ({"softcap": -1.0}, ValueError, "688"),
        ({"z_loss": float("nan")}, ValueError, "z_loss|684|699"),
        ({"targets": torch.zeros(N, V)}, ValueError, "targets"),
        ({"targets": torch.zeros(N + 1, dtype=torch.int64)}, ValueError, "targets"),
        ({"weight": torch.zeros(V, D + 1)}, ValueError, "weight"),
        ({"class_weight": torch.zeros(V - 1)}, ValueError, "class_weights"),
        ({"class_weight": torch.ones(V, requires_grad=True)}, ValueError, "detach"),
        ({"budget_bytes": 64}, ValueError, "587"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusals(change, error, named):
    hidden, weight, _, targets = make(torch.float32)
    arguments = {"hidden": hidden, "weight": weight, "targets": targets} | change
    with pytest.raises(error, match=named):
        linear_cross_entropy(**arguments)

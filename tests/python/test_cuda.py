"""The losses on CUDA tensors, where there is a GPU and the library has its kernels; `./dev gpu-test` runs them."""

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

import ullage  # noqa: E402
from ullage.torch import cross_entropy, grpo_loss, linear_cross_entropy, token_logprobs  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and ullage.probe().cuda["kernels_compiled"]), reason="no GPU, or no kernels for it"
)

N, D, V = 700, 256, 3001


def make(peaked=False):
    hidden = torch.randn(N, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(V, D, device="cuda") / D**0.5 * (8 if peaked else 1)).bfloat16().requires_grad_()
    targets = torch.randint(0, V, (N,), device="cuda")
    targets[::7] = -100
    return hidden, weight, targets


def exact(hidden, weight, targets, **options):
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    return wide, F.cross_entropy(wide[0] @ wide[1].T, targets, **options)


def assert_near(found, wanted, rtol=2**-6):
    for f, w in zip(found, wanted):
        assert (f.double() - w).norm() <= rtol * w.norm()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("peaked", [False, True])
def test_linear(reduction, peaked):
    hidden, weight, targets = make(peaked)
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    wide, reference = exact(hidden, weight, targets, reduction=reduction)
    torch.testing.assert_close(loss.double(), reference, rtol=1e-3, atol=1e-3)
    upstream = torch.rand_like(reference) + 0.5
    found = torch.autograd.grad(loss, (hidden, weight), upstream.to(loss.dtype))
    assert [f.dtype for f in found] == [torch.bfloat16] * 2
    assert_near(found, torch.autograd.grad(reference, wide, upstream))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_from_logits(dtype):
    logits = torch.randn(N, V, device="cuda", dtype=dtype, requires_grad=True)
    _, _, targets = make()
    loss, lse = cross_entropy(logits, targets, label_smoothing=0.1, return_lse=True)
    wide = logits.detach().double().requires_grad_()
    reference = F.cross_entropy(wide, targets, label_smoothing=0.1)
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=1e-5)
    assert_near(torch.autograd.grad(loss, logits), torch.autograd.grad(reference, wide), 2**-8)
    torch.testing.assert_close(lse.double(), torch.logsumexp(wide, -1) * (targets >= 0), rtol=1e-5, atol=1e-5)


def test_main_grad_and_log_probabilities():
    hidden, weight, targets = make()
    wide, reference = exact(hidden, weight, targets, reduction="none")
    log_prob = token_logprobs(hidden, weight, targets)
    torch.testing.assert_close(log_prob.double(), -reference, rtol=1e-3, atol=1e-3)
    upstream = torch.randn(N, device="cuda")
    wanted = torch.autograd.grad(-reference, wide, upstream.double())
    assert_near(torch.autograd.grad(log_prob, (hidden, weight), upstream), wanted)
    weight.main_grad = torch.ones(V, D, device="cuda")
    token_logprobs(hidden, weight, targets).backward(upstream)
    assert_near([weight.main_grad - 1], wanted[1:])


def test_grpo():
    hidden, weight, targets = make()
    shape = (7, 100)
    hidden, targets = hidden.view(*shape, D), targets.view(shape)
    old = token_logprobs(hidden, weight, targets).detach() + 0.1 * torch.randn(shape, device="cuda")
    advantages = torch.randn(7, device="cuda")
    found = grpo_loss(hidden, weight, targets, advantages, old)
    on_cpu = [t.detach().cpu() for t in (hidden.float(), weight.float(), targets, advantages, old)]
    torch.testing.assert_close(found.cpu(), grpo_loss(*on_cpu), rtol=1e-2, atol=1e-3)
    found.backward()


def test_no_synchronisation_and_graph_capture():
    hidden, weight, targets = make()

    def step():
        loss = linear_cross_entropy(hidden, weight, targets)
        return loss, *torch.autograd.grad(loss, (hidden, weight))

    torch.cuda.set_sync_debug_mode("error")
    try:
        eager = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tensor in captured:
        tensor.detach().zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, eager)), "the same bits"


def test_what_the_kernels_do_not_take_is_named():
    hidden, weight, targets = make()
    with pytest.raises(ValueError, match="softcap"):
        linear_cross_entropy(hidden, weight, targets, softcap=30.0)
    with pytest.raises(ValueError, match="696.*bf16"):
        linear_cross_entropy(hidden.float(), weight.float(), targets)

"""The custom operations under everything autograd and the compiler do to them."""

import concurrent.futures
import itertools
import subprocess
import sys

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import ullage
from ullage.torch import FilterReport, cross_entropy, filter_reports, head_loss, linear_cross_entropy, token_logprobs
from ullage import _library as c
from ullage.torch import _ops, _plan, _run
from ullage.torch._head import to_text

N, D, V = 10, 6, 17
CE = [{"kind": "cross_entropy"}]


def make(dtype=torch.float32, n=N, d=D, v=V):
    hidden = torch.randn(n, d, dtype=dtype, requires_grad=True)
    weight = torch.randn(v, d, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, v, (n,))
    targets[::4] = -100
    return hidden, weight, targets


def arguments(hidden, weight, targets, *, gradients, rows, bias=None, teachers=(), losses=None, config=()):
    text = to_text(losses or [{"kind": "cross_entropy"}], **dict(config))
    given = {"input": hidden, "weight": weight, "labels": targets, **({} if bias is None else {"bias": bias})}
    return ([*given.values(), *teachers], " ".join(given), None, text, 0, 0, gradients, rows)


@pytest.mark.parametrize(
    "gradients, rows",
    [(3, 0), (7, _plan.LSE | _plan.ARGMAX), (0, _plan.TOKEN_LOSS), (0, _plan.LOG_PROB | _plan.ENTROPY), (0, 0)],
)
def test_opcheck(gradients, rows):
    hidden, weight, targets = make()
    bias = torch.randn(V, requires_grad=True)
    if gradients == 3:
        bias = None
    differentiable = lambda out: [out[0]] + ([out[3]] if rows & _plan.TOKEN_LOSS else [])  # noqa: E731
    values = differentiable(_ops.head(*arguments(hidden, weight, targets, bias=bias, gradients=gradients, rows=rows)))
    assert all(v.requires_grad for v in values)
    torch.library.opcheck(
        _ops.head,
        arguments(hidden.detach(), weight.detach(), targets, bias=None if bias is None else bias.detach(),
                  gradients=gradients, rows=rows),
    )  # fmt: skip


@pytest.mark.parametrize("gradients", [0, 3])
def test_opcheck_of_the_autograd_registration(gradients):
    hidden, weight, targets = make()
    torch.library.opcheck(
        _ops.head,
        arguments(hidden, weight, targets, gradients=gradients, rows=0),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_opcheck_of_the_backward_operations():
    hidden, weight, targets = make()
    values = arguments(hidden.detach(), weight.detach(), targets, gradients=0, rows=0)
    backward = (*values[:2], torch.randn(N), *values[3:6])
    torch.library.opcheck(_ops.head_backward, (*backward, 3))
    torch.library.opcheck(_ops.head_backward_into, (torch.zeros(V, D), *backward, 1))
    torch.library.opcheck(_ops.scaled, (torch.randn(5, 3), torch.tensor(2.0, dtype=torch.float64), torch.float32))


LOSSES = {
    "linear_cross_entropy": lambda h, w, t: linear_cross_entropy(h, w, t),
    "with options": lambda h, w, t: linear_cross_entropy(
        h, w, t, label_smoothing=0.1, z_loss=1e-3, softcap=5.0, ignore_index=2, shift=True, reduction="sum"
    ),
    "per token": lambda h, w, t: (linear_cross_entropy(h, w, t, reduction="none") * torch.arange(N)).sum(),
    "returns": lambda h, w, t: sum(
        x.sum() for x in linear_cross_entropy(h, w, t, return_lse=True, return_entropy=True)
    ),
    "from logits": lambda h, w, t: cross_entropy(h @ w.T, t),
    "token_logprobs": lambda h, w, t: sum(x.sum() for x in token_logprobs(h, w, t, return_entropy=True)),
    "mix": lambda h, w, t: (
        head_loss(
            {"losses": [{"kind": "cross_entropy"}, {"kind": "z_loss", "weight": 0.1}]}, hidden=h, weight=w, labels=t
        ).total
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_a_graph_break(name, dynamic):
    hidden, weight, targets = make()
    loss = LOSSES[name]

    def step(h, w, t):
        return loss(h * 2, w, t) + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    wanted, found = step(hidden, weight, targets), compiled(hidden, weight, targets)
    assert torch.equal(found, wanted)
    for f, w in zip(torch.autograd.grad(found, (hidden, weight)), torch.autograd.grad(wanted, (hidden, weight))):
        torch.testing.assert_close(f, w, rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        assert torch.equal(compiled(hidden, weight, targets), wanted)


def test_compile_with_inductor_and_garbage_memory_r2():
    """A compiled graph reuses memory; rows nobody wrote would show."""
    hidden, weight, targets = make(n=256, d=32, v=4096)
    for reduction in ("sum", "mean", "none"):
        step = lambda h, w: linear_cross_entropy(h, w, targets, reduction=reduction)  # noqa: E731, B023
        poison = [torch.full((256, 4096), float("nan")) for _ in range(4)]
        del poison
        found, wanted = torch.compile(step, fullgraph=True)(hidden, weight), step(hidden, weight)
        assert torch.equal(found, wanted) and torch.isfinite(found).all()
        (d_hidden,) = torch.autograd.grad(found.sum(), hidden)
        assert (d_hidden[targets < 0] == 0).all() and torch.isfinite(d_hidden).all()
        if reduction == "none":
            assert (found[targets < 0] == 0).all()


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_requires_grad_on_any_subset_r7(needs, reduction):
    hidden, weight, targets = make()
    bias = torch.randn(V)
    tensors = [t.detach().requires_grad_(need) for t, need in zip((hidden, weight, bias), needs)]
    everything = [t.detach().requires_grad_() for t in tensors]
    call = lambda t: linear_cross_entropy(t[0], t[1], targets, bias=t[2], reduction=reduction)  # noqa: E731
    loss, full = call(tensors), call(everything)
    assert torch.equal(loss, full)
    assert loss.requires_grad == any(needs)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            quiet = call(tensors)
        assert torch.equal(quiet, loss) and not quiet.requires_grad
    if any(needs):
        loss.sum().backward()
        full.sum().backward()
    for tensor, whole, need in zip(tensors, everything, needs):
        assert (tensor.grad is not None) == need
        if need:
            assert torch.equal(tensor.grad, whole.grad)


def test_a_frozen_input_books_no_gradient_memory():
    """No d_hidden buffer where the input is frozen, no d_weight where the head is."""
    shapes = dict(n_tok=64, vocab=512, d_model=128, budget_bytes=1 << 20)
    import ullage

    both = ullage.plan_head([{"kind": "cross_entropy"}], gradients=["d_hidden", "d_weight"], **shapes)
    frozen = ullage.plan_head([{"kind": "cross_entropy"}], gradients=["d_weight"], **shapes)
    assert "d_hidden chunk" in both.bookings and "d_hidden chunk" not in frozen.bookings
    hidden, weight, targets = make()
    out = _ops.head(*arguments(hidden, weight, targets, gradients=_plan.D_WEIGHT, rows=0))
    assert [each.shape for each in out[3:]] == [weight.shape], "total, terms, n_valid, and one gradient"


def test_layouts_r16():
    """Strided rows, a transposed weight, 4-byte and strided targets, expanded and strided upstream gradients."""
    base = torch.randn(N, 2 * D)
    hidden = base[:, ::2].clone().requires_grad_()
    strided = base[:, ::2].detach().requires_grad_()
    weight = torch.randn(V, D, requires_grad=True)
    transposed = weight.detach().T.contiguous().T.requires_grad_()
    targets = torch.randint(0, V, (N,))
    sparse = torch.zeros(2 * N, dtype=torch.int32)
    sparse[::2] = targets
    plain = linear_cross_entropy(hidden, weight, targets, reduction="none")
    odd = linear_cross_entropy(strided, transposed, sparse[::2], reduction="none")
    assert torch.equal(plain, odd)
    upstream = torch.randn(2 * N)[::2]
    for given in (torch.ones(()).expand(N), upstream):
        a = torch.autograd.grad(plain, (hidden, weight), given.contiguous(), retain_graph=True)
        b = torch.autograd.grad(odd, (strided, transposed), given, retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_retain_graph_and_double_use_r21(reduction):
    hidden, weight, targets = make()
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    total = loss.sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    halved = torch.autograd.grad(total, (hidden, weight), torch.tensor(0.5), retain_graph=True)
    assert all(torch.equal(a * 0.5, b) for a, b in zip(first, halved))
    twice = torch.autograd.grad(total + 2 * total, (hidden, weight))
    for a, b in zip(first, twice):
        torch.testing.assert_close(3 * a, b, rtol=1e-5, atol=1e-6)
    both = linear_cross_entropy(hidden, weight, targets).mul(2) + linear_cross_entropy(hidden, weight, targets)
    both.backward()
    torch.testing.assert_close(
        hidden.grad, 3 * torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden)[0]
    )


def test_computed_gradients_are_scaled_in_place_and_given_away():
    hidden, weight, targets = make(torch.bfloat16)
    for tensor in (hidden, weight):
        tensor.grad = None
    plain = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, targets)
    kept = torch.autograd.grad(loss, (hidden, weight), torch.tensor(3.0), retain_graph=True)
    given = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(plain, given))
    assert all(torch.allclose(a * 3, b, rtol=2**-7) and (a != b).any() for a, b in zip(plain, kept))
    with pytest.raises(RuntimeError, match="second backward.*retain_graph"):
        torch.autograd.grad(loss, (hidden, weight))
    with torch.no_grad():
        given[0].zero_()  # the caller's own: nothing else reads it
    linear_cross_entropy(hidden, weight, targets).backward()
    assert torch.equal(hidden.grad, plain[0])


def test_the_backward_holds_one_gradient_of_the_weight():
    from torch.utils._python_dispatch import TorchDispatchMode

    class LargeStorages(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.numel() >= weight.numel():
                storages.add(out.untyped_storage().data_ptr())
            return out

    hidden, weight, targets = make(n=64, d=32, v=4096)
    loss = linear_cross_entropy(hidden, weight, targets)
    storages = set()
    with LargeStorages():
        (loss * 2).backward()
    assert storages == {weight.grad.untyped_storage().data_ptr()}


def test_a_second_derivative_in_a_sum_is_refused():
    """Where it would be left out of a gradient that there is, and not asked for by itself."""
    for reduction in ("mean", "none"):
        hidden, weight, targets = make()
        loss = linear_cross_entropy(hidden * 1, weight, targets, reduction=reduction).sum()
        (d_hidden,) = torch.autograd.grad(loss, hidden, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            (loss + d_hidden.square().sum()).backward()


def test_other_transforms_are_refused():
    """A tangent that is dropped would be a wrong answer, and a batch of calls one of other shapes."""
    hidden, weight, targets = (t.detach() for t in make())
    loss = lambda h: linear_cross_entropy(h, weight, targets)  # noqa: E731
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        loss(torch.autograd.forward_ad.make_dual(hidden, hidden))
    with torch.no_grad(), torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        loss(torch.autograd.forward_ad.make_dual(hidden, hidden))
    for transformed, argument in (
        (torch.func.grad(loss), hidden),
        (torch.func.jacrev(loss), hidden),
        (torch.func.vmap(loss), hidden[None]),
    ):
        with pytest.raises(RuntimeError, match="torch.func's transforms"):
            transformed(argument)


def test_a_dispatch_mode_sees_the_operation_once():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    hidden, weight, targets = make()
    seen = []
    with Seen():
        linear_cross_entropy(hidden, weight, targets)
        token_logprobs(hidden, weight, targets).sum().backward()
    assert [f for f in seen if f.namespace == "ullage"] == [_ops.head] * 2 + [_ops.head_backward]


def test_threads_share_plans_and_nothing_else():
    """The same shapes in every call, and so one plan and one prepared set of structs."""
    cases = [make(n=32) for _ in range(16)]
    wanted = [torch.autograd.grad(linear_cross_entropy(*case), case[:2]) for case in cases]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(8):
            found = list(pool.map(lambda case: torch.autograd.grad(linear_cross_entropy(*case), case[:2]), cases))
            for f, w in zip(found, wanted):
                assert all(torch.equal(a, b) for a, b in zip(f, w))


def prepared_on_cuda(n, d, v, budget_bytes=0, **more):
    """A plan needs no device."""
    shapes = {"input": (n, d), "weight": (v, d), "labels": (n,), **more}
    facts = [(torch.int64 if name == "labels" else torch.bfloat16, torch.Size(s)) for name, s in shapes.items()]
    gradients = _plan.D_INPUT | _plan.D_WEIGHT
    return _run._prepared(
        _plan.Call(torch.device("cuda", 0), tuple(facts), " ".join(shapes), to_text(CE), budget_bytes, gradients)
    )


@pytest.mark.parametrize(
    "shape, budget_bytes, mode, dtype",
    [
        ((256, 64, 1000), 0, "chunk", "bfloat16"),
        ((8192, 4096, 128256), 0, "chunk", "float32"),
        ((8192, 4096, 128256), 512 << 20, "strip", "bfloat16"),
        ((8192, 4096, 128256), (4 * 128256 * 4096) + (128 << 20), "chunk", "float32"),
        ((8192, 4096, 128256), 4 << 30, "chunk", "bfloat16"),  # whose workspace holds the sum
    ],
)
def test_a_bf16_gradient_on_cuda_is_made_in_float32_rather_than_by_strips(shape, budget_bytes, mode, dtype):
    made = prepared_on_cuda(*shape, budget_bytes)
    (weight,) = (each for each in made.results if each.name == "weight")
    assert made.plan.mode == mode and weight.dtype == torch.bfloat16 and weight.run_dtype == getattr(torch, dtype)
    assert made.outputs.d_weight.dtype == {"bfloat16": c.BF16, "float32": c.F32}[dtype]


def test_vectors_go_to_cuda_in_float32():
    made = prepared_on_cuda(256, 64, 1000, bias=(1000,))
    assert made.inputs.bias.dtype == c.F32 and made.inputs.hidden.dtype == c.BF16


def test_other_types_are_refused():
    hidden, weight, targets = make()
    with pytest.raises(TypeError, match="input is torch.int64.*float32"):
        cross_entropy(torch.ones(N, V, dtype=torch.int64), targets)
    with pytest.raises(TypeError, match="weight is torch.complex64"):
        linear_cross_entropy(hidden, weight.detach().to(torch.complex64), targets)
    with pytest.raises(TypeError, match="class_weights is torch.complex64"):
        linear_cross_entropy(hidden, weight, targets, class_weight=torch.ones(V, dtype=torch.complex64))


@pytest.mark.parametrize(
    "error, message, call",
    [
        (TypeError, "weight is a Linear", lambda h, w, t: linear_cross_entropy(h, torch.nn.Linear(D, V), t)),
        (TypeError, "targets is a list", lambda h, w, t: linear_cross_entropy(h, w, t.tolist())),
        (TypeError, "hidden is a ndarray", lambda h, w, t: linear_cross_entropy(h.detach().numpy(), w, t)),
        (
            ValueError,
            r"\(3, 17\).*last dimension",
            lambda h, w, t: cross_entropy(torch.ones(3, 17, 2), t[:6].view(3, 2)),
        ),
        (TypeError, "budget_bytes is 1e", lambda h, w, t: linear_cross_entropy(h, w, t, budget_bytes=1e30)),
        (TypeError, "option is a Tensor", lambda h, w, t: linear_cross_entropy(h, w, t, z_loss=torch.ones(()))),
        (ValueError, "temperature is 0;", lambda h, w, t: token_logprobs(h, w, t, temperature=0)),
        (ValueError, "config has loss;", lambda h, w, t: head_loss({"loss": []}, hidden=h, weight=w, labels=t)),
        (
            ValueError,
            "1 tensors of teachers.*accepted: 2.*hidden, weight",
            lambda h, w, t: head_loss(
                {"losses": [{"kind": "distillation"}], "teachers": [{"kind": "hidden"}]},
                hidden=h,
                weight=w,
                teachers=[h.detach()],
            ),
        ),
        (
            ValueError,
            "1 tensors of teachers.*accepted: 0",
            lambda h, w, t: head_loss(CE, hidden=h, weight=w, labels=t, teachers=[h.detach()]),
        ),
        (
            ullage.UllageError,
            "kind is 'logit'",
            lambda h, w, t: head_loss({"losses": CE, "teachers": [{"kind": "logit"}]}, hidden=h, weight=w, labels=t),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_named(error, message, call):
    with pytest.raises(error, match=message):
        call(*make())


def test_a_list_of_losses_and_numpys_numbers_are_taken():
    hidden, weight, targets = make()
    losses = [*CE, {"kind": "z_loss", "weight": numpy.float32(0.5)}]
    found = head_loss(losses, hidden=hidden, weight=weight, labels=targets)
    assert torch.equal(found.total, linear_cross_entropy(hidden, weight, targets, z_loss=0.5))


def test_a_loss_without_a_compiler_does_not_load_one():
    """Loading torch._dynamo takes as long as loading torch."""
    script = (
        "import sys, torch, ullage.torch as u; w = torch.ones(3, 2, requires_grad=True);"
        "u.linear_cross_entropy(torch.ones(1, 2), w, torch.tensor([1]), z_loss=0.1).backward();"
        "assert 'torch._dynamo' not in sys.modules and 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_two_devices_are_refused():
    hidden, weight, targets = make()
    with pytest.raises(ValueError, match="targets on meta.*input on cpu.*one device"):
        linear_cross_entropy(hidden, weight, targets.to("meta"))
    with pytest.raises(ValueError, match="weight on meta"):
        linear_cross_entropy(hidden, weight.detach().to("meta"), targets)


def test_a_second_derivative_is_refused():
    hidden, weight, targets = make()
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction).sum()
        (d_hidden,) = torch.autograd.grad(loss, hidden, create_graph=True)
        with pytest.raises(RuntimeError):
            torch.autograd.grad(d_hidden.square().sum(), weight)


def test_loss_scaling_in_float16_r21():
    """A mean over many rows leaves gradients below float16's smallest; a scale of 65536 must bring them back."""
    hidden, weight, targets = make(torch.float16, n=512, d=8, v=64)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    scale = 65536.0
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
        reference = F.cross_entropy(wide[0] @ wide[1].T, targets, reduction=reduction)
        if reduction == "none":
            loss, reference = loss / 512, reference / 512
        found = torch.autograd.grad(loss.sum() * scale, (hidden, weight))
        for f, w in zip(found, torch.autograd.grad(reference.sum() * scale, wide)):
            assert torch.isfinite(f).all() and f.dtype == torch.float16
            assert (f.double() - w).norm() <= 2**-10 * w.norm()


def test_autocast_r23():
    hidden, weight, targets = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
        theirs = F.cross_entropy(F.linear(hidden, weight).float(), targets)
    as_bf16 = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), targets)
    assert torch.equal(loss, as_bf16) and loss.dtype == torch.float32
    torch.testing.assert_close(loss, theirs, rtol=2**-7, atol=2**-7)
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    assert d_hidden.dtype == d_weight.dtype == torch.float32


@pytest.mark.parametrize("x, w", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16")])
def test_mixed_types_r23(x, w):
    """Each is read as it is, and each gradient has the type of its tensor."""
    hidden, weight, targets = make()
    hidden = hidden.detach().to(getattr(torch, x)).requires_grad_()
    weight = weight.detach().to(getattr(torch, w)).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    reference = F.cross_entropy(wide[0] @ wide[1].T, targets)
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(loss, (hidden, weight))
    for grad, tensor, wanted in zip(grads, (hidden, weight), torch.autograd.grad(reference, wide)):
        assert grad.dtype == tensor.dtype
        assert (grad.double() - wanted).norm() <= 2**-7 * wanted.norm()


def test_float64_with_float32_is_refused():
    hidden, weight, targets = make()
    with pytest.raises(ValueError, match="f64"):
        linear_cross_entropy(hidden.double(), weight, targets)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    hidden, weight, targets = make()
    plain = linear_cross_entropy(hidden, weight, targets)
    kept = checkpoint(linear_cross_entropy, hidden, weight, targets, use_reentrant=use_reentrant)
    assert torch.equal(plain, kept)
    for a, b in zip(torch.autograd.grad(plain, (hidden, weight)), _backward_of(kept, (hidden, weight))):
        assert torch.equal(a, b)


def _backward_of(loss, tensors):
    loss.backward()
    return [t.grad for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_takes_the_gradient_in_float32(dtype):
    """Megatron's convention: micro-batches add into weight.main_grad, and weight.grad is a placeholder."""
    hidden, weight, targets = make(dtype)
    plain = weight.detach().float().requires_grad_()
    weight.main_grad = torch.full((V, D), 0.25)
    weight.grad_added_to_main_grad = False
    for factor in (1.0, 0.5):
        (linear_cross_entropy(hidden, weight, targets) * factor).backward()
        (linear_cross_entropy(hidden.detach().float(), plain, targets) * factor).backward()
    assert weight.grad_added_to_main_grad
    assert (weight.grad == 0).all()
    torch.testing.assert_close(weight.main_grad, plain.grad + 0.25, rtol=1e-5, atol=1e-6)
    (d_hidden,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden)
    assert d_hidden.dtype == dtype and d_hidden.abs().sum() > 0


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_main_grad_under_compile(backend):
    hidden, weight, targets = make()
    plain = weight.detach().clone().requires_grad_()
    weight.main_grad = torch.zeros(V, D)
    step = lambda h, w, t: linear_cross_entropy(h, w, t)  # noqa: E731
    torch.compile(step, fullgraph=True, backend=backend)(hidden, weight, targets).backward()
    step(hidden.detach(), plain, targets).backward()
    assert weight.grad is None and torch.equal(weight.main_grad, plain.grad)


def test_a_filter_on_the_cpu_is_refused_and_reports_nothing():
    hidden, weight, targets = make()
    with filter_reports() as reports:
        with pytest.raises(ullage.UllageError, match="681.*filter_tolerance"):
            linear_cross_entropy(hidden, weight, targets, filter_tolerance=1e-3)
        linear_cross_entropy(hidden, weight, targets).backward()
    assert reports == []


def test_what_a_filter_report_implies():
    report = FilterReport(largest_share=1e-3, largest_gradient=2.0, total_gradient=5.0, kept=0.5)
    weight = torch.tensor([[3.0, 4.0], [1.0, 0.0]], dtype=torch.bfloat16)
    hidden = torch.tensor([[[0.0, -2.0]]])
    assert report.d_hidden_bound(weight) == 10.0 and report.d_weight_bound(hidden) == 10.0
    assert report.d_hidden_bound(weight[:0]) == 0.0


def test_meta_tensors():
    hidden, weight = torch.empty(8, 4, device="meta"), torch.empty(9, 4, device="meta", requires_grad=True)
    targets = torch.empty(8, device="meta", dtype=torch.int64)
    assert linear_cross_entropy(hidden, weight, targets).shape == ()
    assert linear_cross_entropy(hidden, weight, targets, reduction="none").shape == (8,)
    linear_cross_entropy(hidden, weight, targets).backward()
    assert weight.grad.shape == weight.shape and weight.grad.is_meta


def test_dtensor_is_refused():
    class FakeDTensor(torch.Tensor):
        def full_tensor(self):
            return self

    hidden, weight, targets = make()
    with pytest.raises(TypeError, match="weight is a DTensor.*full_tensor"):
        linear_cross_entropy(hidden, weight.detach().as_subclass(FakeDTensor), targets)


def test_a_real_dtensor_is_refused(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        hidden, weight, targets = make()
        with pytest.raises(TypeError, match="DTensor"):
            linear_cross_entropy(hidden, distribute_tensor(weight.detach(), mesh, [Shard(0)]), targets)
    finally:
        dist.destroy_process_group()


def test_nothing_is_mutated():
    hidden, weight, targets = make()
    before = [t.detach().clone() for t in (hidden, weight, targets)]
    linear_cross_entropy(hidden, weight, targets).mul(3).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, (hidden, weight, targets)))


def test_lora_head_r15():
    config = {"losses": [{"kind": "cross_entropy"}], "adapter_scale": 1.0}
    a = torch.tensor([[1.0, 1.0]], requires_grad=True)
    b = torch.tensor([[1.0], [0.0]], requires_grad=True)
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    weight = torch.eye(2)
    out = head_loss(config, hidden=hidden, weight=weight, labels=torch.tensor([0]), adapter_a=a, adapter_b=b)
    out.total.backward()
    assert out.total.item() == pytest.approx(0.126928, abs=1e-6)
    torch.testing.assert_close(b.grad, torch.tensor([[-0.119203], [0.119203]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(a.grad, torch.tensor([[-0.119203, 0.0]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(hidden.grad, torch.tensor([[-0.238406, 0.0]]), atol=1e-6, rtol=0)


def test_rows_of_a_mix_have_their_own_gradients():
    """log_prob knows nothing of the terms' weights, and entropy nothing of a mask."""
    hidden, weight, targets = make(torch.float64)
    options = {
        "token_weights": torch.rand(N, dtype=torch.float64),
        "class_weights": torch.rand(V, dtype=torch.float64) + 0.5,
        "mask": torch.arange(N) % 2 == 0,
    }
    out = head_loss(
        {"losses": [{"kind": "cross_entropy"}, {"kind": "z_loss", "mask": "own", "weight": 0.1}]},
        hidden=hidden,
        weight=weight,
        labels=targets,
        returns=["token_loss", "log_prob", "entropy"],
        **options,
    )
    z = hidden @ weight.T
    log_q, counted, y = F.log_softmax(z, -1), targets >= 0, targets.clamp(min=0)
    log_prob = log_q.gather(1, y[:, None])[:, 0] * counted
    entropy = -(log_q.exp() * log_q).sum(-1) * counted
    token_loss = -log_prob * options["token_weights"] * options["class_weights"][y]
    token_loss = token_loss + 0.1 * torch.logsumexp(z, -1) ** 2 * options["mask"]
    for ours, theirs in ((out.token_loss, token_loss), (out.log_prob, log_prob), (out.entropy, entropy)):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
        upstream = torch.randn(N, dtype=torch.float64)
        found = torch.autograd.grad(ours, (hidden, weight), upstream, retain_graph=True)
        for f, w in zip(found, torch.autograd.grad(theirs, (hidden, weight), upstream, retain_graph=True)):
            torch.testing.assert_close(f, w, rtol=1e-10, atol=1e-11)
    (d_hidden,) = torch.autograd.grad(out.total, hidden, torch.tensor(1 / 3, dtype=torch.float64))
    again = head_loss(
        {"losses": [{"kind": "cross_entropy"}, {"kind": "z_loss", "mask": "own", "weight": 0.1}]},
        hidden=hidden,
        weight=weight,
        labels=targets,
        **options,
    )
    (wanted,) = torch.autograd.grad(again.total, hidden, torch.tensor(1 / 3, dtype=torch.float64))
    torch.testing.assert_close(d_hidden, wanted, rtol=1e-14, atol=1e-16)


def test_a_token_loss_that_is_not_of_its_token_alone_is_refused():
    hidden, weight, targets = make()
    out = head_loss(
        {"losses": [{"kind": "gspo"}]},
        hidden=hidden,
        weight=weight,
        labels=targets,
        n_segments=1,
        advantages=torch.ones(N),
        old_log_probs=torch.zeros(N),
        segments=torch.zeros(N, dtype=torch.int64),
        returns=["token_loss"],
    )
    with pytest.raises(RuntimeError, match="gspo"):
        out.token_loss.sum().backward()

"""The losses on CUDA tensors, where there is a GPU and the library has its kernels; `./dev gpu-test` runs them."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import ullage  # noqa: E402
from ullage.torch import _ops, _plan, _run  # noqa: E402
from ullage.torch import VocabShard, check, cross_entropy, distillation, filter_reports  # noqa: E402
from ullage.torch import grpo_loss, gspo_loss, head_loss, linear_cross_entropy, linear_distillation  # noqa: E402
from ullage.torch import patch, token_logprobs, unpatch  # noqa: E402
from ullage.torch._head import to_text  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and ullage.probe().cuda["kernels_compiled"]), reason="no GPU, or no kernels for it"
)

N, D, V = 700, 256, 3001


@pytest.fixture(autouse=True)
def _nothing_was_met():
    yield
    check()


def make(peaked=False, dtype=torch.bfloat16, n=N, d=D, v=V):
    hidden = torch.randn(n, d, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(v, d, device="cuda") / d**0.5 * (8 if peaked else 1)).to(dtype).requires_grad_()
    targets = torch.randint(0, v, (n,), device="cuda")
    targets[::7] = -100
    return hidden, weight, targets


def wide(*tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def exact(hidden, weight, targets, **options):
    inputs = wide(hidden, weight)
    return inputs, F.cross_entropy(inputs[0] @ inputs[1].T, targets, **options)


def assert_near(found, wanted, rtol=2**-7):
    for f, w in zip(found, wanted):
        assert torch.isfinite(f).all() and (f.double() - w).norm() <= rtol * w.norm()


def assert_no_worse(found, eager, wanted, roundings=1):
    """Than PyTorch's own, which rounds the logits to the inputs' type (and is spared the rest here: its softmax is in
    f64) once, where ours do so `roundings` times; and never much worse than one rounding, or in f32 than a long sum's."""
    for f, e, w in zip(found, eager, wanted):
        rounding = torch.finfo(e.dtype).eps if e.dtype.itemsize == 2 else 2**-19
        error, eager_error = (f.double() - w).norm(), (e.double() - w).norm()
        assert torch.isfinite(f).all() and error <= 1.25 * roundings**0.5 * eager_error + rounding * w.norm(), (
            error, eager_error,
        )  # fmt: skip


@contextlib.contextmanager
def unless_refused():
    """What the kernels do not take they refuse by name, which is right too, and no reason to fail."""
    try:
        yield
    except ullage.UllageError as error:
        if error.name not in ("head_unknown_kind", "head_bad_dtype"):
            raise
        pytest.skip(f"refused: {error}")


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("peaked", [False, True])
def test_linear(reduction, peaked):
    hidden, weight, targets = make(peaked)
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    inputs, reference = exact(hidden, weight, targets, reduction=reduction)
    torch.testing.assert_close(loss.double(), reference, rtol=1e-3, atol=1e-3)
    upstream = torch.rand_like(reference) + 0.5
    found = torch.autograd.grad(loss, (hidden, weight), upstream.to(loss.dtype))
    assert [f.dtype for f in found] == [torch.bfloat16] * 2
    assert_near(found, torch.autograd.grad(reference, inputs, upstream))


OPTIONS = {
    "bias": {},
    "softcap": {"softcap": 5.0},
    "label_smoothing": {"label_smoothing": 0.1},
    "class_weight": {},
    "z_loss": {"z_loss": 1e-2},
    "logits_scale": {"logits_scale": 0.5},
    "ignore_index": {"ignore_index": 3},
    "shift": {"shift": True},
}


def reference_loss(z, targets, options, reduction):
    """In float64, from the formulas and not from ours."""
    softcap, scale = options.get("softcap", 0), options.get("logits_scale", 1)
    z = (softcap * torch.tanh(z / softcap) if softcap else z) * scale
    if options.get("shift"):
        z, targets = z[:-1], targets[1:]
    counted = (targets >= 0) & (targets != options.get("ignore_index", -100))
    targets = targets.masked_fill(~counted, -100)
    class_weight = options.get("class_weight")
    loss = F.cross_entropy(
        z, targets, weight=None if class_weight is None else class_weight.double(), reduction=reduction,
        label_smoothing=options.get("label_smoothing", 0.0),
    )  # fmt: skip
    squares = options.get("z_loss", 0) * torch.logsumexp(z, -1).square() * counted
    return loss + {"mean": squares.sum() / counted.sum(), "sum": squares.sum(), "none": squares}[reduction]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["plain", *OPTIONS])
def test_every_option_of_the_fused_loss(name, dtype, reduction):
    hidden, weight, targets = make(dtype=dtype)
    options = dict(OPTIONS.get(name, {}))
    if name == "class_weight":
        options["class_weight"] = torch.rand(V, device="cuda") + 0.5
    bias = torch.randn(V, device="cuda", dtype=dtype, requires_grad=True) if name == "bias" else None
    with unless_refused():
        loss = linear_cross_entropy(hidden, weight, targets, bias=bias, reduction=reduction, **options)
    inputs, given = wide(hidden, weight, bias), (hidden, weight, bias)
    reference, eager = (
        reference_loss(F.linear(*tensors).double(), targets, options, reduction) for tensors in (inputs, given)
    )
    upstream = torch.rand_like(reference) + 0.5
    with unless_refused():
        found = torch.autograd.grad(loss, [t for t in given if t is not None], upstream.to(loss.dtype))
    assert all(f.dtype == dtype for f in found)
    wanted = torch.autograd.grad(reference, [t for t in inputs if t is not None], upstream)
    theirs = torch.autograd.grad(eager, [t for t in given if t is not None], upstream)
    assert_no_worse([loss, *found], [eager, *theirs], [reference, *wanted], roundings=2 if name == "bias" else 1)


@pytest.mark.parametrize("name", ["return_lse", "return_logprobs", "return_entropy"])
@pytest.mark.parametrize("fused", [True, False])
def test_rows(name, fused):
    hidden, weight, targets = make()
    counted = targets >= 0
    with unless_refused():
        if fused:
            _, row = linear_cross_entropy(hidden, weight, targets, **{name: True})
            z = hidden.detach().double() @ weight.detach().double().T
        else:
            logits = (hidden @ weight.T).detach()
            _, row = cross_entropy(logits, targets, **{name: True})
            z = logits.double()
    log_q = F.log_softmax(z, -1)
    wanted = {
        "return_lse": torch.logsumexp(z, -1),
        "return_logprobs": log_q.gather(1, targets.clamp(min=0)[:, None])[:, 0],
        "return_entropy": -(log_q.exp() * log_q).sum(-1),
    }[name]
    torch.testing.assert_close(row.double(), wanted * counted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", *(name for name in OPTIONS if name != "bias")])
def test_every_option_from_logits(name, dtype, reduction):
    logits = (3 * torch.randn(N, V, device="cuda")).to(dtype).requires_grad_()
    _, _, targets = make()
    options = dict(OPTIONS.get(name, {}))
    if name == "class_weight":
        options["class_weight"] = torch.rand(V, device="cuda") + 0.5
    loss = cross_entropy(logits, targets, reduction=reduction, **options)
    (inputs,) = wide(logits)
    reference = reference_loss(inputs, targets, options, reduction)
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=1e-5)
    upstream = torch.rand_like(reference) + 0.5
    found = torch.autograd.grad(loss, logits, upstream.to(loss.dtype))
    assert_near(found, torch.autograd.grad(reference, inputs, upstream), 1e-5 if dtype == torch.float32 else 2**-8)


def test_loss_scaling_in_float16():
    """A mean over many rows leaves gradients below float16's smallest; a scale of 65536 must bring them back."""
    logits = torch.randn(N, V, device="cuda", dtype=torch.float16, requires_grad=True)
    _, _, targets = make()
    (inputs,) = wide(logits)
    found = torch.autograd.grad(cross_entropy(logits, targets) * 65536, logits)
    assert_near(found, torch.autograd.grad(F.cross_entropy(inputs, targets) * 65536, inputs), 2**-10)


def test_main_grad_and_log_probabilities():
    hidden, weight, targets = make()
    inputs, reference = exact(hidden, weight, targets, reduction="none")
    log_prob = token_logprobs(hidden, weight, targets)
    torch.testing.assert_close(log_prob.double(), -reference, rtol=1e-3, atol=1e-3)
    upstream = torch.randn(N, device="cuda")
    wanted = torch.autograd.grad(-reference, inputs, upstream.double())
    assert_near(torch.autograd.grad(log_prob, (hidden, weight), upstream), wanted)
    weight.main_grad = torch.ones(V, D, device="cuda")
    token_logprobs(hidden, weight, targets).backward(upstream)
    assert_near([weight.main_grad - 1], wanted[1:])
    (3 * linear_cross_entropy(hidden, weight, targets)).backward()
    inputs, reference = exact(hidden, weight, targets)
    assert_near([weight.main_grad - 1], [wanted[1] + 3 * torch.autograd.grad(reference, inputs)[1]])


@pytest.mark.parametrize("loss", [grpo_loss, gspo_loss])
def test_policy_losses(loss):
    hidden, weight, targets = make()
    shape = (7, 100)
    hidden, targets = hidden.view(*shape, D), targets.view(shape)
    old = token_logprobs(hidden, weight, targets).detach() + 0.1 * torch.randn(shape, device="cuda")
    advantages = torch.randn(7, device="cuda")
    found = loss(hidden, weight, targets, advantages, old)
    on_cpu = [t.detach().cpu() for t in (hidden.float(), weight.float(), targets, advantages, old)]
    on_cpu[:2] = [t.requires_grad_() for t in on_cpu[:2]]
    wanted = loss(*on_cpu)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-2, atol=1e-3)
    for f, w in zip(torch.autograd.grad(found, (hidden, weight)), torch.autograd.grad(wanted, on_cpu[:2])):
        assert (f.cpu().double() - w).norm() <= 0.05 * w.norm()  # a ratio near its clip falls to either side


# The textbook's tempers the student as well, beside labels whose softmax is not.
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jensen_shannon", "cross_entropy"])
@pytest.mark.parametrize("textbook", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_distillation(divergence, textbook, fused):
    hidden, weight, targets = make()
    teacher_hidden, teacher_weight, _ = make(peaked=True)
    teacher_hidden, teacher_weight = teacher_hidden.detach(), teacher_weight.detach()
    options = {"divergence": divergence, "temperature": 2.0}
    if textbook:
        options |= {"student_temperature": 2.0, "t_squared": True, "cross_entropy_weight": 0.5}
    if fused:
        with unless_refused():
            found = linear_distillation(
                hidden, weight, targets, teacher_hidden=teacher_hidden, teacher_weight=teacher_weight, **options
            )
        inputs = wide(hidden, weight)
        z, teacher = inputs[0] @ inputs[1].T, teacher_hidden @ teacher_weight.T  # rounded, as eager's are
        sources = (hidden, weight)
    else:
        logits, teacher = (hidden @ weight.T).detach().requires_grad_(), teacher_hidden @ teacher_weight.T
        found = distillation(logits, teacher, targets, **options)
        inputs, sources = wide(logits), (logits,)
        z = inputs[0]
    log_q, log_p = F.log_softmax(z / 2 if textbook else z, -1), F.log_softmax(teacher.double() / 2, -1)
    q, p = log_q.exp(), log_p.exp()
    log_m = torch.logaddexp(log_q, log_p) - torch.log(torch.tensor(2.0))
    rows = {
        "forward_kl": (p * (log_p - log_q)).sum(-1),
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "jensen_shannon": 0.5 * (p * (log_p - log_m) + q * (log_q - log_m)).sum(-1),
        "cross_entropy": -(p * log_q).sum(-1),
    }[divergence]
    reference = rows[targets >= 0].mean()
    if textbook:
        reference = 4 * reference + 0.5 * F.cross_entropy(z, targets)
    torch.testing.assert_close(found.double(), reference, rtol=1e-3, atol=1e-4)
    assert_near(torch.autograd.grad(found, sources), torch.autograd.grad(reference, inputs), 2**-6)


def arguments(hidden, weight, targets, gradients, rows=0):
    text = to_text([{"kind": "cross_entropy"}, {"kind": "z_loss", "weight": 1e-3}])
    given = {"input": hidden, **({} if weight is None else {"weight": weight}), "labels": targets}
    return (list(given.values()), " ".join(given), None, text, 0, 0, gradients, rows)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("gradients, rows", [(3, 0), (0, _plan.TOKEN_LOSS | _plan.LSE)])
def test_opcheck(fused, gradients, rows):
    hidden, weight, targets = make(n=40, d=64, v=301)
    if not fused:
        hidden, weight, gradients = (hidden @ weight.T).detach(), None, gradients & 1
    torch.library.opcheck(
        _ops.head, arguments(hidden.detach(), None if weight is None else weight.detach(), targets, gradients, rows)
    )


def test_opcheck_of_the_backward_operations():
    hidden, weight, targets = make(n=40, d=64, v=301)
    values = arguments(hidden.detach(), weight.detach(), targets, 0)
    backward = (*values[:2], torch.randn(40, device="cuda"), *values[3:6])
    torch.library.opcheck(_ops.head_backward, (*backward, 3))
    torch.library.opcheck(_ops.head_backward_into, (torch.zeros(301, 64, device="cuda"), *backward, 1))
    factor = torch.tensor(2.0, dtype=torch.float64, device="cuda")
    torch.library.opcheck(_ops.scaled, (torch.randn(5, 3, device="cuda"), factor, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 4099, 1 << 21])
def test_scale_rounds_once(dtype, n):
    for offset in (0, 1):  # a pack of 16 bytes may start anywhere
        values = torch.randn(n + offset, device="cuda").to(dtype)[offset:]
        for factor in (1.0, 1 / 3, -1e30):
            by = torch.tensor(factor, dtype=torch.float64, device="cuda")
            accumulator = torch.float64 if dtype == torch.float64 else torch.float32
            wanted = (values.to(accumulator) * by.to(accumulator)).to(dtype)
            ours = values.clone() if offset == 0 else torch.cat([values[:1], values])[1:]
            found = _run.scale(ours, by, ours)
            assert found.data_ptr() == ours.data_ptr() and torch.equal(found, wanted)


def test_computed_gradients_are_given_away():
    hidden, weight, targets = make()
    plain = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, targets)
    thirds = torch.autograd.grad(loss, (hidden, weight), torch.tensor(1 / 3, device="cuda"), retain_graph=True)
    assert_near(thirds, [g.double() / 3 for g in plain], 2**-8)
    given = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(plain, given)), "the kept ones were not scaled in place"
    with pytest.raises(RuntimeError, match="second backward"):
        torch.autograd.grad(loss, (hidden, weight))


LOSSES = {
    "mean": lambda h, w, t: linear_cross_entropy(h, w, t, z_loss=1e-4),
    "per token": lambda h, w, t: (
        linear_cross_entropy(h, w, t, reduction="none") * torch.arange(N, device="cuda")
    ).sum(),
    "returns": lambda h, w, t: sum(x.sum() for x in linear_cross_entropy(h, w, t, return_lse=True, shift=True)),
    "token_logprobs": lambda h, w, t: token_logprobs(h, w, t, temperature=0.7).sum(),
    "from logits": lambda h, w, t: cross_entropy(h @ w.T, t, label_smoothing=0.1),
    "mix": lambda h, w, t: (
        head_loss(
            {"losses": [{"kind": "cross_entropy"}, {"kind": "z_loss", "weight": 0.1}]}, hidden=h, weight=w, labels=t
        ).total
    ),
}


def gradients_of(step, hidden, weight, targets):
    loss = step(hidden, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("name", LOSSES)
def test_compile_without_a_graph_break(name):
    inputs = make()
    step = lambda h, w, t: LOSSES[name](h * 2, w, t) + 1  # noqa: E731
    wanted = gradients_of(step, *inputs)
    found = gradients_of(torch.compile(step, fullgraph=True), *inputs)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6)
    assert_near(found[1:], [w.double() for w in wanted[1:]], 2**-7)


def test_compile_with_cuda_graphs():
    inputs = make()
    compiled = torch.compile(LOSSES["mean"], fullgraph=True, mode="reduce-overhead")
    wanted = gradients_of(LOSSES["mean"], *inputs)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = gradients_of(compiled, *inputs)
        assert all(torch.equal(f, w) for f, w in zip(found, wanted))


@pytest.mark.parametrize("name", LOSSES)
def test_no_synchronisation_and_graph_capture(name):
    inputs = make()
    with no_synchronisation():
        eager = gradients_of(LOSSES[name], *inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        elsewhere = gradients_of(LOSSES[name], *inputs)
    torch.cuda.current_stream().wait_stream(side)
    assert all(torch.equal(a, b) for a, b in zip(elsewhere, eager)), "the same bits on another stream"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients_of(LOSSES[name], *inputs)
    for tensor in captured:
        tensor.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, eager)), "the same bits"


def test_no_synchronisation_with_main_grad_and_policies():
    hidden, weight, targets = make()
    weight.main_grad = torch.zeros(V, D, device="cuda")
    old, advantages = torch.randn(7, 100, device="cuda") - 8, torch.randn(7, device="cuda")
    with no_synchronisation():
        linear_cross_entropy(hidden, weight, targets).backward()
        grpo_loss(hidden.view(7, 100, D), weight, targets.view(7, 100), advantages, old).backward()
    assert weight.main_grad.abs().sum() > 0


def test_a_label_outside_the_vocabulary_is_kept_until_asked():
    hidden, weight, targets = make()
    outside = targets.clone()
    outside[5] = V
    with no_synchronisation():
        loss = linear_cross_entropy(hidden, weight, outside)
        linear_cross_entropy(hidden, weight, targets)  # the same plan; what was met stays
    with pytest.raises(ullage.UllageError, match=r"labels\[5\]") as caught:
        check()
    assert caught.value.code == 586
    check()  # told once
    outside[5] = -100
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, outside)), "the row counted as ignored"
    logits = torch.randn(4, 9, device="cuda")
    logits[2, 3] = float("nan")
    cross_entropy(logits, torch.arange(4, device="cuda"))
    with pytest.raises(ullage.UllageError, match="row 2"):
        check()


def make_sure(n=1024, d=256, v=4096, n_sure=512):
    """Rows of which the first know their label: their tiles are left out."""
    hidden, weight, targets = make(n=n, d=d, v=v)
    targets[:] = torch.arange(n, device="cuda")
    with torch.no_grad():
        hidden[:n_sure] += 30 * weight[targets[:n_sure]]
    return hidden, weight, targets


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_the_filter_keeps_its_bound_and_reports_it(reduction):
    """What a tolerance of a hundredth leaves out moves d_hidden by at most that share, and by what the report says."""
    hidden, weight, targets = make_sure()
    n = len(targets)
    exactly = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
    with filter_reports() as reports:
        filtered = linear_cross_entropy(hidden, weight, targets, reduction=reduction, filter_tolerance=1e-2)
        assert torch.equal(exactly, filtered), "the loss is exact"
        upstream = torch.full_like(exactly, 0.5)
        wanted, found = (torch.autograd.grad(loss, (hidden, weight), upstream) for loss in (exactly, filtered))
    (report,) = reports  # of the run that made the gradients
    factor = 1 if reduction == "none" else 0.5  # a total's upstream factor is not the run's
    of_a_row = {"sum": 1, "mean": 1 / n, "none": 0.5}[reduction]
    assert 0 < report.kept < 1 and 0 < report.largest_share <= 1e-2
    assert report.largest_gradient <= of_a_row * report.largest_share * 1.001
    assert report.largest_gradient <= report.total_gradient <= n * report.largest_gradient
    row_errors = (found[0].double() - wanted[0].double()).norm(dim=1)
    rounding = 2**-7 * wanted[0].double().norm(dim=1)
    assert row_errors.max() > 0 and (row_errors <= factor * report.d_hidden_bound(weight) + rounding).all()
    rounding = 2**-7 * wanted[1].double().norm()
    assert (found[1].double() - wanted[1].double()).norm() <= factor * report.d_weight_bound(hidden) + rounding


def test_filter_reports_are_of_filtered_runs_alone_and_end_with_their_block():
    hidden, weight, targets = make()  # unsure rows: every tile is kept
    with filter_reports() as reports, filter_reports() as others:
        linear_cross_entropy(hidden, weight, targets).backward()
        with torch.no_grad():
            linear_cross_entropy(hidden, weight, targets, filter_tolerance=1e-2)
        assert reports == []
        linear_cross_entropy(hidden, weight, targets, filter_tolerance=1e-9).backward()
        assert reports == others and reports[0].kept == 1 and reports[0].total_gradient == 0
    with no_synchronisation():
        linear_cross_entropy(hidden, weight, targets, filter_tolerance=1e-9).backward()
    assert len(reports) == 1
    with pytest.raises(RuntimeError, match="cannot capture"), filter_reports():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            linear_cross_entropy(hidden, weight, targets, filter_tolerance=1e-9)
    check()  # of a run that was captured and never replayed: nothing


def test_a_wide_weight_gradient_is_rounded_once_and_filtered():
    """Whose float32 sum is past the budget: strips where a budget says so, else a float32 gradient, rounded."""
    n, d, v = 1280, 1024, 151936
    hidden, weight, targets = make_sure(n=n, d=d, v=v)
    strips = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, targets, budget_bytes=512 << 20), (hidden, weight)
    )
    sum_bytes, inputs_bytes = 4 * v * d, torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), (hidden, weight))
    assert torch.equal(found[1], strips[1]), "the same sums, rounded once"
    assert_near(found[:1], [strips[0].double()])
    peak = torch.cuda.max_memory_allocated() - inputs_bytes
    assert sum_bytes < peak <= sum_bytes + max(sum_bytes // 2, 512 << 20) + (4 << 20)
    given = linear_cross_entropy(hidden, weight, targets, budget_bytes=sum_bytes + (256 << 20))
    assert torch.equal(torch.autograd.grad(given, weight)[0], strips[1])
    with filter_reports() as reports:  # strips have none
        linear_cross_entropy(hidden, weight, targets, filter_tolerance=1e-2).backward()
    assert reports[0].kept < 1


def test_a_captured_run_has_met_nothing_until_it_is_replayed():
    logits = torch.randn(90, 77, device="cuda")  # a plan that no other test makes
    outside = torch.full((90,), 77, device="cuda")
    check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cross_entropy(logits, outside)
    check()
    graph.replay()
    with pytest.raises(ullage.UllageError, match=r"labels\[0\]"):
        check()


def test_nothing_to_count():
    hidden, weight, targets = make()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    assert loss == 0 and d_hidden.count_nonzero() == 0 and d_weight.count_nonzero() == 0
    loss = linear_cross_entropy(hidden[:0], weight, targets[:0])
    assert loss == 0 and torch.autograd.grad(loss, weight)[0].count_nonzero() == 0


def test_ignored_rows_are_never_read():
    hidden, weight, targets = make()
    wanted = gradients_of(LOSSES["mean"], hidden, weight, targets)
    poisoned = torch.where((targets < 0)[:, None], float("nan"), hidden.detach()).requires_grad_()
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(LOSSES["mean"], poisoned, weight, targets), wanted))


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_requires_grad_on_a_part(needs):
    hidden, weight, targets = make()
    whole = gradients_of(LOSSES["mean"], hidden, weight, targets)
    part = [t.detach().requires_grad_(need) for t, need in zip((hidden, weight), needs)]
    loss = linear_cross_entropy(*part, targets, z_loss=1e-4)
    loss.backward()
    assert torch.equal(loss, whole[0])
    for tensor, wanted, need in zip(part, whole[1:], needs):
        assert torch.equal(tensor.grad, wanted) if need else tensor.grad is None


def test_layouts():
    """Copies where the kernels' view cannot say a layout; the bits are those of the plain tensor."""
    hidden, weight, targets = make()
    wanted = gradients_of(LOSSES["mean"], hidden, weight, targets)
    apart = torch.zeros(N, 2 * D, device="cuda", dtype=torch.bfloat16)
    apart[:, ::2] = hidden.detach()
    unaligned = torch.empty(N * D + 1, device="cuda", dtype=torch.bfloat16)[1:].view(N, D)
    unaligned.copy_(hidden.detach())
    transposed = weight.detach().T.contiguous().T.requires_grad_()
    for other in (apart[:, ::2], unaligned):
        found = gradients_of(LOSSES["mean"], other.detach().requires_grad_(), transposed, targets.int())
        assert all(torch.equal(f, w) for f, w in zip(found, wanted))
    per_token = linear_cross_entropy(hidden, weight, targets, reduction="none")
    summed = torch.autograd.grad(per_token.sum(), (hidden, weight), retain_graph=True)  # an expanded upstream gradient
    ones = torch.autograd.grad(per_token, (hidden, weight), torch.ones(2 * N, device="cuda")[::2])
    assert all(torch.equal(a, b) for a, b in zip(summed, ones))


def test_autocast():
    hidden, weight, targets = make(dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), targets))
    assert [g.dtype for g in torch.autograd.grad(loss, (hidden, weight))] == [torch.float32] * 2


def test_checkpointing():
    inputs = make()
    wanted = gradients_of(LOSSES["mean"], *inputs)
    kept = checkpoint(LOSSES["mean"], *inputs, use_reentrant=False)
    found = kept.detach(), *torch.autograd.grad(kept, inputs[:2])
    assert all(torch.equal(f, w) for f, w in zip(found, wanted))


@pytest.mark.parametrize("budget_mib", [None, 24, 512])
def test_memory_is_what_the_plan_promises(budget_mib):
    """The most that is allocated, over the inputs and the gradients, is the plan's workspace, which the allocator
    rounds to 2 MiB, and a few scalars."""
    n, d, v = 1024, 512, 65536
    hidden, weight, targets = make(n=n, d=d, v=v)
    budget = None if budget_mib is None else budget_mib << 20
    plan = ullage.plan_head(
        [{"kind": "cross_entropy"}], n_tok=n, d_model=d, vocab=v, gradients=["d_hidden", "d_weight"], dtype="bf16",
        device="cuda", budget_bytes=budget or 0,
    )  # fmt: skip
    (2 * linear_cross_entropy(hidden, weight, targets, budget_bytes=budget)).backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    (2 * linear_cross_entropy(hidden, weight, targets, budget_bytes=budget)).backward()
    peak = torch.cuda.max_memory_allocated() - before - hidden.grad.nbytes - weight.grad.nbytes
    rounded = -(-plan.workspace_bytes >> 21) << 21
    assert plan.workspace_bytes <= peak <= rounded + (1 << 16), (plan.mode, plan.workspace_bytes, peak)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma2"])  # the last with a softcap of its logits
def test_hugging_face(family):
    hf = pytest.importorskip("transformers")
    sizes = dict(vocab_size=997, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16, max_position_embeddings=64)  # fmt: skip
    config = getattr(hf, f"{family}Config")(**sizes, tie_word_embeddings=True)
    model = getattr(hf, f"{family}ForCausalLM")(config).cuda().bfloat16()
    ids = torch.randint(3, 997, (2, 40), device="cuda")
    labels = ids.masked_fill(torch.rand(ids.shape, device="cuda") < 0.2, -100)

    def losses_and_gradients():
        model.zero_grad()
        out = model(input_ids=ids, labels=labels)
        out.loss.backward()
        return out, {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}

    own, wanted = losses_and_gradients()
    out, found = losses_and_gradients() if patch(model) is model else None
    assert out.logits is None and found.keys() == wanted.keys()
    torch.testing.assert_close(out.loss.float(), own.loss.float(), rtol=2e-3, atol=2e-3)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 0.05 * gradient.norm(), name
    assert unpatch(model)(input_ids=ids).logits is not None


def test_what_the_kernels_do_not_take_is_named():
    hidden, weight, targets = make(dtype=torch.float64)
    with pytest.raises(ValueError, match="696.*f64"):
        linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(ValueError, match="696.*f64"):
        cross_entropy(hidden @ weight.T, targets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", [{"z_loss": 0.1}, {"label_smoothing": 0.1, "return_entropy": True}], ids=str)
def test_a_group_of_one_rank_is_the_whole(dtype, options, tmp_path):
    """Both runs of a shard and the exchange on CUDA tensors; tests/python/test_group.py has several ranks."""
    dist = torch.distributed
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = []
        for group in (None, dist.group.WORLD, VocabShard.of(dist.group.WORLD, V, "cuda")):
            torch.manual_seed(0)
            hidden, weight, targets = make(dtype=dtype)
            result = linear_cross_entropy(hidden, weight, targets, process_group=group, **options)
            loss, *more = result if isinstance(result, tuple) else (result,)
            loss.backward()
            found.append([loss.detach(), *more, hidden.grad, weight.grad])
    finally:
        dist.destroy_process_group()
    whole, asked, told = found
    # In float32 but for the gradients' one rounding: that of the softmax's scale may move it by a unit.
    assert_near(asked, [each.double() for each in whole], rtol=max(2 * torch.finfo(dtype).eps, 2**-19))
    for one, other in zip(asked, told):
        assert torch.equal(one, other)


def rank_of_two(rank, folder, dtype):
    torch.cuda.set_device(rank)
    dist = torch.distributed
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    span = slice(0, V - 1000) if rank == 0 else slice(V - 1000, V)
    found = []
    for group in (dist.group.WORLD, VocabShard.of(dist.group.WORLD, span.stop - span.start, "cuda")):
        torch.manual_seed(0)
        hidden, weight, targets = make(dtype=dtype)
        shard = weight.detach()[span].clone().requires_grad_()
        loss, lse = linear_cross_entropy(hidden, shard, targets, z_loss=0.1, return_lse=True, process_group=group)
        loss.backward()
        found.append([each.detach().cpu() for each in (loss, lse, hidden.grad, shard.grad)])
    torch.save(found, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_gpus_are_the_whole(dtype, tmp_path):
    torch.multiprocessing.spawn(rank_of_two, (str(tmp_path), dtype), nprocs=2)
    first, second = (torch.load(tmp_path / str(rank)) for rank in range(2))
    torch.manual_seed(0)
    hidden, weight, targets = make(dtype=dtype)
    loss, lse = linear_cross_entropy(hidden, weight, targets, z_loss=0.1, return_lse=True)
    loss.backward()
    wanted = [each.detach().double().cpu() for each in (loss, lse, hidden.grad, weight.grad)]
    for asked, told in (first, second):
        for one, other in zip(asked, told):
            assert torch.equal(one, other)
    for of_first, of_second in zip(first[0][:3], second[0][:3]):  # what every rank has alike
        assert torch.equal(of_first, of_second)
    found = [*first[0][:3], torch.cat([first[0][3], second[0][3]])]
    assert_near(found, wanted, rtol=max(2 * torch.finfo(dtype).eps, 2**-19))

"""A vocabulary over the ranks of a group: gloo, two and three processes, uneven shards, against the whole on one."""

import itertools
import multiprocessing
import re
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ullage import UllageError
from ullage.torch import (
    LinearCrossEntropyLoss,
    VocabShard,
    cross_entropy,
    gspo_loss,
    grpo_loss,
    head_loss,
    linear_cross_entropy,
    token_logprobs,
)

SIZES = {2: [16, 7], 3: [9, 1, 13]}  # of 23 columns
LARGE = {2: [5000, 3003], 3: [2668, 2668, 2667]}  # of 8003


class Rank:
    """One rank's view of whole tensors; without a group, the only one's."""

    def __init__(self, rank=0, sizes=None, group=None):
        self.group, self.rank = group, rank
        self.span = slice(None) if sizes is None else slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def rows(self, tensor):
        return None if tensor is None else tensor[self.span].detach().clone().requires_grad_()

    def columns(self, tensor):
        return tensor[..., self.span].detach().clone().requires_grad_()


def made(dtype=torch.float64, n=12, d=7, v=23):
    """The same on every rank."""
    generator = torch.Generator().manual_seed(n * v + d)
    hidden = torch.randn(n, d, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(v, d, dtype=torch.float64, generator=generator).to(dtype)
    bias = torch.randn(v, dtype=torch.float64, generator=generator).to(dtype)
    targets = torch.randint(0, v, (n,), generator=generator)
    targets[::5] = -100
    return hidden, weight, bias, targets


def gradients(loss, shared=(), rows=(), columns=()):
    """One backward; `rows` and `columns` are this rank's part of what the parent puts side by side."""
    loss.backward()
    return {
        "loss": loss.detach(),
        "shared": [t.grad for t in shared],
        "rows": [t.grad for t in rows],
        "columns": [t.grad for t in columns],
    }


OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum", "z_loss": 1e-2},
    "capped": {"softcap": 2.0, "logits_scale": 3.0, "z_loss": 0.1},
    "ignoring": {"ignore_index": 3},
    "shifted": {"shift": True},
    "smoothed": {"label_smoothing": 0.1, "logits_scale": 0.7, "z_loss": 0.01},
}


def case_of_options(of, name, with_bias):
    hidden, weight, bias, targets = made()
    weight, bias = of.rows(weight), of.rows(bias) if with_bias else None
    targets = targets.clamp(min=0) if name == "ignoring" else targets
    loss, lse, log_prob, entropy = linear_cross_entropy(
        hidden,
        weight,
        targets,
        bias=bias,
        process_group=of.group,
        return_lse=True,
        return_logprobs=True,
        return_entropy=True,
        **OPTIONS[name],
    )
    return {
        "lse": lse,
        "log_prob": log_prob,
        "entropy": entropy,
        **gradients(loss, [hidden], [weight] + [bias] * with_bias),
    }


def case_of_rows(of, dtype=torch.float64):
    hidden, weight, bias, targets = made(dtype)
    weight = of.rows(weight)
    rows = linear_cross_entropy(hidden, weight, targets, reduction="none", process_group=of.group)
    return {"row_losses": rows.detach(), **gradients((rows * torch.arange(12)).sum(), [hidden], [weight])}


def case_of_logits(of, reduction):
    hidden, weight, _, targets = made()
    logits = of.columns(hidden @ weight.T)
    loss = cross_entropy(logits, targets, z_loss=0.1, reduction=reduction, process_group=of.group)
    return gradients(loss.sum(), columns=[logits])


def case_of_policies(of, kind):
    hidden, weight, _, targets = made(n=12)
    weight = of.rows(weight)
    hidden_2d, targets_2d = hidden.view(3, 4, -1), targets.view(3, 4)
    advantages = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    old = torch.full((3, 4), -2.5, dtype=torch.float64)
    arguments = (hidden_2d, weight, targets_2d, advantages, old)
    if kind == "grpo":
        options = {"reference_logprobs": old - 0.1, "kl_beta": 0.1, "temperature": 0.7, "return_metrics": True}
        loss, out = grpo_loss(*arguments, **options, process_group=of.group)
        return {"metrics": out.metrics, **gradients(loss, [hidden], [weight])}
    elif kind == "gspo":
        loss = gspo_loss(*arguments, epsilon_high=4.0, process_group=of.group)
    elif kind == "cispo":
        loss = head_loss(
            {"losses": [{"kind": "cispo"}, {"kind": "z_loss", "weight": 0.1, "mask": "none"}]},
            hidden=hidden_2d,
            weight=weight,
            labels=targets_2d,
            advantages=advantages[:, None].expand(3, 4),
            old_log_probs=old,
            process_group=of.group,
        ).total
    else:
        loss = token_logprobs(*arguments[:3], temperature=0.7, process_group=of.group).square().sum()
    return gradients(loss, [hidden], [weight])


def case_of_adapter(of):
    hidden, weight, _, targets = made()
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(2, 7, dtype=torch.float64, generator=generator).requires_grad_()
    b = of.rows(torch.randn(23, 2, dtype=torch.float64, generator=generator))
    config = {"losses": [{"kind": "cross_entropy"}], "adapter_scale": 0.5}
    out = head_loss(
        config,
        hidden=hidden,
        weight=weight[of.span],
        labels=targets,
        adapter_a=a,
        adapter_b=b,
        returns=["token_loss"],
        process_group=of.group,
    )
    return {"row_losses": out.token_loss.detach(), **gradients(out.total, [hidden, a], [b])}


def case_of_frozen(of, which):
    hidden, weight, _, targets = made()
    weight = of.rows(weight)
    module = LinearCrossEntropyLoss(process_group=of.group)
    if which == "hidden":
        return gradients(module(hidden.detach(), weight, targets), rows=[weight])
    return gradients(module(hidden, weight.detach(), targets), [hidden])


def case_of_nothing(of, n):
    hidden, weight, _, targets = made(n=n)
    weight = of.rows(weight)
    return gradients(linear_cross_entropy(hidden, weight, targets * 0 - 1, process_group=of.group), [hidden], [weight])


def case_of_empty_rank(of):
    """Labels of the first two columns alone, and in main_grad, twice."""
    hidden, weight, _, targets = made(torch.float32)
    weight = of.rows(weight)
    weight.main_grad = torch.ones_like(weight)
    for _ in range(2):
        linear_cross_entropy(hidden, weight, targets.clamp(max=1), process_group=of.group).backward()
    return {"shared": [hidden.grad], "rows": [weight.main_grad]}


def case_of_8003(of, dtype):
    hidden, weight, _, targets = made(dtype, n=33, d=16, v=8003)
    weight = of.rows(weight)
    return gradients(linear_cross_entropy(hidden, weight, targets, process_group=of.group), [hidden], [weight])


CASES = {
    **{f"{name} {bias}": (case_of_options, (name, bias)) for name in OPTIONS for bias in (False, True)},
    "rows": (case_of_rows, ()),
    "rows bf16": (case_of_rows, (torch.bfloat16,)),
    **{f"logits {reduction}": (case_of_logits, (reduction,)) for reduction in ("mean", "none")},
    **{kind: (case_of_policies, (kind,)) for kind in ("grpo", "gspo", "cispo", "token_logprobs")},
    "adapter": (case_of_adapter, ()),
    "frozen hidden": (case_of_frozen, ("hidden",)),
    "frozen weight": (case_of_frozen, ("weight",)),
    "no rows": (case_of_nothing, (0,)),
    "nothing counted": (case_of_nothing, (4,)),
    "a rank without labels": (case_of_empty_rank, ()),
}


def refusals(of):
    hidden, weight, _, targets = made()
    weight, found = of.rows(weight), {}
    entropy = token_logprobs(hidden, weight, targets, return_entropy=True, process_group=of.group)[1]
    try:
        entropy.sum().backward()
    except UllageError as error:
        found["entropy"] = (error.code, str(error))
    for name, options in {
        "class_weights": {"class_weight": torch.ones(len(weight), dtype=torch.float64)},
        "vocab_offset": {"process_group": VocabShard(of.group, 30, 23)},
        "group_vocab": {},
        "rows": {"hidden": hidden[: 12 - of.rank], "targets": targets[: 12 - of.rank]},
    }.items():
        arguments = {"hidden": hidden, "weight": weight, "targets": targets, "process_group": of.group, **options}
        try:
            if name == "group_vocab":
                head_loss({"losses": [{"kind": "cross_entropy"}], "group_vocab": 23}, hidden=hidden, weight=weight,
                          labels=targets)  # fmt: skip
            else:
                linear_cross_entropy(**arguments)
        except UllageError as error:
            found[name] = (error.code, str(error))
    return found


ALONE = {
    "a target": (UllageError, "labels\\[1\\]", lambda a: a["targets"].__setitem__(1, 23)),
    "shapes": (ValueError, "weight has shape", lambda a: a.update(weight=a["weight"][:, :-1])),
    "types": (TypeError, "weight is", lambda a: a.update(weight=a["weight"].to(torch.complex64))),
    "a constant": (ValueError, "class_weights requires a gradient", lambda a: a.update(class_weight=torch.ones(1).requires_grad_())),
    "memory": (UllageError, "587", lambda a: a.update(budget_bytes=1)),
}  # fmt: skip


def refusal_of_one(of, name, alone, told):
    """What this rank raises where rank `alone` has an argument that is refused, and whether the group still works."""
    hidden, weight, _, targets = made()
    arguments = {"hidden": hidden, "weight": of.rows(weight), "targets": targets, "process_group": of.group}
    if told:
        arguments["process_group"] = VocabShard.of(of.group, len(arguments["weight"]))
    good = dict(arguments, targets=targets.clone())
    if of.rank == alone:
        ALONE[name][2](arguments)
    try:
        linear_cross_entropy(**arguments)
        raised = None
    except Exception as error:
        raised = (type(error), str(error))
    loss = linear_cross_entropy(**good)
    loss.backward()
    return raised, loss.detach()


def rank_main(rank, world, folder):
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        group = dist.new_group(list(range(world)))
        small, large = Rank(rank, SIZES[world], group), Rank(rank, LARGE[world], group)
        found = {name: case(small, *arguments) for name, (case, arguments) in CASES.items()}
        for dtype in (torch.float32, torch.bfloat16):
            found[f"8003 {dtype}"] = case_of_8003(large, dtype)
            found[f"8003 {dtype} again"] = case_of_8003(large, dtype)
        told = VocabShard.of(group, LARGE[world][rank])
        assert (told.offset, told.vocab) == (sum(LARGE[world][:rank]), 8003)
        found["8003 torch.float32 told"] = case_of_8003(Rank(rank, LARGE[world], told), torch.float32)
        found["refusals"] = refusals(small)
        for name, alone, refuses_told in itertools.product(ALONE, (0, world - 1), (False, True)):
            found[name, alone, refuses_told] = refusal_of_one(small, name, alone, refuses_told)
        torch.save(found, f"{folder}/{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        torch.save(traceback.format_exc(), f"{folder}/{rank}")


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    """What each rank found, all cases in one start of the processes."""
    folder = tmp_path_factory.mktemp("group")
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=rank_main, args=(rank, request.param, str(folder))) for rank in range(request.param)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    found = [torch.load(folder / str(rank), weights_only=False) for rank in range(request.param)]
    for each in found:
        assert isinstance(each, dict), each
    return found


def assembled(found):
    """The whole's result from its ranks', after what must be the same bits on all of them was found to be."""
    first = found[0]
    for each in found[1:]:
        for name in ("loss", "lse", "log_prob", "entropy", "metrics", "row_losses"):
            assert (name in first) == (name in each)
            if name in first:
                assert torch.equal(first[name], each[name]), name
        for one, other in zip(first["shared"], each["shared"]):
            assert torch.equal(one, other)
    whole = dict(first)
    for name, dimension in (("rows", 0), ("columns", -1)):
        if name in first:
            whole[name] = [torch.cat(parts, dimension) for parts in zip(*(each[name] for each in found))]
    return whole


def close(is_, right, **tolerance):
    assert is_.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(is_[name], value, **tolerance)


# float64 throughout: sums of at most 23 columns and 12 rows of numbers of about 10. bf16: the parts of a gradient are
# rounded by themselves.
@pytest.mark.parametrize("name", CASES)
def test_every_case_is_the_whole_on_one_device(ranks, name):
    case, arguments = CASES[name]
    tolerance = {"rtol": 1e-12, "atol": 1e-12}
    if name == "rows bf16":
        tolerance = {"rtol": 2**-6, "atol": 2**-6}
    if name == "a rank without labels":
        tolerance = {"rtol": 1e-5, "atol": 1e-6}
    close(assembled([each[name] for each in ranks]), case(Rank(), *arguments), **tolerance)


def test_8003_columns_within_a_derived_bound(ranks):
    """Of float32: reference/error_bound.h's analysis of the whole head, and a rounding of each rank's part of hidden's
    gradient. The exchange rounds six numbers a row, of at most ln V + 2 max |z|: within what is allowed V additions."""
    is_ = assembled([each["8003 torch.float32"] for each in ranks])
    hidden, weight, _, targets = made(torch.float32, n=33, d=16, v=8003)
    x, w = hidden.detach().double().requires_grad_(), weight.double().requires_grad_()
    right = F.cross_entropy(x @ w.T, targets)
    d_x, d_w = torch.autograd.grad(right, (x, w))
    x, w = x.detach(), w.detach()
    u = 2.0**-24
    z = x @ w.T
    delta = (16 + 4) * u * (x.abs() @ w.abs().T).amax(1) + 4 * u * z.abs().amax(1)
    log_q = torch.expm1(2 * delta) + 4 * u + 8003 * u + delta  # of ln q of a row
    counted = targets >= 0
    n = counted.sum()
    loss_bound = (log_q[counted]).sum() / n
    assert (is_["loss"].double() - right).abs() <= loss_bound
    q = torch.softmax(z, -1) * counted[:, None] / n
    hit = F.one_hot(targets.clamp(min=0), 8003) * counted[:, None] / n
    off = torch.expm1(log_q)[:, None] * q + 8 * u * (q + hit)
    size = q + hit + off
    x_bound = (off + 8008 * u * size) @ w.abs() + len(ranks) * u * (size @ w.abs())
    w_bound = (off + 41 * u * size).T @ x.abs()
    for found, wanted, bound in ((is_["shared"][0], d_x, x_bound), (is_["rows"][0], d_w, w_bound)):
        error = (found.double() - wanted).abs()
        assert (error <= bound).all(), (error / bound).max()
        assert (bound < 0.1 * wanted.abs()).any()  # not vacuous


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_in_every_run(ranks, dtype):
    for suffix in [" again"] + [" told"] * (dtype == torch.float32):
        for each in ranks:
            close(each[f"8003 {dtype}{suffix}"], each[f"8003 {dtype}"], rtol=0, atol=0)


def test_refusals(ranks):
    for each in ranks:
        found = each["refusals"]
        assert {name: code for name, (code, _) in found.items()} == {
            "entropy": 661,
            "class_weights": 661,
            "vocab_offset": 662,
            "group_vocab": 663,
            "rows": 664,
        }
        for name, (_, message) in found.items():
            assert name in message or name == "group_vocab" and "group_shift" in message


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", ALONE)
def test_what_one_rank_refuses_all_raise(ranks, name, last, told):
    """None waits for it, and the next call finds the ranks in step."""
    alone = len(ranks) - 1 if last else 0
    kind, message, _ = ALONE[name]
    found = [each[name, alone, told] for each in ranks]
    for rank, ((raised, text), loss) in enumerate(found):
        if rank == alone:
            assert raised is kind and re.search(message, text)
        else:
            assert raised is UllageError and text.startswith("664") and f"rank {alone} of the group" in text
            assert (kind is UllageError) == (text.count("(") == 1), "its code"
        assert torch.equal(loss, found[0][1])


def test_a_compiled_call_breaks_its_graph_around_the_exchange():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        hidden, weight, _, targets = made()
        weight.requires_grad_()

        def step(h, w):
            return linear_cross_entropy(h * 2, w, targets, z_loss=0.1, process_group=dist.group.WORLD) + 1

        found, wanted = torch.compile(step, backend="aot_eager")(hidden, weight), step(hidden, weight)
        assert torch.equal(found, wanted)
        gradients_of = [torch.autograd.grad(loss, (hidden, weight)) for loss in (found, wanted)]
        assert all(torch.equal(f, w) for f, w in zip(*gradients_of))
    finally:
        dist.destroy_process_group()


def test_a_group_and_a_place_in_the_configuration():
    hidden, weight, _, targets = made()
    with pytest.raises(ValueError, match="group_vocab.*VocabShard"):
        head_loss({"losses": [{"kind": "cross_entropy"}], "group_vocab": 23}, hidden=hidden, weight=weight,
                  labels=targets, process_group=object())  # fmt: skip

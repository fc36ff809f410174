"""A vocabulary cut over the ranks of a process group: each holds some rows of the weight, or columns of the logits.

A shard runs twice. The first run gives three numbers a row, which the ranks gather and combine, in rank order and float64,
so that every rank has the same bits; the second takes the combination and gives the losses of the whole head, and the
gradients of its own columns. docs/losses.md has the formulas, ullage/lossk/group.h the contract.

A rank that refuses says so in what is exchanged anyway, and raises its refusal after; the others raise too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ullage import _library as c
from ullage._errors import UllageError
from ullage.torch import _ops, _plan


@dataclasses.dataclass(frozen=True)
class VocabShard:
    """This rank's columns of a vocabulary: [offset, offset + its own) of `vocab`, the others being the group's others'.

    Given as process_group it says what a bare group would have to be asked on every call, for which CUDA waits.
    """

    group: Any  # a torch.distributed process group
    offset: int
    vocab: int

    @classmethod
    def of(cls, group: Any, columns: int, device: torch.device | str = "cpu") -> VocabShard:
        """Of a rank that holds `columns`, in rank order. Every rank of the group must call it; device: that the group's
        transport takes."""
        return _asked(group, columns, 0, device, None)


def joined(
    process_group: Any,
    config: str,
    source: Tensor,
    has_labels: bool,
    tensors_of: Callable[[], tuple[dict[str, Tensor], list[Tensor], int]],
    n_segments: int,
    budget_bytes: int,
    rows: int,
) -> tuple[dict[str, Tensor], list[Tensor], str]:
    """After the first run and the exchange, what the second takes: tensors, the teachers' and the configuration.

    source: the input as the caller gave it. tensors_of: tensors, the teachers' and the gradients that the second run
    makes, or a refusal.
    """
    document = _plan.parsed(config)
    given = sorted({"vocab_offset", "group_vocab"} & set(document))
    if given:
        raise ValueError(
            f"process_group is given and config has {', '.join(given)}; accepted: process_group=VocabShard(group, "
            "offset, vocab), or the group alone, which is asked"
        )
    tensors: dict[str, Tensor] = {}
    teachers: list[Tensor] = []
    gradients = 0
    refusal: Exception | None = None
    try:
        tensors, teachers, gradients = tensors_of()
    except Exception as error:  # whatever it is, the others wait
        refusal = error
    n_tok, shard = source.shape[:-1].numel(), process_group
    if not isinstance(process_group, VocabShard):
        shard = _asked(process_group, _columns(tensors) if tensors else 0, n_tok, source.device, refusal)
    config = json.dumps({**document, "vocab_offset": shard.offset, "group_vocab": shard.vocab})
    if n_tok == 0:
        if refusal is not None:
            raise refusal
        return _shared_by_all(tensors, shard.group), teachers, config

    names = _statistics(document, has_labels, rows)
    rows_of_group = [name for name in names if name != "columns"]
    with torch.no_grad():
        if refusal is None:
            try:
                mine = _first_run(tensors, teachers, config, names, n_segments, budget_bytes)
                # The second run's refusals are the others' business too: in the backward they would wait again.
                after = tensors | {f"group_{name}": mine[0] for name in rows_of_group}
                listed = [*after.values(), *teachers]
                _ops.prepare(listed, " ".join(after), config, budget_bytes, gradients, rows)
            except Exception as error:
                refusal = error
        if refusal is not None:
            wide = source.dtype == torch.float64 and not torch.is_autocast_enabled(source.device.type)
            mine = source.new_full((len(names), n_tok), torch.nan, dtype=torch.float64 if wide else torch.float32)
        # With a VocabShard nothing waits for CUDA: the others' losses are then NaN.
        waits = source.device.type != "cuda" or shard is not process_group
        gathered = _exchanged(mine, shard.group, refusal, waits).double()
        group = _combined(dict(zip(names, gathered.unbind(1))), float(document.get("logits_scale", 1.0)))
        found = {f"group_{name}": group[name].to(mine.dtype) for name in rows_of_group}
    return _shared_by_all(tensors, shard.group) | found, teachers, config


def _columns(tensors: dict[str, Tensor]) -> int:
    return tensors["weight"].shape[0] if "weight" in tensors else tensors["input"].shape[1]


def _asked(group: Any, columns: int, n_tok: int, device: Any, refusal: Exception | None) -> VocabShard:
    found = _gathered(torch.tensor([columns, n_tok, _code(refusal)], device=device), group).tolist()
    _raise_refusals([code for _, _, code in found], refusal)
    if len({n_tok for _, n_tok, _ in found}) > 1:
        raise UllageError(
            664,
            "group_disagrees",
            f"the ranks have {', '.join(str(n_tok) for _, n_tok, _ in found)} rows; accepted: the same rows on every rank",
        )
    of_ranks = [columns for columns, _, _ in found]
    return VocabShard(group, sum(of_ranks[: dist.get_rank(group)]), sum(of_ranks))


def _code(refusal: Exception | None) -> int:
    """As the others are told of it: 0 for none, 1 for one that is not of the status ledger."""
    if refusal is None:
        return 0
    return refusal.code if isinstance(refusal, UllageError) else 1


def _raise_refusals(codes: list[int], own: Exception | None) -> None:
    if own is not None:
        raise own
    refused = [
        f"rank {rank} of the group" + (f" ({code} {c.status_name(code)})" if code > 1 else "")
        for rank, code in enumerate(codes)
        if code
    ]
    if refused:
        raise UllageError(
            664,
            "group_disagrees",
            f"{' and '.join(refused)} refused the call, and says why; accepted: a call of all ranks",
        )


def _gathered(mine: Tensor, group: Any) -> Tensor:
    """[ranks, ...], the same bits on every rank."""
    whole = mine.new_empty(dist.get_world_size(group), *mine.shape)
    dist.all_gather(list(whole.unbind()), mine, group=group)
    return whole


def _exchanged(mine: Tensor, group: Any, refusal: Exception | None, waits: bool) -> Tensor:
    """[ranks, statistics, n_tok], once no rank has refused."""
    code = mine.new_full((1,), _code(refusal))
    whole = _gathered(torch.cat([mine.reshape(-1), code]), group)
    if waits or refusal is not None:
        _raise_refusals([int(each) for each in whole[:, -1].tolist()], refusal)
    return whole[:, :-1].reshape(-1, *mine.shape)


def _statistics(document: dict[str, Any], has_labels: bool, rows: int) -> list[str]:
    """What is exchanged of each row."""
    smooths = any(loss.get("label_smoothing") for loss in document["losses"])
    mixes = bool(rows & (_plan.ENTROPY | _plan.METRICS))
    return [
        "shift",
        "log_sum",
        *["label_log_prob"] * has_labels,
        *["distance", "columns"] * smooths,
        *["entropy"] * mixes,
    ]


def _first_run(
    tensors: dict[str, Tensor],
    teachers: list[Tensor],
    config: str,
    names: list[str],
    n_segments: int,
    budget_bytes: int,
) -> Tensor:
    """The shard's own statistics, [names, n_tok]; `config` says where it lies."""
    bits = {"label_log_prob": _plan.LOG_PROB, "distance": _plan.DISTANCE, "entropy": _plan.ENTROPY}
    rows = _plan.SHARD
    for name in names:
        rows |= bits.get(name, 0)
    listed = [*tensors.values(), *teachers]
    own = _ops.values_of(_ops.head(listed, " ".join(tensors), None, config, n_segments, budget_bytes, 0, rows), rows)
    assert own.shift is not None
    of_names = {
        **own._asdict(),
        "label_log_prob": own.log_prob,
        "columns": torch.full_like(own.shift, _columns(tensors)),
    }
    return torch.stack([of_names[name] for name in names])


def _combined(of_ranks: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """lossk::combined of [ranks, n_tok] each. NaN of one rank is NaN of all."""
    shift = of_ranks["shift"].amax(0)
    moved = scale * (of_ranks["shift"] - shift)
    exponents = moved + of_ranks["log_sum"]
    log_sum = _in_rank_order(exponents.exp()).log()
    log_share = exponents - log_sum
    group = {"shift": shift, "log_sum": log_sum}
    if "label_log_prob" in of_ranks:
        group["label_log_prob"] = (of_ranks["label_log_prob"] + log_share).amax(0)
    if "distance" in of_ranks:
        group["distance"] = _in_rank_order(of_ranks["distance"] + of_ranks["columns"] * moved)
    if "entropy" in of_ranks:
        share = log_share.exp()
        parts = share * (of_ranks["entropy"] - log_share)
        group["entropy"] = _in_rank_order(parts.where(share != 0, torch.zeros_like(parts)))
    return group


def _in_rank_order(parts: Tensor) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def _shared_by_all(tensors: dict[str, Tensor], group: Any) -> dict[str, Tensor]:
    """With those that every rank holds, whose gradients are the sums of the ranks' parts, formed in float32 and rounded:
    without a weight the input is the rank's own."""
    names = ("input", "adapter_a") if "weight" in tensors else ("adapter_a",)
    found = {name: _Shared.apply(tensors[name], group) for name in names if name in tensors}  # type: ignore[no-untyped-call]
    return tensors | found


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(wide, copy=True, memory_format=torch.contiguous_format)
        if total.numel():
            dist.all_reduce(total, group=ctx.group)
        return total.to(gradient.dtype), None

"""A vocabulary cut over the ranks of a process group: each holds some rows of the weight, or columns of the logits.

A shard runs twice. The first run gives three numbers a row, which the ranks gather and combine, in rank order and float64,
so that every rank has the same bits; the second takes the combination and gives the losses of the whole head, and the
gradients of its own columns. docs/losses.md has the formulas, ullage/lossk/group.h the contract.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ullage._errors import UllageError
from ullage.torch import _ops, _run
from ullage.torch._run import HeadTensors


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
        return _asked(group, torch.tensor([columns], device=device))


def shard_of(process_group: Any, tensors: HeadTensors, config: str) -> VocabShard:
    """The rank's shard; where only a group is given, after asking the others."""
    given = sorted({"vocab_offset", "group_vocab"} & set(_run.parsed(config)))
    if given:
        raise ValueError(
            f"process_group is given and config has {', '.join(given)}; accepted: process_group=VocabShard(group, "
            "offset, vocab), or the group alone, which is asked"
        )
    if isinstance(process_group, VocabShard):
        return process_group
    x, weight = tensors.input, tensors.weight
    columns = x.shape[1] if weight is None else weight.shape[0]
    return _asked(process_group, torch.tensor([columns, x.shape[0]], device=x.device))


def _asked(group: Any, facts: Tensor) -> VocabShard:
    found = _gathered(facts, group).tolist()
    rows = {n_tok for _, *others in found for n_tok in others}
    if len(rows) > 1:
        raise UllageError(
            664,
            "group_disagrees",
            f"the ranks have {', '.join(str(fact[1]) for fact in found)} rows; accepted: the same rows on every rank",
        )
    columns = [fact[0] for fact in found]
    return VocabShard(group, sum(columns[: dist.get_rank(group)]), sum(columns))


def _gathered(mine: Tensor, group: Any) -> Tensor:
    """[ranks, ...], the same bits on every rank."""
    whole = mine.new_empty(dist.get_world_size(group), *mine.shape)
    dist.all_gather(list(whole.unbind()), mine, group=group)
    return whole


def placed(config: str, shard: VocabShard) -> str:
    return json.dumps({**_run.parsed(config), "vocab_offset": shard.offset, "group_vocab": shard.vocab})


@torch.no_grad()
def join(tensors: HeadTensors, config: str, shard: VocabShard, n_segments: int, budget_bytes: int) -> HeadTensors:
    """With the group's row statistics, after the first run; `config` is `placed`."""
    if tensors.input.shape[0] == 0:
        return tensors
    document, x = _run.parsed(config), tensors.input
    has_labels = tensors.labels is not None
    smooths = any(loss.get("label_smoothing") for loss in document["losses"])
    rows = _run.SHARD | _run.LOG_PROB * has_labels | _run.DISTANCE * smooths
    own = _run.Values(*_ops.head(*tensors, None, n_segments, config, budget_bytes, 0, rows)[: len(_run.Values._fields)])
    nothing = torch.zeros_like(own.shift)
    statistics = [own.shift, own.log_sum, own.log_prob if has_labels else nothing]
    if smooths:
        columns = x.shape[1] if tensors.weight is None else tensors.weight.shape[0]
        statistics += [own.distance, torch.full_like(own.shift, columns)]
    gathered = _gathered(torch.stack(statistics), shard.group).double()
    group = [each.to(own.shift.dtype) for each in _combined(gathered, float(document.get("logits_scale", 1.0)))]
    return tensors._replace(
        group_shift=group[0],
        group_log_sum=group[1],
        group_label_log_prob=group[2] if has_labels else None,
        group_distance=group[3] if smooths else None,
    )


def _combined(gathered: Tensor, scale: float) -> list[Tensor]:
    """lossk::combined of [ranks, 3 or 5, n_tok]. NaN of one rank is NaN of all."""
    shifts, log_sums, log_probs, *smoothing = gathered.unbind(1)
    shift = shifts.amax(0)
    moved = scale * (shifts - shift)
    exponents = moved + log_sums
    log_sum = _in_rank_order(exponents.exp()).log()
    group = [shift, log_sum, (log_probs + (exponents - log_sum)).amax(0)]
    if smoothing:
        distances, columns = smoothing
        group.append(_in_rank_order(distances + columns * moved))
    return group


def _in_rank_order(parts: Tensor) -> Tensor:
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def shared(tensor: Tensor, group: Any) -> Tensor:
    """The tensor, which every rank holds: its gradient is the sum of the ranks' parts, formed in float32 and rounded."""
    result: Tensor = _Shared.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


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

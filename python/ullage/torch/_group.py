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
        return _asked(group, torch.tensor([columns], device=device))


def shard_of(process_group: Any, tensors: dict[str, Tensor], config: str) -> VocabShard:
    """The rank's shard; where only a group is given, after asking the others."""
    given = sorted({"vocab_offset", "group_vocab"} & set(_plan.parsed(config)))
    if given:
        raise ValueError(
            f"process_group is given and config has {', '.join(given)}; accepted: process_group=VocabShard(group, "
            "offset, vocab), or the group alone, which is asked"
        )
    if isinstance(process_group, VocabShard):
        return process_group
    x = tensors["input"]
    return _asked(process_group, torch.tensor([_columns(tensors), x.shape[0]], device=x.device))


def _columns(tensors: dict[str, Tensor]) -> int:
    return tensors["weight"].shape[0] if "weight" in tensors else tensors["input"].shape[1]


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
    return json.dumps({**_plan.parsed(config), "vocab_offset": shard.offset, "group_vocab": shard.vocab})


@torch.no_grad()
def statistics(
    tensors: dict[str, Tensor],
    teachers: list[Tensor],
    config: str,
    shard: VocabShard,
    n_segments: int,
    budget_bytes: int,
    rows: int,
) -> dict[str, Tensor]:
    """The group's row statistics, after the first run; `config` is `placed`, `rows` what the second will return."""
    if tensors["input"].shape[0] == 0:
        return {}
    document, has_labels = _plan.parsed(config), "labels" in tensors
    smooths = any(loss.get("label_smoothing") for loss in document["losses"])
    mixes = bool(rows & (_plan.ENTROPY | _plan.METRICS))
    wanted = _plan.SHARD | _plan.LOG_PROB * has_labels | _plan.DISTANCE * smooths | _plan.ENTROPY * mixes
    out = _ops.head(
        [*tensors.values(), *teachers], " ".join(tensors), None, config, n_segments, budget_bytes, 0, wanted
    )
    own = _ops.values_of(out, wanted)
    assert own.shift is not None
    mine: dict[str, Any] = {
        "shift": own.shift,
        "log_sum": own.log_sum,
        **({"label_log_prob": own.log_prob} if has_labels else {}),
        **({"distance": own.distance, "columns": torch.full_like(own.shift, _columns(tensors))} if smooths else {}),
        **({"entropy": own.entropy} if mixes else {}),
    }
    gathered = _gathered(torch.stack(list(mine.values())), shard.group).double()
    group = _combined(dict(zip(mine, gathered.unbind(1))), float(document.get("logits_scale", 1.0)))
    return {f"group_{name}": value.to(own.shift.dtype) for name, value in group.items()}


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

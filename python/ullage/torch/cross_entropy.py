"""Cross-entropy with whatever goes with it, fused with the projection or from logits."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ullage.torch._head import IGNORED, refuse, run_head, scale_of, to_text

_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    logits_scale: float = 1.0,
    class_weight: Tensor | None = None,
    shift: bool = False,
    return_lse: bool = False,
    return_logprobs: bool = False,
    return_entropy: bool = False,
    budget_bytes: int | None = None,
    filter_tolerance: float | None = None,
    process_group: Any = None,
) -> Any:
    """F.cross_entropy(hidden @ weight.T + bias, targets) without ever holding the logits.

    hidden [..., d_model]; weight [vocab, d_model]; targets [...], integers. A target that is ignore_index or negative
    is ignored: its hidden state is never read. A batch without one to count has loss 0 and gradients 0. The loss is
    float32 (float64 for float64 inputs) whatever the inputs.

    z_loss: adds z_loss * logsumexp^2 of each counted row. softcap: logits become softcap * tanh(logits / softcap);
    logits_scale: then multiplied by this. class_weight [vocab], label_smoothing: as F.cross_entropy defines them; with
    reduction="mean" the cross-entropy is divided by the sum of the class weights, the z-loss by the rows counted.
    shift: the target of position t is targets[..., t + 1]; reduction="none" then gives [..., length - 1].
    budget_bytes: the most the workspace may take; None: 256 MiB on the CPU, the kernel's own default on CUDA.

    filter_tolerance: on CUDA, the share of its softmax that a row's gradient may leave out, at most, for speed
    (docs/cuda.md says what bound follows); the loss stays exact. None: nothing is left out.

    process_group: the ranks of a torch.distributed group hold the vocabulary together, each some rows of weight (and of
    bias), in rank order, and all of them hidden and the targets, which count over the whole vocabulary. Every rank has
    the same loss, to the bit, and its own rows' gradients; hidden's is summed over the ranks in the backward, in float32,
    and rounded to its type. The logits are made twice. Each call asks the group for its sizes, for which CUDA waits; a
    VocabShard in the group's place says them. class_weight is refused. What one rank refuses, all raise (docs/python.md).

    Gradients are computed in the forward and scaled in the backward; for reduction="none" and a weight with a
    float32 `main_grad`, which they are added to, in the backward.

    With any of return_lse, return_logprobs, return_entropy: a tuple of the loss and those, in this order, each of
    the targets' shape, 0 where ignored, without a gradient (`token_logprobs` has differentiable ones).
    """
    return _cross_entropy(
        targets,
        shift,
        reduction,
        (return_lse, return_logprobs, return_entropy),
        (label_smoothing, z_loss, softcap, logits_scale, filter_tolerance),
        hidden=hidden,
        weight=weight,
        bias=bias,
        class_weights=class_weight,
        ignore_index=ignore_index,
        budget_bytes=budget_bytes,
        process_group=process_group,
    )


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    logits_scale: float = 1.0,
    class_weight: Tensor | None = None,
    shift: bool = False,
    return_lse: bool = False,
    return_logprobs: bool = False,
    return_entropy: bool = False,
    process_group: Any = None,
) -> Any:
    """The same from logits [..., vocab]: one pass over them, forward and backward. The vocabulary is the last
    dimension, whatever the number of dimensions; with a process_group the rank's columns of it."""
    return _cross_entropy(
        targets,
        shift,
        reduction,
        (return_lse, return_logprobs, return_entropy),
        (label_smoothing, z_loss, softcap, logits_scale),
        logits=logits,
        class_weights=class_weight,
        ignore_index=ignore_index,
        process_group=process_group,
    )


class LinearCrossEntropyLoss(torch.nn.Module):
    """linear_cross_entropy with its options kept: loss = module(hidden, weight, targets, bias=None)."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        refuse("bias" in options, "bias is an argument of the call, not an option of the module", TypeError)

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Any:
        return linear_cross_entropy(hidden, weight, targets, bias=bias, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    shift: bool = False,
    return_entropy: bool = False,
    budget_bytes: int | None = None,
    process_group: Any = None,
) -> Any:
    """log softmax(logits / temperature) at the targets, and with return_entropy the entropy of each position.

    Both are differentiable, in hidden, weight and bias, by whatever the caller does with them; the backward makes the
    logits anew, a chunk at a time. Ignored positions are 0. A position's value has the same bits whatever is beside it.
    process_group: as in linear_cross_entropy; the entropy then has no gradient, and its backward raises.
    """
    names = ("log_prob", "entropy") if return_entropy else ("log_prob",)
    options = ("mean", 0.0, 0.0, softcap, scale_of(temperature))
    labels = _shifted(targets, ignore_index) if shift else targets
    out = run_head(
        _config(*options) if torch.compiler.is_compiling() else _known_config(*options),
        hidden=hidden,
        weight=weight,
        bias=bias,
        labels=labels,
        ignore_index=IGNORED if shift else ignore_index,
        budget_bytes=budget_bytes,
        returns=names,
        process_group=process_group,
    )
    found = tuple(_unshifted(getattr(out, name), shift) for name in names)
    return found if return_entropy else found[0]


def _config(
    reduction: str,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    logits_scale: float = 1.0,
    filter_tolerance: float | None = None,
) -> str:
    refuse(reduction not in _REDUCTIONS, f"reduction is {reduction!r}; accepted: {', '.join(_REDUCTIONS)}")
    entropy: dict[str, Any] = {"kind": "cross_entropy"}
    if label_smoothing != 0.0:
        entropy["label_smoothing"] = label_smoothing
    losses = [entropy]
    if z_loss != 0.0:  # without the term, the bits are those of a loss that never heard of it
        losses.append({"kind": "z_loss", "weight": z_loss})
    if reduction != "mean":
        losses = [{**loss, "divisor": 1.0} for loss in losses]
    filtered = {} if filter_tolerance is None else {"filter_tolerance": filter_tolerance}
    return to_text(losses, logits_scale=logits_scale, softcap=softcap, **filtered)


_known_config = functools.lru_cache(maxsize=256)(_config)  # a compiler calls the other: its numbers may be symbols


def _cross_entropy(
    targets: Tensor,
    shift: bool,
    reduction: str,
    wanted: tuple[bool, bool, bool],
    options: tuple[Any, ...],
    *,
    ignore_index: int,
    **inputs: Any,
) -> Any:
    """options: of _config, after the reduction."""
    config = _config(reduction, *options) if torch.compiler.is_compiling() else _known_config(reduction, *options)
    labels = targets
    if shift:
        labels, ignore_index = _shifted(targets, ignore_index), IGNORED
    more = [name for name, want in zip(("lse", "log_prob", "entropy"), wanted) if want]
    per_token = reduction == "none"
    out = run_head(
        config,
        labels=labels,
        ignore_index=ignore_index,
        returns=[*more, "token_loss"] if per_token else more,
        detached=True,
        **inputs,
    )
    loss = _unshifted(out.token_loss, shift) if per_token else out.total
    if not more:
        return loss
    return (loss, *(_unshifted(getattr(out, name), shift) for name in more))


def _shifted(targets: Tensor, ignore_index: int) -> Tensor:
    """The next position's target at each; the last has none."""
    refuse(targets.ndim < 1, "shift needs targets of one dimension or more")
    next_targets = torch.full_like(targets, IGNORED)
    next_targets[..., :-1] = targets[..., 1:]
    return next_targets.masked_fill(next_targets == ignore_index, IGNORED)


def _unshifted(rows: Tensor | None, shift: bool) -> Tensor:
    assert rows is not None  # it was asked for
    return rows[..., :-1] if shift else rows

"""From what a caller has (any leading dimensions, ignore_index, autocast) to the custom operation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_scalar

from ullage.torch import _group, _ops, _run
from ullage.torch._run import D_ADAPTER, D_BIAS, D_INPUT, D_WEIGHT, HeadTensors

IGNORED = -1  # any negative label

ROWS = {
    "token_loss": _run.TOKEN_LOSS,
    "lse": _run.LSE,
    "log_prob": _run.LOG_PROB,
    "entropy": _run.ENTROPY,
    "argmax": _run.ARGMAX,
    "metrics": _run.METRICS,
}
GROUP_STATISTICS = ("group_shift", "group_log_sum", "group_label_log_prob", "group_distance", "group_entropy")
_DIFFERENTIABLE_ROWS = _run.TOKEN_LOSS | _run.LOG_PROB | _run.ENTROPY


class HeadLoss(NamedTuple):
    """`total` is differentiable, and `token_loss`, `log_prob` and `entropy` are where they were asked for.

    Rows have the shape of the labels, and are float32, or float64 for float64 inputs. None: not asked for.
    """

    total: Tensor
    terms: Tensor  # [n_terms] float64, unweighted
    n_valid: Tensor  # rows whose label is not ignored
    token_loss: Tensor | None = None
    lse: Tensor | None = None
    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    argmax: Tensor | None = None
    metrics: Tensor | None = None  # [n_terms][13] float64: lossk::PolicyMetrics, its last two as int64 bits


def to_text(losses: Any, teachers: Any = (), logits_scale: float = 1.0, softcap: float = 0.0, **options: Any) -> str:
    """The configuration as the text that names a plan."""
    document: dict[str, Any] = {"losses": losses, **options}
    if teachers:
        document["teachers"] = teachers
    if logits_scale != 1.0:
        document["logits_scale"] = logits_scale
    if softcap != 0.0:
        document["softcap"] = softcap
    text: str = _dumped(_specialized(document))
    return text


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _dumped(document: Any) -> str:
    return json.dumps(document)


def _specialized(value: Any) -> Any:
    """torch.compile may hold a number as a symbol; a plan needs the number."""
    if isinstance(value, Mapping):
        return {name: _specialized(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_specialized(each) for each in value]
    return guard_scalar(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def refuse(condition: bool, message: str, error: type[Exception] = ValueError) -> None:
    if condition:
        raise error(message)


def check_plain(**tensors: Tensor | None) -> None:
    """A DTensor's local memory is a part of the tensor, and reading it as the whole would be silent nonsense."""
    for name, tensor in tensors.items():
        if tensor is not None and hasattr(tensor, "full_tensor"):
            raise TypeError(
                f"{name} is a DTensor; accepted: a plain tensor. Gather it first ({name}.full_tensor()), or unshard "
                "the module that owns it"
            )


def _constant(**tensors: Tensor | None) -> None:
    """These have no gradient, and dropping one silently would be a wrong answer."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, and the losses have none for it; detach it")


def run_head(
    config: str,
    *,
    logits: Tensor | None = None,
    hidden: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    adapter_a: Tensor | None = None,
    adapter_b: Tensor | None = None,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    teachers: Sequence[Tensor] = (),
    n_segments: int = 0,
    budget_bytes: int | None = None,
    returns: Sequence[str] = (),
    detached: bool = False,
    process_group: Any = None,
    **rows_inputs: Tensor | None,
) -> HeadLoss:
    """detached: of the rows, token_loss alone carries a gradient."""
    refuse(
        (logits is None) == (hidden is None) or (hidden is None) != (weight is None),
        "accepted: logits, or hidden and weight",
    )
    source = logits if hidden is None else hidden
    assert source is not None  # one of the two is given
    check_plain(input=source, weight=weight, bias=bias, labels=labels)
    refuse(source.ndim < 1, "logits or hidden is a scalar; accepted: [..., vocab] or [..., d_model]")
    if weight is not None:
        refuse(
            weight.ndim != 2 or weight.shape[1] != source.shape[-1],
            f"weight has shape {tuple(weight.shape)} and hidden {tuple(source.shape)}; accepted: [vocab, d_model] "
            "and [..., d_model]",
        )
    shape = source.shape[:-1]
    if labels is not None:
        refuse(
            labels.shape != shape or labels.is_floating_point(),
            f"targets are {labels.dtype} of shape {tuple(labels.shape)}; accepted: integers of shape {tuple(shape)}",
        )
    device = source.device.type
    if weight is not None and device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        source, weight = source.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        adapter_a = None if adapter_a is None else adapter_a.to(dtype)
        adapter_b = None if adapter_b is None else adapter_b.to(dtype)
    _constant(**rows_inputs, **{f"teacher tensor {i}": t for i, t in enumerate(teachers)})

    flat = {name: _flattened(name, t, shape) for name, t in rows_inputs.items()}
    tensors = HeadTensors(
        source.reshape(-1, source.shape[-1]),
        weight,
        bias,
        adapter_a,
        adapter_b,
        None if labels is None else _labels(labels, ignore_index),
        flat.get("token_weights"),
        flat.get("class_weights"),
        flat.get("mask"),
        flat.get("advantages"),
        flat.get("old_log_probs"),
        flat.get("reference_log_probs"),
        flat.get("segments"),
        flat.get("pairs"),
        None,
        None,
        None,
        None,
        None,
        [t.reshape(-1, t.shape[-1]) for t in teachers],
    )
    rows = sum(ROWS[name] for name in set(returns))
    if process_group is not None:
        tensors, config = _joined(tensors, config, process_group, n_segments, budget_bytes or 0, rows)
    main_grad = getattr(weight, "main_grad", None) if weight is not None and weight.requires_grad else None
    now = 0
    # Gradients go with the forward where the total alone is asked for; but not in f16 on CUDA, where the kernels keep
    # them in f16, whose range the upstream factor (a loss scale) is there to reach.
    later = _run.TOKEN_LOSS if detached else _DIFFERENTIABLE_ROWS
    out_of_range = source.is_cuda and source.dtype == torch.float16
    if torch.is_grad_enabled() and main_grad is None and not out_of_range and not rows & later:
        for bit, tensor in zip((D_INPUT, D_WEIGHT, D_BIAS, D_ADAPTER, D_ADAPTER), tensors[:5]):
            if tensor is not None and tensor.requires_grad:
                now |= bit
    out = _ops.head(*tensors, main_grad, n_segments, config, budget_bytes or 0, now, rows)
    values = _run.Values(*out[: len(_run.Values._fields)])
    dtype = _run.row_dtype(tensors)

    def shaped(name: str, differentiable: bool) -> Tensor | None:
        if not rows & ROWS[name]:
            return None
        value: Tensor = getattr(values, name).view(shape)
        return value if differentiable else value.detach()

    return HeadLoss(
        values.total.to(dtype),
        values.terms.detach(),
        values.n_valid.detach(),
        shaped("token_loss", True),
        shaped("lse", False),
        shaped("log_prob", not detached),
        shaped("entropy", not detached),
        shaped("argmax", False),
        values.metrics.detach() if rows & _run.METRICS else None,
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _joined(
    tensors: HeadTensors, config: str, process_group: Any, n_segments: int, budget_bytes: int, rows: int
) -> tuple[HeadTensors, str]:
    """A shard of a vocabulary after its first run and the exchange: what its second run takes."""
    shard = _group.shard_of(process_group, tensors, config)
    config = _group.placed(config, shard)
    tensors = _group.join(tensors, config, shard, n_segments, budget_bytes, rows)
    if tensors.weight is not None:  # else the input is the rank's own
        tensors = tensors._replace(input=_group.shared(tensors.input, shard.group))
    if tensors.adapter_a is not None:
        tensors = tensors._replace(adapter_a=_group.shared(tensors.adapter_a, shard.group))
    return tensors, config


def _flattened(name: str, tensor: Tensor | None, shape: torch.Size) -> Tensor | None:
    if tensor is None:
        return None
    check_plain(**{name: tensor})
    if name in ("class_weights", "pairs"):
        return tensor.reshape(-1)
    refuse(
        tensor.shape != shape,
        f"{name} has shape {tuple(tensor.shape)}; accepted: that of the targets, {tuple(shape)}",
    )
    flat = tensor.reshape(-1)
    return flat.to(torch.uint8) if name == "mask" else flat


def _labels(labels: Tensor, ignore_index: int) -> Tensor:
    flat = labels.reshape(-1)
    if flat.dtype not in (torch.int64, torch.int32):
        flat = flat.to(torch.int64)
    return flat.masked_fill(flat == ignore_index, IGNORED) if ignore_index >= 0 else flat


def head_loss(
    config: Mapping[str, Any] | str,
    *,
    logits: Tensor | None = None,
    hidden: Tensor | None = None,
    weight: Tensor | None = None,
    labels: Tensor | None = None,
    ignore_index: int = -100,
    teachers: Sequence[Tensor] = (),
    n_segments: int = 0,
    budget_bytes: int | None = None,
    returns: Sequence[str] = (),
    process_group: Any = None,
    **inputs: Any,
) -> HeadLoss:
    """Any mix of losses, in one pass: {"losses": [{"kind": "cross_entropy"}, {"kind": "z_loss", "weight": 1e-4}]}.

    config: fields of lossk::LossTerm, Teacher and HeadOptions (docs/losses.md). From logits [..., vocab], or from
    hidden [..., d_model] and weight [vocab, d_model]. inputs: bias, adapter_a, adapter_b; token_weights, mask,
    advantages, old_log_probs, reference_log_probs, segments, of the labels' shape; class_weights, pairs. teachers:
    the tensors of config["teachers"] in order: [logits] of a "logits" one, [hidden, weight] of a "hidden" one,
    [ids, log_probs] of a "top_k" one. returns: of token_loss, lse, log_prob, entropy, argmax, metrics.

    process_group: weight (or logits, bias, adapter_b) is this rank's part of the vocabulary, as in
    linear_cross_entropy; of losses of labels and policies.

    Gradients reach logits, hidden, weight, bias and the adapter. Raises ullage.UllageError for what the library
    refuses, naming the term and the field.
    """
    known = {*HeadTensors._fields[2:-1]} - {"labels", *GROUP_STATISTICS}
    refuse(bool(set(inputs) - known), f"inputs has {sorted(set(inputs) - known)}; accepted: {sorted(known)}", TypeError)
    refuse(bool(set(returns) - set(ROWS)), f"returns has {sorted(set(returns) - set(ROWS))}; accepted: {list(ROWS)}")
    text = config if isinstance(config, str) else to_text(**config)
    return run_head(
        text,
        logits=logits,
        hidden=hidden,
        weight=weight,
        labels=labels,
        ignore_index=ignore_index,
        teachers=teachers,
        n_segments=n_segments,
        budget_bytes=budget_bytes,
        returns=returns,
        process_group=process_group,
        **inputs,
    )

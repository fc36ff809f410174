"""From what a caller has (any leading dimensions, ignore_index, autocast) to the custom operation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ullage.torch import _autograd, _group, _ops, _plan
from ullage.torch._plan import ENTROPY, LOG_PROB, TOKEN_LOSS

IGNORED = -1  # any negative label

ROWS = ("token_loss", "lse", "log_prob", "entropy", "argmax", "metrics")
GROUP_STATISTICS = ("group_shift", "group_log_sum", "group_label_log_prob", "group_distance", "group_entropy")
_DIFFERENTIABLE_ROWS = TOKEN_LOSS | LOG_PROB | ENTROPY


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
    metrics: Tensor | None = None  # [n_terms][13] float64: see policy_metrics

    def policy_metrics(self, term: int = 0) -> dict[str, Tensor]:
        """What return_metrics asked for, of one grpo or gspo term, by name and without waiting for the device.

        Means are over a sequence's tokens and summed over the sequences; lossk::PolicyMetrics has the formulas.
        """
        refuse(self.metrics is None, "there are no metrics; accepted: of a call that returns them")
        assert self.metrics is not None
        row = self.metrics[term]
        counts = row.view(torch.int64)  # the last two are integers
        return {
            name: (counts if name in ("n_tokens", "n_segments") else row)[i] for i, name in enumerate(_POLICY_METRICS)
        }


_POLICY_METRICS = (
    "old_log_probs",
    "new_log_probs",
    "ratio",
    "kl",
    "clipped",
    "advantage",
    "entropy",
    "ratio_sum",
    "ratio_squared_sum",
    "max_advantage",
    "min_advantage",
    "n_tokens",
    "n_segments",
)


def to_text(losses: Any, teachers: Any = (), logits_scale: float = 1.0, softcap: float = 0.0, **options: Any) -> str:
    """The configuration as the text that names a plan."""
    document: dict[str, Any] = {"losses": losses, **options}
    if teachers:
        document["teachers"] = teachers
    if logits_scale != 1.0:
        document["logits_scale"] = logits_scale
    if softcap != 0.0:
        document["softcap"] = softcap
    if torch.compiler.is_compiling():
        from ullage.torch._compiled import text_of

        return text_of(document)
    return json.dumps(document, default=_plain_number)


def _plain_number(value: Any) -> Any:
    """NumPy's scalars; a tensor's number only its device knows."""
    if isinstance(value, Tensor) or not hasattr(value, "item"):
        raise TypeError(f"an option is a {type(value).__name__}; accepted: numbers, strings, lists and dictionaries")
    return value.item()


def scale_of(temperature: float) -> float:
    """The logits_scale."""
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; accepted: finite and > 0")
    return 1.0 / temperature


def refuse(condition: bool, message: str, error: type[Exception] = ValueError) -> None:
    if condition:
        raise error(message)


def check_plain(**tensors: Tensor | None) -> None:
    """A DTensor's local memory is a part of the tensor, and reading it as the whole would be silent nonsense."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; accepted: a torch.Tensor")
        if hasattr(tensor, "full_tensor"):
            raise TypeError(
                f"{name} is a DTensor; accepted: a plain tensor. Gather it first ({name}.full_tensor()), or unshard "
                "the module that owns it"
            )


def _check_device(device: torch.device, given: Mapping[str, Tensor], teachers: Sequence[Tensor]) -> None:
    """An address of another device would be read all the same."""
    if device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"the input is on {device}; accepted: cpu and cuda")
    for name, tensor in (*given.items(), *(("a teacher's tensor", t) for t in teachers)):
        if tensor.device != device:
            shown = {"labels": "targets"}.get(name, name)
            raise ValueError(f"{shown} on {tensor.device}, and the input on {device}; accepted: all on one device")


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
    if budget_bytes is not None and not isinstance(budget_bytes, int):
        raise TypeError(f"budget_bytes is {budget_bytes!r}; accepted: an integer, or None")
    local = (source, weight, bias, adapter_a, adapter_b, labels, ignore_index, teachers, rows_inputs)
    rows = 0
    for name in returns:
        rows |= _plan.ROWS[name]
    if process_group is None:
        given, of_teachers = _tensors(*local)
    else:
        join = joined
        if torch.compiler.is_compiling():
            from ullage.torch._compiled import joined as join  # which breaks the graph
        given, of_teachers, config = join(process_group, config, local, n_segments, budget_bytes or 0, rows, detached)
    main_grad, now = _gradients(given, rows, detached)
    listed = [*given.values(), *of_teachers]
    operation = _ops.head if torch.compiler.is_compiling() else _autograd.differentiable_head
    out = operation(listed, " ".join(given), main_grad, config, n_segments, budget_bytes or 0, now, rows)
    values = _ops.values_of(out, rows)
    assert values.total is not None and values.terms is not None and values.n_valid is not None

    shape = source.shape[:-1]

    def shaped(name: str, differentiable: bool = False) -> Tensor | None:
        value: Tensor | None = getattr(values, name)
        if value is None:
            return None
        return (value if differentiable else value.detach()).view(shape)

    return HeadLoss(
        values.total,
        values.terms,
        values.n_valid,
        shaped("token_loss", True),
        shaped("lse"),
        shaped("log_prob", not detached),
        shaped("entropy", not detached),
        shaped("argmax"),
        values.metrics,
    )


def _tensors(
    source: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    adapter_a: Tensor | None,
    adapter_b: Tensor | None,
    labels: Tensor | None,
    ignore_index: int,
    teachers: Sequence[Tensor],
    rows_inputs: Mapping[str, Tensor | None],
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Those given, by name, and the teachers', as the operations take them."""
    check_plain(**{"logits" if weight is None else "hidden": source}, weight=weight, bias=bias, targets=labels)
    refuse(source.ndim < 1, "logits or hidden is a scalar; accepted: [..., vocab] or [..., d_model]")
    if weight is not None and (weight.ndim != 2 or weight.shape[1] != source.shape[-1]):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} and hidden {tuple(source.shape)}; accepted: [vocab, d_model] "
            "and [..., d_model]"
        )
    shape = source.shape[:-1]
    if labels is not None and (labels.shape != shape or labels.is_floating_point()):
        raise ValueError(
            f"targets are {labels.dtype} of shape {tuple(labels.shape)}; accepted: integers of shape {tuple(shape)}"
            + (", for the vocabulary is the last dimension of the logits" if weight is None else "")
        )
    device = source.device.type
    if weight is not None and device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        source, weight = source.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        adapter_a = None if adapter_a is None else adapter_a.to(dtype)
        adapter_b = None if adapter_b is None else adapter_b.to(dtype)
    _constant(**rows_inputs, **{f"teacher tensor {i}": t for i, t in enumerate(teachers)})
    tensors = {
        "input": _rows_of(source),
        "weight": weight,
        "bias": bias,
        "adapter_a": adapter_a,
        "adapter_b": adapter_b,
        "labels": None if labels is None else _labels(labels, ignore_index),
        **{name: None if t is None else _flattened(name, t, shape) for name, t in rows_inputs.items()},
    }
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    of_teachers = [_rows_of(t) for t in teachers]
    _check_device(source.device, given, of_teachers)
    return given, of_teachers


def _gradients(given: Mapping[str, Tensor], rows: int, detached: bool) -> tuple[Tensor | None, int]:
    """The weight's main_grad, and the gradients that go with the forward: where the total alone is asked for; but not in
    f16 on CUDA, where the kernels keep them in f16, whose range the upstream factor (a loss scale) is there to reach."""
    weight, source = given.get("weight"), given["input"]
    main_grad = getattr(weight, "main_grad", None) if weight is not None and weight.requires_grad else None
    later = TOKEN_LOSS if detached else _DIFFERENTIABLE_ROWS
    out_of_range = source.is_cuda and source.dtype == torch.float16
    now = 0
    if torch.is_grad_enabled() and main_grad is None and not out_of_range and not rows & later:
        for name, bit in _plan.GRADIENTS.items():
            if name in given and given[name].requires_grad:
                now |= bit
    return main_grad, now


def joined(
    process_group: Any,
    config: str,
    local: tuple[Any, ...],
    n_segments: int,
    budget_bytes: int,
    rows: int,
    detached: bool,
) -> tuple[dict[str, Tensor], list[Tensor], str]:
    """local: the arguments of _tensors."""
    source, _, _, _, _, labels, *_ = local

    def tensors_of() -> tuple[dict[str, Tensor], list[Tensor], int]:
        given, teachers = _tensors(*local)
        return given, teachers, _gradients(given, rows, detached)[1]

    return _group.joined(
        process_group,
        config,
        source,
        labels is not None,
        tensors_of,
        n_segments,
        budget_bytes,
        rows,
    )


def _rows_of(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1])


def _flattened(name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    check_plain(**{name: tensor})
    if name in ("class_weights", "pairs"):
        return tensor.reshape(-1)
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted: that of the targets, {tuple(shape)}")
    flat = tensor.reshape(-1)
    return flat.to(torch.uint8) if name == "mask" else flat


def _labels(labels: Tensor, ignore_index: int) -> Tensor:
    flat = labels if labels.ndim == 1 else labels.reshape(-1)
    if flat.dtype not in (torch.int64, torch.int32):
        flat = flat.to(torch.int64)
    return flat.masked_fill(flat == ignore_index, IGNORED) if ignore_index >= 0 else flat


def _text_of(config: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    if not isinstance(config, Mapping):
        return to_text(list(config))
    if "losses" not in config:
        raise ValueError(f"config has {', '.join(config) or 'nothing'}; accepted: losses, and what goes with them")
    return to_text(**config)


def head_loss(
    config: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str,
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

    config: fields of lossk::LossTerm, Teacher and HeadOptions (docs/losses.md), its list of losses alone, or its JSON
    text. From logits [..., vocab], or from hidden [..., d_model] and weight [vocab, d_model]. inputs: bias, adapter_a,
    adapter_b; token_weights, mask, advantages, old_log_probs, reference_log_probs, segments, of the labels' shape;
    class_weights, pairs. teachers: the tensors of config["teachers"] in order: [logits] of a "logits" one,
    [hidden, weight] of a "hidden" one, [ids, log_probs] of a "top_k" one. returns: of token_loss, lse, log_prob,
    entropy, argmax, metrics.

    process_group: weight (or logits, bias, adapter_b) is this rank's part of the vocabulary, as in
    linear_cross_entropy; of losses of labels and policies.

    Gradients reach logits, hidden, weight, bias and the adapter. Raises ullage.UllageError for what the library
    refuses, naming the term and the field.
    """
    known = {*_ops.TENSORS} - {"input", "weight", "labels", "upstream_rows", *GROUP_STATISTICS}
    refuse(bool(set(inputs) - known), f"inputs has {sorted(set(inputs) - known)}; accepted: {sorted(known)}", TypeError)
    refuse(bool(set(returns) - set(ROWS)), f"returns has {sorted(set(returns) - set(ROWS))}; accepted: {list(ROWS)}")
    text = config if isinstance(config, str) else _text_of(config)
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

"""One run of a head plan over tensors: the bodies of the custom operations, outside autograd."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
from typing import Any, NamedTuple

import torch

from ullage import _arrays
from ullage import _library as c
from ullage._errors import UllageError
from ullage.head import HeadPlan, make_plan
from ullage.torch import _filter, _status

# Gradients to compute, a set of bits.
D_INPUT, D_WEIGHT, D_BIAS, D_ADAPTER = 1, 2, 4, 8
# Values of each row to return, a set of bits; METRICS are of each policy term.
TOKEN_LOSS, LSE, LOG_PROB, ENTROPY, ARGMAX, METRICS = 1, 2, 4, 8, 16, 32
# Of a shard of the vocabulary: shift and log_sum, and no losses, which wait for the group's (_group.py); and distance.
SHARD, DISTANCE = 64, 128

N_METRICS = 13  # doubles in a PolicyMetrics, the last two of them int64

NAMES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class HeadTensors(NamedTuple):
    """What the losses read, in the order of the operations' arguments."""

    input: torch.Tensor  # [n_tok][vocab] logits where weight is None, else [n_tok][d_model] hidden states
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    adapter_a: torch.Tensor | None
    adapter_b: torch.Tensor | None
    labels: torch.Tensor | None
    token_weights: torch.Tensor | None
    class_weights: torch.Tensor | None
    mask: torch.Tensor | None
    advantages: torch.Tensor | None
    old_log_probs: torch.Tensor | None
    reference_log_probs: torch.Tensor | None
    segments: torch.Tensor | None
    pairs: torch.Tensor | None
    group_shift: torch.Tensor | None
    group_log_sum: torch.Tensor | None
    group_label_log_prob: torch.Tensor | None
    group_distance: torch.Tensor | None
    group_entropy: torch.Tensor | None
    teachers: list[torch.Tensor]  # logits: [logits]; hidden: [hidden, weight]; top_k: [ids, log_probs]; in order


class Gradients(NamedTuple):
    """Empty where not computed."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    adapter_a: torch.Tensor
    adapter_b: torch.Tensor


class Values(NamedTuple):
    """Empty where not asked for; rows are f32, or f64 for f64 inputs."""

    total: torch.Tensor  # [] f64
    terms: torch.Tensor  # [n_terms] f64, unweighted
    n_valid: torch.Tensor  # [] int64
    token_loss: torch.Tensor
    lse: torch.Tensor
    log_prob: torch.Tensor
    entropy: torch.Tensor
    shift: torch.Tensor
    log_sum: torch.Tensor
    distance: torch.Tensor
    argmax: torch.Tensor
    metrics: torch.Tensor  # [n_terms][N_METRICS] f64


@functools.lru_cache(maxsize=256)
def parsed(config: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(config)
    return document


def row_dtype(tensors: HeadTensors) -> torch.dtype:
    return torch.float64 if tensors.input.dtype == torch.float64 else torch.float32


def empty_values(tensors: HeadTensors, config: str, rows: int) -> Values:
    x = tensors.input
    n_tok, dtype, n_terms = x.shape[0], row_dtype(tensors), len(parsed(config)["losses"])

    def of_rows(bit: int, kind: torch.dtype) -> torch.Tensor:
        return x.new_empty(n_tok if rows & bit else 0, dtype=kind)

    return Values(
        x.new_empty(0 if rows & SHARD else (), dtype=torch.float64),
        x.new_empty(0 if rows & SHARD else n_terms, dtype=torch.float64),
        x.new_empty((), dtype=torch.int64),
        of_rows(TOKEN_LOSS, dtype),
        of_rows(LSE, dtype),
        of_rows(LOG_PROB, dtype),
        of_rows(ENTROPY, dtype),
        of_rows(SHARD, dtype),
        of_rows(SHARD, dtype),
        of_rows(DISTANCE, dtype),
        of_rows(ARGMAX, torch.int64),
        x.new_empty((n_terms if rows & METRICS else 0, N_METRICS), dtype=torch.float64),
    )


def empty_gradients(
    tensors: HeadTensors, gradients: int, *, scaled_later: bool = False, weight_dtype: torch.dtype | None = None
) -> Gradients:
    """Of the input's type, and all others of weight_dtype, or where not given of the weight's.

    On the CPU 16-bit weights have float32 gradients, to be rounded by the caller: the run would otherwise need the
    same bytes in its workspace, out of the budget for logits. scaled_later: an upstream factor is still to come, so
    that f16, whose range it may need, is kept in f32.
    """
    x, weight = tensors.input, tensors.weight
    if weight_dtype is None:
        weight_dtype = (x if weight is None else weight).dtype
        if x.device.type == "cpu" and weight_dtype.itemsize == 2:
            weight_dtype = torch.float32
    bits = (D_INPUT, D_WEIGHT, D_BIAS, D_ADAPTER, D_ADAPTER)
    dtypes = (x.dtype, *(weight_dtype,) * 4)

    def like(source: torch.Tensor | None, bit: int, dtype: torch.dtype) -> torch.Tensor:
        if source is None or not gradients & bit:
            return x.new_empty(0)
        return x.new_empty(source.shape, dtype=torch.float32 if scaled_later and dtype == torch.float16 else dtype)

    return Gradients(*(like(*each) for each in zip(tensors[:5], bits, dtypes)))


@functools.lru_cache(maxsize=16)
def _plan(request: str, device_index: int | None) -> HeadPlan:
    """Kept few: a plan for the CPU owns its threads. A plan is the current device's, and two may differ."""
    return make_plan(json.loads(request))


def plan_of(
    tensors: HeadTensors,
    config: str,
    *,
    budget_bytes: int,
    gradients: int,
    rows: int,
    out: Gradients,
    accumulate: bool,
) -> HeadPlan:
    x, weight = tensors.input, tensors.weight
    document = dict(parsed(config))
    filter_tolerance = document.pop("filter_tolerance", 0)  # how it is computed, not what, for the library
    rest = list(tensors.teachers)
    teachers = []
    for teacher in document.get("teachers", ()):
        first = rest.pop(0)
        if teacher["kind"] == "top_k":
            rest.pop(0)
            teachers.append({**teacher, "k": first.shape[-1]})
            continue
        facts = {"vocab": first.shape[1], "dtype": NAMES[first.dtype]}
        if teacher["kind"] == "hidden":
            second = rest.pop(0)
            facts |= {"vocab": second.shape[0], "d_model": second.shape[1], "weight_dtype": NAMES[second.dtype]}
        teachers.append({**teacher, **facts})
    if teachers:
        document["teachers"] = teachers
    if tensors.bias is not None:
        document["bias"] = True
    if tensors.adapter_a is not None:
        document["adapter_rank"] = tensors.adapter_a.shape[0]

    hidden = weight is not None
    wanted = {
        "input_dtype": NAMES[x.dtype],
        "weight_dtype": NAMES[(x if weight is None else weight).dtype],
        "d_hidden" if hidden else "d_logits": bool(gradients & D_INPUT),
        "d_weight": bool(gradients & D_WEIGHT),
        "d_bias": bool(gradients & D_BIAS),
        "d_adapter": bool(gradients & D_ADAPTER),
        # On CUDA one of the fused heads finds neither an entropy nor an arg-max, and only of the first a plan is told.
        "entropy": bool(rows & (ENTROPY | (ARGMAX if x.is_cuda else 0))),
        "policy_metrics": bool(rows & METRICS),
        "grad_dtype": NAMES[out.input.dtype if gradients & D_INPUT else x.dtype],
        "d_weight_dtype": "f32",
    }
    for bit, grad in ((D_WEIGHT, out.weight), (D_BIAS, out.bias), (D_ADAPTER, out.adapter_a)):
        if gradients & bit:
            wanted["d_weight_dtype"] = NAMES[grad.dtype]
    request = {
        "n_tok": x.shape[0],
        "d_model": x.shape[1] if hidden else 0,
        "vocab": x.shape[1] if weight is None else weight.shape[0],
        "config": document,
        "request": wanted,
        "limits": {
            "budget_bytes": budget_bytes,
            "n_threads": 0 if x.is_cuda else torch.get_num_threads(),
            "accumulate": accumulate,
            "filter_tolerance": filter_tolerance,
        },
        "device": x.device.type,
    }
    return _plan(json.dumps(request), x.device.index)


def plan_without_strips(
    tensors: HeadTensors, config: str, out: Gradients, *, budget_bytes: int, **what: Any
) -> tuple[HeadPlan, bool]:
    """The plan, and whether d_weight is to be float32 where out's has 16 bits, and rounded into it.

    A 16-bit d_weight whose float32 sum does not fit the workspace is made by strips of the vocabulary, for which
    logits are made again: up to 8 n d v operations for 6. A float32 one needs no other sum and lends its memory to the
    run, and takes twice the 16-bit one's bytes until it is rounded. Without a budget it is had; with one, where both
    fit.
    """
    plan = refusal = None
    try:
        plan = plan_of(tensors, config, out=out, budget_bytes=budget_bytes, **what)
    except UllageError as error:  # of a filter, say, which strips do not have
        refusal = error
    sum_bytes = 4 * out.weight.numel() if out.weight.is_cuda and out.weight.dtype.itemsize == 2 else 0
    rest = budget_bytes - sum_bytes if budget_bytes else 0
    fits = sum_bytes > 0 and (rest > 0 or not budget_bytes)
    if fits and (plan is None or plan.mode == "strip"):
        wide = out._replace(weight=out.weight.new_empty(0, dtype=torch.float32))
        with contextlib.suppress(UllageError):
            without = plan_of(tensors, config, out=wide, budget_bytes=rest, **what)
            if plan is None or without.operations < plan.operations:
                return without, True
    if plan is None:
        assert refusal is not None
        raise refusal
    return plan, False


def run(
    tensors: HeadTensors,
    config: str,
    *,
    n_segments: int,
    budget_bytes: int,
    gradients: int,
    rows: int = 0,
    values: Values | None = None,
    out: Gradients,
    upstream_rows: torch.Tensor | None = None,
    accumulate: bool = False,
) -> None:
    """Fills `values` and `out` on the input's device and its current stream."""
    x, weight = tensors.input, tensors.weight
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        plan, widened = plan_without_strips(
            tensors,
            config,
            out,
            budget_bytes=budget_bytes,
            gradients=gradients,
            rows=rows,
            accumulate=accumulate,
        )
    rounded = out.weight
    if widened:
        rounded_bytes = rounded.untyped_storage().nbytes()
        rounded.untyped_storage().resize_(0)  # until the workspace is free again
        out = out._replace(weight=rounded.new_empty(rounded.shape, dtype=torch.float32))
    alive: list[torch.Tensor] = []
    given = c.Inputs(struct_size=ctypes.sizeof(c.Inputs), n_segments=n_segments, upstream=1.0)
    _put(given, "logits" if weight is None else "hidden", x, alive)
    for name in HeadTensors._fields[1:-1]:
        _put(given, name, getattr(tensors, name), alive)
    _put(given, "upstream_rows", upstream_rows, alive)
    kinds = [teacher["kind"] for teacher in parsed(config).get("teachers", ())]
    slots = (c.Teacher * max(len(kinds), 1))()
    rest = list(tensors.teachers)
    for slot, kind in zip(slots, kinds):
        for name in {"logits": ["logits"], "hidden": ["hidden", "weight"], "top_k": ["ids", "log_probs"]}[kind]:
            _put(slot, name, rest.pop(0), alive)
    given.teachers, given.n_teachers = slots, len(kinds)

    wanted = c.Outputs(struct_size=ctypes.sizeof(c.Outputs), accumulate=int(accumulate))
    if values is not None:
        for name, tensor in zip(values._fields[:-1], values):
            if tensor.numel():
                field = "label_log_prob" if name == "log_prob" else name
                setattr(wanted, field, _arrays.vector(name, _arrays.view(name, tensor)))
        if values.metrics.numel():
            values.metrics.zero_()
            wanted.policy_metrics, wanted.n_policy_metrics = values.metrics.data_ptr(), values.metrics.shape[0]
    fields = ("d_logits" if weight is None else "d_hidden", "d_weight", "d_bias", "d_adapter_a", "d_adapter_b")
    for field, grad in zip(fields, out):
        if grad.numel():
            view = _arrays.view(field, grad)
            make = _arrays.vector if field == "d_bias" else _arrays.matrix
            setattr(wanted, field, make(field, view))

    workspace = torch.empty(max(plan.workspace_bytes, 64), dtype=torch.uint8, device=x.device)
    arguments = (
        plan._handle.pointer,
        ctypes.byref(given),
        ctypes.byref(wanted),
        workspace.data_ptr(),
        workspace.numel(),
    )
    if x.device.type == "cuda":
        with torch.cuda.device(x.device):
            # The caching allocator hands the workspace out again only behind this run, on this stream.
            stream = torch.cuda.current_stream().cuda_stream
            c.call("ullage_head_plan_run", *arguments, stream or None)
            _status.watch(plan, workspace, stream)
            if gradients and parsed(config).get("filter_tolerance"):
                _filter.observe(plan, workspace, stream)
    else:
        c.call("ullage_head_plan_run", *arguments, None)
    if widened:
        del workspace
        rounded.untyped_storage().resize_(rounded_bytes)
        rounded.copy_(out.weight)


def _put(struct: Any, name: str, tensor: torch.Tensor | None, alive: list[torch.Tensor]) -> None:
    """Sets a view of the tensor, of a copy where the struct's view cannot say its layout."""
    if tensor is None:
        return
    matrix = dict(struct._fields_)[name] is c.Matrix
    if matrix:
        if tensor.shape[1] > 1 and tensor.stride(1) != 1 or tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
            tensor = tensor.contiguous()
        row_bytes = tensor.stride(0) * tensor.itemsize
        if tensor.is_cuda and name in ("hidden", "weight") and (tensor.data_ptr() | row_bytes) % 16:
            tensor = tensor.clone(memory_format=torch.contiguous_format)  # the tensor copies' alignment
    else:
        if tensor.ndim != 1 or name == "mask":
            tensor = tensor.contiguous()
        if tensor.is_cuda and tensor.is_floating_point():
            tensor = tensor.float()
    alive.append(tensor)
    make = _arrays.matrix if matrix else _arrays.vector
    setattr(struct, name, make(name, _arrays.view(name, tensor)))


def scale(gradient: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """gradient * factor into out, which may be the gradient itself; formed in f32 or f64 and rounded once."""
    if gradient.is_cuda and out.dtype == gradient.dtype:
        if out is not gradient:
            out.copy_(gradient)
        factor = factor.to(torch.float64)
        values = _arrays.vector("gradient", _arrays.view("gradient", out))
        with torch.cuda.device(out.device):
            stream = torch.cuda.current_stream().cuda_stream
            c.call("ullage_scale_cuda", ctypes.byref(values), factor.data_ptr(), stream or None)
        return out
    if out is gradient and factor.item() == 1:
        return out
    wide = torch.promote_types(gradient.dtype, torch.float32)
    factor = factor.to(wide)
    if gradient.dtype == wide == out.dtype:
        return torch.mul(gradient, factor, out=out)
    rows = max(1, (1 << 22) // max(1, gradient[0].numel() if len(gradient) else 1))
    for begin in range(0, len(gradient), rows):
        part = slice(begin, begin + rows)
        out[part] = gradient[part].to(wide) * factor
    return out

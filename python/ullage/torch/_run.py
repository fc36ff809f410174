"""One run of a head plan over tensors: the bodies of the operations, outside autograd."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ullage import _library as c
from ullage.head import MATRICES, HeadPlan
from ullage.torch import _filter, _plan, _status
from ullage.torch._plan import Call, Result

_CODES = {
    torch.float64: c.F64,
    torch.float32: c.F32,
    torch.bfloat16: c.BF16,
    torch.float16: c.F16,
    torch.int32: c.I32,
    torch.int64: c.I64,
    torch.uint8: c.U8,
    torch.bool: c.U8,
}


class Prepared(NamedTuple):
    """A call's plan, and its structs but for addresses and strides."""

    plan: HeadPlan
    results: list[Result]
    fields: list[str]  # of the inputs' struct, for each tensor but the teachers'
    teacher_fields: list[tuple[int, str]]
    output_fields: list[str]  # for each result
    inputs: c.Inputs
    teachers: Any  # c.Teacher[]
    outputs: c.Outputs
    filtered: bool


def _prepared(call: Call) -> Prepared:
    plan, results = _plan.plan_of(call)
    names, configured = call.names.split(), _plan.parsed(call.config).get("teachers", ())
    source = "hidden" if "weight" in names else "logits"
    fields = [source if name == "input" else name for name in names]
    teacher_fields = [(i, field) for i, each in enumerate(configured) for field in _plan.OF_TEACHER[each["kind"]]]
    values = {"log_prob": "label_log_prob", "metrics": "policy_metrics"}
    gradients = {name: f"d_{source if name == 'input' else name}" for name in _plan.GRADIENTS}
    output_fields = [(values | gradients).get(each.name, each.name) for each in results]

    inputs = c.Inputs(struct_size=ctypes.sizeof(c.Inputs), upstream=1.0, n_teachers=len(configured))
    teachers = (c.Teacher * len(configured))()
    outputs = c.Outputs(struct_size=ctypes.sizeof(c.Outputs), accumulate=call.main_dtype is not None)
    on_cuda = call.device.type == "cuda"
    for field, (dtype, shape) in zip(fields, call.tensors):
        _describe(inputs, field, dtype, shape, on_cuda)
    for (i, field), (dtype, shape) in zip(teacher_fields, call.tensors[len(fields) :]):
        _describe(teachers[i], field, dtype, shape, on_cuda)
    for field, each in zip(output_fields, results):
        if each.name == "metrics":
            outputs.n_policy_metrics = each.shape[0]
        else:
            _describe(outputs, field, each.run_dtype, torch.Size(each.shape))
    filtered = bool(call.gradients and _plan.parsed(call.config).get("filter_tolerance"))
    return Prepared(plan, results, fields, teacher_fields, output_fields, inputs, teachers, outputs, filtered)


_on_cpu = functools.lru_cache(maxsize=16)(_prepared)  # kept few: a plan for the CPU owns its threads
_on_cuda = functools.lru_cache(maxsize=256)(_prepared)


def _describe(struct: Any, field: str, dtype: torch.dtype, shape: torch.Size, to_float: bool = False) -> None:
    """The view of a contiguous tensor. to_float: vectors of other floating types are converted."""
    if dtype not in _CODES:
        raise TypeError(f"{field} is {dtype}; accepted: {', '.join(map(str, _CODES))}")
    if field.removeprefix("d_") in MATRICES:
        setattr(struct, field, c.Matrix(None, *shape, shape[1], _CODES[dtype]))
    else:
        code = c.F32 if to_float and dtype.is_floating_point else _CODES[dtype]
        setattr(struct, field, c.Vector(None, shape.numel(), 1, code))


def _point(struct: Any, field: str, tensor: Tensor) -> Tensor:
    """Sets the address and the stride; returns what is to be kept alive: a copy, where the view cannot say the layout."""
    view = getattr(struct, field)
    if field in MATRICES:
        rows, columns = tensor.shape
        row_stride, column_stride = tensor.stride()
        if columns > 1 and column_stride != 1 or rows > 1 and row_stride < columns:
            tensor = tensor.contiguous()
        copied_by_tensor = tensor.is_cuda and field in ("hidden", "weight")  # whose alignment is 16 bytes
        if copied_by_tensor and (tensor.data_ptr() | tensor.stride(0) * tensor.itemsize) % 16:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        if rows > 1:
            view.row_stride = tensor.stride(0)
    else:
        if tensor.ndim != 1 or field == "mask":
            tensor = tensor.contiguous()
        if tensor.is_cuda and tensor.is_floating_point():
            tensor = tensor.float()
        if tensor.ndim == 1 and len(tensor) > 1:
            view.stride = tensor.stride(0)
    view.data = tensor.data_ptr() or _EMPTY_ADDRESS
    return tensor


_EMPTY = ctypes.create_string_buffer(8)
_EMPTY_ADDRESS = ctypes.addressof(_EMPTY)  # null would say "not given"; an empty tensor is given


def prepared(call: Call) -> Prepared:
    if call.device.type != "cuda":
        return _on_cpu(call)
    with torch.cuda.device(call.device):
        return _on_cuda(call)


def run(call: Call, tensors: Sequence[Tensor], n_segments: int, main_grad: Tensor | None = None) -> list[Tensor]:
    """The results of the call, on its device and the current stream; d_weight is added to main_grad, and not among them,
    where that is given."""
    if call.device.type != "cuda":
        return _run(_on_cpu(call), tensors, n_segments, main_grad)
    with torch.cuda.device(call.device):
        return _run(_on_cuda(call), tensors, n_segments, main_grad)


def _run(made: Prepared, tensors: Sequence[Tensor], n_segments: int, main_grad: Tensor | None) -> list[Tensor]:
    device = tensors[0].device
    inputs = c.Inputs.from_buffer_copy(made.inputs)
    inputs.n_segments = n_segments
    alive = [_point(inputs, field, tensor) for field, tensor in zip(made.fields, tensors)]
    if made.teacher_fields:
        inputs.teachers = teachers = type(made.teachers).from_buffer_copy(made.teachers)
        for (i, field), tensor in zip(made.teacher_fields, tensors[len(made.fields) :]):
            alive.append(_point(teachers[i], field, tensor))

    outputs = c.Outputs.from_buffer_copy(made.outputs)
    filled = []
    for field, each in zip(made.output_fields, made.results):
        if field == "d_weight" and main_grad is not None:
            _point_at_main_grad(outputs.d_weight, main_grad)
            continue
        result = torch.empty(each.shape, dtype=each.run_dtype, device=device)
        filled.append((result, each.dtype))
        if field == "policy_metrics":
            outputs.policy_metrics = result.zero_().data_ptr()
            continue
        if main_grad is not None:  # the run adds to every gradient
            result.zero_()
        getattr(outputs, field).data = result.data_ptr()

    # Of whole words: the first is the status. The caching allocator hands it out again only behind this run, on its
    # stream.
    workspace = torch.empty(max(made.plan.workspace_bytes + 7 >> 3, 8), dtype=torch.int64, device=device)
    stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
    c.call(
        "ullage_head_plan_run",
        made.plan._handle.pointer,
        ctypes.byref(inputs),
        ctypes.byref(outputs),
        workspace.data_ptr(),
        workspace.nbytes,
        stream or None,
    )
    if device.type == "cuda":
        _status.watch(made.plan, workspace, stream)
        if made.filtered:
            _filter.observe(made.plan, workspace, stream)
    del workspace  # the roundings may have it
    return [result if result.dtype == dtype else result.to(dtype) for result, dtype in filled]


def _point_at_main_grad(view: c.Matrix, main_grad: Tensor) -> None:
    if (view.rows, view.cols) != main_grad.shape or view.cols > 1 and main_grad.stride(1) != 1:
        raise ValueError(
            f"main_grad has shape {tuple(main_grad.shape)} and strides {main_grad.stride()}; accepted: "
            f"[{view.rows}, {view.cols}], the columns of a row adjacent"
        )
    view.data, view.row_stride = main_grad.data_ptr(), main_grad.stride(0) if view.rows > 1 else view.cols


def scale(gradient: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """gradient * factor into out, which may be the gradient itself; formed in f32 or f64 and rounded once."""
    if gradient.is_cuda and out.dtype == gradient.dtype:
        if out is not gradient:
            out.copy_(gradient)
        factor = factor.to(torch.float64)
        values = c.Vector(out.data_ptr() or _EMPTY_ADDRESS, out.numel(), 1, _CODES[out.dtype])
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

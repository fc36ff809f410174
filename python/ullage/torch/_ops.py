"""The operations: ullage::head and its backward, with fake registrations; _autograd.py has the formula.

Of the many tensors that losses may read an operation takes those that are there, and their names: whatever stands
between a caller and an operation's body looks at every argument each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ullage.head import MATRICES, VECTORS
from ullage.torch import _plan, _run
from ullage.torch._plan import D_WEIGHT, Call

# The names of what the losses read: "input" [n_tok][vocab] logits where there is no weight, else [n_tok][d_model] hidden
# states; of the backward alone upstream_rows, a factor of each row. An operation takes those that are given, and then
# the teachers' tensors in order: the logits of a "logits" one, hidden states and weight of a "hidden" one, ids and
# log_probs of a "top_k" one.
TENSORS = ("input", *(name for name in MATRICES + VECTORS if name not in ("logits", "hidden")))


class Values(NamedTuple):
    """None where not asked for; rows are f32, or f64 for f64 inputs."""

    total: Tensor | None = None  # [] of the rows' type
    terms: Tensor | None = None  # [n_terms] f64, unweighted
    n_valid: Tensor | None = None  # [] int64
    token_loss: Tensor | None = None
    lse: Tensor | None = None
    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    shift: Tensor | None = None
    log_sum: Tensor | None = None
    distance: Tensor | None = None
    argmax: Tensor | None = None
    metrics: Tensor | None = None  # [n_terms][N_METRICS] f64


def values_of(results: Any, rows: int) -> Values:
    """Those among what ullage::head returned."""
    return Values(**dict(zip(_plan.value_names(rows), results)))


def _call(tensors: list[Tensor], names: str, config: str, budget_bytes: int, gradients: int, **more: Any) -> Call:
    device = tensors[0].device
    return Call(
        device,
        tuple([(tensor.dtype, tensor.shape) for tensor in tensors]),
        names,
        config,
        budget_bytes,
        gradients,
        n_threads=torch.get_num_threads() if device.type == "cpu" else 0,
        **more,
    )


def prepare(tensors: list[Tensor], names: str, config: str, budget_bytes: int, gradients: int, rows: int) -> None:
    """Raises what ullage::head would refuse before it reads a tensor."""
    _run.prepared(_call(tensors, names, config, budget_bytes, gradients, rows=rows))


def _fake(call: Call, device_of: Tensor) -> list[Tensor]:
    """What a run of the call returns, of no content."""
    return [
        device_of.new_empty(each.shape, dtype=each.dtype)
        for each in _plan.results(call)
        if each.name != "weight" or call.main_dtype is None
    ]


library: Any = torch.library.Library("ullage", "FRAGMENT")  # type: ignore[no-untyped-call]
_TENSORS = "Tensor[] tensors, str names"
_OPTIONS = "str config, SymInt n_segments, int budget_bytes, int gradients"


def _operation(name: str, schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Not torch.library.custom_op: it looks for aliases among an operation's arguments and results on every call,
    which takes longer than all that is here."""
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for backend in ("CPU", "CUDA"):
        library.impl(name, body, backend)
    torch.library.register_fake(f"ullage::{name}", fake, lib=library)
    return getattr(torch.ops.ullage, name).default


def _head_body(
    tensors: list[Tensor],
    names: str,
    main_grad: Tensor | None,
    config: str,
    n_segments: int,
    budget_bytes: int,
    gradients: int,
    rows: int,
) -> list[Tensor]:
    """Values, then gradients of the total: those that there are. main_grad is for the backward."""
    return _run.run(_call(tensors, names, config, budget_bytes, gradients, rows=rows), tensors, n_segments)


def _fake_head(
    tensors: list[Tensor], names: str, _main: Any, config: str, _n: int, budget_bytes: int, gradients: int, rows: int
) -> list[Tensor]:
    return _fake(_call(tensors, names, config, budget_bytes, gradients, rows=rows), tensors[0])


_schema = f"({_TENSORS}, Tensor? main_grad, {_OPTIONS}, int rows) -> Tensor[]"
head = _operation("head", _schema, _head_body, _fake_head)


def _with_upstream(tensors: list[Tensor], names: str, upstream_rows: Tensor) -> tuple[list[Tensor], str]:
    of_teachers = len(names.split())
    return [*tensors[:of_teachers], upstream_rows, *tensors[of_teachers:]], f"{names} upstream_rows"


def _head_backward_body(
    tensors: list[Tensor],
    names: str,
    upstream_rows: Tensor,
    config: str,
    n_segments: int,
    budget_bytes: int,
    gradients: int,
) -> list[Tensor]:
    """Gradients of the total with a factor of each row: those that are asked for."""
    tensors, names = _with_upstream(tensors, names, upstream_rows)
    return _run.run(_call(tensors, names, config, budget_bytes, gradients), tensors, n_segments)


def _fake_head_backward(
    tensors: list[Tensor], names: str, upstream: Tensor, config: str, _n: int, budget_bytes: int, gradients: int
) -> list[Tensor]:
    tensors, names = _with_upstream(tensors, names, upstream)
    return _fake(_call(tensors, names, config, budget_bytes, gradients), tensors[0])


_schema = f"({_TENSORS}, Tensor upstream_rows, {_OPTIONS}) -> Tensor[]"
head_backward = _operation("head_backward", _schema, _head_backward_body, _fake_head_backward)


BESIDE_MAIN = ("input", "bias", "adapter_a", "adapter_b")
_schema = f"(Tensor(a!) main_grad, {_TENSORS}, Tensor upstream_rows, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"


@torch.library.custom_op("ullage::head_backward_into", mutates_args=("main_grad",), schema=_schema)
def head_backward_into(
    main_grad: Tensor,
    tensors: list[Tensor],
    names: str,
    upstream_rows: Tensor,
    config: str,
    n_segments: int,
    budget_bytes: int,
    gradients: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, with d_weight added to main_grad; those of the others in BESIDE_MAIN, empty where not asked for."""
    tensors, names = _with_upstream(tensors, names, upstream_rows)
    call = _call_into(main_grad, tensors, names, config, budget_bytes, gradients)
    return _beside_main(call, _run.run(call, tensors, n_segments, main_grad), main_grad)


@head_backward_into.register_fake
def _(
    main_grad: Tensor,
    tensors: list[Tensor],
    names: str,
    upstream_rows: Tensor,
    config: str,
    _n: int,
    budget_bytes: int,
    gradients: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors, names = _with_upstream(tensors, names, upstream_rows)
    call = _call_into(main_grad, tensors, names, config, budget_bytes, gradients)
    return _beside_main(call, _fake(call, tensors[0]), main_grad)


def _call_into(
    main_grad: Tensor, tensors: list[Tensor], names: str, config: str, budget_bytes: int, gradients: int
) -> Call:
    return _call(tensors, names, config, budget_bytes, gradients | D_WEIGHT, main_dtype=main_grad.dtype)


def _beside_main(call: Call, results: list[Tensor], main_grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four, for an operation that changes an argument cannot return a list."""
    made = [name for name in _plan.gradient_names(call.names, call.gradients) if name != "weight"]
    found = dict(zip(made, results))
    d_input, d_bias, d_a, d_b = (found.get(name, main_grad.new_empty(0)) for name in BESIDE_MAIN)
    return d_input, d_bias, d_a, d_b


@torch.library.custom_op("ullage::scaled", mutates_args=())
def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * factor, formed in f32 or f64 and rounded once to dtype."""
    return _run.scale(gradient, factor, torch.empty_like(gradient, dtype=dtype))


@scaled.register_fake
def _(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)

"""ullage::head in autograd.

Where gradients are asked of ullage::head itself they are computed in the forward, with the logits at hand, and the
backward scales them by the gradient of the total: in place, for it gives them away, unless the graph is kept for
another backward. Where none are, and an input needs them all the same (per-token losses, log-probabilities,
main_grad), the backward runs the head a second time with the upstream gradient in it.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ullage.torch import _ops, _plan, _run
from ullage.torch._ops import Values
from ullage.torch._plan import parsed

_DIFFERENTIABLE = ("total", "token_loss", "log_prob", "entropy")


@functools.lru_cache(maxsize=256)
def _layout(names: str, gradients: int, rows: int) -> tuple[list[str], list[str], list[int]]:
    """Of ullage::head's results: the values' names, then the gradients'; and which of all are not differentiable."""
    values, made = _plan.value_names(rows), _plan.gradient_names(names, gradients)
    return (
        values,
        made,
        [i for i, name in enumerate([*values, *made]) if i >= len(values) or name not in _DIFFERENTIABLE],
    )


class _Head(torch.autograd.Function):
    """ullage::head and its formula."""

    @staticmethod
    def forward(
        ctx: Any,
        names: str,
        main_grad: Tensor | None,
        config: str,
        n_segments: int,
        budget_bytes: int,
        gradients: int,
        rows: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            out = _ops.head(tensors, names, main_grad, config, n_segments, budget_bytes, gradients, rows)
        ctx.values, made, plain = _layout(names, gradients, rows)
        ctx.mark_non_differentiable(*[out[i] for i in plain])
        ctx.set_materialize_grads(False)
        ctx.names, ctx.gradients = names, gradients
        ctx.arguments = (config, n_segments, budget_bytes)
        # Attributes and not saved tensors: the backward adds to the one, and gives the others away.
        ctx.main_grad = main_grad
        ctx.computed = dict(zip(made, out[len(ctx.values) :]))
        if gradients:
            ctx.dtypes = [tensor.dtype for tensor in tensors]
        else:
            ctx.save_for_backward(*tensors)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_values = Values(**dict(zip(ctx.values, grads)))
        formula = _scale_computed if ctx.gradients else _run_again
        if torch.is_grad_enabled():
            with torch.no_grad():
                found = formula(ctx, of_values)
            found = {name: _once_differentiable(gradient) for name, gradient in found.items()}
        else:
            found = formula(ctx, of_values)
        fields = ctx.names.split()
        of_teachers = len(ctx.needs_input_grad) - _N_PLAIN - len(fields)
        return (*(None,) * _N_PLAIN, *(found.get(name) for name in fields), *(None,) * of_teachers)


_N_PLAIN = 7  # arguments of _Head before its tensors


def differentiable_head(tensors: list[Tensor], *plain: Any) -> list[Tensor]:
    """ullage::head with its formula: what the operation does where a compiler meets it, without the way there."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "ullage: torch.func's transforms (grad, vmap, jacrev, ...) do not reach the losses at the head; accepted: "
            "backward and torch.autograd.grad"
        )
    if (
        not torch.is_grad_enabled() and forward_ad._current_level < 0
    ):  # nothing that a gradient or a tangent could reach
        with torch._C._AutoDispatchBelowAutograd():
            out: list[Tensor] = _ops.head(tensors, *plain)
        return out
    return list(_Head.apply(*plain, *tensors))  # type: ignore[no-untyped-call]


_ops.library.impl("head", differentiable_head, "Autograd")


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("ullage: the losses at the head are differentiable once; a second derivative was asked for")


def _once_differentiable(gradient: Tensor | None) -> Tensor | None:
    """A second derivative that is left out would be a wrong answer."""
    return None if gradient is None else _Once.apply(gradient.requires_grad_())  # type: ignore[no-untyped-call]


def _scale_computed(ctx: Any, of_values: Values) -> dict[str, Tensor | None]:
    if of_values.token_loss is not None or of_values.log_prob is not None or of_values.entropy is not None:
        raise RuntimeError("ullage::head: gradients were computed for the total; those of rows need gradients=0")
    if ctx.computed is None:
        raise RuntimeError(
            "ullage: a second backward through the losses at the head; keep the graph (retain_graph=True)"
        )
    computed, factor = ctx.computed, of_values.total
    if factor is None:
        return {}
    if type(factor) is not Tensor or factor.is_meta:  # traced by a compiler, who fuses this and reuses the memory
        times = _times
    else:
        times = _ops.scaled
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            times, ctx.computed = _scaled_in_place, None
        if factor.is_cuda:
            factor = factor.double()  # once for all
    dtypes = dict(zip(ctx.names.split(), ctx.dtypes))
    return {name: times(gradient, factor, dtypes[name]) for name, gradient in computed.items()}


def _times(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return (gradient.to(wide) * factor.to(wide)).to(dtype)


def _scaled_in_place(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    found = _run.scale(gradient, factor, gradient)
    return found if found.dtype == dtype else found.to(dtype)


def _run_again(ctx: Any, of_values: Values) -> dict[str, Tensor | None]:
    config, n_segments, budget_bytes = ctx.arguments
    fields, saved = ctx.names.split(), ctx.saved_tensors
    given, teachers = dict(zip(fields, saved)), saved[len(fields) :]
    needs = [name for name, need in zip(fields, ctx.needs_input_grad[_N_PLAIN:]) if need]
    gradients = functools.reduce(int.__or__, [_plan.GRADIENTS[name] for name in needs], 0)
    main_grad = ctx.main_grad if "weight" in needs else None
    passes: list[tuple[dict[str, Tensor], Any, str, Tensor]] = []
    if of_values.total is not None:
        passes.append((given, teachers, config, of_values.total.expand(given["input"].shape[0])))
    if of_values.token_loss is not None:
        passes.append((given, teachers, undivided(config), of_values.token_loss))
    if of_values.log_prob is not None:
        bare = _without(given, "token_weights", "class_weights")
        passes.append((bare, (), log_prob_config(config), of_values.log_prob))
    if of_values.entropy is not None:
        passes.append((_without(given, "mask"), _uniform(given), entropy_config(config), of_values.entropy))

    total: dict[str, Tensor] = {}
    made = _plan.gradient_names(ctx.names, gradients)
    for read, more, document, upstream in passes:
        arguments = ([*read.values(), *more], " ".join(read), upstream, document, n_segments, budget_bytes, gradients)
        if main_grad is None:
            found = dict(zip(made, _ops.head_backward(*arguments)))
        else:
            beside = zip(_ops.BESIDE_MAIN, _ops.head_backward_into(main_grad, *arguments))
            found = {name: each for name, each in beside if name in made}
        total = {name: total[name] + part if name in total else part for name, part in found.items()}
    rounded: dict[str, Tensor | None] = {name: each.to(given[name].dtype) for name, each in total.items()}
    return rounded if main_grad is None else rounded | {"weight": _grad_in_main(given["weight"])}


def _without(given: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: each for name, each in given.items() if name not in names}


def _uniform(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Hidden states and weight of a teacher whose logits are all 0."""
    x = given["input"]
    vocab = given["weight"].shape[0] if "weight" in given else x.shape[1]
    dtype = _plan.row_dtype(x.dtype)
    return x.new_zeros((x.shape[0], 1), dtype=dtype), x.new_zeros((vocab, 1), dtype=dtype)


def _grad_in_main(weight: Any) -> Tensor | None:
    """Megatron's convention: a flag says that main_grad has it, and a gradient nobody reads still fires the hooks."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    unread: Tensor = weight.new_zeros(()).expand_as(weight)
    return unread


@functools.lru_cache(maxsize=256)
def undivided(config: str) -> str:
    """The terms whose sum is the sum of token_loss: each with the divisor 1, and none of a dpo, a loss of pairs."""
    document = dict(parsed(config))
    losses = document["losses"]
    if any(loss["kind"] == "gspo" for loss in losses):
        raise RuntimeError(
            "ullage: token_loss of a gspo term depends on every token of its sequence; differentiate the total"
        )
    document["losses"] = [{**loss, "divisor": 1, **({"weight": 0} if loss["kind"] == "dpo" else {})} for loss in losses]
    return json.dumps(document)


def _one_loss(config: str, **loss: Any) -> dict[str, Any]:
    return {**parsed(config), "losses": [{"weight": -1, "divisor": 1, **loss}], "teachers": []}


@functools.lru_cache(maxsize=256)
def log_prob_config(config: str) -> str:
    return json.dumps(_one_loss(config, kind="cross_entropy"))


@functools.lru_cache(maxsize=256)
def entropy_config(config: str) -> str:
    """H(q) = ln V - KL(q | uniform): the reverse divergence from a teacher whose logits are all 0."""
    document = _one_loss(config, kind="distillation", divergence="reverse_kl", name="entropy")
    document["teachers"] = [{"kind": "hidden"}]
    return json.dumps(document)

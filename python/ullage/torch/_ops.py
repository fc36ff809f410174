"""The custom operations: ullage::head and its backward, with fake and autograd registrations.

Where gradients are asked of ullage::head itself they are computed in the forward, with the logits at hand, and the
backward scales them by the gradient of the total: in place, for it gives them away, unless the graph is kept for
another backward. Where none are, and an input needs them all the same (per-token losses, log-probabilities,
main_grad), the backward runs the head a second time with the upstream gradient in it.
"""

from __future__ import annotations

import json
from typing import Any, Optional

import torch
from torch import Tensor

from ullage.torch import _run
from ullage.torch._run import D_ADAPTER, D_BIAS, D_INPUT, D_WEIGHT, HeadTensors, Values

N_TENSORS = len(HeadTensors._fields)


@torch.library.custom_op("ullage::head", mutates_args=())
def head(
    input: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    adapter_a: Optional[Tensor],
    adapter_b: Optional[Tensor],
    labels: Optional[Tensor],
    token_weights: Optional[Tensor],
    class_weights: Optional[Tensor],
    mask: Optional[Tensor],
    advantages: Optional[Tensor],
    old_log_probs: Optional[Tensor],
    reference_log_probs: Optional[Tensor],
    segments: Optional[Tensor],
    pairs: Optional[Tensor],
    group_shift: Optional[Tensor],
    group_log_sum: Optional[Tensor],
    group_label_log_prob: Optional[Tensor],
    group_distance: Optional[Tensor],
    group_entropy: Optional[Tensor],
    teachers: list[Tensor],
    main_grad: Optional[Tensor],
    n_segments: int,
    config: str,
    budget_bytes: int,
    gradients: int,
    rows: int,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor,
]:  # fmt: skip
    """Values, then Gradients of the total."""
    tensors = HeadTensors(
        input, weight, bias, adapter_a, adapter_b, labels, token_weights, class_weights, mask, advantages,
        old_log_probs, reference_log_probs, segments, pairs, group_shift, group_log_sum, group_label_log_prob,
        group_distance, group_entropy, teachers,
    )  # fmt: skip
    values = _run.empty_values(tensors, config, rows)
    out = _run.empty_gradients(tensors, gradients, scaled_later=input.device.type == "cpu")
    _run.run(
        tensors,
        config,
        n_segments=n_segments,
        budget_bytes=budget_bytes,
        gradients=gradients,
        rows=rows,
        values=values,
        out=out,
    )
    return (*values, *out)


@head.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    tensors, config, gradients, rows = HeadTensors(*args[:N_TENSORS]), args[-4], args[-2], args[-1]
    values = _run.empty_values(tensors, config, rows)
    out = _run.empty_gradients(tensors, gradients, scaled_later=tensors.input.device.type == "cpu")
    return (*values, *out)


@torch.library.custom_op("ullage::head_backward", mutates_args=())
def head_backward(
    input: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    adapter_a: Optional[Tensor],
    adapter_b: Optional[Tensor],
    labels: Optional[Tensor],
    token_weights: Optional[Tensor],
    class_weights: Optional[Tensor],
    mask: Optional[Tensor],
    advantages: Optional[Tensor],
    old_log_probs: Optional[Tensor],
    reference_log_probs: Optional[Tensor],
    segments: Optional[Tensor],
    pairs: Optional[Tensor],
    group_shift: Optional[Tensor],
    group_log_sum: Optional[Tensor],
    group_label_log_prob: Optional[Tensor],
    group_distance: Optional[Tensor],
    group_entropy: Optional[Tensor],
    teachers: list[Tensor],
    upstream_rows: Tensor,
    n_segments: int,
    config: str,
    budget_bytes: int,
    gradients: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the total with a factor of each row."""
    tensors = HeadTensors(
        input, weight, bias, adapter_a, adapter_b, labels, token_weights, class_weights, mask, advantages,
        old_log_probs, reference_log_probs, segments, pairs, group_shift, group_log_sum, group_label_log_prob,
        group_distance, group_entropy, teachers,
    )  # fmt: skip
    out = _run.empty_gradients(tensors, gradients)
    _run.run(
        tensors,
        config,
        n_segments=n_segments,
        budget_bytes=budget_bytes,
        gradients=gradients,
        out=out,
        upstream_rows=upstream_rows,
    )
    return out.input, out.weight, out.bias, out.adapter_a, out.adapter_b


@head_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    return tuple(_run.empty_gradients(HeadTensors(*args[:N_TENSORS]), args[-1]))


@torch.library.custom_op("ullage::head_backward_into", mutates_args=("main_grad",))
def head_backward_into(
    main_grad: Tensor,
    input: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    adapter_a: Optional[Tensor],
    adapter_b: Optional[Tensor],
    labels: Optional[Tensor],
    token_weights: Optional[Tensor],
    class_weights: Optional[Tensor],
    mask: Optional[Tensor],
    advantages: Optional[Tensor],
    old_log_probs: Optional[Tensor],
    reference_log_probs: Optional[Tensor],
    segments: Optional[Tensor],
    pairs: Optional[Tensor],
    group_shift: Optional[Tensor],
    group_log_sum: Optional[Tensor],
    group_label_log_prob: Optional[Tensor],
    group_distance: Optional[Tensor],
    group_entropy: Optional[Tensor],
    teachers: list[Tensor],
    upstream_rows: Tensor,
    n_segments: int,
    config: str,
    budget_bytes: int,
    gradients: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same, with d_weight added to main_grad; the others are returned."""
    tensors = HeadTensors(
        input, weight, bias, adapter_a, adapter_b, labels, token_weights, class_weights, mask, advantages,
        old_log_probs, reference_log_probs, segments, pairs, group_shift, group_log_sum, group_label_log_prob,
        group_distance, group_entropy, teachers,
    )  # fmt: skip
    out = _run.empty_gradients(tensors, gradients & ~D_WEIGHT, weight_dtype=torch.float32)
    for fresh in out:  # the run adds to every gradient buffer
        fresh.zero_()
    _run.run(
        tensors,
        config,
        n_segments=n_segments,
        budget_bytes=budget_bytes,
        gradients=gradients | D_WEIGHT,
        out=out._replace(weight=main_grad),
        upstream_rows=upstream_rows,
        accumulate=True,
    )
    return out.input, out.bias, out.adapter_a, out.adapter_b


@head_backward_into.register_fake
def _(main_grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    out = _run.empty_gradients(HeadTensors(*args[:N_TENSORS]), args[-1] & ~D_WEIGHT, weight_dtype=torch.float32)
    return out.input, out.bias, out.adapter_a, out.adapter_b


@torch.library.custom_op("ullage::scaled", mutates_args=())
def scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * factor, formed in f32 or f64 and rounded once to dtype."""
    return _run.scale(gradient, factor, torch.empty_like(gradient, dtype=dtype))


@scaled.register_fake
def _(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    tensors = HeadTensors(*inputs[:N_TENSORS])
    main_grad, n_segments, config, budget_bytes, gradients, _rows = inputs[N_TENSORS:]
    ctx.arguments = (n_segments, config, budget_bytes)
    ctx.gradients = gradients
    ctx.dtypes = [None if t is None else t.dtype for t in tensors[:5]]
    ctx.n_teachers = len(tensors.teachers)
    # An attribute and not a saved tensor: the backward adds to it, on purpose.
    ctx.main_grad = main_grad
    if gradients:
        # Attributes too: saved tensors could not be given away. Detached, for an output holds its node.
        ctx.computed = [gradient.detach() for gradient in output[len(Values._fields) :]]
    else:
        ctx.save_for_backward(*tensors[:-1], *tensors.teachers)


def _backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    of_values, of_gradients = Values(*grads[: len(Values._fields)]), grads[len(Values._fields) :]
    if any(g is not None for g in of_gradients):
        raise RuntimeError("ullage: the losses at the head are differentiable once; a second derivative was asked for")
    plain = ("terms", "lse", "shift", "log_sum", "distance", "argmax", "metrics")
    asked = [name for name in plain if getattr(of_values, name) is not None]
    if asked:
        raise RuntimeError(f"ullage::head: {', '.join(asked)} are not differentiable; detach them")
    found = _scale_saved(ctx, of_values) if ctx.gradients else _run_again(ctx, of_values)
    rest = (None,) * (N_TENSORS - 5 - 1)
    return (*found, *rest, [None] * ctx.n_teachers, *(None,) * 6)


def _scale_saved(ctx: Any, of_values: Values) -> list[Tensor | None]:
    if any(getattr(of_values, name) is not None for name in ("token_loss", "log_prob", "entropy")):
        raise RuntimeError("ullage::head: gradients were computed for the total; those of rows need gradients=0")
    if ctx.computed is None:
        raise RuntimeError(
            "ullage: a second backward through the losses at the head; keep the graph (retain_graph=True)"
        )
    computed, factor = ctx.computed, of_values.total
    if type(computed[0]) is not Tensor:  # traced by a compiler, who fuses this and reuses the memory himself
        times = _times
    elif torch._C._autograd._get_current_graph_task_keep_graph():
        times = scaled
    else:
        times = _scaled_in_place
        ctx.computed = None
    bits = (D_INPUT, D_WEIGHT, D_BIAS, D_ADAPTER, D_ADAPTER)
    return [
        times(gradient, factor, dtype) if factor is not None and ctx.gradients & bit and dtype is not None else None
        for gradient, bit, dtype in zip(computed, bits, ctx.dtypes)
    ]


def _times(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return (gradient.to(wide) * factor.to(wide)).to(dtype)


def _scaled_in_place(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return _run.scale(gradient, factor, gradient).to(dtype)


def _run_again(ctx: Any, of_values: Values) -> list[Tensor | None]:
    n_segments, config, budget_bytes = ctx.arguments
    saved: list[Any] = list(ctx.saved_tensors)
    tensors = HeadTensors(*[*saved[: N_TENSORS - 1], saved[N_TENSORS - 1 :]])
    needs = ctx.needs_input_grad
    gradients = D_INPUT * needs[0] | D_WEIGHT * needs[1] | D_BIAS * needs[2] | D_ADAPTER * (needs[3] or needs[4])
    n_tok = tensors.input.shape[0]
    passes = []
    if of_values.total is not None:
        passes.append((tensors, config, of_values.total.to(_run.row_dtype(tensors)).expand(n_tok)))
    if of_values.token_loss is not None:
        passes.append((tensors, undivided(config), of_values.token_loss))
    if of_values.log_prob is not None:
        bare = tensors._replace(teachers=[], token_weights=None, class_weights=None)
        passes.append((bare, log_prob_config(config), of_values.log_prob))
    if of_values.entropy is not None:
        passes.append((_beside_uniform(tensors), entropy_config(config), of_values.entropy))

    total: list[Tensor | None] = [None] * 5
    for inputs, document, upstream in passes:
        if ctx.main_grad is not None and needs[1]:
            d_input, d_bias, d_a, d_b = head_backward_into(
                ctx.main_grad, *inputs, upstream, n_segments, document, budget_bytes, gradients
            )
            found = [d_input, None, d_bias, d_a, d_b]
        else:
            found = head_backward(*inputs, upstream, n_segments, document, budget_bytes, gradients)
        total = [f if t is None else t + f for t, f in zip(total, found)]
    if ctx.main_grad is not None and needs[1]:
        total[1] = _grad_in_main(tensors.weight)
    bits = (D_INPUT, D_WEIGHT, D_BIAS, D_ADAPTER, D_ADAPTER)
    return [
        None if t is None or source is None or not gradients & bit else t.to(source.dtype)
        for t, bit, source in zip(total, bits, tensors[:5])
    ]


def _grad_in_main(weight: Any) -> Tensor | None:
    """Megatron's convention: a flag says that main_grad has it, and a gradient nobody reads still fires the hooks."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    unread: Tensor = weight.new_zeros(()).expand_as(weight)
    return unread


def undivided(config: str) -> str:
    """The terms whose sum is the sum of token_loss: each with the divisor 1, and none of a dpo, a loss of pairs."""
    document = dict(_run.parsed(config))
    losses = document["losses"]
    if any(loss["kind"] == "gspo" for loss in losses):
        raise RuntimeError(
            "ullage: token_loss of a gspo term depends on every token of its sequence; differentiate the total"
        )
    document["losses"] = [{**loss, "divisor": 1, **({"weight": 0} if loss["kind"] == "dpo" else {})} for loss in losses]
    return json.dumps(document)


def _one_loss(config: str, **loss: Any) -> dict[str, Any]:
    return {**_run.parsed(config), "losses": [{"weight": -1, "divisor": 1, **loss}], "teachers": []}


def log_prob_config(config: str) -> str:
    return json.dumps(_one_loss(config, kind="cross_entropy"))


def entropy_config(config: str) -> str:
    """H(q) = ln V - KL(q | uniform): the reverse divergence from a teacher whose logits are all 0."""
    document = _one_loss(config, kind="distillation", divergence="reverse_kl", name="entropy")
    document["teachers"] = [{"kind": "hidden"}]
    return json.dumps(document)


def _beside_uniform(tensors: HeadTensors) -> HeadTensors:
    x = tensors.input
    vocab = x.shape[1] if tensors.weight is None else tensors.weight.shape[0]
    dtype = x.dtype if x.dtype == torch.float64 else torch.float32
    return tensors._replace(
        mask=None, teachers=[x.new_zeros((x.shape[0], 1), dtype=dtype), x.new_zeros((vocab, 1), dtype=dtype)]
    )


head.register_autograd(_backward, setup_context=_setup_context)

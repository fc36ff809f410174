"""Distillation: a divergence between a teacher's distribution and the student's, in one pass over the logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ullage.torch._head import refuse, run_head, to_text

_REDUCTIONS = ("mean", "sum", "none")


def distillation(
    logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor | None = None,
    *,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    student_temperature: float = 1.0,
    t_squared: bool = False,
    beta: float = 0.5,
    truncate_teacher: bool = False,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    cross_entropy_weight: float = 0.0,
    softcap: float = 0.0,
    logits_scale: float = 1.0,
) -> Tensor:
    """The divergence of softmax(teacher_logits / temperature) and softmax(logits / student_temperature), over
    the rows whose target is not ignored, or whose mask is not 0, or all.

    divergence: "forward_kl", "reverse_kl", "cross_entropy", or "jensen_shannon" with `beta`. temperature is the
    teacher's alone and the loss has no factor T^2: both of the textbook's are student_temperature=T and
    t_squared=True. truncate_teacher: a wider teacher's extra columns are dropped and the rest renormalised.
    cross_entropy_weight: adds that much of the cross-entropy with the targets; 0, so that equal models have loss 0.
    logits and teacher_logits [..., vocab].
    """
    return _distil(
        [{"kind": "logits"}],
        [teacher_logits],
        targets,
        reduction,
        cross_entropy_weight,
        _term(divergence, temperature, student_temperature, t_squared, beta, truncate_teacher),
        {"softcap": softcap, "logits_scale": logits_scale},
        logits=logits,
        mask=mask,
        ignore_index=ignore_index,
    )


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None = None,
    *,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    teacher_logits: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
    bias: Tensor | None = None,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    student_temperature: float = 1.0,
    t_squared: bool = False,
    beta: float = 0.5,
    top_k_tail: str = "tail_bin",
    truncate_teacher: bool = False,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    cross_entropy_weight: float = 0.0,
    softcap: float = 0.0,
    logits_scale: float = 1.0,
    budget_bytes: int | None = None,
) -> Tensor:
    """The same fused with the projection: neither model's logits are ever held.

    The teacher is one of: teacher_hidden [..., d_teacher] and teacher_weight [vocab, d_teacher]; teacher_logits
    [..., vocab]; teacher_ids and teacher_logprobs [..., k], whose missing mass top_k_tail places: "tail_bin" (one
    more bin), "truncated" or "renormalized". The softcap and logits_scale are of both models.
    """
    accepted = "teacher_hidden and teacher_weight, teacher_logits, or teacher_ids and teacher_logprobs"
    refuse((teacher_hidden is None) != (teacher_weight is None), f"half a teacher is given; accepted: {accepted}")
    refuse((teacher_ids is None) != (teacher_logprobs is None), f"half a teacher is given; accepted: {accepted}")
    choices: list[tuple[str, list[Any]]] = [
        ("hidden", [teacher_hidden, teacher_weight]),
        ("logits", [teacher_logits]),
        ("top_k", [teacher_ids, teacher_logprobs]),
    ]
    given = [(kind, tensors) for kind, tensors in choices if tensors[0] is not None]
    refuse(len(given) != 1, f"{len(given)} teachers are given; accepted: one, {accepted}")
    (kind, tensors) = given[0]
    term = _term(divergence, temperature, student_temperature, t_squared, beta, truncate_teacher)
    if kind == "top_k":
        term["top_k_tail"] = top_k_tail
    return _distil(
        [{"kind": kind}],
        tensors,
        targets,
        reduction,
        cross_entropy_weight,
        term,
        {"softcap": softcap, "logits_scale": logits_scale},
        hidden=hidden,
        weight=weight,
        bias=bias,
        mask=mask,
        ignore_index=ignore_index,
        budget_bytes=budget_bytes,
    )


def _term(
    divergence: str, temperature: float, student_temperature: float, t_squared: bool, beta: float, truncate: bool
) -> dict[str, Any]:
    term: dict[str, Any] = {"kind": "distillation", "divergence": divergence}
    if temperature != 1.0:
        term["temperature"] = temperature
    if student_temperature != 1.0:
        term["student_temperature"] = student_temperature
    if t_squared:
        term["t_squared"] = True
    if divergence == "jensen_shannon":
        term["beta"] = beta
    if truncate:
        term["truncate_teacher"] = True
    return term


def _distil(
    teachers: list[dict[str, Any]],
    tensors: list[Tensor],
    targets: Tensor | None,
    reduction: str,
    cross_entropy_weight: float,
    term: dict[str, Any],
    options: dict[str, Any],
    **inputs: Any,
) -> Tensor:
    refuse(reduction not in _REDUCTIONS, f"reduction is {reduction!r}; accepted: {', '.join(_REDUCTIONS)}")
    losses = [term]
    if inputs.get("mask") is not None:
        refuse(targets is not None, "mask and targets are given; accepted: one of the two says which rows count")
    if cross_entropy_weight != 0.0:
        refuse(targets is None, "cross_entropy_weight needs targets")
        losses = [term, {"kind": "cross_entropy", "weight": cross_entropy_weight}]
    if reduction != "mean":
        losses = [{**loss, "divisor": 1.0} for loss in losses]
    per_token = reduction == "none"
    out = run_head(
        to_text(losses, teachers=teachers, **options),
        labels=targets,
        teachers=tensors,
        returns=("token_loss",) if per_token else (),
        **inputs,
    )
    return out.total if out.token_loss is None else out.token_loss

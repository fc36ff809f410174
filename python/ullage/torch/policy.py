"""Policy-gradient losses at the head: the log-probabilities, the ratio and the clipped surrogate in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ullage.torch._head import HeadLoss, refuse, run_head, scale_of, to_text


def grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor,
    *,
    reference_logprobs: Tensor | None = None,
    bias: Tensor | None = None,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    kl_beta: float = 0.0,
    normalizer: str = "tokens",
    max_length: int = 0,
    divisor: float | None = None,
    segments: Tensor | None = None,
    n_segments: int | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    return_metrics: bool = False,
    budget_bytes: int | None = None,
    process_group: Any = None,
) -> Any:
    """Clipped token ratios: -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A) + kl_beta k3.

    hidden [sequences, length, d_model]; targets [sequences, length]: the token each position predicts, prompts and
    padding ignored; advantages [sequences] or [sequences, length]; old_logprobs and reference_logprobs
    [sequences, length], read where the target counts. normalizer, with the divisor where none is given: "tokens"
    (DAPO, BNPO), "sequence_means" (GRPO's mean of means), "max_length" (Dr. GRPO). divisor: the whole batch's, so that
    micro-batches add up. Packed rows: targets [length] with segments [length], their documents, and n_segments.
    kl_beta > 0 needs reference_logprobs. process_group: as in linear_cross_entropy. With return_metrics: the loss and a
    HeadLoss, whose policy_metrics() are the ratio, the share that was clipped and so on.
    """
    return _policy(
        "grpo",
        hidden,
        weight,
        targets,
        advantages,
        old_logprobs,
        reference_logprobs,
        bias,
        {
            "epsilon_low": epsilon_low,
            "epsilon_high": epsilon_high,
            "kl_beta": kl_beta,
            "normalizer": normalizer,
            **({"max_length": max_length} if normalizer == "max_length" else {}),
        },
        divisor,
        segments,
        n_segments,
        ignore_index,
        temperature,
        softcap,
        return_metrics,
        budget_bytes,
        process_group,
    )


def gspo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor,
    *,
    reference_logprobs: Tensor | None = None,
    bias: Tensor | None = None,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    kl_beta: float = 0.0,
    normalizer: str = "sequences",
    divisor: float | None = None,
    segments: Tensor | None = None,
    n_segments: int | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float = 0.0,
    return_metrics: bool = False,
    budget_bytes: int | None = None,
    process_group: Any = None,
) -> Any:
    """The same with the ratio of whole sequences, exp of the mean log-ratio of their tokens. The default
    normaliser weighs a sequence by its length; "sequence_means" weighs all alike."""
    return _policy(
        "gspo",
        hidden,
        weight,
        targets,
        advantages,
        old_logprobs,
        reference_logprobs,
        bias,
        {"epsilon_low": epsilon_low, "epsilon_high": epsilon_high, "kl_beta": kl_beta, "normalizer": normalizer},
        divisor,
        segments,
        n_segments,
        ignore_index,
        temperature,
        softcap,
        return_metrics,
        budget_bytes,
        process_group,
    )


def _policy(
    kind: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor | None,
    bias: Tensor | None,
    term: dict[str, Any],
    divisor: float | None,
    segments: Tensor | None,
    n_segments: int | None,
    ignore_index: int,
    temperature: float,
    softcap: float,
    return_metrics: bool,
    budget_bytes: int | None,
    process_group: Any,
) -> Any:
    if segments is None:
        refuse(
            targets.ndim != 2,
            f"targets have shape {tuple(targets.shape)}; accepted: [sequences, length], or any with segments",
        )
        n_segments = targets.shape[0]
        segments = torch.arange(n_segments, device=targets.device)[:, None].expand_as(targets)
        if advantages.ndim == 1:
            refuse(
                advantages.shape[0] != n_segments,
                f"advantages have shape {tuple(advantages.shape)}; accepted: ({n_segments},), one for each sequence, or "
                "the shape of the targets",
            )
            advantages = advantages[:, None].expand_as(targets)
    else:
        refuse(n_segments is None, "segments need n_segments, their number")
    refuse(
        term["kl_beta"] != 0.0 and reference_logprobs is None,
        f"kl_beta is {term['kl_beta']} and reference_logprobs is not given",
    )
    loss = {"kind": kind, **term, **({} if divisor is None else {"divisor": divisor})}
    out: HeadLoss = run_head(
        to_text([loss], logits_scale=scale_of(temperature), softcap=softcap),
        hidden=hidden,
        weight=weight,
        bias=bias,
        labels=targets,
        ignore_index=ignore_index,
        n_segments=n_segments or 0,
        budget_bytes=budget_bytes,
        returns=("metrics",) if return_metrics else (),
        process_group=process_group,
        advantages=advantages,
        old_log_probs=old_logprobs,
        reference_log_probs=reference_logprobs,
        segments=segments,
    )
    return (out.total, out) if return_metrics else out.total

"""A pytest plugin: Liger Kernel's own tests of its cross-entropies, with ours in their place.

Nothing of theirs is here: their tests come from a checkout, and find these functions under their names.
"""

from __future__ import annotations

import counted
import torch
from torch import Tensor

from ullage import UllageError
from ullage.torch import check, head_loss, token_logprobs


def loss_of(
    source: dict[str, Tensor | None],
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    z_loss: float,
    label_smoothing: float,
    reduction: str,
    softcap: float | None,
    wants_z_loss: bool,
    wants_accuracy: bool,
    wants_predicted: bool,
    token_weights: Tensor | None = None,
):
    """(loss, z_loss, token_accuracy, predicted_tokens), None where not wanted."""
    counted.calls += 1
    divisor = {} if reduction == "mean" else {"divisor": 1.0}
    terms = [{"kind": "cross_entropy", "label_smoothing": label_smoothing, **divisor}]
    if z_loss:
        terms.append({"kind": "z_loss", "weight": z_loss, **divisor})
    per_token = reduction == "none"
    returns = [name for name, wanted in {
        "token_loss": per_token, "lse": per_token and wants_z_loss, "argmax": wants_accuracy or wants_predicted,
    }.items() if wanted]  # fmt: skip
    out = head_loss(
        {"losses": terms, **({"softcap": float(softcap)} if softcap else {})},
        **source,
        labels=target,
        ignore_index=ignore_index,
        class_weights=class_weight,
        token_weights=token_weights,
        returns=returns,
    )
    counts = target != ignore_index
    accuracy = predicted = z = None
    if wants_z_loss:
        rows = z_loss * out.lse.square() if per_token else out.terms[-1] * z_loss
        z = rows.to(out.total.dtype)
    if wants_accuracy:
        right = ((out.argmax == target) & counts).float()
        accuracy = right if per_token else right.sum() / counts.sum()
    if wants_predicted:
        predicted = torch.where(counts, out.argmax, -1)
    return out.token_loss if per_token else out.total, z, accuracy, predicted


class FusedLinear:
    @staticmethod
    def apply(
        hidden, weight, target, bias=None, class_weight=None, ignore_index=-100, z_loss=0.0, label_smoothing=0.0,
        reduction="mean", softcap=None, wants_z_loss=False, accum_dtype=None, use_token_scaling=False,
        wants_accuracy=False, wants_predicted=False,
    ):  # fmt: skip
        scaling = None
        if use_token_scaling:  # each token's loss times its probability, a constant
            with torch.no_grad():
                scaling = token_logprobs(
                    hidden, weight, target, bias=bias, ignore_index=ignore_index, softcap=softcap or 0.0
                ).exp()
        return loss_of(
            {"hidden": hidden, "weight": weight, "bias": bias}, target, class_weight, ignore_index, z_loss,
            label_smoothing, reduction, softcap, wants_z_loss, wants_accuracy, wants_predicted, scaling,
        )  # fmt: skip


class FromLogits:
    @staticmethod
    def apply(logits, target, *options):
        """Theirs has the logits' type, and asserts that targets are in range before it starts."""
        loss, z, *others = loss_of({"logits": logits}, target, *options)
        try:
            check()
        except UllageError as error:
            raise AssertionError(f"Target out of bounds: {error}") from error
        return loss.to(logits.dtype), None if z is None else z.to(logits.dtype), *others


def pytest_configure(config):
    import liger_kernel.ops as ops
    import liger_kernel.transformers.cross_entropy as module
    import liger_kernel.transformers.functional as functional
    import liger_kernel.transformers.fused_linear_cross_entropy as fused_module

    for place in (ops, functional, fused_module):
        place.LigerFusedLinearCrossEntropyFunction = FusedLinear
    for place in (ops, functional, module):
        place.LigerCrossEntropyFunction = FromLogits

"""Hugging Face causal language models whose loss goes through the fused head. Duck-typed: any model with a decoder
(`base_model`), an nn.Linear head (`get_output_embeddings()`) and the library's forward arguments."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import Tensor, nn

from ullage.torch.cross_entropy import linear_cross_entropy


def patch(
    model: nn.Module, *, z_loss: float = 0.0, budget_bytes: int | None = None, filter_tolerance: float | None = None
) -> nn.Module:
    """Makes model(..., labels=labels) compute its loss without the logits; returns the model.

    The loss is the library's own: labels are shifted by one, -100 is ignored, and num_items_in_batch, where the
    trainer gives it, is the divisor. final_logit_softcapping (Gemma), logits_scaling (Granite) and logit_scale (Cohere)
    are read from the configuration. The output's `logits` are None unless the call says output_logits=True; a call
    without labels is the model's own. The options are those of linear_cross_entropy. `unpatch` undoes it.
    """
    _head_of(model)
    options = {"z_loss": z_loss, "budget_bytes": budget_bytes, "filter_tolerance": filter_tolerance}
    own = type(model).forward
    parameters = inspect.signature(own).parameters
    names = [name for name in parameters if name != "self"]

    def forward(self: nn.Module, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        kwargs = {**dict(zip(names, args)), **kwargs}
        labels = kwargs.pop("labels", labels)
        output_logits = kwargs.pop("output_logits", False)
        if labels is None and kwargs.get("shift_labels") is None:
            return own(self, **kwargs)
        return _forward_with_loss(self, labels, kwargs, output_logits, options)

    # Trainers read the signature to learn which columns of a data set the model takes.
    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """The model with its own forward."""
    model.__dict__.pop("forward", None)
    return model


def _head_of(model: Any) -> nn.Linear:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is not nn.Linear:
        raise TypeError(
            f"the output head of {type(model).__name__} is {type(head).__name__}; accepted: nn.Linear. An adapter on "
            "the head would be left out of the loss: merge it, or leave the head out of its targets"
        )
    return head


def _decoder_of(model: Any) -> nn.Module:
    decoder: nn.Module = model.base_model
    if decoder is model:
        raise TypeError(f"{type(model).__name__} has no base_model; accepted: a decoder under a causal language model")
    return decoder


def _forward_with_loss(
    model: nn.Module,
    labels: Tensor | None,
    kwargs: dict[str, Any],
    output_logits: bool,
    options: dict[str, Any],
) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    head, config = _head_of(model), model.config
    for name in ("logits_to_keep", "num_logits_to_keep"):
        if kwargs.pop(name, 0):
            raise ValueError(f"{name} is given with labels; accepted: one of the two")
    n_items = kwargs.pop("num_items_in_batch", None)
    ignore_index = kwargs.pop("ignore_index", -100)
    shifted = kwargs.pop("shift_labels", None)
    as_tuple = kwargs.pop("return_dict", None) is False
    out = _decoder_of(model)(**kwargs, return_dict=True)
    hidden = out.last_hidden_state
    targets: Any = labels if shifted is None else shifted
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    # Granite and Cohere scale, Gemma caps, and no family does both: the order does not matter here.
    loss = linear_cross_entropy(
        hidden,
        head.weight,
        targets.to(hidden.device),
        bias=head.bias,
        ignore_index=ignore_index,
        reduction="mean" if n_items is None else "sum",
        softcap=softcap,
        logits_scale=scale,
        shift=shifted is None,
        **options,
    )
    if n_items is not None:
        loss = loss / (n_items.to(loss.device) if torch.is_tensor(n_items) else n_items)
    logits = None
    if output_logits:
        logits = head(hidden)
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        logits = logits * scale
    result = CausalLMOutputWithPast(
        loss=loss,
        logits=logits,
        past_key_values=out.past_key_values,
        hidden_states=out.hidden_states,
        attentions=out.attentions,
    )
    return result.to_tuple() if as_tuple else result

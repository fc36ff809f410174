"""The losses at the head of a language model as PyTorch operations.

>>> loss = linear_cross_entropy(hidden, weight, targets)   # was: F.cross_entropy(hidden @ weight.T, targets)
"""

from ullage.torch._filter import FilterReport, filter_reports
from ullage.torch._group import VocabShard
from ullage.torch._head import HeadLoss, head_loss
from ullage.torch.cross_entropy import LinearCrossEntropyLoss, cross_entropy, linear_cross_entropy, token_logprobs
from ullage.torch.distillation import distillation, linear_distillation
from ullage.torch.huggingface import patch, unpatch
from ullage.torch.policy import grpo_loss, gspo_loss
from ullage.torch._status import check

__all__ = [
    "FilterReport",
    "HeadLoss",
    "LinearCrossEntropyLoss",
    "VocabShard",
    "check",
    "cross_entropy",
    "distillation",
    "filter_reports",
    "grpo_loss",
    "gspo_loss",
    "head_loss",
    "linear_cross_entropy",
    "linear_distillation",
    "patch",
    "token_logprobs",
    "unpatch",
]

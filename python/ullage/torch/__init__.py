"""The losses at the head of a language model as PyTorch operations.

>>> loss = linear_cross_entropy(hidden, weight, targets)   # was: F.cross_entropy(hidden @ weight.T, targets)
"""

from ullage.torch._head import HeadLoss, head_loss
from ullage.torch.cross_entropy import LinearCrossEntropyLoss, cross_entropy, linear_cross_entropy, token_logprobs

__all__ = [
    "HeadLoss",
    "LinearCrossEntropyLoss",
    "cross_entropy",
    "head_loss",
    "linear_cross_entropy",
    "token_logprobs",
]

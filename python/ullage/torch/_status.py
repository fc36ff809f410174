"""What only the device could see. A run on CUDA does not wait, so a label outside the vocabulary cannot raise there;
it is kept, on the device, until someone asks."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from ullage import _library as c
from ullage._errors import UllageError
from ullage.head import HeadPlan

_KEPT = 256  # plans and streams, the latest

# (plan's address, stream) -> the plan and its status bytes, whose first 8 are the largest status word of its runs.
_found: OrderedDict[tuple[int, int], tuple[HeadPlan, torch.Tensor]] = OrderedDict()


def watch(plan: HeadPlan, workspace: torch.Tensor, stream: int) -> None:
    """After a run on the current stream: one small launch, capturable."""
    key = (plan._handle.pointer.value or 0, stream)
    if key not in _found:
        if len(_found) == _KEPT:
            _found.popitem(last=False)
        n_words = c.shared_library().ullage_head_plan_status_bytes(plan._handle.pointer) // 8
        _found[key] = plan, _outside_of_graphs(n_words, workspace.device).fill_(-1)
    word = _found[key][1][:1]
    torch.maximum(word, workspace[:8].view(torch.int64), out=word)


def _outside_of_graphs(n_words: int, device: torch.device) -> torch.Tensor:
    """Memory that no CUDA graph's pool owns: a pool is its thread's. (A capture owns what its stream allocates.)"""
    stream, made = torch.cuda.current_stream(device), []

    def make() -> None:
        with torch.cuda.stream(stream):
            made.append(torch.empty(n_words, dtype=torch.int64, device=device))

    if torch.cuda.is_current_stream_capturing():
        make()
    else:
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    return made[0]


def check() -> None:
    """Waits for the streams that losses ran on, and raises what one met since the last check: a target outside the
    vocabulary (its row counted as ignored), a NaN or infinite logit. On the CPU the call itself raises.

    It forgets what it raised. Call it where you wait anyway: where the loss is logged.
    """
    first: UllageError | None = None
    for (_, stream), (plan, status) in _found.items():
        with torch.cuda.device(status.device):
            try:
                n_bytes = status.numel() * 8
                c.call("ullage_head_plan_check", plan._handle.pointer, status.data_ptr(), n_bytes, stream or None)
            except UllageError as error:
                first = first or error
                status.fill_(-1)
    if first is not None:
        raise first

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
_SLOT_WORDS = 256  # more than the status of any plan

# (plan's address, stream) -> the plan and a slot, whose first word is the largest status word of its runs.
_found: OrderedDict[tuple[int, int], tuple[HeadPlan, torch.Tensor]] = OrderedDict()
_free: dict[torch.device, list[torch.Tensor]] = {}  # slots that no plan has, -1 everywhere


def watch(plan: HeadPlan, workspace: torch.Tensor, stream: int) -> None:
    """After a run on the current stream, of whose workspace the first int64 is the status: one small launch, capturable."""
    key = (plan._handle.pointer.value or 0, stream)
    if key not in _found:
        if len(_found) == _KEPT:
            _, (_, slot) = _found.popitem(last=False)
            _free[slot.device].append(slot.fill_(-1))
        free = _free.setdefault(workspace.device, [])
        if not free:
            free.extend(_slots(workspace.device))
        _found[key] = plan, free.pop()
    word = _found[key][1][:1]
    torch.maximum(word, workspace[:1], out=word)


def _slots(device: torch.device) -> list[torch.Tensor]:
    """Made beside whatever is captured later: what a capture fills holds anything until its replay, and what it
    allocates is its pool's, which is its thread's."""
    made: list[torch.Tensor] = []

    def make(stream: torch.cuda.Stream, n: int) -> None:
        with torch.cuda.stream(stream):
            made.extend(torch.full((n, _SLOT_WORDS), -1, dtype=torch.int64, device=device))

    if torch.cuda.is_current_stream_capturing():  # the very first run
        make(torch.cuda.current_stream(device), 1)
    else:
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        thread = threading.Thread(target=make, args=(aside, _KEPT))
        thread.start()
        thread.join()
        aside.record_event().synchronize()  # other streams' runs write to them; nothing else is on this one
    return made


def check() -> None:
    """Waits for the devices that losses ran on, and raises what one met since the last check: a target outside the
    vocabulary (its row counted as ignored), a NaN or infinite logit. On the CPU the call itself raises.

    It forgets what it raised. Call it where you wait anyway: where the loss is logged.
    """
    first: UllageError | None = None
    for device in {slot.device for _, slot in _found.values()}:
        torch.cuda.synchronize(device)  # a graph may be replayed on any stream
    for (_, stream), (plan, slot) in _found.items():
        with torch.cuda.device(slot.device):
            try:
                c.call("ullage_head_plan_check", plan._handle.pointer, slot.data_ptr(), slot.nbytes, stream or None)
            except UllageError as error:
                first = first or error
                slot.fill_(-1)
    if first is not None:
        raise first

"""What the benchmarks through PyTorch have in common: how a step is timed, and their records."""

from __future__ import annotations

import datetime
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

import ullage


AHEAD = 8192  # the side of the products before each step


@functools.cache
def busy() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(AHEAD, AHEAD, device="cuda").bfloat16(), torch.empty(AHEAD, AHEAD, device="cuda").bfloat16()


def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of the device and of the host, which is ahead: products come before."""
    factor, out = busy()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(2):
        torch.mm(factor, factor, out=out)
    begin.record()
    entered = time.perf_counter()
    step()
    host_ms = (time.perf_counter() - entered) * 1e3
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), host_ms


def started(benchmark: str, missing: dict[str, str]) -> dict:
    """A record without measurements. missing: the peers that are not here, and why; said on the way."""
    for name, why in missing.items():
        print(f"SKIPPED: {name}: {why}")
    return {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ullage": ullage.version(),
        "missing": missing,
        "records": [],
    }


def save(record: dict, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps(record, indent=1) + "\n")

"""What the records of the benchmarks through PyTorch have in common."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import torch

import ullage


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

"""What a decode session would cost, and what is on this machine: both before any work."""

from __future__ import annotations

import dataclasses
import json
import os
from ctypes import byref, c_void_p
from typing import Any

from ullage import _library
from ullage._errors import UllageError
from ullage._table import human_bytes, table


@dataclasses.dataclass(frozen=True)
class SessionPlan:
    """The memory of a resident decode session of a model; prints as a table."""

    model: str
    shape: dict[str, Any]
    parameters: int
    weights: dict[str, Any]  # type, assumed, resident_bytes, stored_bytes, stored_elements
    kv_cache: dict[str, Any]  # type, context, bucket, bytes, waste_bytes, position_bytes
    resident_bytes: int  # weights and KV cache
    memory_bytes: int  # of the device
    fits: bool
    largest_context: int  # positions: what the memory holds, within the contract's ceiling
    memory_context: int  # positions: what the memory holds
    token: dict[str, int]  # of one decoded token: dispatches, dispatches_deep, read_bytes
    session: dict[str, Any]  # status 600, or why this library's own session refuses the shape

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        s, kv = self.shape, self.kv_cache
        fits = "yes" if self.fits else "no"
        rows = [
            ("parameters", f"{self.parameters:,}"),
            ("weights", f"{human_bytes(self.weights['resident_bytes'])}  {self.weights['type']}"),
            ("KV cache", f"{human_bytes(kv['bytes'])}  {kv['type']}, {kv['context']:,} positions"),
            ("fits", f"{fits}, {self.resident_bytes / self.memory_bytes:.1%} of {human_bytes(self.memory_bytes)}"),
            ("context", f"{self.largest_context:,} at most"),
            ("a token", f"{self.token['dispatches']} dispatches, {human_bytes(self.token['read_bytes'])} read"),
        ]
        title = f"{self.model}: {s['family']}, {s['n_layers']} layers, d_model {s['d_model']:,}, vocab {s['vocab']:,}"
        return table(title, rows)


@dataclasses.dataclass(frozen=True)
class Probe:
    """What is on this machine; prints as a table."""

    version: str
    cpu: dict[str, Any]  # name, threads
    instruction_sets: list[str]  # of the CPU kernels, best first
    memory_bytes: int
    available_bytes: int
    cuda: dict[str, Any]  # kernels_compiled, devices, session_possible

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def __str__(self) -> str:
        compiled = "compiled in" if self.cuda["kernels_compiled"] else "not compiled in"
        return table(
            f"ullage {self.version}",
            [
                ("cpu", f"{self.cpu['name']}, {self.cpu['threads']} threads"),
                ("kernels", ", ".join(self.instruction_sets)),
                ("memory", f"{human_bytes(self.memory_bytes)}, {human_bytes(self.available_bytes)} available"),
                ("cuda", f"{compiled}; {self.cuda['devices']} devices here"),
            ],
        )


def plan_session(
    model: str | os.PathLike[str],
    *,
    context: int = 512,
    kv_type: str = "bf16",
    weight_type: str = "bf16",
    memory_bytes: int = 0,
) -> SessionPlan:
    """Sizes a session of `context` positions on a device of memory_bytes, 0 for this machine.

    model: a .gguf file, a folder with config.json and safetensors, or a config.json alone, sized as if its weights
    were of weight_type. Types: "f32", "f16", "bf16", "q8_0", "q4_0". Raises UllageError.
    """
    request = {
        "model": os.fspath(model),
        "context": context,
        "kv_type": kv_type,
        "weight_type": weight_type,
        "memory_bytes": memory_bytes,
    }
    return SessionPlan(**_asked("ullage_plan_session", json.dumps(request).encode()))


def probe() -> Probe:
    """What is on this machine."""
    return Probe(**_asked("ullage_probe"))


def _asked(name: str, *arguments: bytes) -> dict[str, Any]:
    out = c_void_p()
    code = getattr(_library.shared_library(), name)(*arguments, byref(out))
    text = _library.taken(out)
    if code % 20 != 0:
        raise UllageError(code, _library.status_name(code), text)
    answer: dict[str, Any] = json.loads(text)
    return answer

"""The losses at the head over arrays: plan, then run."""

from __future__ import annotations

import ctypes
import dataclasses
import json
from collections.abc import Mapping, Sequence
from ctypes import byref, c_void_p
from typing import Any

import numpy

from ullage import _arrays
from ullage import _library as c
from ullage._table import human_bytes, table

# The inputs of a run, as ullage_head_inputs has them, but for the teachers' and n_segments.
MATRICES = ("logits", "hidden", "weight", "adapter_a", "adapter_b")
VECTORS = (
    "bias",
    "labels",
    "token_weights",
    "class_weights",
    "mask",
    "advantages",
    "old_log_probs",
    "reference_log_probs",
    "segments",
    "pairs",
    "upstream_rows",
    "group_shift",
    "group_log_sum",
    "group_label_log_prob",
    "group_distance",
    "group_entropy",
)
_GRADIENTS = ("d_logits", "d_hidden", "d_weight", "d_bias", "d_adapter_a", "d_adapter_b")
_ROWS = {
    "token_loss": numpy.float32,
    "lse": numpy.float32,
    "label_log_prob": numpy.float32,
    "entropy": numpy.float32,
    "shift": numpy.float32,
    "log_sum": numpy.float32,
    "distance": numpy.float32,
    "argmax": numpy.int64,
    "correct": numpy.uint8,
}
_DTYPES = {"f64": numpy.float64, "f32": numpy.float32, "f16": numpy.float16, "bf16": numpy.uint16}
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class HeadResult:
    """What a run computed; arrays are the caller's where they were given, else new NumPy ones. bf16 is uint16."""

    total: float
    terms: dict[str, float]
    n_valid: int
    token_loss: Any = None
    lse: Any = None
    label_log_prob: Any = None
    entropy: Any = None
    shift: Any = None
    log_sum: Any = None
    distance: Any = None
    argmax: Any = None
    correct: Any = None
    d_logits: Any = None
    d_hidden: Any = None
    d_weight: Any = None
    d_bias: Any = None
    d_adapter_a: Any = None
    d_adapter_b: Any = None


@dataclasses.dataclass(frozen=True)
class HeadPlan:
    """What a run will use and do, before any work; prints as a table."""

    n_tok: int
    d_model: int  # 0: the logits are given
    vocab: int
    device: str
    kernel: str
    mode: str  # "from_logits", "chunk", "chunk_two_pass"
    chunk: int  # rows at a time
    n_chunks: int
    bookings: dict[str, int]  # bytes by purpose; they add up to workspace_bytes
    workspace_bytes: int
    workspace_alignment: int
    materialized_bytes: int  # what [n_tok][vocab] logits would take all at once
    operations: float  # floating-point operations of the products
    rejections: dict[str, str]  # candidate -> the reason why it was passed over
    request: dict[str, Any] = dataclasses.field(repr=False, compare=False)
    _handle: _Handle = dataclasses.field(repr=False, compare=False)

    def to_json(self) -> str:
        hidden = ("request", "_handle")
        return json.dumps({f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in hidden})

    def __str__(self) -> str:
        shape = f"{self.n_tok:,} tokens" + (f", d_model {self.d_model:,}" if self.d_model else ", from logits")
        rows = [
            ("kernel", f"{self.kernel}, {self.mode}"),
            ("chunk", f"{self.chunk:,} rows, {self.n_chunks:,} of them"),
            ("logits", f"{human_bytes(self.materialized_bytes)} all at once, which they never are"),
            ("workspace", human_bytes(self.workspace_bytes)),
            *((f"  {purpose}", human_bytes(size)) for purpose, size in self.bookings.items()),
            *((f"not {candidate}", reason) for candidate, reason in self.rejections.items()),
        ]
        if not self.d_model:
            rows = [row for row in rows if row[0] != "logits"]
        return table(f"losses at the head: {shape}, vocab {self.vocab:,}, on {self.device}", rows)

    def run(
        self,
        *,
        outputs: Sequence[str] = (),
        out: Mapping[str, Any] | None = None,
        teachers: Sequence[Mapping[str, Any]] = (),
        n_segments: int = 0,
        upstream: float = 1.0,
        accumulate: bool = False,
        workspace: numpy.ndarray | None = None,
        **inputs: Any,
    ) -> HeadResult:
        """Computes on the CPU.

        inputs: logits, or hidden and weight; labels, and whatever else the terms need, by the names of lossk::Inputs.
        NumPy arrays, tensors on the CPU, or anything that speaks DLPack. outputs: which of token_loss, lse,
        label_log_prob, entropy, shift, log_sum, distance, argmax and correct to return; gradients are those of the plan's request.
        out: arrays to write to, by name. Of a shard without its group's statistics the losses are NaN. Raises
        UllageError, with every output untouched.
        """
        if self.device != "cpu":
            raise ValueError(f"the plan is for {self.device}; run works on the CPU, ullage.torch on tensors anywhere")
        unknown = sorted(set(inputs) - set(MATRICES) - set(VECTORS))
        if unknown:
            raise TypeError(f"run got {', '.join(unknown)}; accepted: {', '.join(MATRICES + VECTORS)}")
        alive: list[Any] = []
        given = c.Inputs(struct_size=ctypes.sizeof(c.Inputs), n_segments=n_segments, upstream=upstream)
        _fill(given, inputs, alive)
        listed = (c.Teacher * max(len(teachers), 1))()
        for slot, teacher in zip(listed, teachers):
            _fill(slot, teacher, alive)
        given.teachers, given.n_teachers = listed, len(teachers)

        arrays = self._outputs(outputs, dict(out or {}))
        config = self.request["config"]
        losses = config["losses"]
        terms, total = numpy.full(len(losses), numpy.nan), numpy.full(1, numpy.nan)
        n_valid = numpy.zeros(1, numpy.int64)
        has_losses = not config.get("group_vocab") or inputs.get("group_shift") is not None
        wanted = c.Outputs(struct_size=ctypes.sizeof(c.Outputs), accumulate=int(accumulate))
        _fill(wanted, {**arrays, "n_valid": n_valid, **({"terms": terms, "total": total} if has_losses else {})}, alive)
        if workspace is None:
            workspace = numpy.empty(self.workspace_bytes + _ALIGNMENT, numpy.uint8)
            workspace = workspace[-workspace.ctypes.data % _ALIGNMENT :]
        c.call(
            "ullage_head_plan_run",
            self._handle.pointer,
            byref(given),
            byref(wanted),
            workspace.ctypes.data,
            workspace.nbytes,
            None,
        )
        names = [loss.get("name", loss["kind"]) for loss in losses]
        return HeadResult(float(total[0]), dict(zip(names, terms.tolist())), int(n_valid[0]), **arrays)

    def _outputs(self, names: Sequence[str], out: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(names) - set(_ROWS)) + sorted(set(out) - set(_ROWS) - set(_GRADIENTS))
        if unknown:
            raise TypeError(f"outputs has {', '.join(unknown)}; accepted: {', '.join((*_ROWS, *_GRADIENTS))}")
        double = self.request["request"].get("input_dtype") == "f64"
        for name in names:
            dtype = numpy.float64 if double and _ROWS[name] == numpy.float32 else _ROWS[name]
            out.setdefault(name, numpy.zeros(self.n_tok, dtype))
        rank = self.request["config"].get("adapter_rank", 0)
        shapes = {
            "d_logits": (self.n_tok, self.vocab),
            "d_hidden": (self.n_tok, self.d_model),
            "d_weight": (self.vocab, self.d_model),
            "d_bias": (self.vocab,),
            "d_adapter_a": (rank, self.d_model),
            "d_adapter_b": (self.vocab, rank),
        }
        request = self.request["request"]
        for name, shape in shapes.items():
            if not request.get("d_adapter" if "adapter" in name else name):
                continue
            row = name in ("d_logits", "d_hidden")
            dtype = request.get("grad_dtype" if row else "d_weight_dtype", "f32")
            out.setdefault(name, numpy.zeros(shape, _DTYPES[dtype]))
        return out


def plan_head(
    config: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str,
    *,
    n_tok: int,
    vocab: int,
    d_model: int = 0,
    gradients: Sequence[str] = (),
    entropy: bool = False,
    dtype: str = "f32",
    weight_dtype: str | None = None,
    grad_dtype: str | None = None,
    d_weight_dtype: str | None = None,
    budget_bytes: int = 0,
    chunk: int = 0,
    n_threads: int = 0,
    implementation: str = "auto",
    device: str = "cpu",
) -> HeadPlan:
    """Plans the losses of n_tok rows: from logits, or, with d_model, from hidden states.

    config: {"losses": [{"kind": "cross_entropy"}], "softcap": 30}, its list of losses alone, or its JSON text.
    gradients: of d_logits, d_hidden, d_weight, d_bias, d_adapter, those to compute. dtypes: "f64", "f32", "bf16",
    "f16"; those not given follow `dtype`. budget_bytes: of workspace; 0: 256 MiB. Raises UllageError.
    """
    if isinstance(config, str):
        config = json.loads(config)
    if not isinstance(config, Mapping):
        config = {"losses": list(config)}
    accepted = ("d_logits", "d_hidden", "d_weight", "d_bias", "d_adapter")
    unknown = sorted(set(gradients) - set(accepted))
    if unknown:
        raise TypeError(f"gradients has {', '.join(unknown)}; accepted: {', '.join(accepted)}")
    request = {
        "n_tok": n_tok,
        "d_model": d_model,
        "vocab": vocab,
        "config": dict(config),
        "request": {
            "input_dtype": dtype,
            "weight_dtype": weight_dtype or dtype,
            "grad_dtype": grad_dtype or dtype,
            "d_weight_dtype": d_weight_dtype or weight_dtype or dtype,
            "entropy": entropy,
            **dict.fromkeys(gradients, True),
        },
        "limits": {
            "budget_bytes": budget_bytes,
            "chunk": chunk,
            "n_threads": n_threads,
            "implementation": implementation,
        },
        "device": device,
    }
    return make_plan(request)


def make_plan(request: dict[str, Any]) -> HeadPlan:
    """The plan of a document as ullage_head_plan_create takes it."""
    handle = _Handle(request)
    promise = json.loads(c.shared_library().ullage_head_plan_json(handle.pointer))
    promise["bookings"] = {b["purpose"]: b["bytes"] for b in promise["bookings"]}
    promise["rejections"] = {r["candidate"]: r["reason"] for r in promise["rejections"]}
    shape = {name: request.get(name, 0) for name in ("n_tok", "d_model", "vocab")}
    return HeadPlan(**shape, **promise, request=request, _handle=handle)


class _Handle:
    """Owns one ullage_head_plan."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.pointer = c_void_p()
        self._destroy = c.shared_library().ullage_head_plan_destroy  # the module may be gone before the last plan
        c.call("ullage_head_plan_create", json.dumps(request).encode(), byref(self.pointer))

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._destroy(self.pointer)


def _fill(struct: Any, arrays: Mapping[str, Any], alive: list[Any]) -> None:
    """Sets the struct's views by name and keeps what they borrow alive."""
    kinds = dict(struct._fields_)
    for name, array in arrays.items():
        if array is None:
            continue
        if kinds.get(name) not in (c.Matrix, c.Vector):
            raise TypeError(f"{name} is not known; accepted: {', '.join(kinds)}")
        view = _arrays.view(name, array)
        alive.append(view)
        make = _arrays.matrix if kinds[name] is c.Matrix else _arrays.vector
        setattr(struct, name, make(name, view))

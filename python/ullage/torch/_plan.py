"""What an operation returns, and the plan that it runs by: both follow from what its tensors are, not from what they
hold."""

from __future__ import annotations

import contextlib
import functools
import json
from typing import Any, NamedTuple

import torch

from ullage._errors import UllageError
from ullage.head import HeadPlan, make_plan

# Gradients to compute, a set of bits.
D_INPUT, D_WEIGHT, D_BIAS, D_ADAPTER = 1, 2, 4, 8
# Values of each row to return, a set of bits; METRICS are of each policy term.
TOKEN_LOSS, LSE, LOG_PROB, ENTROPY, ARGMAX, METRICS = 1, 2, 4, 8, 16, 32
# Of a shard of the vocabulary: shift and log_sum, and no losses, which wait for the group's (_group.py); and distance.
SHARD, DISTANCE = 64, 128

GRADIENTS = {"input": D_INPUT, "weight": D_WEIGHT, "bias": D_BIAS, "adapter_a": D_ADAPTER, "adapter_b": D_ADAPTER}
ROWS = {
    "token_loss": TOKEN_LOSS,
    "lse": LSE,
    "log_prob": LOG_PROB,
    "entropy": ENTROPY,
    "shift": SHARD,
    "log_sum": SHARD,
    "distance": DISTANCE,
    "argmax": ARGMAX,
    "metrics": METRICS,
}
N_METRICS = 13  # doubles in a PolicyMetrics, the last two of them int64

_NAMES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class Call(NamedTuple):
    """An operation's arguments without what its tensors hold: all that a plan depends on."""

    device: torch.device
    tensors: tuple[tuple[torch.dtype, torch.Size], ...]
    names: str  # of the tensors: of _ops.TENSORS; those beyond are the teachers'
    config: str
    budget_bytes: int
    gradients: int
    rows: int = 0
    main_dtype: torch.dtype | None = None  # of the main_grad that d_weight is added to
    n_threads: int = 0  # 0: on CUDA

    def given(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        return dict(zip(self.names.split(), self.tensors))


class Result(NamedTuple):
    name: str
    shape: Any
    dtype: torch.dtype
    run_dtype: torch.dtype  # as the run fills it


@functools.lru_cache(maxsize=256)
def parsed(config: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(config)
    return document


def value_names(rows: int) -> list[str]:
    """Those of Values that a run returns."""
    losses = [] if rows & SHARD else ["total", "terms"]
    return [*losses, "n_valid", *[name for name, bit in ROWS.items() if rows & bit]]


def gradient_names(names: str, gradients: int) -> list[str]:
    """The tensors among those named whose gradients a run returns."""
    given = names.split()
    return [name for name, bit in GRADIENTS.items() if gradients & bit and name in given]


def row_dtype(input_dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if input_dtype == torch.float64 else torch.float32


def results(call: Call) -> list[Result]:
    """What the run fills: values, where it is not a backward, then gradients.

    Gradients are of the input's type, and all others of the weight's. On the CPU those of 16-bit weights are float32,
    to be rounded by the caller: the run would otherwise need the same bytes in its workspace, out of the budget for
    logits. There too a forward's f16 is kept in f32, for an upstream factor is still to come, which may need the range.
    """
    given, on_cpu = call.given(), call.device.type == "cpu"
    dtype, shape = given["input"]
    backward = "upstream_rows" in given
    made = [] if backward else _values(call, dtype, shape[0])
    weight_dtype = given.get("weight", given["input"])[0]
    if call.main_dtype is not None or on_cpu and weight_dtype.itemsize == 2:
        weight_dtype = torch.float32
    for name in gradient_names(call.names, call.gradients):
        kind = dtype if name == "input" else weight_dtype
        if on_cpu and not backward and kind == torch.float16:
            kind = torch.float32
        if name == "weight" and call.main_dtype is not None:
            kind = call.main_dtype
        made.append(Result(name, given[name][1], kind, kind))
    return made


def _values(call: Call, dtype: torch.dtype, n_tok: Any) -> list[Result]:
    n_terms, rows, f64 = len(parsed(call.config)["losses"]), row_dtype(dtype), torch.float64
    special = {
        "total": ((), rows, f64),
        "terms": ((n_terms,), f64, f64),
        "n_valid": ((), torch.int64, torch.int64),
        "argmax": ((n_tok,), torch.int64, torch.int64),
        "metrics": ((n_terms, N_METRICS), f64, f64),
    }
    return [Result(name, *special.get(name, ((n_tok,), rows, rows))) for name in value_names(call.rows)]


def plan_of(call: Call) -> tuple[HeadPlan, list[Result]]:
    """The plan, and the call's results as it fills them. On CUDA call.device must be current, for a plan is the current
    device's.

    A 16-bit d_weight whose float32 sum does not fit the workspace is made by strips of the vocabulary, for which
    logits are made again: up to 8 n d v operations for 6. A float32 one needs no other sum and lends its memory to the
    run, and takes twice the 16-bit one's bytes until it is rounded. Without a budget it is had; with one, where both
    fit.
    """
    plan = refusal = None
    made = results(call)
    try:
        plan = make_plan(_request(call, made))
    except UllageError as error:  # of a filter, say, which strips do not have
        refusal = error
    sum_bytes = 0
    if call.device.type == "cuda":
        sum_bytes = sum(4 * each.shape.numel() for each in made if each.name == "weight" and each.dtype.itemsize == 2)
    rest = call.budget_bytes - sum_bytes if call.budget_bytes else 0
    fits = sum_bytes > 0 and (rest > 0 or not call.budget_bytes)
    if fits and (plan is None or plan.mode == "strip"):
        wide = [each._replace(run_dtype=torch.float32) if each.name == "weight" else each for each in made]
        with contextlib.suppress(UllageError):
            without = make_plan(_request(call._replace(budget_bytes=rest), wide))
            if plan is None or without.operations < plan.operations:
                return without, wide
    if plan is None:
        assert refusal is not None
        raise refusal
    return plan, made


def _request(call: Call, made: list[Result]) -> dict[str, Any]:
    """The document that ullage_head_plan_create takes."""
    given, gradients = call.given(), {each.name: each.run_dtype for each in made if each.name in GRADIENTS}
    document = dict(parsed(call.config))
    filter_tolerance = document.pop("filter_tolerance", 0)  # how it is computed, not what, for the library
    if teachers := _teachers(document.get("teachers", ()), list(call.tensors[len(given) :])):
        document["teachers"] = teachers
    if "bias" in given:
        document["bias"] = True
    if "adapter_a" in given:
        document["adapter_rank"] = given["adapter_a"][1][0]

    dtype, shape = given["input"]
    weight_dtype, weight_shape = given.get("weight", given["input"])
    fused, on_cuda = "weight" in given, call.device.type == "cuda"
    of_weights = [kind for name, kind in gradients.items() if name != "input"]
    wanted = {
        "input_dtype": _name("input", dtype),
        "weight_dtype": _name("weight", weight_dtype),
        "d_hidden" if fused else "d_logits": "input" in gradients,
        "d_weight": "weight" in gradients,
        "d_bias": "bias" in gradients,
        "d_adapter": "adapter_a" in gradients,
        # On CUDA one of the fused heads finds neither an entropy nor an arg-max, and only of the first a plan is told.
        "entropy": bool(call.rows & (ENTROPY | (ARGMAX if on_cuda else 0))),
        "policy_metrics": bool(call.rows & METRICS),
        "grad_dtype": _name("input", gradients.get("input", dtype)),
        "d_weight_dtype": _name("main_grad", of_weights[-1]) if of_weights else "f32",
    }
    return {
        "n_tok": shape[0],
        "d_model": shape[1] if fused else 0,
        "vocab": weight_shape[0] if fused else shape[1],
        "config": document,
        "request": wanted,
        "limits": {
            "budget_bytes": call.budget_bytes,
            "n_threads": call.n_threads,
            "accumulate": call.main_dtype is not None,
            "filter_tolerance": filter_tolerance,
        },
        "device": call.device.type,
    }


def _name(tensor: str, dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise TypeError(f"{tensor} is {dtype}; accepted: {', '.join(map(str, _NAMES))}")
    return _NAMES[dtype]


# The tensors of a teacher of each kind.
OF_TEACHER = {"logits": ("logits",), "hidden": ("hidden", "weight"), "top_k": ("ids", "log_probs")}


def _teachers(configured: list[dict[str, Any]], tensors: list[tuple[torch.dtype, torch.Size]]) -> list[dict[str, Any]]:
    """With what their tensors say."""
    if any(each.get("kind") not in OF_TEACHER for each in configured):
        return configured  # which the library refuses
    fields = [field for each in configured for field in OF_TEACHER[each["kind"]]]
    if len(fields) != len(tensors):
        raise ValueError(
            f"{len(tensors)} tensors of teachers are given; accepted: {len(fields)}, for those of the configuration"
            + (f": {', '.join(fields)}" if fields else "")
        )
    teachers = []
    for teacher in configured:
        dtype, shape = tensors.pop(0)
        if teacher["kind"] == "top_k":
            tensors.pop(0)
            teachers.append({**teacher, "k": shape[-1]})
            continue
        facts = {"vocab": shape[1], "dtype": _name("a teacher", dtype)}
        if teacher["kind"] == "hidden":
            weight_dtype, weight_shape = tensors.pop(0)
            weight_facts = {"d_model": weight_shape[1], "weight_dtype": _name("a teacher's weight", weight_dtype)}
            facts |= {"vocab": weight_shape[0], **weight_facts}
        teachers.append({**teacher, **facts})
    return teachers

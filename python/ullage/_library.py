"""libullage.so through ctypes: the structs and functions of ullage/ullage.h and ullage/head.h."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_void_p
from typing import Any

from ullage._errors import UllageError

F64, F32, BF16, F16, I32, I64, U8 = range(7)


class Matrix(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("rows", c_int64),
        ("cols", c_int64),
        ("row_stride", c_int64),
        ("dtype", c_int32),
    ]


class Vector(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("size", c_int64), ("stride", c_int64), ("dtype", c_int32)]


class Teacher(ctypes.Structure):
    _fields_ = [
        ("logits", Matrix),
        ("hidden", Matrix),
        ("weight", Matrix),
        ("ids", Vector),
        ("log_probs", Vector),
    ]


class Inputs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("logits", Matrix),
        ("hidden", Matrix),
        ("weight", Matrix),
        ("bias", Vector),
        ("adapter_a", Matrix),
        ("adapter_b", Matrix),
        ("labels", Vector),
        ("token_weights", Vector),
        ("class_weights", Vector),
        ("mask", Vector),
        ("advantages", Vector),
        ("old_log_probs", Vector),
        ("reference_log_probs", Vector),
        ("segments", Vector),
        ("n_segments", c_int64),
        ("pairs", Vector),
        ("teachers", POINTER(Teacher)),
        ("n_teachers", c_int64),
        ("upstream", c_double),
        ("upstream_rows", Vector),
        ("group_shift", Vector),
        ("group_log_sum", Vector),
        ("group_label_log_prob", Vector),
        ("group_distance", Vector),
        ("group_entropy", Vector),
    ]


class Outputs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("terms", Vector),
        ("total", Vector),
        ("n_valid", Vector),
        ("token_loss", Vector),
        ("lse", Vector),
        ("label_log_prob", Vector),
        ("entropy", Vector),
        ("argmax", Vector),
        ("correct", Vector),
        ("d_logits", Matrix),
        ("d_hidden", Matrix),
        ("d_weight", Matrix),
        ("d_bias", Vector),
        ("d_adapter_a", Matrix),
        ("d_adapter_b", Matrix),
        ("policy_metrics", c_void_p),
        ("n_policy_metrics", c_int64),
        ("accumulate", c_int32),
        ("shift", Vector),
        ("log_sum", Vector),
        ("distance", Vector),
    ]


class FilterReport(ctypes.Structure):
    _fields_ = [(name, c_double) for name in ("largest_share", "largest_gradient", "total_gradient", "kept")]


def _candidates() -> list[pathlib.Path]:
    package = pathlib.Path(__file__).resolve().parent
    checkout = package.parent.parent
    return [package / "lib" / "libullage.so", checkout / "build" / "lib" / "libullage.so"]


@functools.cache
def shared_library() -> ctypes.CDLL:
    """The shared library: ULLAGE_LIBRARY, else the one in the package, else the checkout's build."""
    named = os.environ.get("ULLAGE_LIBRARY")
    paths = [pathlib.Path(named)] if named else _candidates()
    for path in paths:
        if path.exists():
            return _declared(ctypes.CDLL(str(path)))
    tried = ", ".join(map(str, paths))
    raise ImportError(f"libullage.so is not there; looked at {tried}; ULLAGE_LIBRARY can name another")


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    message = POINTER(c_void_p)
    signatures = {
        "ullage_version": (c_char_p, []),
        "ullage_status_name": (c_char_p, [c_int]),
        "ullage_functions_json": (c_char_p, []),
        "ullage_execute": (c_int, [c_char_p, c_char_p, c_char_p, message]),
        "ullage_string_free": (None, [c_void_p]),
        "ullage_probe": (c_int, [message]),
        "ullage_plan_session": (c_int, [c_char_p, message]),
        "ullage_head_plan_create": (c_int, [c_char_p, POINTER(c_void_p), message]),
        "ullage_head_plan_destroy": (None, [c_void_p]),
        "ullage_head_plan_json": (c_char_p, [c_void_p]),
        "ullage_head_plan_workspace_bytes": (c_int64, [c_void_p]),
        "ullage_head_plan_status_bytes": (c_int64, [c_void_p]),
        "ullage_head_plan_run": (
            c_int,
            [c_void_p, POINTER(Inputs), POINTER(Outputs), c_void_p, c_size_t, c_void_p, message],
        ),
        "ullage_head_plan_check": (c_int, [c_void_p, c_void_p, c_size_t, c_void_p, message]),
        "ullage_head_plan_filter_report": (
            c_int,
            [c_void_p, c_void_p, c_size_t, c_void_p, POINTER(FilterReport), message],
        ),
        "ullage_scale_cuda": (c_int, [POINTER(Vector), c_void_p, c_void_p, message]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def version() -> str:
    text: bytes = shared_library().ullage_version()
    return text.decode()


def status_name(code: int) -> str:
    text: bytes = shared_library().ullage_status_name(code)
    return text.decode()


def taken(text: c_void_p) -> str:
    """The string a call gave, freed."""
    if not text.value:
        return ""
    try:
        return ctypes.string_at(text.value).decode()
    finally:
        shared_library().ullage_string_free(text)


def call(name: str, *arguments: Any) -> None:
    """Calls a function whose last parameter is the message, and raises its refusal."""
    message = c_void_p()
    code = getattr(shared_library(), name)(*arguments, byref(message))
    text = taken(message) if message else ""
    if code % 20 != 0:
        raise UllageError(code, status_name(code), text)

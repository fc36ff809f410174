"""Anyone's arrays as views the C structs can borrow: NumPy, PyTorch and whatever speaks DLPack."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy

from ullage import _library as c

NAMES = {c.F64: "f64", c.F32: "f32", c.BF16: "bf16", c.F16: "f16", c.I32: "i32", c.I64: "i64", c.U8: "u8"}

# uint16 holds the bits of bf16, which NumPy itself does not have; ml_dtypes' bfloat16 is the same by name.
_TYPES = {
    "float64": c.F64,
    "float32": c.F32,
    "float16": c.F16,
    "bfloat16": c.BF16,
    "uint16": c.BF16,
    "int32": c.I32,
    "int64": c.I64,
    "uint8": c.U8,
    "bool": c.U8,
}


class View(NamedTuple):
    data: int
    dtype: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    owner: Any  # keeps the memory alive

    @property
    def size(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size


def _type_of(name: str, dtype: str) -> int:
    short = dtype.rpartition(".")[2]
    if short not in _TYPES:
        raise TypeError(f"{name} is {short}; accepted: {', '.join(_TYPES)}")
    return _TYPES[short]


def view(name: str, array: Any) -> View:
    if hasattr(array, "data_ptr"):  # PyTorch, without importing it
        return View(
            array.data_ptr(), _type_of(name, str(array.dtype)), tuple(array.shape), tuple(array.stride()), array
        )
    if not isinstance(array, numpy.ndarray) and hasattr(array, "__dlpack__"):
        return _from_dlpack(name, array)
    array = numpy.asarray(array)
    dtype = _type_of(name, array.dtype.name)
    item = array.dtype.itemsize
    if any(stride % item for stride in array.strides):
        array = numpy.ascontiguousarray(array)
    return View(array.ctypes.data, dtype, array.shape, tuple(s // item for s in array.strides), array)


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


# (DLPack's type code, bits): int 0, uint 1, float 2, bfloat 4, bool 6.
_DL_TYPES = {
    (2, 64): c.F64,
    (2, 32): c.F32,
    (2, 16): c.F16,
    (4, 16): c.BF16,
    (1, 16): c.BF16,
    (0, 32): c.I32,
    (0, 64): c.I64,
    (1, 8): c.U8,
    (6, 8): c.U8,
}


def _from_dlpack(name: str, array: Any) -> View:
    """The capsule keeps the memory alive and frees it with itself: its name stays "dltensor"."""
    capsule = array.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    dtype = _DL_TYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise TypeError(f"{name} is DLPack type {tensor.code} of {tensor.bits} bits; accepted: {NAMES.values()}")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[i] for i in range(tensor.ndim))
    else:
        strides = tuple(numpy.cumprod((1, *shape[:0:-1]), dtype=int)[::-1].tolist())
    return View((tensor.data or 0) + tensor.byte_offset, dtype, shape, strides, (array, capsule))


def matrix(name: str, v: View) -> c.Matrix:
    if len(v.shape) != 2:
        raise ValueError(f"{name} has shape {v.shape}; accepted: two dimensions")
    rows, cols = v.shape
    if v.size and cols > 1 and v.strides[1] != 1:
        raise ValueError(f"{name} has column stride {v.strides[1]}; accepted: 1, the columns of a row adjacent")
    return c.Matrix(_address(v), rows, cols, v.strides[0] if rows > 1 else cols, v.dtype)


def vector(name: str, v: View) -> c.Vector:
    """A vector; of more dimensions, a contiguous array read in order."""
    stride = 1
    if len(v.shape) == 1:
        stride = v.strides[0] if v.shape[0] > 1 else 1
    else:
        expected = 1
        for extent, given in zip(reversed(v.shape), reversed(v.strides)):
            if extent > 1 and given != expected:
                raise ValueError(f"{name} has shape {v.shape} and strides {v.strides}; accepted: contiguous")
            expected *= extent
    return c.Vector(_address(v), v.size, stride, v.dtype)


def _address(v: View) -> int:
    # Null says "not given"; an empty array is given.
    return v.data or (_EMPTY.ctypes.data if v.size == 0 else 0)


_EMPTY = numpy.zeros(8)

"""The DLPack structures: arrays of any framework read as address and shape, and memory given as an array.

Source: dlpack.h 0.8 (github.com/dmlc/dlpack) and the Python protocol beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

_DEVICE_NAMES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}  # kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged
_DEVICE_TYPES = {"cpu": 1, "cuda": 2}
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4}
_TYPES = {  # layout dtype -> code, bits; what frameworks know no better goes as bytes
    "float32": ("float", 32),
    "float16": ("float", 16),
    "bfloat16": ("bfloat", 16),
    "int8": ("int", 8),
}


class DLTensor(ctypes.Structure):
    """`DLTensor`."""

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

    @property
    def device(self) -> str | None:
        """`cpu` or `cuda`; None for other kinds."""
        return _DEVICE_NAMES.get(self.device_type)


class _Managed(ctypes.Structure):
    """`DLManagedTensor`, and behind it what its pointers point to."""

    _fields_ = [
        ("tensor", DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("dimensions", ctypes.c_int64 * 16),
    ]


_NAME = b"dltensor"
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def _delete(managed: int) -> None:
    """The consumer is done: give back the reference that the capsule was made with."""
    ctypes.pythonapi.Py_DecRef(ctypes.cast(_Managed.from_address(managed).context, ctypes.py_object))


def _drop(capsule: int) -> None:
    """A capsule goes; one that nobody has taken (and so renamed) gives its reference back."""
    if _is_valid(capsule, _NAME):
        _delete(_get_pointer(capsule, _NAME))


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_drop)


def read(capsule: object) -> DLTensor:
    """The tensor of an unconsumed capsule; valid as long as the capsule and its array are."""
    return DLTensor.from_address(_get_pointer(id(capsule), _NAME))


class MemoryArray:
    """Contiguous memory at an address, for any framework's `from_dlpack`; nothing is copied.

    Whoever made the memory keeps it; `owner` is kept as long as a framework's tensor over it lives.
    """

    def __init__(
        self,
        address: int,
        shape: Sequence[int],
        dtype: str,
        *,
        device: str = "cpu",
        device_id: int = 0,
        owner: object = None,
    ) -> None:
        """`dtype` is a layout's; `shape` counts stored elements."""
        self._address, self._shape, self._owner = address, tuple(shape), owner
        self._device = (_DEVICE_TYPES[device], device_id)
        code, self._bits = _TYPES.get(dtype, ("uint", 8))
        self._code = _CODES[code]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> object:
        """The memory is written by copies that its users wait for, so no stream is waited for here."""
        managed = _Managed()
        tensor, ndim = managed.tensor, len(self._shape)
        tensor.data, tensor.ndim = self._address, ndim
        tensor.device_type, tensor.device_id = self._device
        tensor.code, tensor.bits, tensor.lanes = self._code, self._bits, 1
        stride = 1
        for i in reversed(range(ndim)):
            managed.dimensions[i], managed.dimensions[8 + i] = self._shape[i], stride
            stride *= self._shape[i]
        first = ctypes.addressof(managed) + _Managed.dimensions.offset
        tensor.shape = ctypes.cast(first, ctypes.POINTER(ctypes.c_int64))
        tensor.strides = ctypes.cast(first + 8 * 8, ctypes.POINTER(ctypes.c_int64))
        kept = (managed, self)
        managed.context = id(kept)
        managed.deleter = ctypes.cast(_DELETER, ctypes.c_void_p).value
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        return _new_capsule(ctypes.addressof(managed), _NAME, ctypes.cast(_DESTRUCTOR, ctypes.c_void_p))

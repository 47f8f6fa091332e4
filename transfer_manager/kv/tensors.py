"""Arrays of NumPy, Paddle and PyTorch: where their memory is (which needs no framework), and tensors over ours."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_cache.errors import LayoutError, NotEnoughMemoryError
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.kv.dlpack import MemoryArray, read
from fastdeploy_cache.transfer_manager.kv.layout import Place, Places, RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, SegmentHandle
from fastdeploy_cache.transfer_manager.kv.parts import KVPart

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 (where PyTorch puts it)


@dataclass(frozen=True, kw_only=True)
class ArrayPlace:
    """Where an array is: `shape` and `strides_bytes` by dimension; `device` is `cpu` or `cuda`."""

    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int
    device: str = "cpu"
    device_id: int = 0

    @classmethod
    def of(cls, array: Any) -> ArrayPlace:
        """The place of a NumPy array, a Paddle or PyTorch tensor, or anything else with `__dlpack__`; copies nothing.

        The caller keeps the array alive. Raises `LayoutError` for what has no DLPack, or lies on another device.
        """
        try:
            capsule = array.__dlpack__()
        except (AttributeError, TypeError, RuntimeError, BufferError) as error:
            raise LayoutError(f"{type(array).__name__} gives no DLPack capsule: {error}") from error
        tensor = read(capsule)
        device = tensor.device
        if device is None:
            raise LayoutError(f"array is on DLPack device type {tensor.device_type}; known: CPU and CUDA")
        shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
        item_bytes = tensor.bits * tensor.lanes // 8
        if tensor.strides:
            strides = tuple(tensor.strides[i] * item_bytes for i in range(tensor.ndim))
        else:
            strides = _contiguous_strides(shape, item_bytes)
        return cls(
            address=(tensor.data or 0) + tensor.byte_offset,
            shape=shape,
            strides_bytes=strides,
            item_bytes=item_bytes,
            device=device,
            device_id=tensor.device_id,
        )


def _contiguous_strides(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    return tuple(item_bytes * math.prod(shape[i + 1 :]) for i in range(len(shape)))


ArrayLike = Any  # an ArrayPlace, or what `ArrayPlace.of` takes


def array_places(layout: RankLayout, layers: Sequence[Mapping[str, ArrayLike]]) -> list[list[ArrayPlace]]:
    """The places of the arrays [blocks, ...], by layer and part, checked against the layout.

    Blocks may be any distance apart ([2, blocks, ...] and [blocks, 2, ...] of an engine come in as two slices each);
    inside a block the array is contiguous, in whatever shape.

    Raises:
        LayoutError: a part is missing, or has another number of bytes per block, or is not contiguous inside a block.
    """
    if len(layers) != layout.num_layers:
        raise LayoutError(f"KV arrays of {len(layers)} layers; the layout has {layout.num_layers}")
    found = []
    for index, arrays in enumerate(layers):
        parts = layout.parts_of(index)
        names = {part.name for part in parts}
        if set(arrays) != names:
            raise LayoutError(f"layer {index} has arrays {sorted(arrays)}; the layout's parts are {sorted(names)}")
        found.append([_checked(f"layer {index} {part.name}", part, arrays[part.name]) for part in parts])
    return found


def _checked(name: str, part: KVPart, array: ArrayLike) -> ArrayPlace:
    place = array if isinstance(array, ArrayPlace) else ArrayPlace.of(array)
    inner_bytes = math.prod(place.shape[1:]) * place.item_bytes
    if not place.shape or inner_bytes != part.num_bytes:
        raise LayoutError(f"{name} is {place.shape} of {place.item_bytes} bytes; a block has {part.num_bytes} bytes")
    dense = _contiguous_strides(place.shape[1:], place.item_bytes)
    strides = tuple(zip(place.shape[1:], place.strides_bytes[1:], dense, strict=True))
    if any(stride != wanted for size, stride, wanted in strides if size > 1):
        raise LayoutError(f"{name} is not contiguous inside a block: strides {place.strides_bytes}, expected {dense}")
    if place.shape[0] > 1 and place.strides_bytes[0] < part.num_bytes:
        raise LayoutError(f"{name} has blocks {place.strides_bytes[0]} bytes apart; they are {part.num_bytes} long")
    return place


def placed(
    layout: RankLayout,
    layers: Sequence[Mapping[str, ArrayLike]],
    home_of: Callable[[KVPart, ArrayPlace, int], tuple[int, int]],
) -> Places:
    """The same as places in segments. `home_of` tells the segment of an array, given the bytes from its first block to
    the end of its last, and where in it the array begins; it may raise."""

    def place(part: KVPart, array: ArrayPlace) -> Place:
        num_blocks, stride = array.shape[0], array.strides_bytes[0]
        return Place(*home_of(part, array, (num_blocks - 1) * stride + part.num_bytes), stride, num_blocks)

    places = enumerate(array_places(layout, layers))
    return tuple(tuple(map(place, layout.parts_of(layer), in_layer)) for layer, in_layer in places)


def local_segments(
    layout: RankLayout, layers: Sequence[Mapping[str, ArrayLike]]
) -> tuple[list[np.ndarray[Any, np.dtype[np.uint8]]], Places]:
    """This process's own CPU arrays as flat bytes and places, for a device in the same process.

    The caller keeps the arrays alive as long as the device.
    """
    segments: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    def home_of(part: KVPart, array: ArrayPlace, num_bytes: int) -> tuple[int, int]:
        if array.device != "cpu":
            raise LayoutError(f"{part.name} is on {array.device}; the CPU device needs arrays in CPU memory")
        segments.append(np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(array.address)))
        return len(segments) - 1, 0

    return segments, placed(layout, layers, home_of)


class SharedSpan(NamedTuple):
    """Memory of this process at an address that another one can map by its descriptor."""

    address: int
    num_bytes: int
    fd: int

    @classmethod
    def of(cls, segment: SharedArray) -> SharedSpan:
        """A segment of ours."""
        address = segment.view(np.uint8, (segment.num_bytes,)).ctypes.data
        return cls(address, segment.num_bytes, segment.fd)


def share_in_place(tensors: Iterable[Any]) -> list[SharedSpan]:
    """Move the memory of PyTorch CPU tensors into shared memory. All tensors over it follow, and its bytes stay.

    The descriptors are good as long as the tensors live. Source: `UntypedStorage._share_fd_cpu_` of PyTorch, by which
    its own worker processes share tensors.

    Raises:
        NotEnoughMemoryError: /dev/shm is too small.
    """
    storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    num_bytes = sum(storage.nbytes() for storage in storages.values() if not storage.is_shared())
    found = os.statvfs(_SHARED_MEMORY)
    num_free_bytes = found.f_bavail * found.f_frsize
    if num_bytes > num_free_bytes:  # PyTorch would take it, and the process would end at the first byte that is lacking
        raise NotEnoughMemoryError(
            f"the KV arrays have {num_bytes} bytes, and {_SHARED_MEMORY} has room for {num_free_bytes}; make it larger "
            "(for a container: --shm-size), or give the engine fewer KV blocks"
        )
    spans = []
    for storage in storages.values():
        fd, _ = storage._share_fd_cpu_()
        spans.append(SharedSpan(storage.data_ptr(), storage.nbytes(), fd))
    return spans


def shared_handle(
    layout: RankLayout, layers: Sequence[Mapping[str, ArrayLike]], spans: Sequence[SharedSpan], pid: int
) -> KVHandle:
    """The handle of arrays that this process (`pid`) has in its own shared memory.

    Raises:
        LayoutError: an array lies in none of the spans, so no other process could reach it.
    """

    def home_of(part: KVPart, array: ArrayPlace, num_bytes: int) -> tuple[int, int]:
        for number, span in enumerate(spans):
            offset = array.address - span.address
            if array.device == "cpu" and 0 <= offset <= span.num_bytes - num_bytes:
                return number, offset
        raise LayoutError(f"{part.name} at {array.address:#x} is in none of the {len(spans)} segments")

    places = placed(layout, layers, home_of)
    return KVHandle(tuple([SegmentHandle.of(span.num_bytes, span.fd, pid) for span in spans]), places)


def torch_tensor(array: np.ndarray[Any, Any], dtype: str) -> Any:
    """A PyTorch CPU tensor over the array's very memory, of the layout's `dtype` (as bfloat16 and float8, too).

    Raises:
        LayoutError: PyTorch is missing.
    """
    try:
        import torch
    except ImportError as error:
        raise LayoutError(f"cannot import torch ({error}); run: pip install 'fastdeploy-cache[torch]'") from error
    names = {"float8_e4m3": "float8_e4m3fn", "int4": "uint8"}
    signed = array.view(np.int16) if array.dtype == np.uint16 else array  # torch knows few unsigned types
    return torch.from_numpy(signed).view(getattr(torch, names.get(dtype, dtype)))


def paddle_tensor(array: np.ndarray[Any, Any]) -> Any:
    """A Paddle CPU tensor over the array's very memory; of uint16, as which bfloat16 is stored, a bfloat16 one.

    Raises:
        LayoutError: Paddle is missing, or this version copies.
    """
    try:
        import paddle
    except ImportError as error:
        raise LayoutError(f"cannot import paddle ({error}); run: pip install 'fastdeploy-cache[paddle]'") from error
    shared: Any = array
    if array.dtype == np.uint16:  # which Paddle would take for itself, a type that it has no kernels for
        if not array.flags.c_contiguous:
            raise LayoutError(f"bfloat16 array of strides {array.strides} is not contiguous; Paddle gets such only")
        shared = MemoryArray(array.ctypes.data, array.shape, "bfloat16", owner=array)
    tensor = paddle.from_dlpack(shared)
    if tensor.data_ptr() != array.ctypes.data:
        raise LayoutError(
            f"paddle {paddle.__version__} copies instead of sharing memory; Paddle 3.0 or newer is needed"
        )
    return tensor

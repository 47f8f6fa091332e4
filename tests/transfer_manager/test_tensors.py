"""Arrays of NumPy, Paddle and PyTorch as KV arrays: their places, and copies from and to them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.errors import LayoutError, NotEnoughMemoryError
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.launch.reference_engine.paddle_runtime import import_paddle
from fastdeploy_cache.transfer_manager.device.cpu import CpuDevice
from fastdeploy_cache.transfer_manager.kv.dlpack import MemoryArray
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout, Place
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVMemory
from fastdeploy_cache.transfer_manager.kv.tensors import (
    ArrayPlace,
    SharedSpan,
    array_places,
    local_segments,
    share_in_place,
    shared_handle,
)
from fastdeploy_cache.transfer_manager.rank.inline_client import InlineClient
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.answers import Answers, task

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8).for_rank(1, 4)
NUM_GPU, NUM_CPU = 5, 6
BLOCK = (4, 2, 8)  # of one part in one layer
PART = 128
OUT, IN = TaskKind.SWAP_OUT, TaskKind.SWAP_IN
Tensor = Callable[[np.ndarray], Any]


def import_torch() -> Any:
    """PyTorch, or the test is skipped."""
    return pytest.importorskip("torch", reason="PyTorch is an extra, and not installed here")


def torch_of(array: np.ndarray) -> Any:
    """A PyTorch tensor over the array's memory."""
    return import_torch().from_numpy(array)


@pytest.fixture(scope="module")
def paddle() -> Any:
    """Paddle, with its threads and signal handlers limited."""
    return import_paddle()


@pytest.fixture(params=["numpy", "paddle", "torch"])
def tensor(request: pytest.FixtureRequest, paddle: Any) -> Tensor:
    """Makes a framework's tensor over a NumPy array's very memory."""
    kinds: dict[str, Tensor] = {"numpy": lambda array: array, "paddle": paddle.from_dlpack, "torch": torch_of}
    if request.param == "torch":
        import_torch()
    return kinds[request.param]


def random_arrays(*shape: int) -> np.ndarray:
    """Random float16, of random bits."""
    return np.random.default_rng(7).integers(0, 2**16, shape, dtype=np.uint16).view(np.float16)


def layers_of(make: Callable[[np.ndarray], Any] = lambda array: array) -> tuple[list[dict[str, Any]], np.ndarray]:
    """An engine's arrays of the layout, part by part; and all of it as [layers, parts, blocks, bytes]."""
    memory = random_arrays(2, 2, NUM_GPU, *BLOCK)
    layers = [{"key": make(layer[0]), "value": make(layer[1])} for layer in memory]
    return layers, memory.view(np.uint8).reshape(2, 2, NUM_GPU, PART)


# -- where an array is


def test_places_of_tensors(tensor: Tensor) -> None:
    """Address, shape, strides and size of an element: of a whole array, a slice of it and its transpose."""
    array = random_arrays(6, 5, 4)
    whole = tensor(array)
    part, transposed = whole[1:4, :, 1:3], whole[2].T
    for found, original in ((whole, array), (part, array[1:4, :, 1:3]), (transposed, array[2].T)):
        assert ArrayPlace.of(found) == ArrayPlace(
            address=original.ctypes.data, shape=original.shape, strides_bytes=original.strides, item_bytes=2
        )


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8"])
def test_elements_have_their_size(tensor: Tensor, dtype: str) -> None:
    """Whatever the dtype: item and stride in bytes."""
    place = ArrayPlace.of(tensor(np.zeros((3, 2), dtype)))
    assert (place.item_bytes, place.strides_bytes) == (
        np.dtype(dtype).itemsize,
        (2 * place.item_bytes, place.item_bytes),
    )


def test_bfloat16_is_two_bytes(paddle: Any) -> None:
    """NumPy has no bfloat16: a tensor of it over an array of uint16 has the array's place."""
    array = np.zeros((4, 3), np.uint16)
    found = paddle.from_dlpack(MemoryArray(array.ctypes.data, array.shape, "bfloat16", owner=array))
    assert found.dtype == paddle.bfloat16
    assert ArrayPlace.of(found) == ArrayPlace.of(array)


def test_a_place_keeps_no_array_alive(tensor: Tensor) -> None:
    """Only the address is read: the capsule gives its hold on the array back."""
    array = np.zeros((4, 3), np.float32)
    found = tensor(array)
    before = sys.getrefcount(array)
    for _ in range(10):
        ArrayPlace.of(found)
    assert sys.getrefcount(array) == before


@pytest.mark.parametrize(
    "thing",
    [7, [1, 2], np.array(["text"]), np.frombuffer(b"read only", np.uint8)],
    ids=["int", "list", "text", "read only"],
)
def test_what_has_no_dlpack_is_refused(thing: object) -> None:
    """LayoutError with the type: it is no array, or one that nobody may write."""
    with pytest.raises(LayoutError, match=f"{type(thing).__name__} gives no DLPack capsule"):
        ArrayPlace.of(thing)


class Foreign(MemoryArray):
    """An array of another kind of device."""

    def __init__(self, device_type: int) -> None:
        super().__init__(4096, (3, 2), "float16", device_id=1)
        self._device = (device_type, 1)


@pytest.mark.parametrize(("device_type", "name"), [(1, "cpu"), (2, "cuda"), (3, "cpu"), (13, "cuda")])
def test_devices_have_their_names(device_type: int, name: str) -> None:
    """Plain, pinned, GPU and managed memory; the address is not touched."""
    place = ArrayPlace.of(Foreign(device_type))
    assert (place.address, place.shape, place.strides_bytes) == (4096, (3, 2), (4, 2))
    assert (place.device, place.device_id) == (name, 1)


def test_other_devices_are_refused() -> None:
    """LayoutError with the number that DLPack gives them."""
    with pytest.raises(LayoutError, match="DLPack device type 10; known: CPU and CUDA"):
        ArrayPlace.of(Foreign(10))


# -- whether arrays fit a layout


def test_an_engines_arrays_may_come_as_slices() -> None:
    """[2, blocks, ...] and [blocks, 2, ...] are a slice for the keys and one for the values."""
    keys_first, blocks_first = random_arrays(2, NUM_GPU, *BLOCK), random_arrays(NUM_GPU, 2, *BLOCK)
    layers = [
        {"key": keys_first[0], "value": keys_first[1]},
        {"key": blocks_first[:, 0], "value": blocks_first[:, 1]},
    ]
    (key, value), (other_key, other_value) = array_places(LAYOUT, layers)
    assert value.address - key.address == NUM_GPU * PART and key.strides_bytes[0] == PART
    assert other_value.address - other_key.address == PART and other_key.strides_bytes[0] == 2 * PART


@pytest.mark.parametrize("shape", [BLOCK, (64,), (2, 32), (1, 64, 1)])
def test_a_block_may_have_any_shape(shape: tuple[int, ...]) -> None:
    """As long as its bytes are the part's, in one piece: also another dtype's elements."""
    array = random_arrays(NUM_GPU, *shape)
    for seen in (array, array.view(np.uint16), array.reshape(NUM_GPU, 64).view(np.uint8)):
        places = array_places(LAYOUT, [{"key": seen, "value": seen}] * 2)
        assert {place.address for in_layer in places for place in in_layer} == {array.ctypes.data}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "of 0 layers; the layout has 2"),
        ([{"key": random_arrays(NUM_GPU, *BLOCK)}] * 2, r"layer 0 has arrays \['key'\]; .* \['key', 'value'\]"),
        ([dict.fromkeys(("key", "value", "more"), random_arrays(NUM_GPU, *BLOCK))] * 2, "'more'"),
        ([dict.fromkeys(("key", "value"), random_arrays(NUM_GPU, 4, 2, 4))] * 2, r"layer 0 key is \(5, 4, 2, 4\) of 2"),
        ([dict.fromkeys(("key", "value"), random_arrays(64)[0:1].reshape(()).copy())] * 2, r"layer 0 key is \(\) of 2"),
        ([dict.fromkeys(("key", "value"), random_arrays(NUM_GPU, 4, 2, 16)[..., :8])] * 2, "not contiguous inside"),
        (
            [dict.fromkeys(("key", "value"), random_arrays(NUM_GPU, 4, 2, 8).swapaxes(1, 2))] * 2,
            "not contiguous inside",
        ),
        (
            [dict.fromkeys(("key", "value"), random_arrays(4, NUM_GPU, 2, 8).swapaxes(0, 1))] * 2,
            "not contiguous inside",
        ),
        ([dict.fromkeys(("key", "value"), random_arrays(NUM_GPU, 4, 2, 8)[::-1])] * 2, "blocks -128 bytes apart"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(layers: list[dict[str, Any]], message: str) -> None:
    """Missing layers and parts, parts too many, other sizes, and blocks in pieces: LayoutError with the numbers."""
    with pytest.raises(LayoutError, match=message):
        array_places(LAYOUT, layers)


# -- copies from and to them


@pytest.mark.parametrize("blocks_first", [False, True])
def test_the_cpu_device_copies_an_engines_arrays(tensor: Tensor, blocks_first: bool) -> None:
    """Segments made of tensors are their memory: images are their bytes, and loads change them, and no other block."""
    shape = (2, NUM_GPU, 2, *BLOCK) if blocks_first else (2, 2, NUM_GPU, *BLOCK)
    memory = random_arrays(*shape)
    by_part = memory.swapaxes(1, 2) if blocks_first else memory
    made = [tensor(layer) for layer in memory]
    layers = [{name: t[:, i] if blocks_first else t[i] for i, name in enumerate(("key", "value"))} for t in made]
    segments, places = local_segments(LAYOUT, layers)
    LAYOUT.check_places(places, [segment.nbytes for segment in segments], NUM_GPU)
    images = np.zeros((NUM_CPU, LAYOUT.block_bytes), np.uint8)
    device = CpuDevice(LAYOUT, segments, places, images, NUM_GPU)
    before = by_part.copy()
    device.copy(OUT, np.array([3, 1], np.int32), np.array([0, 5], np.int32), lambda _: None)
    assert images[0].tobytes() == before[:, :, 3].tobytes() and images[5].tobytes() == before[:, :, 1].tobytes()
    assert not images[1:5].any()
    device.copy(IN, np.array([0, 5], np.int32), np.array([4, 0], np.int32), lambda _: None)
    expected = before.copy()
    expected[:, :, [4, 0]] = before[:, :, [3, 1]]
    assert by_part.tobytes() == expected.tobytes()


def test_arrays_on_a_gpu_are_not_local() -> None:
    """The CPU device cannot touch them: LayoutError with the device."""
    place = ArrayPlace(address=4096, shape=(5, 64), strides_bytes=(128, 2), item_bytes=2, device="cuda")
    with pytest.raises(LayoutError, match="key is on cuda; the CPU device needs"):
        local_segments(LAYOUT, [{"key": place, "value": place}] * 2)


@pytest.fixture
def shared() -> Iterator[list[SharedArray]]:
    """Two shared segments, each with room for a layer and a little more."""
    segments = [SharedArray.create(f"engine {i}", 64 + 2 * NUM_GPU * PART) for i in range(2)]
    yield segments
    for segment in segments:
        segment.close()


def test_shared_tensors_are_handed_over(tensor: Tensor, shared: list[SharedArray]) -> None:
    """Tensors over shared segments get a handle; who opens it shares their bytes, both ways."""
    arrays = [segment.view(np.float16, (2, NUM_GPU, *BLOCK), offset_bytes=64) for segment in shared]
    made = [tensor(array) for array in arrays]
    layers = [{"key": each[0], "value": each[1]} for each in made]
    handle = shared_handle(LAYOUT, layers, [SharedSpan.of(segment) for segment in shared], os.getpid())
    assert handle.places == tuple(
        (Place(i, 64, PART, NUM_GPU), Place(i, 64 + NUM_GPU * PART, PART, NUM_GPU)) for i in range(2)
    )
    opened = KVMemory.open(LAYOUT, NUM_GPU, KVHandle.from_bytes(handle.to_bytes()))
    arrays[1][1, 4], opened.views()[0]["key"][2] = 3, 5
    assert (opened.views()[1]["value"][4] == 3).all() and (arrays[0][0, 2] == 5).all()
    assert not opened.views()[1]["value"][3].any() and not arrays[0][0, 3].any()
    opened.close()


def test_tensors_outside_shared_segments_are_refused(shared: list[SharedArray]) -> None:
    """Private memory, or an array that runs over its segment's end: LayoutError, no other process could reach it."""
    private = random_arrays(NUM_GPU, *BLOCK)
    inside = shared[0].view(np.float16, (2 * NUM_GPU, *BLOCK))
    too_long = ArrayPlace(
        address=inside.ctypes.data, shape=(2 * NUM_GPU + 1, 64), strides_bytes=(PART, 2), item_bytes=2
    )
    on_gpu = ArrayPlace(
        address=inside.ctypes.data, shape=(NUM_GPU, 64), strides_bytes=(PART, 2), item_bytes=2, device="cuda"
    )
    spans = [SharedSpan.of(segment) for segment in shared]
    for value in (private, too_long, on_gpu):
        with pytest.raises(LayoutError, match=r"value at 0x[0-9a-f]+ is in none of the 2 segments"):
            shared_handle(LAYOUT, [{"key": inside, "value": value}] * 2, spans, os.getpid())


# -- an engine in one process


@pytest.fixture
def client() -> Iterator[tuple[InlineClient, Answers]]:
    """Started, without KV arrays; and its answers."""
    made, answers = InlineClient(LAYOUT, NUM_GPU, NUM_CPU, own_kv=False), Answers()
    made.start(answers)
    yield made, answers
    made.stop()
    made.__dict__.clear()  # pytest still holds it when the leak fixture looks


def test_an_engines_own_arrays_are_swapped(client: tuple[InlineClient, Answers], tensor: Tensor) -> None:
    """Attached, blocks go out and come back to other places byte for byte; the engine's other blocks stay."""
    inline, answers = client
    layers, memory = layers_of(tensor)
    assert not inline.available
    inline.attach_kv(0, layers)
    assert inline.available
    before = memory.copy()
    inline.submit(task(1, OUT, [3, 0], [2, 4]))
    assert memory.tobytes() == before.tobytes()
    memory[:, :, [3, 0]] = 0xEE
    inline.submit(task(2, IN, [1, 2], [2, 4]))
    expected = before.copy()
    expected[:, :, [1, 2]], expected[:, :, [3, 0]] = before[:, :, [3, 0]], 0xEE
    assert memory.tobytes() == expected.tobytes()
    assert [(result.error, result.ranks[0].num_bytes) for result in answers.now()] == [(None, 2 * 4 * PART)] * 2


def test_lost_arrays_are_let_go(client: tuple[InlineClient, Answers]) -> None:
    """After `kv_lost` the client is unavailable, tasks fail and nothing is copied; new arrays make it whole again."""
    inline, answers = client
    layers, memory = layers_of()
    inline.attach_kv(0, layers)
    inline.submit(task(1, OUT, [1], [0]))
    inline.kv_lost(0)
    assert not inline.available and not inline.has_room(OUT)
    before = memory.tobytes()
    inline.submit(task(2, IN, [2], [0]))
    assert memory.tobytes() == before
    new_layers, new_memory = layers_of()
    new_memory[:] = 0
    inline.attach_kv(0, new_layers)
    inline.submit(task(3, IN, [4], [0]))
    assert new_memory[:, :, 4].tobytes() == memory[:, :, 1].tobytes() and memory.tobytes() == before
    assert [result.error for result in answers.now()] == [None, "rank 0: its KV arrays are not attached", None]


def test_arrays_that_cannot_be_attached_change_nothing(client: tuple[InlineClient, Answers]) -> None:
    """A handle, too few blocks, or a part missing: LayoutError, and the client stays without."""
    inline, _ = client
    layers, _ = layers_of()
    short = [{name: array[:-1] for name, array in layer.items()} for layer in layers]
    overlapping = [
        {name: np.lib.stride_tricks.as_strided(a, a.shape, (64, *a.strides[1:])) for name, a in layer.items()}
        for layer in layers
    ]
    for wrong in (KVHandle((), ()), short, overlapping, layers[:1], [{"key": layer["key"]} for layer in layers]):
        with pytest.raises(LayoutError):
            inline.attach_kv(0, wrong)
        assert not inline.available
    for ask in (inline.kv_views, inline.kv_handle):
        with pytest.raises(LayoutError, match="the KV arrays of rank 0 are its worker's own"):
            ask(0)


class HugeTensor:
    """As much of PyTorch's tensor and its storage as is asked before memory is moved: more than /dev/shm can have."""

    def untyped_storage(self) -> HugeTensor:
        return self

    def data_ptr(self) -> int:
        return 4096

    def nbytes(self) -> int:
        return 1 << 60

    def is_shared(self) -> bool:
        return False

    def _share_fd_cpu_(self) -> tuple[int, int]:
        raise AssertionError("PyTorch was asked to move what has no room")


def test_arrays_that_shared_memory_has_no_room_for_are_refused_before_they_are_moved() -> None:
    """The error says how much there is, and what to change; the process would be killed at its first write else."""
    with pytest.raises(NotEnoughMemoryError, match=f"{1 << 60} bytes, and /dev/shm has room for .*--shm-size"):
        share_in_place([HugeTensor()])

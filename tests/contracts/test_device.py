"""What every device promises: exact bytes, all or nothing, layer by layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from fastdeploy_cache.errors import DeviceError
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.launch.gpu.layouts import ID_PAIRS, LAYOUTS
from fastdeploy_cache.launch.gpu.layouts import NUM_CPU_BLOCKS as NUM_CPU
from fastdeploy_cache.launch.gpu.layouts import NUM_GPU_BLOCKS as NUM_GPU
from fastdeploy_cache.transfer_manager.device.base import Device
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.devices import DEVICES


@dataclass
class Bench:
    """A device and all that it may touch."""

    device: Device
    layout: RankLayout
    kv: SharedArray
    cpu: SharedArray

    @property
    def images(self) -> np.ndarray:
        return self.cpu.view(np.uint8, (NUM_CPU, self.layout.block_bytes))

    def pieces(self) -> list[np.ndarray]:
        """The bytes of each layer's each part as the model's views show them: [num_blocks, bytes]."""
        views = self.views()
        return [array.reshape(len(array), -1).view(np.uint8)[:NUM_GPU] for layer in views for array in layer.values()]

    def views(self) -> list[dict[str, np.ndarray]]:
        flat = self.kv.view(np.uint8, (self.kv.num_bytes,))
        return self.layout.kv_views([flat], self.layout.places(NUM_GPU))

    def fill(self, seed: int) -> None:
        for array, noise in zip((self.kv, self.cpu), _noise(seed, self.kv.num_bytes, self.cpu.num_bytes), strict=True):
            array.view(np.uint8, (array.num_bytes,))[:] = noise

    def everything(self) -> bytes:
        return b"".join(array.view(np.uint8, (array.num_bytes,)).tobytes() for array in (self.kv, self.cpu))

    def swap(self, kind: TaskKind, gpu: list[int], cpu: list[int]) -> tuple[int, list[int]]:
        layers: list[int] = []
        return self.copy(kind, gpu, cpu, layers.append), layers

    def copy(self, kind: TaskKind, gpu: list[int], cpu: list[int], on_layer: Callable[[int], None]) -> int:
        sources, destinations = (cpu, gpu) if kind is TaskKind.SWAP_IN else (gpu, cpu)
        return self.device.copy(kind, np.array(sources, np.int32), np.array(destinations, np.int32), on_layer)


@functools.lru_cache(maxsize=1)  # a test fills the same arrays again and again
def _noise(seed: int, *sizes: int) -> list[np.ndarray]:
    noise = np.random.default_rng(seed)
    return [noise.integers(0, 256, num_bytes, dtype=np.uint8) for num_bytes in sizes]


@pytest.fixture(params=DEVICES)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Bench]]:
    """Makes a bench for a named layout; its memory goes at the end."""
    arrays: list[SharedArray] = []
    benches: list[Bench] = []

    def new(name: str) -> Bench:
        layout = LAYOUTS[name]
        kv = SharedArray.create("kv", layout.gpu_bytes(NUM_GPU))
        cpu = SharedArray.create("cpu", NUM_CPU * layout.block_bytes)
        arrays.extend((kv, cpu))
        benches.append(Bench(DEVICES[request.param](layout, kv, cpu, monkeypatch), layout, kv, cpu))
        return benches[-1]

    yield new
    for bench in benches:
        bench.device.close()
        del bench.device
    for array in arrays:
        array.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_within_the_gpu_changes_its_destinations_only(make: Callable[[str], Bench], layout: str) -> None:
    """All layers and parts of the sources arrive; sources, other blocks and the CPU blocks stay as they were."""
    bench = make(layout)
    bench.fill(3)
    before, images = [piece.copy() for piece in bench.pieces()], bench.images.copy()
    num_bytes, layers = bench.swap(TaskKind.COPY, [9, 2, 3], [0, 5, 6])
    assert num_bytes == 3 * bench.layout.block_bytes
    assert layers[-1] == bench.layout.num_layers
    for piece, original in zip(bench.pieces(), before, strict=True):
        expected = original.copy()
        expected[[0, 5, 6]] = original[[9, 2, 3]]
        assert (piece == expected).all()
    assert (bench.images == images).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_survive_the_round_trip(make: Callable[[str], Bench], layout: str) -> None:
    """Out, overwritten, in again elsewhere: every layer and part has its bytes back, and no other byte changed."""
    bench = make(layout)
    for gpu, cpu in ID_PAIRS:
        _check_round_trip(bench, gpu, cpu)


def _check_round_trip(bench: Bench, gpu: list[int], cpu: list[int]) -> None:
    bench.fill(seed=1)
    before = [piece[gpu].copy() for piece in bench.pieces()]
    bench.swap(TaskKind.SWAP_OUT, gpu, cpu)
    images = bench.images[cpu].copy()
    for piece in bench.pieces():
        piece[:] = 0xEE
    targets = gpu[1:] + gpu[:1]  # to other blocks than they came from
    bench.swap(TaskKind.SWAP_IN, targets, cpu)
    for piece, bytes_before in zip(bench.pieces(), before, strict=True):
        assert np.array_equal(piece[targets], bytes_before)
        others = np.setdiff1d(np.arange(NUM_GPU), targets)
        assert (piece[others] == 0xEE).all(), "a block that was not asked for was written"
    assert np.array_equal(bench.images[cpu], images), "loading changed its source"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_image_is_the_blocks_parts_in_order(make: Callable[[str], Bench], layout: str) -> None:
    """In the CPU tier a block is its layers one after the other, parts within: as storage will write it."""
    bench = make(layout)
    bench.fill(seed=2)
    images_before = bench.images.copy()
    bench.swap(TaskKind.SWAP_OUT, [9, 2], [3, 14])
    for gpu, cpu in ((9, 3), (2, 14)):
        assert bench.images[cpu].tobytes() == b"".join(piece[gpu].tobytes() for piece in bench.pieces())
    others = np.setdiff1d(np.arange(NUM_CPU), [3, 14])
    assert np.array_equal(bench.images[others], images_before[others])


@pytest.mark.parametrize("kind", [kind for kind in TaskKind if kind.is_swap])
@pytest.mark.parametrize("layout", ["uneven", "steps", "extra layers"])
def test_bytes_moved_and_layers_are_reported(make: Callable[[str], Bench], kind: TaskKind, layout: str) -> None:
    """The count is blocks times block bytes; layers are told in rising order up to all, also for no blocks."""
    bench = make(layout)
    for gpu, cpu in (([5, 1, 2], [0, 8, 9]), ([], [])):
        num_bytes, layers = bench.swap(kind, gpu, cpu)
        assert num_bytes == len(gpu) * bench.layout.block_bytes
        assert layers == sorted(set(layers)) and layers[-1] == bench.layout.num_layers


def test_large_layers_are_reported_one_by_one(make: Callable[[str], Bench]) -> None:
    """Of a load whose layers are worth a copy each, every layer is told: that is what overlap lives on."""
    bench = make("steps")
    assert bench.swap(TaskKind.SWAP_IN, [5, 1, 2], [0, 8, 9])[1] == [1, 2, 3, 4, 5]


def test_a_layer_that_is_told_is_in_place(make: Callable[[str], Bench]) -> None:
    """When layer n is reported its bytes are there: an engine may compute it while later ones still load."""
    bench = make("steps")
    bench.fill(seed=3)
    gpu, cpu = [4, 0], [1, 6]
    bench.swap(TaskKind.SWAP_OUT, gpu, cpu)
    wanted = [piece[gpu].copy() for piece in bench.pieces()]
    for piece in bench.pieces():
        piece[:] = 0
    num_parts, told = len(bench.layout.parts), []

    def on_layer(num_layers: int) -> None:
        told.append(num_layers)
        for piece, bytes_wanted in zip(bench.pieces()[: num_layers * num_parts], wanted, strict=False):
            assert np.array_equal(piece[gpu], bytes_wanted)

    bench.copy(TaskKind.SWAP_IN, gpu, cpu, on_layer)
    assert told == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", [kind for kind in TaskKind if kind.is_swap])
@pytest.mark.parametrize(
    ("gpu", "cpu"),
    [
        ([0, NUM_GPU], [0, 1]),
        ([0, 1], [0, NUM_CPU]),
        ([0, -1], [0, 1]),
        ([0, 1], [-1, 0]),
        ([0, 1, 2], [0, 1]),
        ([0], []),
        ([], [0]),
        ([2**31 - 1], [0]),
    ],
)
def test_impossible_ids_copy_nothing(
    make: Callable[[str], Bench], kind: TaskKind, gpu: list[int], cpu: list[int]
) -> None:
    """An id outside its pool or lists of different length: DeviceError before a single byte moves."""
    bench = make("float16")
    bench.fill(seed=4)
    before, layers = bench.everything(), list[int]()
    with pytest.raises(DeviceError):
        bench.copy(kind, gpu, cpu, layers.append)
    assert bench.everything() == before and layers == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_leading_tokens_are_copied_and_the_others_stay(
    make: Callable[[str], Bench], layout: str, num_tokens: int
) -> None:
    """Of each destination the first tokens of every part are the source's, the rest is as before; no other block."""
    bench = make(layout)
    bench.fill(seed=5)
    before = [{name: array.copy() for name, array in layer.items()} for layer in bench.views()]
    sources, destinations = np.array([9, 2, 3], np.int32), np.array([0, 5, 6], np.int32)
    moved = bench.device.copy(TaskKind.COPY, sources, destinations, lambda _: None, num_tokens)
    expected_bytes = 0
    for layer, originals in zip(bench.views(), before, strict=True):
        for part in bench.layout.parts:
            expected, axis = originals[part.name].copy(), part.token_axis
            if axis is None:
                expected[destinations] = originals[part.name][sources]
                expected_bytes += part.num_bytes
            else:
                first = (slice(None),) * axis + (slice(num_tokens),)
                for source, destination in zip(sources, destinations, strict=True):
                    expected[destination][first] = originals[part.name][source][first]
                expected_bytes += expected[0][first].nbytes
            assert layer[part.name].tobytes() == expected.tobytes()
    assert moved == 3 * expected_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wiped_blocks_are_zeros(make: Callable[[str], Bench], layout: str) -> None:
    """All bytes of the wiped blocks of both tiers are zeros then, and no byte beside them has changed."""
    bench = make(layout)
    bench.fill(21)
    before, images = [piece.copy() for piece in bench.pieces()], bench.images.copy()
    num_bytes = bench.device.wipe(np.array([3, 1], np.int32), np.array([2], np.int32))
    assert num_bytes == 3 * bench.layout.block_bytes
    for piece, known in zip(bench.pieces(), before, strict=True):
        known[[3, 1]] = 0
        np.testing.assert_array_equal(piece, known)
    images[2] = 0
    np.testing.assert_array_equal(bench.images, images)


def test_ids_outside_are_not_wiped(make: Callable[[str], Bench]) -> None:
    """An id outside its pool is refused, and nothing is overwritten."""
    bench = make(next(iter(LAYOUTS)))
    bench.fill(22)
    before = bench.everything()
    for gpu, cpu in (([0, NUM_GPU], []), ([], [NUM_CPU]), ([-1], [0])):
        with pytest.raises(DeviceError, match="leave the pool"):
            bench.device.wipe(np.array(gpu, np.int32), np.array(cpu, np.int32))
    assert bench.everything() == before

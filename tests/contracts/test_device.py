"""What every device promises: exact bytes, all or nothing, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from ipc.shared_array import SharedArray
from transfer_manager.device.base import Device
from transfer_manager.device.cpu import CpuDevice
from transfer_manager.errors import DeviceError
from transfer_manager.layout import STORAGE_DTYPES, KVLayout, KVPart, RankLayout
from transfer_manager.task import Direction

NUM_GPU, NUM_CPU = 12, 17
UNEVEN = (KVPart("key", (3, 2, 5), "float16"), KVPart("scale", (3,), "float32"), KVPart("value", (7,), "int8"))
LAYOUTS = {
    dtype: KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype).for_rank(1, 4) for dtype in STORAGE_DTYPES
}
LAYOUTS["uneven"] = RankLayout(num_layers=4, parts=UNEVEN)
LAYOUTS["one byte"] = RankLayout(num_layers=1, parts=(KVPart("latent", (1,), "uint8"),))
# (device ids, CPU ids): neighbours, permutations, strides, backwards, one, none, all
ID_PAIRS = [
    ([0, 1, 2, 3], [4, 5, 6, 7]),
    ([7, 2, 11, 0, 5], [16, 0, 3, 8, 1]),
    ([1, 3, 5, 7, 9, 11], [0, 1, 2, 3, 4, 5]),
    ([5, 4, 3, 2], [2, 3, 4, 5]),
    ([3, 4, 5, 9, 10, 1], [8, 9, 10, 11, 2, 3]),
    ([11], [16]),
    ([], []),
    (list(range(NUM_GPU)), list(range(NUM_CPU - NUM_GPU, NUM_CPU))),
]

MakeDevice = Callable[[RankLayout, SharedArray, SharedArray], Device]


def make_cpu(layout: RankLayout, kv: SharedArray, cpu: SharedArray) -> Device:
    return CpuDevice(layout, kv, cpu, NUM_GPU, NUM_CPU)


DEVICES: dict[str, MakeDevice] = {"cpu": make_cpu}


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
        views = self.layout.kv_views(self.kv, NUM_GPU)
        return [array.view(np.uint8).reshape(NUM_GPU, -1) for layer in views for array in layer.values()]

    def fill(self, seed: int) -> None:
        noise = np.random.default_rng(seed)
        for array in (self.kv, self.cpu):
            view = array.view(np.uint8, (array.num_bytes,))
            view[:] = noise.integers(0, 256, array.num_bytes, dtype=np.uint8)

    def everything(self) -> bytes:
        return b"".join(array.view(np.uint8, (array.num_bytes,)).tobytes() for array in (self.kv, self.cpu))

    def swap(self, direction: Direction, gpu: list[int], cpu: list[int]) -> tuple[int, list[int]]:
        layers: list[int] = []
        return self.copy(direction, gpu, cpu, layers.append), layers

    def copy(self, direction: Direction, gpu: list[int], cpu: list[int], on_layer: Callable[[int], None]) -> int:
        sources, destinations = (cpu, gpu) if direction is Direction.SWAP_IN else (gpu, cpu)
        return self.device.copy(direction, np.array(sources, np.int32), np.array(destinations, np.int32), on_layer)


@pytest.fixture(params=DEVICES)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Bench]]:
    """Makes a bench for a named layout; its memory goes at the end."""
    arrays: list[SharedArray] = []
    benches: list[Bench] = []

    def new(name: str) -> Bench:
        layout = LAYOUTS[name]
        kv = SharedArray.create("kv", NUM_GPU * layout.block_bytes)
        cpu = SharedArray.create("cpu", NUM_CPU * layout.block_bytes)
        arrays.extend((kv, cpu))
        benches.append(Bench(DEVICES[request.param](layout, kv, cpu), layout, kv, cpu))
        return benches[-1]

    yield new
    for bench in benches:
        del bench.device
    for array in arrays:
        array.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_within_the_gpu_changes_its_destinations_only(make: Callable[[str], Bench], layout: str) -> None:
    """All layers and parts of the sources arrive; sources, other blocks and the CPU blocks stay as they were."""
    bench = make(layout)
    bench.fill(3)
    before, images = [piece.copy() for piece in bench.pieces()], bench.images.copy()
    num_bytes, layers = bench.swap(Direction.COPY, [9, 2, 3], [0, 5, 6])
    assert num_bytes == 3 * bench.layout.block_bytes
    assert layers == list(range(1, bench.layout.num_layers + 1))
    for piece, original in zip(bench.pieces(), before, strict=True):
        expected = original.copy()
        expected[[0, 5, 6]] = original[[9, 2, 3]]
        assert (piece == expected).all()
    assert (bench.images == images).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("gpu", "cpu"), ID_PAIRS)
def test_bytes_survive_the_round_trip(
    make: Callable[[str], Bench], layout: str, gpu: list[int], cpu: list[int]
) -> None:
    """Out, overwritten, in again elsewhere: every layer and part has its bytes back, and no other byte changed."""
    bench = make(layout)
    bench.fill(seed=1)
    before = [piece[gpu].copy() for piece in bench.pieces()]
    bench.swap(Direction.SWAP_OUT, gpu, cpu)
    images = bench.images[cpu].copy()
    for piece in bench.pieces():
        piece[:] = 0xEE
    targets = gpu[1:] + gpu[:1]  # to other blocks than they came from
    bench.swap(Direction.SWAP_IN, targets, cpu)
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
    bench.swap(Direction.SWAP_OUT, [9, 2], [3, 14])
    for gpu, cpu in ((9, 3), (2, 14)):
        assert bench.images[cpu].tobytes() == b"".join(piece[gpu].tobytes() for piece in bench.pieces())
    others = np.setdiff1d(np.arange(NUM_CPU), [3, 14])
    assert np.array_equal(bench.images[others], images_before[others])


@pytest.mark.parametrize("direction", Direction)
def test_bytes_moved_and_layers_are_reported(make: Callable[[str], Bench], direction: Direction) -> None:
    """The count is blocks times block bytes; layers are told 1, 2 ... n, each once, in order, also for no blocks."""
    bench = make("uneven")
    assert bench.swap(direction, [5, 1, 2], [0, 8, 9]) == (3 * bench.layout.block_bytes, [1, 2, 3, 4])
    assert bench.swap(direction, [], []) == (0, [1, 2, 3, 4])


def test_a_layer_that_is_told_is_in_place(make: Callable[[str], Bench]) -> None:
    """When layer n is reported its bytes are there: an engine may compute it while later ones still load."""
    bench = make("uneven")
    bench.fill(seed=3)
    gpu, cpu = [4, 0], [1, 6]
    bench.swap(Direction.SWAP_OUT, gpu, cpu)
    wanted = [piece[gpu].copy() for piece in bench.pieces()]
    for piece in bench.pieces():
        piece[:] = 0
    num_parts, told = len(bench.layout.parts), []

    def on_layer(num_layers: int) -> None:
        told.append(num_layers)
        for piece, bytes_wanted in zip(bench.pieces()[: num_layers * num_parts], wanted, strict=False):
            assert np.array_equal(piece[gpu], bytes_wanted)

    bench.copy(Direction.SWAP_IN, gpu, cpu, on_layer)
    assert told == [1, 2, 3, 4]


@pytest.mark.parametrize("direction", Direction)
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
    make: Callable[[str], Bench], direction: Direction, gpu: list[int], cpu: list[int]
) -> None:
    """An id outside its pool or lists of different length: DeviceError before a single byte moves."""
    bench = make("float16")
    bench.fill(seed=4)
    before, layers = bench.everything(), list[int]()
    with pytest.raises(DeviceError):
        bench.copy(direction, gpu, cpu, layers.append)
    assert bench.everything() == before and layers == []

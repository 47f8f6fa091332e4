"""What every device promises of checkpoints: the bytes of each row, packed into pages, step by step, all or nothing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from fastdeploy_cache.errors import DeviceError
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.launch.gpu.layouts import HYBRID_LAYOUTS, NUM_UNITS
from fastdeploy_cache.launch.gpu.layouts import NUM_CPU_BLOCKS as NUM_PAGES
from fastdeploy_cache.launch.gpu.layouts import NUM_GPU_BLOCKS as NUM_GPU
from fastdeploy_cache.transfer_manager.device import images
from fastdeploy_cache.transfer_manager.device.base import Device
from fastdeploy_cache.transfer_manager.device.images import CheckpointImage
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.task import LEFT_OUT, TaskKind
from tests.rigs.devices import DEVICES

OUT, IN = TaskKind.SWAP_OUT, TaskKind.SWAP_IN


@dataclasses.dataclass
class Rig:
    """A device of a hybrid model, and all that it may touch."""

    device: Device
    layout: RankLayout
    kv: SharedArray
    cpu: SharedArray

    @property
    def pages(self) -> np.ndarray:
        return self.cpu.view(np.uint8, (NUM_PAGES, self.layout.block_bytes))

    def arrays(self, row: int) -> list[np.ndarray]:
        """The bytes of each part of each layer of a row, in the model's order: [units, bytes]."""
        views = self.layout.kv_views([self.kv.view(np.uint8, (self.kv.num_bytes,))], self.layout.places(NUM_GPU))
        layers = [views[layer] for layer in range(self.layout.num_layers) if self.layout.row_of(layer) == row]
        return [array.reshape(len(array), -1).view(np.uint8) for layer in layers for array in layer.values()]

    def all_arrays(self) -> list[np.ndarray]:
        return [array for row in range(len(self.layout.rows)) for array in self.arrays(row)]

    def fill(self) -> None:
        noise = np.random.default_rng(7)
        for array in (self.kv, self.cpu):
            array.view(np.uint8, (array.num_bytes,))[:] = noise.integers(0, 256, array.num_bytes, dtype=np.uint8)

    def everything(self) -> bytes:
        return b"".join(array.view(np.uint8, (array.num_bytes,)).tobytes() for array in (self.kv, self.cpu))

    def image(self, units: list[list[int]], first_page: int = 3) -> CheckpointImage:
        """With as many pages as it fills, which lie backwards and apart."""
        ids = tuple(np.array(each, np.int32) for each in units)
        num_bytes = sum(len(each) * self.layout.unit_bytes(row) for row, each in enumerate(ids, 1))
        num_pages = -(-num_bytes // self.layout.block_bytes)
        pages = [(first_page - 2 * number) % NUM_PAGES for number in range(num_pages)]
        assert len(set(pages)) == num_pages
        return CheckpointImage(ids, np.array(pages, np.int32))

    def units(self) -> list[list[int]]:
        """As many of each row as a checkpoint has of it, out of order."""
        return [[5, 1, 2, 6][: row.num_checkpoint_units] for row in self.layout.rows[1:]]

    def packed(self, image: CheckpointImage) -> bytes:
        """What its image is, by the definition: row, layer, part, unit."""
        rows = enumerate(image.units, 1)
        return b"".join(array[unit].tobytes() for row, units in rows for array in self.arrays(row) for unit in units)

    def move(self, kind: TaskKind, image: CheckpointImage) -> tuple[int, list[int], int]:
        """Bytes moved, layers that were told, and steps."""
        layers, num_steps = list[int](), 1
        moving = self.device.move_image(kind, image, layers.append)
        while True:
            try:
                next(moving)
            except StopIteration as end:
                return end.value, layers, num_steps
            num_steps += 1


@pytest.fixture(params=DEVICES)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Rig]]:
    """Makes a rig for a named layout; its memory goes at the end."""
    rigs: list[Rig] = []

    def new(name: str) -> Rig:
        layout = HYBRID_LAYOUTS[name]
        kv = SharedArray.create("kv", layout.gpu_bytes(NUM_GPU))
        cpu = SharedArray.create("cpu", NUM_PAGES * layout.block_bytes)
        rigs.append(Rig(DEVICES[request.param](layout, kv, cpu, monkeypatch), layout, kv, cpu))
        rigs[-1].fill()
        return rigs[-1]

    yield new
    for rig in rigs:
        rig.device.close()
        del rig.device
        rig.kv.close()
        rig.cpu.close()


@pytest.mark.parametrize("step_bytes", [1, 50, 300, 2**24])
@pytest.mark.parametrize("name", HYBRID_LAYOUTS)
def test_an_image_is_packed_and_comes_back(
    make: Callable[[str], Rig], name: str, step_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By row, layer, part and unit, however its steps are cut; in again to other units, and not a byte else changes."""
    monkeypatch.setattr(images, "STEP_BYTES", step_bytes)
    rig = make(name)
    image, before = rig.image(rig.units()), rig.pages.copy()
    assert all(before[image.pages].any(axis=1))
    plan = images.ImageMap(rig.layout, rig.layout.places(NUM_GPU), NUM_PAGES).steps(OUT, image)
    assert all(step.pieces.num_bytes.sum() <= step_bytes for step in plan)
    wanted = rig.packed(image)
    assert rig.move(OUT, image)[0] == len(wanted)
    stored = rig.pages[image.pages].tobytes()
    assert stored[: len(wanted)] == wanted
    assert not any(stored[len(wanted) :]), "the rest of the last page has what was there before"
    others = np.setdiff1d(np.arange(NUM_PAGES), image.pages)
    assert np.array_equal(rig.pages[others], before[others])

    old = [array.copy() for array in rig.all_arrays()]
    other = rig.image([[3, 0, 4, 1][: len(units)] for units in image.units])
    assert rig.move(IN, other)[0] == len(wanted) and rig.packed(other) == wanted
    place = 0
    for row in range(len(rig.layout.rows)):
        for array in rig.arrays(row):
            kept = np.setdiff1d(np.arange(len(array)), other.units[row - 1] if row else [])
            assert np.array_equal(array[kept], old[place][kept]), "a unit that was not asked for was written"
            place += 1
    assert rig.pages[image.pages].tobytes() == stored, "loading changed its source"


@pytest.mark.parametrize("name", HYBRID_LAYOUTS)
def test_an_image_may_lack_units_of_a_row(make: Callable[[str], Rig], name: str) -> None:
    """A chunk that has just begun has none, a short prompt fewer; an image of none at all moves nothing."""
    rig = make(name)
    for units in ([[], *rig.units()[1:]], [*rig.units()[:-1], []], [[4], *([[0]] * (len(rig.layout.rows) - 2))]):
        image = rig.image(units)
        wanted = rig.packed(image)
        assert rig.move(OUT, image)[0] == len(wanted)
        assert rig.pages[image.pages].tobytes()[: len(wanted)] == wanted
    before = rig.everything()
    nothing = rig.image([[] for _ in rig.layout.rows[1:]])
    assert rig.move(IN, nothing) == (0, [rig.layout.num_layers], 1)
    assert rig.everything() == before


@pytest.mark.parametrize("step_bytes", [1, 50, 2**24])
@pytest.mark.parametrize("name", HYBRID_LAYOUTS)
def test_a_load_leaves_units_out(
    make: Callable[[str], Rig], name: str, step_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its caller has already is not written, whichever units these are; all others come; all layers are told."""
    monkeypatch.setattr(images, "STEP_BYTES", step_bytes)
    rig = make(name)
    image = rig.image(rig.units())
    rig.move(OUT, image)
    wanted = [[array[units].copy() for array in rig.arrays(row)] for row, units in enumerate(image.units, 1)]
    for number in range(sum(map(len, image.units)) + 1):  # the first ones, up to all
        rig.kv.view(np.uint8, (rig.kv.num_bytes,))[:] += 1
        before = [[array[units].copy() for array in rig.arrays(row)] for row, units in enumerate(image.units, 1)]
        flat = np.concatenate(image.units)
        flat[:number] = LEFT_OUT
        units = tuple(np.split(flat, np.cumsum([len(each) for each in image.units])[:-1]))
        num_bytes, layers, _ = rig.move(IN, CheckpointImage(units, image.pages))
        assert layers[-1] == rig.layout.num_layers
        for row, (ids, old, new) in enumerate(zip(image.units, before, wanted, strict=True), 1):
            left = units[row - 1] == LEFT_OUT
            for array, was, comes in zip(rig.arrays(row), old, new, strict=True):
                assert np.array_equal(array[ids][left], was[left]) and np.array_equal(array[ids][~left], comes[~left])
        sizes = [rig.layout.unit_bytes(row) for row in range(1, len(rig.layout.rows))]
        assert num_bytes == sum(size * int((each != LEFT_OUT).sum()) for size, each in zip(sizes, units, strict=True))


@pytest.mark.parametrize("kind", [OUT, IN])
@pytest.mark.parametrize("name", HYBRID_LAYOUTS)
def test_layers_are_told_in_the_models_order(
    make: Callable[[str], Rig], name: str, kind: TaskKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When n layers are told, the image's part of the first n is in place, those of full rows have none; last all."""
    rig = make(name)
    layout, image = rig.layout, rig.image(rig.units())
    monkeypatch.setattr(images, "STEP_BYTES", max(layout.unit_bytes(row) for row in range(1, len(layout.rows))))
    told = list[int]()
    for _ in rig.device.move_image(kind, image, told.append):
        assert _is_in_place(rig, image, told[-1])
    assert told == sorted(told) and told[-1] == layout.num_layers and len(told) > 1


def _is_in_place(rig: Rig, image: CheckpointImage, num_layers: int) -> bool:
    """Whether both tiers have the same of the first layers."""
    packed, stored, at = rig.packed(image), rig.pages[image.pages].tobytes(), 0
    for row, units in enumerate(image.units, 1):
        for layer in range(rig.layout.num_layers):
            if rig.layout.row_of(layer) == row:
                size = len(units) * sum(part.num_bytes for part in rig.layout.parts_of(layer))
                if layer < num_layers and stored[at : at + size] != packed[at : at + size]:
                    return False
                at += size
    return True


def test_a_move_may_be_left_between_two_steps(make: Callable[[str], Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was cancelled is; the device goes on with the next, and with blocks."""
    monkeypatch.setattr(images, "STEP_BYTES", 16)
    rig = make("every kind of row")
    image = rig.image(rig.units())
    moving = rig.device.move_image(IN, image, lambda _: None)
    next(moving)
    rig.device.copy(OUT, np.array([2], np.int32), np.array([9], np.int32), lambda _: None)
    moving.close()
    wanted = rig.packed(image)
    rig.move(OUT, image)
    assert rig.pages[image.pages].tobytes()[: len(wanted)] == wanted


@pytest.mark.parametrize(
    ("row", "bad", "said"),
    [
        (0, [NUM_UNITS], "units of the row 'state' (layer 0 is its first) 7..7 leave the pool of 7"),
        (0, [-2], "units of the row 'state' (layer 0 is its first) -2..-2 leave the pool of 7"),
        (1, [2, 2], "units of the row 'window 9' (layer 3 is its first) have one twice: [2, 2]"),
        (-1, [NUM_PAGES], "CPU pages 17..17 leave the pool of 17"),
        (-1, [0, 1, 2], "an image of 616 bytes has 3 pages; it fills 2"),
        (-1, [4, 4], "CPU pages have one twice: [4, 4]"),
        (2, [0], "an image has units of 3 rows; the layout has 2 behind the full one"),
    ],
)
@pytest.mark.parametrize("kind", [OUT, IN])
def test_what_no_image_can_be_is_refused(
    make: Callable[[str], Rig], kind: TaskKind, row: int, bad: list[int], said: str
) -> None:
    """One `DeviceError` that names the row and its first layer, before a byte is copied or a layer told."""
    rig, told = make("a state and a window"), list[int]()
    good, ids = rig.image([[5], [1]]), np.array(bad, np.int32)
    if row < 0:
        image = good._replace(pages=ids)
    else:
        image = good._replace(units=(*good.units[:row], ids, *good.units[row + 1 :]))
    before = rig.everything()
    with pytest.raises(DeviceError) as caught:
        next(rig.device.move_image(kind, image, told.append))
    assert str(caught.value) == said
    assert rig.everything() == before and told == []


def test_nothing_is_left_out_of_what_is_stored(make: Callable[[str], Rig]) -> None:
    """An image with a hole would be read as a whole one."""
    rig = make("a state and a window")
    good, before = rig.image([[5], [1]]), rig.everything()
    with pytest.raises(DeviceError, match=re.escape("-1..-1 leave the pool of 7")):
        next(rig.device.move_image(OUT, good._replace(units=(good.units[0], np.array([LEFT_OUT], np.int32))), print))
    assert rig.everything() == before


@pytest.mark.parametrize("num_tokens", [None, 1, 3])
@pytest.mark.parametrize("name", HYBRID_LAYOUTS)
def test_units_are_copied_within_the_gpu(make: Callable[[str], Rig], name: str, num_tokens: int | None) -> None:
    """Those of one row, whole or their first tokens; no other row, unit or page changes."""
    rig = make(name)
    for row in range(1, len(rig.layout.rows)):
        before, pages = [array.copy() for array in rig.all_arrays()], rig.pages.copy()
        sources, targets = np.array([5, 0], np.int32), np.array([2, 6], np.int32)
        num_bytes = rig.device.copy_units(row, sources, targets, num_tokens)
        expected_bytes, place = 0, 0
        for number in range(len(rig.layout.rows)):
            layers = [layer for layer in range(rig.layout.num_layers) if rig.layout.row_of(layer) == number]
            parts = [part for layer in layers for part in rig.layout.parts_of(layer)]
            for part, array in zip(parts, rig.arrays(number), strict=True):
                wanted = before[place].reshape(len(array), part.num_stripes, -1).copy()
                if number == row:
                    size = part.num_bytes // part.num_stripes if num_tokens is None else part.leading_bytes(num_tokens)
                    wanted[targets, :, :size] = wanted[sources, :, :size]
                    expected_bytes += 2 * size * part.num_stripes
                assert np.array_equal(array, wanted.reshape(array.shape))
                place += 1
        assert num_bytes == expected_bytes and np.array_equal(rig.pages, pages)
    for bad in ((9, [0], [1]), (1, [0], [NUM_UNITS]), (1, [0, 1], [2]), (1, [0, 1], [2, 2])):
        with pytest.raises(DeviceError):
            rig.device.copy_units(bad[0], *(np.array(ids, np.int32) for ids in bad[1:]))


@pytest.mark.parametrize("name", HYBRID_LAYOUTS)
def test_wiped_units_are_zeros(make: Callable[[str], Rig], name: str) -> None:
    """All bytes of these units of one row are zeros then, and no byte beside them has changed; a unit outside its row,
    or a row that is none, is refused, and nothing is overwritten."""
    rig, nothing = make(name), np.empty(0, np.int32)
    for row in range(1, len(rig.layout.rows)):
        pages, before = rig.pages.copy(), {each: [a.copy() for a in rig.arrays(each)] for each in range(row + 1)}
        for array in before[row]:
            array[[3, 1]] = 0
        num_bytes = rig.device.wipe(np.array([3, 1], np.int32), nothing, row)
        assert num_bytes == 2 * rig.layout.unit_bytes(row)
        for each, arrays in before.items():
            assert all(map(np.array_equal, rig.arrays(each), arrays)), each
        assert np.array_equal(rig.pages, pages)
        known = rig.everything()
        for bad in ((row, [0, rig.layout.num_units[row - 1]]), (row, [-1]), (len(rig.layout.rows), [0])):
            with pytest.raises(DeviceError, match=r"of (the )?row"):
                rig.device.wipe(np.array(bad[1], np.int32), nothing, bad[0])
        assert rig.everything() == known

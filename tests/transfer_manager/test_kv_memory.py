"""KV arrays in shared memory: what is written on one side of a handle is read on the other."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fastdeploy_cache.errors import CodecError, IPCError, LayoutError
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout, Place, RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVMemory, SegmentHandle

ROOT = Path(__file__).parents[2]
SECONDS, NUM_BLOCKS = 60, 6
LAYOUTS: dict[str, KVLayout] = {
    "layer first": KVLayout(num_layers=3, num_kv_heads=2, head_dim=8),
    "block first": KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, device_order="block_first"),
    "latent with scales": KVLayout(
        num_layers=2, num_kv_heads=1, head_dim=12, value_head_dim=0, dtype="int8", scale_dtype="float32"
    ),
}
PLAIN = LAYOUTS["layer first"].for_rank(1, 4)

# what a child process does with the memory of the plain layout; {0} is what follows
CHILD = """
import sys
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVMemory
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8).for_rank(1, 4)
"""
READ_AND_WRITE = """
kv = KVMemory.open(layout, 6, KVHandle.from_bytes(bytes.fromhex(sys.argv[1])))
print([int(array[block, 3, 1, 7]) for layer in kv.views() for array in layer.values() for block in (0, 5)])
kv.views()[2]["value"][5] = -7
"""
MAKE_AND_WAIT = """
kv = KVMemory.create(layout, 6)
kv.views()[1]["key"][2] = 41
print(kv.handle().to_bytes().hex(), flush=True)
sys.stdin.read()  # until the parent has opened it
"""


def child(program: str, *arguments: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    """A process that knows our packages and nothing of this one's memory."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def descriptors() -> dict[str, str]:
    """Every open descriptor of this process, but the one that looks."""
    gc.collect()
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[link.name] = str(link.readlink())
    return found


@pytest.fixture
def kv() -> Iterator[KVMemory]:
    """Six blocks of the plain layout."""
    memory = KVMemory.create(PLAIN, NUM_BLOCKS)
    yield memory
    memory.close()


def number(memory: KVMemory) -> list[int]:
    """Give blocks 0 and 5 of every array a number of their own; the numbers."""
    numbers: list[int] = []
    for layer in memory.views():
        for array in layer.values():
            for block in (0, 5):
                array[block] = len(numbers) + 1
                numbers.append(len(numbers) + 1)
    return numbers


@pytest.mark.parametrize("name", LAYOUTS)
def test_both_sides_of_a_handle_are_one_memory(name: str) -> None:
    """New arrays are zeros in the layout's shapes; through a handle that went as bytes, each side sees the other."""
    layout = LAYOUTS[name].for_rank(1, 4)
    mine = KVMemory.create(layout, NUM_BLOCKS)
    handle = KVHandle.from_bytes(mine.handle().to_bytes())
    assert handle == mine.handle() and handle.segments[0].pid == os.getpid()
    theirs = KVMemory.open(layout, NUM_BLOCKS, handle)
    for ours, other in zip(mine.views(), theirs.views(), strict=True):
        for part in layout.parts:
            assert ours[part.name].shape == (NUM_BLOCKS, *part.storage_shape)
            assert ours[part.name].dtype == part.storage_dtype and not ours[part.name].any()
            ours[part.name][1], other[part.name][4] = 3, 5
            assert (other[part.name][1] == 3).all() and (ours[part.name][4] == 5).all()
    assert [flat.tobytes() for flat in mine.flat()] == [flat.tobytes() for flat in theirs.flat()]
    mine.close()
    theirs.close()


@pytest.mark.processes
def test_another_process_reads_and_writes_the_memory(kv: KVMemory) -> None:
    """A process that is given the handle's bytes reads what we wrote, and we read what it wrote."""
    numbers = number(kv)
    process = child(READ_AND_WRITE, kv.handle().to_bytes().hex())
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0 and output == f"{numbers}\n"
    assert (kv.views()[2]["value"][5] == -7).all() and (kv.views()[2]["value"][4] == 0).all()


@pytest.mark.processes
def test_a_child_inherits_the_memory(kv: KVMemory) -> None:
    """With the descriptors passed on, the handle names no process: it is of the reader itself."""
    numbers = number(kv)
    assert {segment.pid for segment in kv.inherited().segments} == {0}
    fds = tuple(segment.fd for segment in kv.segments)
    process = child(READ_AND_WRITE, kv.inherited().to_bytes().hex(), pass_fds=fds)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0 and output == f"{numbers}\n"
    assert (kv.views()[2]["value"][5] == -7).all()


@pytest.mark.processes
def test_memory_outlives_the_process_that_made_it() -> None:
    """Opened while it lived, its bytes stay; a handle that comes too late is an IPCError with its number."""
    process = child(MAKE_AND_WAIT)
    assert process.stdout is not None
    handle = KVHandle.from_bytes(bytes.fromhex(process.stdout.readline()))
    opened = KVMemory.open(PLAIN, NUM_BLOCKS, handle)
    process.communicate(timeout=SECONDS)
    assert process.returncode == 0 and handle.segments[0].pid == process.pid
    assert (opened.views()[1]["key"][2] == 41).all() and not opened.views()[1]["key"][3].any()
    with pytest.raises(IPCError, match=rf"of process {process.pid} cannot be opened: No such file"):
        KVMemory.open(PLAIN, NUM_BLOCKS, handle)
    opened.close()


def test_a_handle_ends_with_its_owners_descriptor(kv: KVMemory) -> None:
    """Closed by its owner, a handle is an IPCError that names both; nothing else is opened in its place."""
    handle, fd = kv.handle(), kv.segments[0].fd
    kv.close()
    with pytest.raises(IPCError, match=rf"descriptor {fd} of process {os.getpid()} cannot be opened"):
        KVMemory.open(PLAIN, NUM_BLOCKS, handle)


def test_views_keep_the_memory_alive(kv: KVMemory) -> None:
    """After close, twice, the model's views are valid memory, shared with who has opened it; there are no new ones."""
    other = KVMemory.open(PLAIN, NUM_BLOCKS, kv.handle())
    view, seen = kv.views()[0]["key"], other.views()[0]["key"]
    kv.close()
    kv.close()
    other.close()
    view[2] = 9
    assert (seen[2] == 9).all()
    with pytest.raises(IPCError, match="closed"):
        kv.views()


def test_gpu_memory_is_refused() -> None:
    """The CPU device cannot map a CUDA handle, and says so before it opens anything."""
    segment = SegmentHandle(kind="cuda", num_bytes=PLAIN.gpu_bytes(NUM_BLOCKS), ipc_handle=bytes(64))
    handle = KVHandle((segment,), PLAIN.places(NUM_BLOCKS))
    with pytest.raises(LayoutError, match="on a GPU; the CPU device needs shared memory"):
        KVMemory.open(PLAIN, NUM_BLOCKS, KVHandle.from_bytes(handle.to_bytes()))


def test_what_is_no_handle_is_refused(kv: KVMemory) -> None:
    """Nothing, rubbish, another message, half a handle and one of another kind: CodecError, each time."""
    good = kv.handle().to_bytes()
    for rubbish in (
        b"",
        b"rubbish",
        b"\x80",
        b"\xc1" * 40,
        good[:-1],
        good + b"\x00",
        good.replace(b"memfd", b"magic"),
    ):
        assert rubbish != good
        with pytest.raises(CodecError, match="KVHandle"):
            KVHandle.from_bytes(rubbish)


@pytest.mark.parametrize(
    ("layout", "num_blocks", "message"),
    [
        (PLAIN, NUM_BLOCKS + 1, "has 6 blocks; the GPU pool needs 7"),
        (LAYOUTS["latent with scales"].for_rank(1, 4), NUM_BLOCKS, "of 3 layers; the layout has 2"),
        (KVLayout(num_layers=3, num_kv_heads=2, head_dim=16).for_rank(1, 4), NUM_BLOCKS, "leaves its segment"),
    ],
)
def test_arrays_of_another_layout_are_refused(kv: KVMemory, layout: RankLayout, num_blocks: int, message: str) -> None:
    """More blocks, other layers or larger parts than the arrays have: LayoutError, and no descriptor stays."""
    before = descriptors()
    with pytest.raises(LayoutError, match=message):
        KVMemory.open(layout, num_blocks, kv.handle())
    assert descriptors() == before


def test_a_refused_handle_leaves_no_descriptor(kv: KVMemory) -> None:
    """Memory smaller than told, or a second segment that cannot be opened: IPCError, what was opened is closed."""
    (good,), before = kv.handle().segments, descriptors()
    larger = msgspec.structs.replace(good, num_bytes=good.num_bytes + 1)
    gone = msgspec.structs.replace(good, fd=10**6)
    for second, message in (
        (larger, rf"has {good.num_bytes} bytes, {good.num_bytes + 1} expected"),
        (gone, "10{6} of"),
    ):
        with pytest.raises(IPCError, match=message):
            KVMemory.open(PLAIN, NUM_BLOCKS, KVHandle((good, second), kv.places))
        assert descriptors() == before


def test_a_handle_of_a_process_whose_number_another_one_has_is_refused(kv: KVMemory) -> None:
    """Its descriptor of that number is some other file: mapped, a model would compute into it."""
    (good,), before = kv.handle().segments, descriptors()
    other = msgspec.structs.replace(good, started=good.started - 1)
    with pytest.raises(IPCError, match="another one has its number"):
        other.open_fd()
    os.close(good.open_fd())
    assert good.started > 0 and descriptors() == before


def test_a_handle_of_memory_that_was_given_up_is_refused(kv: KVMemory) -> None:
    """Its descriptor's number is another memory's by now, of another rank say."""
    (good,) = kv.handle().segments
    with pytest.raises(IPCError, match="no longer that memory"):
        msgspec.structs.replace(good, inode=good.inode + 1).open_fd()


def test_opening_and_closing_leaves_no_descriptor(kv: KVMemory) -> None:
    """Each opening has its own descriptor for each segment, not inherited by others, and gives it back."""
    before = descriptors()
    opened = KVMemory.open(PLAIN, NUM_BLOCKS, kv.handle())
    new = set(descriptors()) - set(before)  # Python's mmap keeps one, too
    assert str(opened.segments[0].fd) in new and not any(os.get_inheritable(int(fd)) for fd in new)
    opened.close()
    assert descriptors() == before


def test_arrays_may_be_spread_over_segments() -> None:
    """Each part's views are over its own segment, at its place there, with its stride."""
    layout = RankLayout(num_layers=1, parts=KVLayout(num_layers=1, num_kv_heads=1, head_dim=4).for_rank(1, 2).parts)
    first, second = (KVMemory.create(layout, 8) for _ in range(2))
    places = ((Place(1, 32, 48, 3), Place(0, 16, 16, 4)),)
    handle = KVHandle((*first.handle().segments, *second.handle().segments), places)
    opened = KVMemory.open(layout, 3, handle)
    (views,) = opened.views()
    views["key"][1], views["value"][3] = 2, 3
    for memory, start, value in ((second, 32 + 48, 2), (first, 16 + 3 * 16, 3)):
        (flat,) = memory.flat()
        expected = np.zeros(flat.nbytes, np.uint8)
        expected[start : start + 16] = np.full(8, value, np.float16).view(np.uint8)
        assert (flat == expected).all()
    for memory in (first, second, opened):
        memory.close()

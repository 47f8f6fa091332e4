"""The CUDA device's own promises, on a fake driver: what is missing is named, handles, pinning, failures, order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastdeploy_cache.errors import DeviceError, LayoutError, RankStartError
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.device.cuda import export_kv, open_cuda, open_segment
from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda
from fastdeploy_cache.transfer_manager.kv.layout import Place
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, SegmentHandle
from fastdeploy_cache.transfer_manager.kv.tensors import ArrayPlace
from fastdeploy_cache.transfer_manager.rank.client import RankClient
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.cuda_rank import (
    COPY,
    IDS,
    IN,
    LAYOUT,
    NUM_CPU,
    NUM_GPU,
    OUT,
    PART,
    SMALL,
    RecordingDriver,
    on_gpu,
    opened,
    setup_of,
)
from tests.rigs.fake_cuda import FakeDriver, install


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    """A driver with one GPU and batched copies; there is no run-time compiler, so no kernel."""
    fake = RecordingDriver()
    install(monkeypatch, fake)
    return fake


@pytest.fixture
def images() -> np.ndarray:
    """The CPU blocks' memory, random."""
    return np.random.default_rng(1).integers(0, 256, (NUM_CPU, LAYOUT.block_bytes), dtype=np.uint8)


# -- what is missing


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where NVIDIA's package is not installed, a DeviceError says which it is and how to get it."""
    install(monkeypatch, None)
    with pytest.raises(DeviceError, match=r"needs NVIDIA's cuda-bindings .*pip install 'cuda-bindings"):
        Cuda(0)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings raise RuntimeError where there is no libcuda.so: a DeviceError with their words and a way out."""

    class NoLibrary(FakeDriver):
        def cuInit(self, flags: int) -> None:  # noqa: N802
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    install(monkeypatch, NoLibrary())
    with pytest.raises(DeviceError, match=r"no NVIDIA driver can be loaded \(Failed to dlopen.*device = 'cpu'"):
        Cuda(0)


@pytest.mark.processes
def test_the_real_bindings_name_a_missing_driver() -> None:
    """With NVIDIA's own package on a machine without a driver: the same DeviceError, whatever they raise."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings are an extra, and not installed here")
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has an NVIDIA driver")
    with pytest.raises(DeviceError, match="no NVIDIA driver can be loaded"):
        Cuda(0)


def test_a_driver_that_refuses_is_named(driver: RecordingDriver) -> None:
    """A driver without a device to drive: its own word for it, and the number."""
    driver.fail["cuInit"] = 100
    with pytest.raises(DeviceError, match=r"cuInit failed: CUDA_ERROR_100 \(100\)"):
        Cuda(0)


@pytest.mark.parametrize("device_id", [2, -1, 1000])
def test_there_is_no_such_device(monkeypatch: pytest.MonkeyPatch, device_id: int) -> None:
    """The message has the number asked for and how many there are; the last one there is, is opened."""
    install(monkeypatch, FakeDriver(num_devices=2))
    with pytest.raises(DeviceError, match=f"no CUDA device {device_id}: the driver sees 2; see CUDA_VISIBLE_DEVICES"):
        Cuda(device_id)
    assert Cuda(1).device == 1


MISSING = {
    "bindings": (None, r"cuda-bindings .*pip install 'cuda-bindings"),
    "driver": ("def cuInit(flags):\n    raise RuntimeError('libcuda.so.1 not found')\n", r"no NVIDIA driver.*libcuda"),
}


@pytest.mark.processes
@pytest.mark.parametrize("what", MISSING)
def test_a_rank_without_a_gpu_fails_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A real rank process: RankStartError with what is missing and how to get it, and no traceback before it."""
    program, message = MISSING[what]
    bindings = tmp_path / "cuda" / "bindings"
    bindings.mkdir(parents=True)
    for package in (bindings.parent, bindings):
        (package / "__init__.py").write_text("")
    if program is not None:
        (bindings / "driver.py").write_text(program)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    client = RankClient(TransferConfig(device="cuda", kv_owner="transfer"), SMALL, NUM_GPU, NUM_CPU)
    with pytest.raises(RankStartError, match=message) as raised:
        client.start(lambda result: None)
    assert "Traceback" not in str(raised.value) and not client.available
    client.stop()
    client.__dict__.clear()  # pytest still holds the frame when the leak fixture looks


# -- handles


def test_a_rank_makes_its_own_arrays(driver: RecordingDriver, images: np.ndarray) -> None:
    """Without a handle the rank makes zeroed memory; what one device loads through the handle the other one stores."""
    device, handle = opened(images)
    assert handle.places == LAYOUT.places(NUM_GPU)
    (segment,) = handle.segments
    assert (segment.kind, segment.num_bytes) == ("cuda", LAYOUT.gpu_bytes(NUM_GPU))
    memory = on_gpu(driver, handle)
    assert not memory.any()
    theirs = np.zeros_like(images)
    other, new_kv = open_cuda(setup_of(KVHandle.from_bytes(handle.to_bytes())), theirs)
    assert new_kv is None
    gpu, cpu = IDS
    device.copy(IN, cpu, gpu, lambda _: None)
    assert not np.delete(memory, gpu, axis=2).any() and memory[:, :, gpu].any()
    other.copy(OUT, gpu, cpu, lambda _: None)
    assert (theirs[cpu] == images[cpu]).all() and not np.delete(theirs, cpu, axis=0).any()
    device.close()
    other.close()


def test_handles_that_do_not_fit_are_refused(driver: RecordingDriver, images: np.ndarray) -> None:
    """CPU memory, too few blocks, an owner that is gone: refused with the reason, and no CPU memory stays pinned."""
    num_bytes, places = LAYOUT.gpu_bytes(NUM_GPU), LAYOUT.places(NUM_GPU)
    on_cpu = SegmentHandle(kind="memfd", num_bytes=num_bytes, pid=1, fd=5)
    with pytest.raises(LayoutError, match="in CPU memory; the cuda device needs them on the GPU"):
        open_cuda(setup_of(KVHandle((on_cpu,), places)), images)
    gone = SegmentHandle(kind="cuda", num_bytes=num_bytes, ipc_handle=bytes(64))
    with pytest.raises(LayoutError, match="has 5 blocks; the GPU pool needs 6"):
        open_cuda(setup_of(KVHandle((gone,), LAYOUT.places(NUM_GPU - 1))), images)
    driver.fail["cuIpcOpenMemHandle"] = 201
    with pytest.raises(DeviceError, match=r"cuIpcOpenMemHandle failed: CUDA_ERROR_201"):
        open_cuda(setup_of(KVHandle((gone,), places)), images)
    assert driver.pinned == {}


def test_arrays_in_one_allocation_share_its_handle(driver: RecordingDriver) -> None:
    """A framework's pool: each allocation is a segment once, each array's place is its offset there and its stride."""
    cuda = Cuda(0)
    pool, single = (cuda.call("cuMemAlloc", size) for size in (4096 + 10 * NUM_GPU * PART, NUM_GPU * PART))

    def array(address: int, stride: int = PART) -> ArrayPlace:
        return ArrayPlace(
            address=address, shape=(NUM_GPU, 64), strides_bytes=(stride, 2), item_bytes=2, device="cuda", device_id=0
        )

    layers = [
        {"key": array(pool + 512), "value": array(pool + 512 + PART, 2 * PART)},
        {"key": array(single), "value": array(pool)},
    ]
    handle = export_kv(SMALL, layers, 0)
    assert handle.places == (
        (Place(0, 512, PART, NUM_GPU), Place(0, 512 + PART, 2 * PART, NUM_GPU)),
        (Place(1, 0, PART, NUM_GPU), Place(0, 0, PART, NUM_GPU)),
    )
    assert [segment.num_bytes for segment in handle.segments] == [driver.on_gpu[pool], driver.on_gpu[single]]
    assert [open_segment(cuda, segment) for segment in handle.segments] == [pool, single]


def test_arrays_on_the_cpu_are_not_exported(driver: RecordingDriver) -> None:
    """There is no GPU handle of a NumPy array: LayoutError with where it is."""
    array = np.zeros((NUM_GPU, 64), np.float16)
    with pytest.raises(LayoutError, match="an array is on cpu:0; export_kv is for GPU 0"):
        export_kv(SMALL, [{"key": array, "value": array}] * 2, 0)


# -- pinned memory


@pytest.mark.parametrize("row_bytes", [1, 4096, 3 * 5 * 7 * 512, 2**21 + 16, 61 * 64 * 576 * 2])
def test_memory_is_pinned_in_pieces_that_end_between_rows(driver: RecordingDriver, row_bytes: int) -> None:
    """Registrations tile the memory, none is larger than 64 GiB, and none ends inside a block or a page."""
    address, num_bytes = 2**40, 200 * 2**30 // row_bytes * row_bytes
    starts = Cuda(0).pin(address, num_bytes, row_bytes)
    assert [start for start, _ in driver.registered] == starts and len(starts) == 4
    end = address
    for start, size in driver.registered:
        assert start == end and 0 < size <= 64 * 2**30
        assert (start - address) % row_bytes == 0 and start % 4096 == 0
        end = start + size
    assert end == address + num_bytes


def test_close_unpins_what_was_pinned(driver: RecordingDriver, images: np.ndarray) -> None:
    """The CPU blocks are registered as they are, and given back once, however often the device is closed."""
    device, _ = opened(images)
    assert driver.registered == [(images.ctypes.data, images.nbytes)]
    device.close()
    device.close()
    assert driver.unregistered == [images.ctypes.data] and driver.pinned == {}


def test_without_cpu_blocks_nothing_is_pinned(driver: RecordingDriver) -> None:
    """An empty CPU tier has no memory to register; copies within the GPU work."""
    device, _ = opened(np.empty((0, LAYOUT.block_bytes), np.uint8))
    moved = device.copy(COPY, IDS[0][:1], IDS[0][1:2], lambda _: None)
    assert moved == LAYOUT.block_bytes and driver.registered == []
    device.close()


# -- failures


@pytest.mark.parametrize(("code", "lost"), [(700, True), (999, True), (719, True), (2, False), (1, False)])
@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync", "cuEventRecord"])
def test_only_errors_that_stick_lose_the_device(
    driver: RecordingDriver, images: np.ndarray, call: str, code: int, lost: bool
) -> None:
    """After an illegal address only a new process recovers, after want of memory the next copy may succeed."""
    device, _ = opened(images)
    assert not device.is_lost
    driver.fail[call] = code
    with pytest.raises(DeviceError, match=rf"{call} failed: \w+ \({code}\)"):
        device.copy(OUT, *IDS, lambda _: None)
    assert device.is_lost == lost
    if not lost:
        assert device.copy(OUT, *IDS, lambda _: None) == 3 * LAYOUT.block_bytes
    device.close()


@pytest.mark.parametrize("kind", [kind for kind in TaskKind if kind.is_swap])
@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync", "cuEventRecord", "cuEventSynchronize"])
def test_a_failing_copy_waits_for_what_it_started(
    driver: RecordingDriver, images: np.ndarray, kind: TaskKind, call: str
) -> None:
    """When it raises nothing is being written any more: its blocks may be given out again."""
    device, _ = opened(images)
    driver.num_done = 0
    gpu, cpu = IDS
    sources, destinations = {OUT: (gpu, cpu), IN: (cpu, gpu), COPY: (gpu, np.array([2, 3, 5], np.int32))}[kind]
    driver.fail[call] = 2
    with pytest.raises(DeviceError, match=f"{call} failed"):
        device.copy(kind, sources, destinations, lambda _: None)
    assert driver.num_pending == 0 and driver.num_done > 0
    device.close()


def test_a_layer_is_told_when_its_bytes_are_in(driver: RecordingDriver, images: np.ndarray) -> None:
    """The driver copies only what is waited for: at each layer's call that layer is in, and the next is still not."""
    device, handle = opened(images)
    memory, told = on_gpu(driver, handle), list[tuple[int, list[bool]]]()
    gpu, cpu = IDS
    wanted = images[cpu].reshape(len(cpu), LAYOUT.num_layers, len(LAYOUT.parts), -1).swapaxes(0, 1)

    def on_layer(num_layers: int) -> None:
        told.append((num_layers, [bool((memory[i, :, gpu] == wanted[i]).all()) for i in range(LAYOUT.num_layers)]))

    device.copy(IN, cpu, gpu, on_layer)
    assert told == [(1, [True, False, False]), (2, [True, True, False]), (3, [True, True, True])]
    device.close()

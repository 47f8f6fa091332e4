"""The copy kernel on a simulated driver: when it is used, its table, and how many launches a copy takes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fastdeploy_cache.transfer_manager.device import copy_kernel
from fastdeploy_cache.transfer_manager.device.cuda import CudaDevice
from fastdeploy_cache.transfer_manager.task import Lane
from tests.rigs.cuda_rank import IDS, IN, LAYOUT, NUM_CPU, OUT, RecordingDriver, on_gpu, opened
from tests.rigs.fake_cuda import FakeDriver, install


@pytest.fixture
def images() -> np.ndarray:
    """The CPU blocks' memory, random."""
    return np.random.default_rng(1).integers(0, 256, (NUM_CPU, LAYOUT.block_bytes), dtype=np.uint8)


@pytest.mark.parametrize(("kernel_seconds", "is_used"), [(0.5, True), (0.9, False), (2.0, False)])
def test_measuring_the_kernel_gives_its_memory_back(
    monkeypatch: pytest.MonkeyPatch, images: np.ndarray, kernel_seconds: float, is_used: bool
) -> None:
    """Scratch memory is freed, only arrays, CPU blocks and tables stay; the kernel is used if it is clearly faster."""
    driver = RecordingDriver()
    install(monkeypatch, driver, compiler=True)
    seconds: list[Callable[[], None]] = []

    def timed(self: CudaDevice, start: Callable[[], None]) -> float:
        start()
        self._cuda.call("cuStreamSynchronize", self._streams[Lane.IN])
        seconds.append(start)
        return 1.0 if len(seconds) % 2 else kernel_seconds  # the kernel is the second of each pair

    monkeypatch.setattr(CudaDevice, "_time", timed)
    device, handle = opened(images)
    assert seconds and driver.num_copies["cuLaunchKernel"] and not device.is_lost
    assert list(driver.on_gpu.values()) == [handle.segments[0].num_bytes]
    table = 16 * copy_kernel.TABLE_PIECES
    assert sorted(driver.pinned.values()) == sorted([table, table, images.nbytes])
    launched = driver.num_copies["cuLaunchKernel"]
    device.copy(IN, IDS[1], IDS[0], lambda _: None)
    assert (driver.num_copies["cuLaunchKernel"] > launched) == is_used
    device.close()


def test_launches_that_fit_the_table_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, images: np.ndarray
) -> None:
    """All layers of a load are started before anything of it has been copied."""
    monkeypatch.setattr(CudaDevice, "_goes_by_kernel", lambda self, size, use: True)
    driver = RecordingDriver()
    install(monkeypatch, driver, compiler=True)
    device, _ = opened(images)
    waiting: list[int] = []
    monkeypatch.setattr(driver, "cuEventSynchronize", lambda event: waiting.append(driver.num_pending) or run(event))
    run = FakeDriver.cuEventSynchronize.__get__(driver)
    device.copy(IN, IDS[1], IDS[0], lambda _: None)
    assert waiting == [LAYOUT.num_layers, 2, 1] and driver.num_copies["cuLaunchKernel"] == LAYOUT.num_layers
    device.close()


def test_a_launch_holds_no_more_vectors_than_its_numbers_can(
    monkeypatch: pytest.MonkeyPatch, images: np.ndarray
) -> None:
    """The kernel counts in 32 bits: what would be more goes in several launches, and every byte arrives."""
    monkeypatch.setattr(copy_kernel, "_MOST_VECTORS", 2 * LAYOUT.parts[0].num_bytes // copy_kernel.KERNEL_ALIGNMENT)
    monkeypatch.setattr(CudaDevice, "_goes_by_kernel", lambda self, size, use: True)
    driver = RecordingDriver()
    install(monkeypatch, driver, compiler=True)
    device, handle = opened(images)
    memory, (gpu, cpu) = on_gpu(driver, handle), IDS
    device.copy(IN, cpu, gpu, lambda _: None)
    assert driver.num_copies["cuLaunchKernel"] == 3 * LAYOUT.num_layers  # 6 pieces of a layer, 2 at a time
    assert memory[:, :, gpu].transpose(2, 0, 1, 3).tobytes() == images[cpu].tobytes()
    device.close()


def test_more_pieces_than_the_table_holds_go_in_several_launches(
    monkeypatch: pytest.MonkeyPatch, images: np.ndarray
) -> None:
    """The table is filled anew only when the launch before has read it: every byte arrives, out and in."""
    monkeypatch.setattr(copy_kernel, "TABLE_PIECES", 4)
    monkeypatch.setattr(CudaDevice, "_goes_by_kernel", lambda self, size, use: True)
    driver = RecordingDriver()
    install(monkeypatch, driver, compiler=True)
    device, handle = opened(images)
    memory, (gpu, cpu) = on_gpu(driver, handle), IDS
    wanted = images[cpu].copy()
    device.copy(IN, cpu, gpu, lambda _: None)
    assert driver.num_copies["cuLaunchKernel"] == 6  # 3 layers, each of 3 blocks with 2 rows: 4 pieces and 2
    assert memory[:, :, gpu].transpose(2, 0, 1, 3).tobytes() == wanted.tobytes()
    images[cpu] = 0
    device.copy(OUT, gpu, cpu, lambda _: None)
    assert driver.num_copies["cuLaunchKernel"] == 6 + 5  # 18 pieces
    assert (images[cpu] == wanted).all() and driver.num_copies["cuMemcpyBatchAsync"] == 0
    device.close()

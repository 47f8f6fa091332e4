"""The calls of the CUDA driver held against NVIDIA's own bindings, as far as that goes without a GPU; their ends."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.errors import DeviceError
from fastdeploy_cache.transfer_manager.device.cuda import CudaDevice
from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.fake_cuda import FakeDriver, install

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8).for_rank(1, 4)
NUM_GPU, NUM_CPU = 4, 5
FREE = 2**40, 2**41  # addresses that nobody has


def calls_of(driver: Any) -> dict[str, tuple[Any, ...]]:
    """Every call of ours, with arguments of the types that we give."""
    stream, event, base, device = driver.CUstream(0), driver.CUevent(0), driver.CUdeviceptr(5), driver.CUdevice(0)
    values = (FREE[0], FREE[1], 1, 1), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    flags, pinned = driver.CUevent_flags, driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    by_host = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    return {
        "cuInit": (0,),
        "cuDriverGetVersion": (),
        "cuDeviceGetCount": (),
        "cuDeviceGet": (0,),
        "cuDeviceGetName": (64, device),
        "cuDeviceGetPCIBusId": (64, device),
        "cuDeviceTotalMem": (device,),
        "cuDeviceGetAttribute": (by_host, device),
        "cuDevicePrimaryCtxRetain": (device,),
        "cuCtxSetCurrent": (driver.CUcontext(0),),
        "cuCtxSynchronize": (),
        "cuStreamCreate": (driver.CUstream_flags.CU_STREAM_NON_BLOCKING,),
        "cuStreamSynchronize": (stream,),
        "cuStreamDestroy": (stream,),
        "cuEventCreate": (flags.CU_EVENT_DISABLE_TIMING | flags.CU_EVENT_BLOCKING_SYNC,),
        "cuEventRecord": (event, stream),
        "cuEventSynchronize": (event,),
        "cuEventDestroy": (event,),
        "cuGetProcAddress": (b"cuMemcpyBatchAsync", 12080, 0),
        "cuMemcpyAsync": (*FREE, 5, stream),
        "cuMemcpyHtoD": (*FREE, 5),
        "cuMemcpyDtoH": (*FREE, 5),
        "cuMemAlloc": (100,),
        "cuMemFree": (FREE[0],),
        "cuMemGetInfo": (),
        "cuMemGetAddressRange": (FREE[0],),
        "cuMemsetD8": (base, 0, 100),
        "cuMemsetD8Async": (base, 0, 100, stream),
        "cuMemHostAlloc": (100, 3),
        "cuMemFreeHost": (FREE[1],),
        "cuMemHostRegister": (FREE[1], 4096, pinned),
        "cuMemHostUnregister": (FREE[1],),
        "cuIpcGetMemHandle": (base,),
        "cuIpcOpenMemHandle": (driver.CUipcMemHandle(), driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
        "cuModuleLoadData": (b"code",),
        "cuModuleGetFunction": (driver.CUmodule(0), b"copy_pieces"),
        "cuModuleUnload": (driver.CUmodule(0),),
        "cuLaunchKernel": (driver.CUfunction(0), 1, 1, 1, 1, 1, 1, 0, stream, values, 0),
    }


@pytest.mark.processes
def test_the_real_bindings_take_our_arguments() -> None:
    """Without a driver each call gets as far as to look for it: names, numbers and types of its arguments are right."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings are an extra, and not installed here")
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has an NVIDIA driver, which would be called")
    for name, arguments in calls_of(driver).items():
        with pytest.raises(RuntimeError):
            getattr(driver, name)(*arguments)
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    assert ctypes.string_at(attributes.getPtr(), 24) == (1).to_bytes(4, "little") + bytes(20)


def test_every_call_of_the_product_is_among_those() -> None:
    """What the product calls by name is in the list above, so that a new call is looked at, too."""
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings are an extra, and not installed here")
    root, known = Path(__file__).parents[2], set(calls_of(real))
    sources = [*(root / "transfer_manager/device").glob("cuda*.py"), *(root / "launch").rglob("*.py")]
    text = "\n".join(source.read_text() for source in sources)
    named = {word.split('"')[0] for word in text.split('"') if word.startswith("cu") and word[2:3].isupper()}
    assert named - {"cuMemcpyBatchAsync"} <= known and len(named) > 30


class StrangeDriver(FakeDriver):
    """Its bindings know no codes above 999, and say so as NVIDIA's do."""

    @staticmethod
    def CUresult(code: int) -> object:  # noqa: N802 (NVIDIA's name)
        raise ValueError(f"{code} is not a valid CUresult")


def device_of(cuda: Cuda, images: np.ndarray) -> CudaDevice:
    base = int(cuda.call("cuMemAlloc", LAYOUT.gpu_bytes(NUM_GPU)))
    places = LAYOUT.places(NUM_GPU)
    return CudaDevice(LAYOUT, cuda, bases=[base], places=places, images=images, num_gpu_blocks=NUM_GPU, kernel="always")


@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync", "cuEventRecord"])
def test_a_code_that_the_bindings_do_not_know(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A newer driver's error: DeviceError with its number, and a new process, as nobody knows what else it means."""
    driver = StrangeDriver()
    install(monkeypatch, driver)
    device = device_of(Cuda(0), np.zeros((NUM_CPU, LAYOUT.block_bytes), np.uint8))
    driver.fail[call] = 4242
    ids = np.array([0], np.int32)
    with pytest.raises(DeviceError, match=rf"{call} failed: a code that these cuda-bindings do not know \(4242\)"):
        device.copy(TaskKind.SWAP_OUT, ids, ids, lambda _: None)
    assert device.is_lost


def test_bindings_that_raise_for_such_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's make an enumeration of the code before they return it: their ValueError is a DeviceError of ours. Only
    one about a code that the driver has returned says that the GPU is lost; one about an argument does not."""
    driver = FakeDriver()
    install(monkeypatch, driver)
    cuda = Cuda(0)
    said = ""

    def raises(*_: object) -> None:
        raise ValueError(said)

    monkeypatch.setattr(driver, "cuMemGetInfo", raises)
    said = "9 is not a valid CUmemLocationType"
    with pytest.raises(DeviceError, match="cuMemGetInfo failed in cuda-bindings: 9 is not a valid CUmemLocationType"):
        cuda.call("cuMemGetInfo")
    assert not cuda.is_lost
    said = "4242 is not a valid CUresult"
    with pytest.raises(DeviceError, match="cuMemGetInfo failed: 4242 is not a valid CUresult; newer cuda-bindings"):
        cuda.call("cuMemGetInfo")
    assert cuda.is_lost


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much it was, the driver's word, and what to do about it."""
    driver = FakeDriver()
    install(monkeypatch, driver)
    driver.fail["cuMemHostRegister"] = 2
    images = np.zeros((NUM_CPU, LAYOUT.block_bytes), np.uint8)
    with pytest.raises(
        DeviceError, match=rf"{images.nbytes} bytes of CPU blocks cannot be pinned: .*OUT_OF_MEMORY.*ulimit"
    ):
        device_of(Cuda(0), images)


def test_close_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, events, the kernel and its tables, not only pinned memory: a process may open device after device."""
    driver = FakeDriver()
    install(monkeypatch, driver, compiler=True)
    cuda = Cuda(0)
    device = device_of(cuda, np.zeros((NUM_CPU, LAYOUT.block_bytes), np.uint8))
    assert device.kernel_piece_bytes == {LAYOUT.parts[0].num_bytes} and driver.pinned and driver._events
    device.close()
    device.close()
    assert (driver.pinned, driver._events) == ({}, {}) and len(driver.on_gpu) == 1  # the arrays are not the device's


def test_after_a_loss_nothing_is_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost context answers every call with the same error, which must not hide why the process ends."""
    driver = FakeDriver()
    install(monkeypatch, driver, compiler=True)
    device = device_of(Cuda(0), np.zeros((NUM_CPU, LAYOUT.block_bytes), np.uint8))
    driver.lost = 700
    ids = np.array([1], np.int32)
    with pytest.raises(DeviceError, match=r"ILLEGAL_ADDRESS \(700\)"):
        device.copy(TaskKind.SWAP_IN, ids, ids, lambda _: None)
    device.close()


def test_bindings_older_than_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new driver under bindings that have no attributes for batches: single copies, and no AttributeError."""
    driver = FakeDriver()
    monkeypatch.delattr(FakeDriver, "CUmemcpyAttributes")
    install(monkeypatch, driver)
    assert not Cuda(0).has_batch
    monkeypatch.undo()
    install(monkeypatch, FakeDriver())
    assert Cuda(0).has_batch and not Cuda(0, may_batch=False).has_batch

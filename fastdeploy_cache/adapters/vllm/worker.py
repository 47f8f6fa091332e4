"""The workers' half of the vLLM connector: hands KV arrays over and waits for loads. No byte is moved here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy_cache.adapters.vllm.groups import layer_order
from fastdeploy_cache.adapters.vllm.step import LayerwiseLoad, StepPlan, WorkerKV
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import ConfigError, LayoutError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVMemory
from fastdeploy_cache.transfer_manager.kv.tensors import ArrayPlace, SharedSpan, share_in_place, shared_handle
from fastdeploy_cache.transfer_manager.rank.layer_progress import LayerProgress

_DIMENSIONS = "HNC"  # of a layer's cache behind its blocks: head slots, tokens, content


class WorkerHalf:
    """One for each rank, in vLLM's worker process. One thread at a time, as vLLM calls it."""

    def __init__(self, config: CacheConfig, rank: int, layer_names: Sequence[str] = ()) -> None:
        """`layer_names`: of a model with several KV cache groups, in the order of the layout's layers."""
        self._config, self._rank, self._layer_names = config, rank, tuple(layer_names)
        self._layer_of: dict[str, int] = {}
        self.kv: WorkerKV | None = None  # what the scheduler's half attaches; None before `register`
        self._spans: list[SharedSpan] = []
        self._progress: LayerProgress | None = None
        self._plan: StepPlan | None = None
        self._waiting: list[LayerwiseLoad] = []
        self._deadline = 0.0
        self._failed: set[int] = set()
        self._failed_requests: set[str] = set()

    # -- KV arrays

    @property
    def layout(self) -> RankLayout:
        """What a block of this rank's looks like."""
        layout = self._config.rank_layout()
        assert layout is not None
        return layout

    def share(self, memory: KVMemory) -> None:
        """On the CPU device, before `register`: the shared memory that the tensors lie in already."""
        self._spans = [SharedSpan.of(segment) for segment in memory.segments]

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """vLLM's caches by layer name, each [blocks, heads, tokens, content] of any strides that keep a block together.

        Raises:
            LayoutError: the bytes of a block lie apart, or are not as many as the model's configuration says.
            NotEnoughMemoryError: on the CPU device, /dev/shm has no room for the caches, which are moved there.
        """
        if self._config.transfer.device == "cpu" and not self._spans:
            self._spans = share_in_place(kv_caches.values())  # before their addresses are looked at: these change
        layout, places = self.layout, list[dict[str, ArrayPlace]]()
        index_of: dict[tuple[int, str], int] = {}  # layers of one group may share one cache
        orders: dict[int, set[str]] = {}  # by row
        for name in self._layer_names or layer_order(kv_caches):
            if name not in kv_caches:
                raise LayoutError(f"layer {name!r} has no KV cache here; there are {', '.join(sorted(kv_caches))}")
            cache = kv_caches[name]
            at = cache.data_ptr(), name if self._layer_names else ""
            if at not in index_of:
                number = index_of[at] = len(places)
                place, order = _place_of(name, cache, self._config.pool_sizes()[0])
                known = min(number, layout.num_layers - 1)  # what is too much is refused with the whole
                places.append({layout.parts_of(known)[0].name: place})
                orders.setdefault(layout.row_of(known), set()).add(order)
            self._layer_of[name] = index_of[at]
        for found in orders.values():
            if len(found) > 1:
                raise LayoutError(f"layers lie in different orders: {sorted(found)}; they must all be alike")
        order = " | ".join(each for _, found in sorted(orders.items()) for each in found)
        self.kv = WorkerKV(self._handle(places).to_bytes(), order)

    def _handle(self, places: Sequence[Mapping[str, ArrayPlace]]) -> KVHandle:
        if self._config.transfer.device == "cuda":
            from fastdeploy_cache.transfer_manager.device.cuda import export_kv

            return export_kv(self.layout, places, next(iter(places[0].values())).device_id)
        return shared_handle(self.layout, places, self._spans, os.getpid())

    # -- a step

    def begin(self, plan: StepPlan) -> None:
        """The step's work. Waits for nothing."""
        self._plan = plan
        self._waiting = list(plan.loads)
        self._deadline = SYSTEM_CLOCK.now() + plan.timeout_seconds
        self._failed |= plan.failed_block_ids
        self._failed_requests |= plan.failed
        if plan.loads and self._progress is None:
            self._progress = LayerProgress.open(plan.progress[self._rank])

    def wait_layer(self, name: str) -> None:
        """Return when the layer's blocks are there, or are known not to come.

        Raises:
            ConfigError: vLLM names a layer that it has not registered.
        """
        if self._waiting:
            if name not in self._layer_of:
                raise ConfigError(f"layer {name!r} has no KV cache here; known: {', '.join(sorted(self._layer_of))}")
            self._wait(self._layer_of[name])

    def wait_all(self) -> None:
        """Wait for all loads before the step ends: its blocks may be given to others behind it, so nothing may still be
        written there."""
        if self._waiting:
            self._wait(max(self._layer_of.values()))
            self._waiting = []

    def _wait(self, layer: int) -> None:
        assert self._progress is not None
        for load in list(self._waiting):
            seconds = max(0.0, self._deadline - SYSTEM_CLOCK.now())
            if not self._progress.wait_layer(load.task_ids, layer, seconds):
                self._waiting.remove(load)
                self._failed.update(load.block_ids)

    def take_received(self) -> set[str]:
        """Requests whose loads between steps have ended. Ends the step."""
        plan, self._plan = self._plan, None
        return set(plan.received) if plan is not None else set()

    def take_failed(self) -> set[int]:
        """GPU blocks that do not hold what they should."""
        failed, self._failed = self._failed, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Requests whose loads have failed, of a model with several KV cache groups."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed


def _place_of(name: str, cache: Any, num_blocks: int) -> tuple[ArrayPlace, str]:
    """A layer's blocks as rows of bytes, and the order of the dimensions inside one."""
    shape, strides, item_bytes = tuple(cache.shape), tuple(cache.stride()), cache.element_size()
    found = f"layer {name!r} is {shape} with strides {strides}"
    if not shape or shape[0] % num_blocks or not shape[0]:
        raise LayoutError(f"{found}; its first dimension must be a multiple of vLLM's {num_blocks} blocks")
    ratio = shape[0] // num_blocks  # an attention kernel's blocks may be smaller than vLLM's
    inner = [(size, stride) for size, stride in zip((ratio, *shape[1:]), strides, strict=True) if size > 1]
    num_items = ratio * cache[0].numel()
    if sum((size - 1) * stride for size, stride in inner) + 1 != num_items:
        raise LayoutError(
            f"{found}: a block's {num_items} elements lie apart; set VLLM_KV_CACHE_LAYOUT to one that keeps a block "
            "together, such as LBNHC or BLNHC"
        )
    place = ArrayPlace(
        address=cache.data_ptr(),
        shape=(num_blocks, num_items * item_bytes),
        strides_bytes=(ratio * strides[0] * item_bytes, 1),
        item_bytes=1,
        device=cache.device.type,
        device_id=cache.device.index or 0,
    )
    by_stride = sorted(range(1, len(shape)), key=lambda axis: (-strides[axis], axis))
    names = _DIMENSIONS if len(shape) == 4 else "".join(str(axis) for axis in range(1, len(shape)))
    order = "".join(names[axis - 1] for axis in by_stride if shape[axis] > 1)
    return place, f"{order} x{ratio}"

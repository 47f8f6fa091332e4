"""vLLM's KV connector over a `PrefixCacheManager`: `--kv-transfer-config` names this module and the class.

vLLM keeps its own blocks and its own prefix cache on the GPU. Below it, this connector brings a CPU tier and storage;
the ranks' processes move the bytes, straight from and to vLLM's KV arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

try:
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
except ImportError as error:
    raise ImportError(
        f"fastdeploy_cache.adapters.vllm.connector needs vLLM 0.29 or newer ({error}); "
        "load it by vLLM's --kv-transfer-config, where vLLM is installed"
    ) from error

from fastdeploy_cache.adapters.known_versions import VLLM
from fastdeploy_cache.adapters.vllm.connector_metrics import (
    ConnectorCounters,
    ConnectorStats,
    hits_by_source,
    storage_source,
)
from fastdeploy_cache.adapters.vllm.log import show_log
from fastdeploy_cache.adapters.vllm.scheduler import SchedulerHalf
from fastdeploy_cache.adapters.vllm.settings import is_layerwise, settings_of
from fastdeploy_cache.adapters.vllm.step import StepPlan, WorkerKV
from fastdeploy_cache.adapters.vllm.worker import WorkerHalf
from fastdeploy_cache.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from fastdeploy_cache.transfer_manager.kv.memory import KVMemory


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Scheduler to workers."""

    plan: StepPlan


@dataclass
class KVMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker to scheduler, once."""

    kv: WorkerKV


@dataclass
class StepDone(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Worker to scheduler, after a step that computed on loads or was told of failed ones."""

    number: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepDone:
        """What all of them have done."""
        assert isinstance(other, StepDone)
        return StepDone(min(self.number, other.number))


class FastDeployCacheConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One in vLLM's scheduler, one in each worker. Called by one thread at a time, as vLLM does."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Starts the ranks, in the scheduler's role.

        Raises:
            ConfigError: the model, the parallelism or a setting cannot be served.
            NotEnoughMemoryError: the CPU tier does not fit.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        show_log()
        VLLM.check(vllm.__version__)
        settings = settings_of(vllm_config, kv_cache_config)
        if settings.groups.rows and not hasattr(KVConnectorBase_V1, "get_transfer_results"):
            raise ConfigError(
                f"this is vLLM {vllm.__version__}, which cannot be told that the load of a request has failed, and the "
                "model has several KV cache groups; use 0.30 or newer, or give --disable-hybrid-kv-cache-manager"
            )
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._number_done: int | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                settings.cache,
                settings.kv_format,
                is_layerwise=settings.layerwise_load,
                groups=settings.groups,
                metrics=settings.metrics,
            )
            self._storage_source = storage_source(settings.cache)
        else:
            parallel = vllm_config.parallel_config
            rank = parallel.rank % parallel.tensor_parallel_size
            self._worker = WorkerHalf(settings.cache, rank, settings.layer_names)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not stored is computed again."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:  # noqa: ARG003 (vLLM's signature)
        """Its KV memory comes from an allocator that cannot be shared."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Waiting for a layer happens between pieces."""
        return is_layerwise(extra_config)

    def shutdown(self) -> None:
        """Ends the ranks."""
        if self._scheduler is not None:
            self._scheduler.close()

    # -- scheduler

    @property
    def scheduler(self) -> SchedulerHalf:
        """This half; an assertion in a worker."""
        assert self._scheduler is not None, "this connector is a worker's"
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Attaches the workers' KV arrays to the ranks."""
        found = {rank: each.kv for rank, each in metadata.items() if isinstance(each, KVMetadata)}
        self.scheduler.attach(found)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Whose blocks are kept while they are copied."""
        self.scheduler.bind_block_pool(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind those; None: storage is still being asked."""
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Starts the load."""
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:  # noqa: ARG002
        """Which tiers the promised tokens come from; vLLM 0.32 and newer ask it behind `update_state_after_alloc`."""
        return hits_by_source(self.scheduler.hit_of(request), self._storage_source)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Starts to store what has been computed; says what has been loaded."""
        state, num_tokens = scheduler_output.kv_connector_block_state, scheduler_output.num_scheduled_tokens
        offers = getattr(state, "boundary_state_offloads", None) or {}
        works = {}
        for request_id, work in self.scheduler.works(num_tokens, offers).items():
            block_ids = state.get_block_ids(request_id) if state is not None else None
            if block_ids is not None:
                works[request_id] = work, block_ids
        return StepMetadata(self.scheduler.step(works))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """A step has been computed, and what it could not load has been taken out."""
        done = connector_output.kv_connector_worker_meta
        if isinstance(done, StepDone):
            self.scheduler.processed(done.number)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The same of one group, as vLLM's `MultiConnector` asks where another of its connectors knows no groups."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Stores the rest; blocks that are being copied are kept by a reference, so vLLM may free them at once."""
        self.scheduler.finish(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Copies are on their way: go on stepping, so that their blocks come free."""
        return self._scheduler is not None and self._scheduler.kept.is_busy

    def reset_cache(self) -> bool | None:
        """Forget the CPU tier; what is in storage stays."""
        self.scheduler.reset()
        return True

    # -- metrics

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What the manager has counted since the last call, for vLLM's log and its metrics; in the scheduler only."""
        counts = self._scheduler.take_counts() if self._scheduler is not None else {}
        return ConnectorStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """The same from what another process has sent."""
        return ConnectorStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Counters on vLLM's own page of metrics."""
        return ConnectorCounters(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- worker

    @property
    def worker(self) -> WorkerHalf:
        """This half; an assertion in the scheduler."""
        assert self._worker is not None, "this connector is the scheduler's"
        return self._worker

    def share_cpu_memory(self, memory: KVMemory) -> None:
        """Where the KV caches are CPU tensors, before they are registered: the shared memory that they lie in."""
        self.worker.share(memory)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """vLLM has made its KV caches."""
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The handle of the KV arrays, for the scheduler."""
        return KVMetadata(self.worker.kv) if self.worker.kv is not None else None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ARG002
        """The ranks are loading already; take up what to wait for."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self.worker.begin(metadata.plan)
        is_awaited = metadata.plan.loads or metadata.plan.failed_block_ids or metadata.plan.failed
        self._number_done = metadata.plan.number if is_awaited else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until the layer is there, with `layerwise_load`."""
        self.worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        """Nothing: whole blocks are stored after the step."""

    def wait_for_save(self) -> None:
        """The end of a step: no load of it may still write."""
        self.worker.wait_all()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Requests whose loads have ended; there is nothing to say of stores."""
        return None, self.worker.take_received() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The same, and which of them have failed, of a model with several KV cache groups."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving.update(self.worker.take_failed_requests())
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM computes again, or fails on: its `kv_load_failure_policy`."""
        return self.worker.take_failed()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """That the step's loads, and what failed, are over."""
        number, self._number_done = self._number_done, None
        return StepDone(number) if number is not None else None

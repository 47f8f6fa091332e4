"""What FastDeploy's tests and callers read of a cache manager: views, true at the moment of the look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from fastdeploy_cache.adapters.fastdeploy.current_cache import CurrentCache
from fastdeploy_cache.adapters.fastdeploy.held_tasks import HeldTasks
from fastdeploy_cache.adapters.fastdeploy.nodes import BlockNode, NodeView
from fastdeploy_cache.adapters.fastdeploy.task import path_hashes
from fastdeploy_cache.books.run import GPU, Tier
from fastdeploy_cache.metrics.fastdeploy_names import FastDeployNames


class FreeBlockList(Sequence[int]):
    """The free blocks of a tier, lowest first, which is a heap. FastDeploy's schedulers ask for the length in each
    step: that costs no walk over the pool, all else does."""

    def __init__(self, current: CurrentCache, tier: Tier) -> None:
        self._current, self._tier = current, tier

    def __len__(self) -> int:
        return self._current.cache.blocks.view.tier_stats(self._tier).num_free

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._current.cache.blocks.view.free_block_ids(self._tier)[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return repr(self[:])


class Views:
    """The part of the adapter that changes nothing. Each look costs a walk over pool or tree: for tests and doubt."""

    def __init__(self, current: CurrentCache, tasks: HeldTasks) -> None:
        self._current, self._tasks = current, tasks

    def nodes(self) -> NodeView:
        """Every cached block's node, by its id: the block's hash; and the root, with all below it."""
        size = self._current.block_size
        held = {name: path_hashes(task.request, task.num_handed_blocks, size) for name, task in self._tasks.items()}
        return NodeView(self._current.cache.blocks.view.runs(), size, held)

    def lru_leaf_heap(self, tier: Tier) -> list[BlockNode]:
        """Leaves on the GPU, or in the CPU tier only, that no task holds, those first that would be evicted first."""
        return self.nodes().leaves(self._current.cache.blocks.view.eviction_order(tier), on_gpu=tier is GPU)

    def lru_leaf_set(self, tier: Tier) -> set[str]:
        """The node ids of `lru_leaf_heap`: nodes are made anew at each look, ids stay."""
        return {node.node_id for node in self.lru_leaf_heap(tier)}

    @property
    def req_leaf_map(self) -> dict[str, BlockNode]:
        """The last cached node that each task holds."""
        nodes, size = self.nodes(), self._current.block_size
        leaves = {}
        for name, held in self._tasks.items():
            hashes = path_hashes(held.request, held.num_handed_blocks, size)
            leaves[name] = nodes.by_hash.get(hashes[-1].hex(), nodes.root) if hashes else nodes.root
        return leaves

    @property
    def leaf_req_map(self) -> dict[str, set[str]]:
        """The tasks whose last node each is, by node id."""
        tasks: dict[str, set[str]] = {}
        for name, node in self.req_leaf_map.items():
            tasks.setdefault(node.node_id, set()).add(name)
        return tasks

    @property
    def req_to_radix_tree_info(self) -> dict[str, list[Any]]:
        """[Its last node, tokens of it that are in the tree] for each task."""
        size = self._current.block_size
        tokens = {name: held.num_handed_blocks * size for name, held in self._tasks.items()}
        return {name: [node, tokens[name]] for name, node in self.req_leaf_map.items() if name in tokens}

    @property
    def unfilled_req_block_map(self) -> dict[str, list[int]]:
        """The blocks of each v0 task behind the full ones of its prompt: the tail, and the reserve for decoding."""
        return {name: list(held.unfilled_ids) for name, held in self._tasks.items() if held.unfilled_ids}

    @property
    def kvcache_storage_backend(self) -> str | None:
        """The attached store's kind."""
        storage = self._current.cache.config.storage
        return storage.kind if storage is not None else None

    def fastdeploy_names(self, *, with_dp: bool = False) -> FastDeployNames:
        """A collector of FastDeploy's series; `cache.serve_metrics(also=[...])` shows both kinds.

        `with_dp`: with the label `dp`, which they do not have there, for several managers on one page.
        """
        return FastDeployNames(self._current.cache.metrics, self._block_gauges, self._shown_config, with_dp=with_dp)

    def _block_gauges(self) -> dict[str, float]:
        gpu, cpu = (self._current.cache.blocks.view.tier_stats(tier) for tier in Tier)
        num_free = gpu.num_available
        return {
            "available_gpu_block_num": num_free,
            "free_gpu_block_num": gpu.num_free,
            "max_gpu_block_num": gpu.num_blocks,
            "max_cpu_block_num": cpu.num_blocks,
            "available_gpu_resource": gpu.num_free / gpu.num_blocks,
            "gpu_cache_usage_perc": (gpu.num_blocks - num_free) / gpu.num_blocks,
        }

    def _shown_config(self) -> dict[str, object]:
        theirs = self._current.their_config.cache_config
        names = [n for n in vars(theirs) if not n.startswith("_")] if hasattr(theirs, "__dict__") else []
        simple = {n: getattr(theirs, n) for n in names}
        return {n: v for n, v in simple.items() if isinstance(v, str | int | float | bool | None)}

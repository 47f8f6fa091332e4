"""What still departs from the shape that tests/test_shape.py holds. The sets only shrink."""

from __future__ import annotations

INHERITANCE: set[str] = {
    "fastdeploy_cache/adapters/fastdeploy/manager.py: PrefixCacheManager(BlockCalls)",
    "fastdeploy_cache/adapters/fastdeploy/manager.py: PrefixCacheManager(Launching)",
    "fastdeploy_cache/adapters/fastdeploy/manager.py: PrefixCacheManager(PeerCalls)",
    "fastdeploy_cache/adapters/fastdeploy/manager.py: PrefixCacheManager(StorageCalls)",
    "fastdeploy_cache/adapters/fastdeploy/manager.py: PrefixCacheManager(Views)",
    "launch/reference_engine/engine.py: Engine(Intake)",
    "transfer_manager/peer/link_shm.py: _ShmPeer(Peer)",
}
NOT_IMPLEMENTED: set[str] = {
    "fastdeploy_cache/adapters/fastdeploy/peers.py: PeerCalls._hand_over",
    "fastdeploy_cache/adapters/fastdeploy/peers.py: PeerCalls._held",
    "fastdeploy_cache/adapters/fastdeploy/storage.py: StorageCalls._held",
    "fastdeploy_cache/adapters/fastdeploy/storage.py: StorageCalls._show_proven",
    "fastdeploy_cache/policies/eviction.py: _ForATime.level",
    "fastdeploy_cache/policies/eviction.py: _ForATime.mark",
    "ipc/codec.py: _to_wire",
}
LONG_CLASSES: set[str] = {
    "fastdeploy_cache/adapters/fastdeploy/manager.py: PrefixCacheManager",
    "fastdeploy_cache/books/prefix_tree.py: PrefixTree",
    "launch/reference_engine/engine.py: Engine",
}
REWIRED: set[str] = set()
DOCSTRINGS: set[str] = {
    "fastdeploy_cache/adapters/fastdeploy/blocks.py: BlockCalls.allocate_cpu_blocks",
    "fastdeploy_cache/adapters/fastdeploy/blocks.py: BlockCalls.recycle_cpu_blocks",
    "fastdeploy_cache/adapters/fastdeploy/config.py: pool_size",
    "fastdeploy_cache/adapters/fastdeploy/launching.py: RankProcess.pid",
    "fastdeploy_cache/adapters/fastdeploy/manager.py: PrefixCacheManager._hold",
    "fastdeploy_cache/adapters/fastdeploy/manager.py: PrefixCacheManager.cache_output_blocks",
    "fastdeploy_cache/adapters/fastdeploy/peer_config.py: _port",
    "fastdeploy_cache/adapters/fastdeploy/storage.py: StorageCalls.write_cache_to_storage_decode",
    "fastdeploy_cache/adapters/fastdeploy/task.py: HeldTask.num_tokens",
    "fastdeploy_cache/adapters/fastdeploy/views.py: Views.leaf_req_map",
    "fastdeploy_cache/adapters/fastdeploy/views.py: Views.req_leaf_map",
    "fastdeploy_cache/adapters/fastdeploy/views.py: Views.req_to_radix_tree_info",
    "fastdeploy_cache/adapters/fastdeploy/views.py: Views.unfilled_req_block_map",
    "fastdeploy_cache/adapters/sglang/radix_cache.py: HiRadixCache._insert",
    "fastdeploy_cache/adapters/slots/__init__.py: the module",
    "fastdeploy_cache/adapters/slots/copies.py: ArraySlots.check",
    "fastdeploy_cache/adapters/slots/copies.py: ArraySlots.copy",
    "fastdeploy_cache/adapters/slots/copies.py: RankSlots.check",
    "fastdeploy_cache/adapters/slots/copies.py: RankSlots.copy",
    "fastdeploy_cache/adapters/slots/pages.py: as_array",
    "fastdeploy_cache/adapters/slots/pages.py: as_integers",
    "fastdeploy_cache/adapters/slots/prefix_cache.py: SlotPrefixCache.copy_slot",
    "fastdeploy_cache/adapters/slots/prefix_cache.py: the module",
    "fastdeploy_cache/adapters/vllm/connector.py: FastDeployCacheConnector.wait_for_layer_load",
    "fastdeploy_cache/adapters/vllm/manager.py: KVCacheManager.prefetch",
    "fastdeploy_cache/adapters/vllm/pool.py: KVCacheBlocks.blocks",
    "fastdeploy_cache/adapters/vllm/pool.py: KVCacheBlocks.get_block_ids",
    "fastdeploy_cache/adapters/vllm/pool.py: PooledBlock.block_hash",
    "fastdeploy_cache/adapters/vllm/pool.py: hash_of",
    "fastdeploy_cache/adapters/vllm/scheduler.py: SchedulerHalf.storable",
    "fastdeploy_cache/adapters/vllm/scheduler.py: _Load.failed_ids",
    "fastdeploy_cache/adapters/vllm/settings.py: the module",
    "fastdeploy_cache/adapters/vllm/worker.py: WorkerHalf.wait_all",
    "launch/bench/pauses.py: _prompts",
    "launch/reference_engine/engine.py: Engine._confirm",
    "launch/reference_engine/engine.py: Engine._hold_seconds",
    "launch/reference_engine/engine.py: Engine._waits",
    "launch/reference_engine/engine.py: Engine.preempt_all",
    "launch/server/engine_control.py: EngineControl._still",
}
WIDE_PAGES: set[str] = set()

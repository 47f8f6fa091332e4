"""SGLang's own host pools over our stores: the pages that SGLang sees are those that were stored, in every layout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang: see launch/engines.sh")
pytest.importorskip("torch", reason="needs SGLang with PyTorch")

import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLAHostAllocation, MLATokenToKVPoolHost

from tests.rigs.sglang_storage import Rank, indices_of, keys_of

NUM_LAYERS, NUM_HEADS, HEAD_DIM, PAGE_SIZE, NUM_TOKENS = 3, 2, 8, 4, 32
SMALL = {"weights_id": "w1", "capacity_bytes": 2**24, "slab_bytes": 2**20, "staging_bytes": 2**16}


def mha_pool(layout: str) -> Any:
    """A pool of keys and values of 64 tokens and a page."""
    buffers = [torch.zeros(NUM_TOKENS, NUM_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2 * NUM_LAYERS)]
    pointers = torch.tensor([each.data_ptr() for each in buffers], dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(buffers[:NUM_LAYERS]),
            v=tuple(buffers[NUM_LAYERS:]),
            k_data_ptrs=pointers[:NUM_LAYERS],
            v_data_ptrs=pointers[NUM_LAYERS:],
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE_SIZE,
        head_num=NUM_HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(info, 2.0, 0, **_common(layout))


def mla_pool(layout: str) -> Any:
    """A pool of latents of the same size; its memory is made here, as it has no device pool."""
    allocation = MLAHostAllocation(
        dtype=torch.bfloat16, kv_lora_rank=16, qk_rope_head_dim=8, kv_cache_dim=24, size_per_token=24 * 2 * NUM_LAYERS
    )
    pool = MLATokenToKVPoolHost(allocation, 2.0, 0, target_layer_num=NUM_LAYERS, **_common(layout))
    pool._transfer_device = torch.device("cpu")
    pool.kv_buffer = pool.init_kv_buffer()
    return pool


def _common(layout: str) -> dict[str, Any]:
    sizes = {"device_capacity_tokens": NUM_TOKENS, "start_layer": 0, "end_layer": NUM_LAYERS}
    return {"page_size": PAGE_SIZE, "layout": layout, "pin_memory": False, "device": "cpu", **sizes}


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("new_pool", [mha_pool, mla_pool])
def test_pages_of_every_layout(new_pool: Any, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang reads of a page, `get_data_page`, is in another page what it was in the first; others stay."""
    monkeypatch.setattr("sglang.srt.mem_cache.pool_host.base.host_memory_budget_bytes", lambda *_, **__: 2**40)
    pool = new_pool(layout)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    before = [pool.get_data_page(PAGE_SIZE * page).clone() for page in range(16)]
    rank, keys = Rank({**SMALL, "folder": str(tmp_path)}, pool), keys_of(4)
    try:
        assert rank.backend.batch_set_v1(keys, torch.from_numpy(indices_of([1, 6, 2, 5]))) == [True] * 4
        assert rank.backend.batch_get_v1(keys, torch.from_numpy(indices_of([11, 9, 14, 8]))) == [True] * 4
    finally:
        rank.backend.close()
    moved = dict(zip([11, 9, 14, 8], [1, 6, 2, 5], strict=True))
    for page in range(16):
        assert torch.equal(pool.get_data_page(PAGE_SIZE * page), before[moved.get(page, page)])


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("new_pool", [mha_pool, mla_pool])
def test_the_last_page_is_the_last(new_pool: Any, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own pool says how long it is: its last page can be stored, and there is none behind it."""
    monkeypatch.setattr("sglang.srt.mem_cache.pool_host.base.host_memory_budget_bytes", lambda *_, **__: 2**40)
    pool = new_pool(layout)
    num_pages = pool.size // PAGE_SIZE
    rank, keys = Rank({**SMALL, "folder": str(tmp_path)}, pool), keys_of(1)
    try:
        for page, is_there in ((num_pages - 1, True), (num_pages, False), (-1, False)):
            assert rank.backend.batch_set_v1(keys, torch.from_numpy(indices_of([page]))) == [is_there]
            assert rank.backend.batch_get_v1(keys, torch.from_numpy(indices_of([page]))) == [is_there]
    finally:
        rank.backend.close()


def test_sglang_has_the_first_rank_alone_write_draft_heads() -> None:
    """Beside an MLA model SGLang skips them on other ranks for every backend but Mooncake's own, and never skips
    states: why `check_pool` refuses the first, and takes the second."""
    other_rank = SimpleNamespace(backup_skip=True, storage_backend_type="dynamic")
    written = [
        HybridCacheController.should_backup(other_rank, PoolTransfer(name=name))
        for name in (PoolName.DRAFT, PoolName.DRAFT_SWA, PoolName.MAMBA)
    ]
    assert written == [False, False, True]

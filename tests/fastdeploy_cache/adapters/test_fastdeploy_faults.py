"""What goes wrong in FastDeploy's own cache manager, and does not here: a test for each known fault."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_cache import KVLayout
from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from fastdeploy_cache.adapters.fastdeploy.task import new_request, path_hashes
from fastdeploy_cache.errors import BlockOwnerError, RequestError
from tests.rigs.call_counts import counted
from tests.rigs.fastdeploy_engine import (
    PROMPT,
    Kernel,
    Task,
    give_up_v1,
    new_config,
    push_out,
    serve_v1,
    with_cpu,
)


def test_01_two_requests_compute_one_prompt_once_in_the_tree(manager: PrefixCacheManager) -> None:
    """Both insert it: 5 nodes, not 10; the second's duplicates go home, and evicting breaks no link."""
    tasks = [Task("a", PROMPT), Task("b", PROMPT)]
    for task in tasks:
        assert manager.request_match_blocks(task, 4)[1] == 0
        task.block_tables = manager.allocate_gpu_blocks(6)
    for task in tasks:
        manager.update_cache_blocks(task, 4, 22)
    assert len(manager.node_map) == 5
    for task in tasks:
        give_up_v1(manager, task)
    assert len(manager.gpu_free_block_list) == 27
    manager.free_block_ids(2)
    assert serve_v1(manager, Task("c", PROMPT), [1]) == 12, "what was not evicted is reachable"


def test_02_no_room_for_a_load_leaves_nothing_behind() -> None:
    """A prompt in the CPU tier and a full GPU: a miss, no pins; with room the next one loads it all."""
    manager = with_cpu(transfer_client="inline")
    serve_v1(manager, Task("a", PROMPT), [1], Kernel(manager))
    push_out(manager)
    held = manager.allocate_gpu_blocks(8)
    before = manager.cache.stats()
    task = Task("b", PROMPT)
    assert manager.request_match_blocks(task, 4)[:2] == ([], 0)
    manager.release_block_ids(task)
    assert manager.cache.stats() == before
    manager.recycle_gpu_blocks(held)
    ids, num_tokens, details = manager.request_match_blocks(task, 4)
    assert num_tokens == details["cpu_match_token_num"] == 20 and details["gpu_recv_block_ids"] == ids
    Kernel(manager).check(PROMPT, ids, 5)
    manager.release_block_ids(task)
    manager.close()


def test_03_eviction_goes_on_where_the_cpu_tier_is_held() -> None:
    """All CPU blocks are taken: what cannot be copied is dropped, and the blocks are free."""
    manager = with_cpu(8, 4, transfer_client="inline")
    held = manager.allocate_cpu_blocks(4)
    serve_v1(manager, Task("a", PROMPT), [1])
    assert manager.free_block_ids(5) == 5 and len(manager.gpu_free_block_list) == 8
    manager.recycle_cpu_blocks(held)
    manager.close()


def test_04_more_than_the_cpu_tier_holds_still_uses_it() -> None:
    """Seven blocks leave the GPU at once, three fit below: three are there."""
    manager = with_cpu(8, 3, transfer_client="inline")
    serve_v1(manager, Task("a", list(range(28))), [1], Kernel(manager))
    push_out(manager)
    stats = manager.cache.stats()
    assert stats.cpu.num_cached == 3 and stats.gpu.num_free == 8
    manager.close()


def test_05_exactly_what_is_missing_is_evicted(manager: PrefixCacheManager) -> None:
    """One free, two needed: one goes."""
    serve_v1(manager, Task("a", PROMPT), [1])
    held = manager.allocate_gpu_blocks(26)
    assert len(manager.gpu_free_block_list) == 1
    assert manager.can_allocate_gpu_blocks(2) and len(manager.gpu_free_block_list) == 2
    assert len(manager.node_map) == 4
    manager.recycle_gpu_blocks(held)


def test_06_a_double_free_is_refused(manager: PrefixCacheManager) -> None:
    """Also of a cached block, and of a list with one bad id: nothing is freed."""
    ids = manager.allocate_gpu_blocks(3)
    manager.recycle_gpu_blocks(ids[0])
    for bad in (ids[0], ids, [1, 1], [99], -1):
        with pytest.raises(BlockOwnerError):
            manager.recycle_gpu_blocks(bad)
    manager.recycle_gpu_blocks(ids[1:])
    serve_v1(manager, Task("a", PROMPT), [1])
    with pytest.raises(BlockOwnerError):
        manager.recycle_gpu_blocks(0)


def test_07_an_empty_prompt_is_refused_before_anything_is_taken(manager: PrefixCacheManager) -> None:
    """In both sequences; the next request with that id is served."""
    for call in (manager.request_match_blocks, manager.request_block_ids):
        with pytest.raises(RequestError, match="no tokens"):
            call(Task("a", []), 4)
    assert serve_v1(manager, Task("a", PROMPT), [1]) == 0


@pytest.mark.processes
def test_08_keys_depend_on_tokens_images_and_namespace_alone() -> None:
    """Lists, arrays of any type, strings made anew, another process: one key. Tenants part."""
    names = [str(b"img", "ascii"), "img"]
    images = [{"mm_positions": [SimpleNamespace(offset=1, length=2)], "mm_hashes": [name]} for name in names]
    tasks = [Task("a", PROMPT, multimodal_inputs=images[0]), Task("b", np.array(PROMPT, np.uint16))]
    tasks[1].multimodal_inputs = images[1]
    keys = [path_hashes(new_request(task), 5, 4) for task in tasks]
    assert keys[0] == keys[1]
    program = (
        "from fastdeploy_cache import Request; from fastdeploy_cache.adapters.fastdeploy.task import path_hashes;"
        f"r = Request(request_id='a', prompt_token_ids={PROMPT}, images=[(1, 2, 'img')]);"
        "print(path_hashes(r, 5, 4)[-1].hex())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.strip() == keys[0][-1].hex()
    tenant = Task("c", PROMPT, multimodal_inputs=images[0])
    tenant.namespace = "tenant"  # type: ignore[attr-defined]
    assert path_hashes(new_request(tenant), 5, 4)[0] != keys[0][0]


def _num_calls_of_a_hit(num_leaves: int) -> int:
    manager = PrefixCacheManager(new_config(2 * num_leaves + 8), 1)
    for number in range(num_leaves):
        serve_v1(manager, Task(f"r{number}", [number % 251, number // 251, 1, 2, 3]), [1])
    # the first request in a new part of the flight recorder's ring is written whole, those behind it refer to it
    serve_v1(manager, Task("first", [0, 0, 1, 2, 8]), [1])
    task = Task("hit", [0, 0, 1, 2, 9])
    (ids, _, _), num_calls = counted(lambda: manager.request_match_blocks(task, 4))
    assert len(ids) == 1
    manager.release_block_ids(task)
    manager.close()
    return num_calls


def test_09_a_hit_costs_the_same_among_many_leaves() -> None:
    """As many calls with 2,000 cached leaves as with 20: nothing walks over them."""
    assert _num_calls_of_a_hit(2000) <= _num_calls_of_a_hit(20) + 5


def test_13_a_node_keeps_its_own_tokens_only(manager: PrefixCacheManager) -> None:
    """Ten chunks of one prompt: each cached token is kept once in all."""
    serve_v1(manager, Task("a", list(range(40))), [1], chunk=4)
    assert sum(run.token_ids.size for run in manager.cache.blocks.view.runs()) == 40


def test_14_a_decode_reserve_ends_with_its_request(manager: PrefixCacheManager) -> None:
    """A reserve behind an aligned prompt does not outlive its request, or a reset, in any node."""
    task = Task("a", PROMPT[:8])
    manager.request_block_ids(task, 4, 8)
    assert manager.unfilled_req_block_map == {"a": [2, 3]}
    manager.reset()
    manager.release_block_ids(task)
    assert manager.unfilled_req_block_map == {} and len(manager.gpu_free_block_list) == 32
    root = manager.radix_tree_root
    root.reverved_dec_block_ids.append(1)
    assert manager.radix_tree_root.reverved_dec_block_ids == []


def test_15_answers_have_their_shape_in_every_state(manager: PrefixCacheManager) -> None:
    """Paused: hits as ever; asleep: a miss of three values; taking blocks then is a clear error."""
    serve_v1(manager, Task("a", PROMPT), [1])
    assert manager.control("pause") == (200, "paused")
    assert serve_v1(manager, Task("b", PROMPT), [1]) == 20
    assert manager.control("sleep") == (200, "asleep")
    task = Task("c", PROMPT)
    ids, num_tokens, details = manager.request_match_blocks(task, 4)
    assert (ids, num_tokens, details["gpu_match_token_num"]) == ([], 0, 0)
    assert not manager.can_allocate_gpu_blocks(1)
    with pytest.raises(AssertionError):
        manager.allocate_gpu_blocks(1)
    manager.release_block_ids(task)
    assert manager.control("resume")[0] == 500 and manager.control("wakeup") == (200, "running")
    bad = [("jump", None), ("pause", {"speed": 1}), ("pause", [1]), ("pause", {"timeout_seconds": "x"}),
           ("pause", {"timeout_seconds": 1e12}), ("sleep", {"tiers": "gpu"})]  # fmt: skip
    assert {manager.control(*each)[0] for each in bad} == {400}
    assert manager.control("sleep", {"tags": "weight"}) == (200, "running"), "not ours"
    assert manager.control("sleep", {"tags": "weight,kv_cache"}) == (200, "asleep")
    assert manager.control("wakeup", {"tags": ["kv_cache"]}) == (200, "running")


@pytest.mark.processes
@pytest.mark.parametrize(
    "layout",
    [
        KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, value_head_dim=4, dtype="bfloat16"),
        KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="uint8", scale_dtype="bfloat16"),
        KVLayout(num_layers=2, num_kv_heads=1, head_dim=8, value_head_dim=0, dtype="bfloat16"),
        KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16", num_extra_layers=1),
    ],
    ids=["values smaller than keys", "fp8 with scales", "latent", "extra layer"],
)
def test_20_21_every_part_and_layer_has_its_size_and_place(layout: KVLayout) -> None:
    """Values of another size, scales, one latent part, a speculative layer: counted, moved and brought back."""
    manager = with_cpu(8, 8, layout=layout)
    per_token = sum(array[0].nbytes for parts in manager.cache.ranks.kv_views(0) for array in parts.values()) // 4
    assert manager.cache.config.block_bytes() == per_token * 4
    kernel = Kernel(manager)
    kernel._value = lambda tokens, block: sum(tokens[: 4 * (block + 1)]) % 100 + 1  # type: ignore[method-assign]
    serve_v1(manager, Task("a", PROMPT), [1], kernel)
    push_out(manager)
    task = Task("b", PROMPT)
    ids, _, details = manager.request_match_blocks(task, 4)
    assert details["cpu_match_token_num"] == 20
    kernel.check(PROMPT, ids, 5)
    manager.release_block_ids(task)
    manager.close()


@pytest.mark.processes
def test_22_no_copy_reads_a_block_before_it_is_computed() -> None:
    """Nothing is copied down between allocation and update_cache_blocks."""
    manager = with_cpu(8, 8)
    task = Task("a", PROMPT)
    manager.request_match_blocks(task, 4)
    task.block_tables = manager.allocate_gpu_blocks(6)
    stats = manager.cache.stats()
    assert stats.num_transfers_in_flight == stats.num_swapped_out_blocks == 0
    Kernel(manager).compute(PROMPT, task.block_tables, 0, 22)
    manager.update_cache_blocks(task, 4, 22)
    give_up_v1(manager, task)
    assert manager.cache.wait_for_transfers(10) and manager.cache.stats().num_swapped_out_blocks == 5
    manager.close()


def test_eviction_takes_tails_and_leaves_the_rest_matchable(manager: PrefixCacheManager) -> None:
    """Two of a chain of five go: three are matched."""
    serve_v1(manager, Task("a", PROMPT), [1])
    manager.free_block_ids(2)
    assert serve_v1(manager, Task("b", PROMPT), [1]) == 12

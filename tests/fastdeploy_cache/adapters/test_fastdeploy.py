"""FastDeploy's cache manager over ours: both call sequences, its views, its tasks, over simulated and real ranks."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_cache.adapters.fastdeploy.config import layout_of
from fastdeploy_cache.adapters.fastdeploy.manager import NotEnoughBlocksError, PrefixCacheManager
from fastdeploy_cache.adapters.fastdeploy.nodes import CacheStatus
from fastdeploy_cache.adapters.fastdeploy.task import new_request, path_hashes
from fastdeploy_cache.errors import ConfigError
from tests.rigs.fastdeploy_engine import (
    PROMPT,
    SUFFIX,
    Kernel,
    Task,
    give_up_v1,
    images,
    launch,
    new_config,
    serve_v0,
    serve_v1,
)


def test_v1_hits_what_an_earlier_request_computed(manager: PrefixCacheManager) -> None:
    """The second equal prompt matches all full blocks; its own tail and duplicates go home."""
    assert serve_v1(manager, Task("a", PROMPT), [1, 2, 3]) == 0
    assert serve_v1(manager, Task("b", PROMPT), [1, 2, 3]) == 20
    assert len(manager.gpu_free_block_list) == 32 - 6
    assert serve_v1(manager, Task("c", [*PROMPT, 1, 2, 9]), [5]) == 24, "the answer was kept, too"


def test_v1_without_output_caching_keeps_prompts_only() -> None:
    """enable_output_caching off: what was said is not found."""
    manager = PrefixCacheManager(new_config(outputs=False), 1)
    serve_v1(manager, Task("a", PROMPT), [1, 2, 3])
    assert serve_v1(manager, Task("b", [*PROMPT, 1, 2, 3, 4, 5]), [7]) == 20
    manager.close()


def test_v1_chunks_are_findable_while_the_request_runs(manager: PrefixCacheManager) -> None:
    """After a chunk another request matches it; not before."""
    task = Task("a", PROMPT)
    manager.request_match_blocks(task, 4)
    task.block_tables = manager.allocate_gpu_blocks(2)
    other = Task("b", PROMPT)
    assert manager.request_match_blocks(other, 4)[1] == 0
    manager.release_block_ids(other)
    manager.update_cache_blocks(task, 4, 8)
    assert task.num_cached_blocks == 2
    ids, num_tokens, details = manager.request_match_blocks(other, 4)
    assert (ids, num_tokens, details["match_gpu_block_ids"]) == (task.block_tables, 8, task.block_tables)
    manager.release_block_ids(other)
    give_up_v1(manager, task)


def test_v1_a_preempted_request_comes_back(manager: PrefixCacheManager) -> None:
    """It gives all back and finds prompt and output again, but for the last token."""
    task = Task("a", PROMPT)
    manager.request_match_blocks(task, 4)
    task.block_tables = manager.allocate_gpu_blocks(7)
    manager.update_cache_blocks(task, 4, 22)
    task.output_token_ids = [1, 2, 3]
    manager.cache_output_blocks(task, 4)
    give_up_v1(manager, task)
    ids, num_tokens, _ = manager.request_match_blocks(task, 4)
    assert num_tokens == 24 and len(ids) == 6
    give_up_v1(manager, task)


def test_v0_is_visible_once_it_has_said_a_token_and_not_before(manager: PrefixCacheManager) -> None:
    """Blocks of a prompt that may still be computed are found by nobody; when it has said something, by everybody."""
    first, second = Task("a", PROMPT), Task("b", PROMPT)
    common, unique, _ = manager.request_block_ids(first, 4, 8)
    assert common == [] and unique == list(range(8)), "22 tokens and 8 of reserve"
    assert manager.unfilled_req_block_map == {"a": [5, 6, 7]}
    assert manager.request_block_ids(second, 4, 0)[0] == []
    manager.release_block_ids(second)
    assert manager.node_map == {}, "released before it was computed"
    first.output_token_ids.append(7)
    common, _, details = manager.request_block_ids(second, 4, 0)
    assert common == [0, 1, 2, 3, 4] and details == {"gpu_cache_blocks": 5, "cpu_cache_blocks": 0}
    manager.release_block_ids(first)
    manager.release_block_ids(second)
    assert len(manager.gpu_free_block_list) == 32 - 5


def test_v0_mark_computed_makes_visible_earlier_or_never(manager: PrefixCacheManager) -> None:
    """Marked tokens are findable at once; a request given up with 0 leaves nothing behind."""
    first, second = Task("a", PROMPT), Task("b", PROMPT)
    manager.request_block_ids(first, 4, 0)
    manager.mark_computed(first, 9)
    assert manager.request_block_ids(second, 4, 0)[0] == [0, 1]
    manager.mark_computed(second, 0)
    manager.release_block_ids(second)
    manager.release_block_ids(first)
    assert len(manager.node_map) == 2, "what was not marked was not published"


@pytest.mark.processes
def test_v0_and_v1_serve_the_same_bytes_over_real_ranks() -> None:
    """Both sequences over two ranks and a small GPU pool: every block read holds what it should, from both tiers."""
    choose = random.Random(3)
    texts = [[(13 * i * i + 5 * text * (i // 8)) % 97 for i in range(48)] for text in range(5)]
    for serve in (serve_v1, serve_v0):
        manager = PrefixCacheManager(new_config(14, 40), 2)
        processes = launch(manager, SUFFIX, tp_size=2)
        assert [p.poll() for p in processes] == [None, None] and len({p.pid for p in processes}) == 2
        kernel, num_from_cpu = Kernel(manager), 0
        for number in range(60):
            prompt = choose.choice(texts)[: choose.randint(1, 40)] + [choose.randint(0, 9)] * choose.choice([0, 0, 5])
            assert manager.cache.wait_for_transfers(10)  # what is being copied down is no room
            serve(manager, Task(f"r{number}", prompt), [1, 2, 3], kernel)
            manager.cache.check_invariants()
        num_from_cpu = manager.cache.stats().num_swapped_in_blocks
        assert num_from_cpu > 30, "the CPU tier was not used"
        manager.close()


def test_a_refused_request_leaves_nothing_behind(manager: PrefixCacheManager) -> None:
    """No room, in either sequence and at any step: the pools and the tree are as before."""
    serve_v1(manager, Task("warm", PROMPT), [1])
    holder = manager.allocate_gpu_blocks(24)
    before = manager.cache.stats()
    with pytest.raises(AssertionError):
        manager.request_block_ids(Task("v0", [*PROMPT[:8], *range(60)]), 4, 4)
    assert manager.cache.stats() == before
    with pytest.raises(AssertionError):
        serve_v1(manager, Task("v1", [*PROMPT[:8], *range(60)]), [1])
    assert not manager.can_allocate_gpu_blocks(9)
    with pytest.raises(NotEnoughBlocksError):
        manager.allocate_gpu_blocks(9)
    assert manager.cache.stats() == before
    manager.recycle_gpu_blocks(holder)


def test_views_show_the_tree(manager: PrefixCacheManager) -> None:
    """Nodes, leaves, maps: as FastDeploy's tests read them."""
    serve_v1(manager, Task("a", PROMPT), [1])
    serve_v1(manager, Task("b", [*PROMPT[:8], *range(8)]), [1])
    nodes = manager.node_map
    assert len(nodes) == 7 and {n.depth for n in nodes.values()} == {1, 2, 3, 4, 5}
    assert all(n.has_in_gpu and n.cache_status is CacheStatus.GPU and not n.shared_count for n in nodes.values())
    root = manager.radix_tree_root
    assert root.is_persistent and len(root.children) == 1
    leaves = manager.gpu_lru_leaf_heap
    assert [n.depth for n in leaves] == [5, 4] and all(n.is_gpu_leaf_node for n in leaves), "oldest first"
    assert sorted(leaves) == leaves and manager.gpu_lru_leaf_set == {n.node_id for n in leaves}
    assert manager.cpu_lru_leaf_heap == [] and manager.cpu_free_block_list == []
    task = Task("c", PROMPT)
    manager.request_match_blocks(task, 4)
    leaf = manager.req_leaf_map["c"]
    assert leaf.depth == 5 and leaf.req_id_set == {"c"} and leaf.shared_count == 1
    assert manager.leaf_req_map == {leaf.node_id: {"c"}}
    node, num_tokens = manager.req_to_radix_tree_info["c"]
    assert (node.node_id, num_tokens) == (leaf.node_id, 20)
    give_up_v1(manager, task)


def test_evicting_by_hand(manager: PrefixCacheManager) -> None:
    """free_block_ids takes exactly as many as asked, from the oldest; free_nodes_directly a chain up to a fork."""
    serve_v1(manager, Task("a", PROMPT), [1])
    serve_v1(manager, Task("b", [*PROMPT[:8], *range(8)]), [1])
    assert manager.free_block_ids(1) == 1 and len(manager.node_map) == 6
    assert manager.free_block_ids_async(1).result() == 1
    other = next(n for n in manager.gpu_lru_leaf_heap if n.depth == 4)
    assert manager.free_nodes_directly(other) == 2, "up to the fork behind block 2"
    assert manager.free_nodes_directly(manager.radix_tree_root) == 0
    assert manager.free_block_ids(100) == 3 and manager.node_map == {}


def test_required_blocks_resource_and_block_size(manager: PrefixCacheManager) -> None:
    """Small helpers, and the refusal of another block size."""
    assert [manager.get_required_block_num(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    ids = manager.allocate_gpu_blocks(8)
    assert ids == list(range(8)) and manager.available_gpu_resource == 0.75
    manager.recycle_gpu_blocks(ids[0])
    manager.recycle_gpu_blocks(ids[1:])
    assert manager.available_gpu_resource == 1.0
    with pytest.raises(ConfigError, match="block_size 16"):
        manager.request_match_blocks(Task("a", PROMPT), 16)


def test_images_part_prompts_and_are_never_cut(manager: PrefixCacheManager) -> None:
    """Same tokens, another image: a miss from the image on; a chunk that ends inside one is matched before it."""
    first = Task("a", PROMPT, multimodal_inputs=images((6, 8, "cat")))
    assert serve_v1(manager, first, [1]) == 0
    assert serve_v1(manager, Task("b", PROMPT, multimodal_inputs=images((6, 8, "cat"))), [1]) == 20
    assert serve_v1(manager, Task("c", PROMPT, multimodal_inputs=images((6, 8, "dog"))), [1]) == 4
    assert serve_v1(manager, Task("d", PROMPT), [1]) == 4
    chunked = Task("e", [*PROMPT[:12], 7, 7, *PROMPT[14:]], multimodal_inputs=images((6, 8, "cat")))
    assert serve_v1(manager, chunked, [1], chunk=8) == 4, "12 tokens agree, but end inside the image"


def test_extra_keys_and_chunked_images(manager: PrefixCacheManager) -> None:
    """Half-open borders; the cursor is carried so that every block gets every image that overlaps it, and stays at the
    last image, which the original refuses to be called behind."""
    task = Task("a", PROMPT, multimodal_inputs=images((4, 4, "x"), (10, 6, "y"), (16, 2, "z")))
    cursor, found, cursors = 0, [], []
    for start in range(0, 20, 4):
        cursor, names = manager.get_block_hash_extra_keys(task, start, start + 4, cursor)
        found.append(names)
        cursors.append(cursor)
    assert found == [[], ["x"], ["y"], ["y"], ["z"]]
    assert cursors == [0, 1, 1, 2, 2]
    assert manager.get_block_hash_extra_keys(task, 18, 22, 1) == (1, []), "behind all images nothing moves"
    assert manager.get_block_hash_extra_keys(Task("b", PROMPT), 0, 4, 3) == (3, [])
    inside = [manager.is_chunked_mm_input(task.multimodal_inputs, n) for n in (0, 4, 5, 8, 10, 12, 16, 17, 18)]
    assert inside == [(n in (5, 12, 17), {12: 1, 17: 2}.get(n, 0)) for n in (0, 4, 5, 8, 10, 12, 16, 17, 18)]
    assert manager.is_chunked_mm_input(None, 5) == (False, 0)


def test_more_arguments_than_are_known_are_not_looked_at(manager: PrefixCacheManager) -> None:
    """Both requests take what callers of the original pass beside its own arguments."""
    task = Task("a", PROMPT)
    assert manager.request_match_blocks(task, 4, "storage", None)[1] == 0
    manager.release_block_ids(task)
    assert manager.request_block_ids(task, 4, 0, "storage", None)[0] == []
    manager.release_block_ids(task)


@pytest.mark.processes
def test_swap_tasks_move_the_callers_blocks() -> None:
    """Explicit GPU and CPU ids: bytes go down, are overwritten, and come back; foreign blocks are refused."""
    manager = PrefixCacheManager(new_config(8, 8), 1)
    launch(manager, SUFFIX)
    kernel = Kernel(manager)
    gpu, cpu, tokens = manager.allocate_gpu_blocks(3), manager.allocate_cpu_blocks(3), list(range(12))
    kernel.compute(tokens, gpu, 0, 12)
    assert manager.issue_swap_task("out", [], gpu, cpu, SimpleNamespace(name="SWAP2CPU"))
    kernel.compute(list(range(50, 62)), gpu, 0, 12)
    assert manager.issue_swap_task("in", [], gpu, cpu, "SWAP2GPU") and manager.sync_swap_task("in")
    kernel.check(tokens, gpu, 3)
    assert manager.task_swapping_event == {}
    with pytest.raises(ValueError, match="SWAP2CPU or SWAP2GPU"):
        manager.issue_swap_task("x", [], gpu, cpu, "CTRL")
    manager.recycle_cpu_blocks(cpu)
    manager.recycle_gpu_blocks(gpu)
    manager.close()


@pytest.mark.processes
def test_storage_brings_back_what_another_engine_wrote(tmp_path: Path) -> None:
    """write_cache_to_storage before release; a new engine matches it from storage, and reads tasks by token ids."""
    store = {"kind": "file", "folder": str(tmp_path), "weights_id": "w", "admission": "all", "capacity_bytes": "10MB"}

    def start() -> PrefixCacheManager:
        made = PrefixCacheManager(new_config(16, 16, kvcache_storage_backend="file", storage=store), 1)
        launch(made, SUFFIX)
        return made

    writer = start()
    assert writer.kvcache_storage_backend == "file"
    serve_v1(writer, Task("a", PROMPT), [1, 2, 3], Kernel(writer))
    assert writer.cache.storage.flush(10)
    writer.close()
    reader = start()
    kernel, task = Kernel(reader), Task("b", PROMPT)
    ids, num_tokens, details = reader.request_match_blocks(task, 4)
    assert num_tokens == details["storage_match_token_num"] == 20 and details["match_storage_block_ids"] == ids
    kernel.check(PROMPT, ids, 5)
    reader.release_block_ids(task)
    own = reader.allocate_gpu_blocks(4)
    keys = [block_hash.hex() for block_hash in path_hashes(new_request(task), 4, 4)]
    read = SimpleNamespace(task_id="t", keys=keys, token_ids=PROMPT[:16], gpu_block_ids=own, timeout=5.0)
    assert reader.issue_prefetch_storage_task(read) == own and reader.wait_prefetch_storage_task("t") == own
    kernel.check(PROMPT, own, 4)
    with pytest.raises(ValueError, match="3 keys for 4 blocks"):
        reader.issue_write_back_storage_task(SimpleNamespace(task_id="t", keys=["k"] * 3, gpu_block_ids=own))
    reader.recycle_gpu_blocks(own)
    reader.close()


@pytest.mark.processes
def test_a_decode_instance_writes_without_a_match(tmp_path: Path) -> None:
    """write_cache_to_storage_decode: the blocks of a task that was never matched are found by another engine."""
    store = {"kind": "file", "folder": str(tmp_path), "weights_id": "w", "admission": "all", "capacity_bytes": 10**7}
    manager = PrefixCacheManager(new_config(16, 16, storage=store), 1)
    launch(manager, SUFFIX)
    task = Task("a", PROMPT, output_token_ids=[1, 2, 3])
    task.block_tables = manager.allocate_gpu_blocks(7)
    Kernel(manager).compute([*PROMPT, 1, 2, 3], task.block_tables, 0, 25)
    assert manager.write_cache_to_storage_decode(task)
    manager.recycle_gpu_blocks(task.block_tables)
    assert manager.cache.storage.flush(10) and manager.cache.stats().storage is not None
    manager.close()
    reader = PrefixCacheManager(new_config(16, 16, storage=store), 1)
    launch(reader, SUFFIX)
    other = Task("b", [*PROMPT, 1, 2, 5])
    ids, num_tokens, _ = reader.request_match_blocks(other, 4)
    assert num_tokens == 24
    Kernel(reader).check([*PROMPT, 1, 2], ids, 6)
    reader.release_block_ids(other)
    reader.close()


def test_sizes_can_change_before_work_begins() -> None:
    """update_cache_config takes the size found by profiling; not while blocks are held."""
    config = new_config(8)
    manager = PrefixCacheManager(config, 1)
    held = manager.allocate_gpu_blocks(1)
    config.cache_config.total_block_num = 20
    with pytest.raises(ConfigError, match="1 blocks are held"):
        manager.update_cache_config(config.cache_config)
    manager.recycle_gpu_blocks(held)
    manager.update_cache_config(config.cache_config)
    assert manager.num_gpu_blocks == 20 and len(manager.gpu_free_block_list) == 20
    manager.close()


def test_a_splitwise_role_is_checked() -> None:
    """An unknown one is refused; a messager without settings for peers says what is missing."""
    with pytest.raises(ConfigError, match="splitwise_role is 'both'"):
        PrefixCacheManager(new_config(), 1, "both")
    manager = PrefixCacheManager(new_config(), 1, "prefill")
    with pytest.raises(ConfigError, match="sends no blocks"):
        manager.launch_cache_messager(None, 1, [0], None, None, "127.0.0.1", 0, "x")
    manager.close()


@pytest.mark.parametrize(
    ("dtype", "stored", "scale"),
    [
        ("bfloat16", "bfloat16", None),
        ("float16", "float16", None),
        ("uint8", "uint8", None),
        ("block_wise_fp8", "uint8", "bfloat16"),
    ],
)
def test_layouts(dtype: str, stored: str, scale: str | None) -> None:
    """cache_dtype becomes a layout, with scales for block-wise FP8."""
    config = new_config()
    config.cache_config.cache_dtype = dtype
    layout = layout_of(config)
    assert (layout.dtype, layout.scale_dtype, layout.num_layers, layout.heads_first) == (stored, scale, 2, True)
    config.cache_config.cache_dtype = "int3"
    with pytest.raises(ConfigError, match="int3"):
        layout_of(config)


def test_fastdeploys_metric_names(manager: PrefixCacheManager) -> None:
    """All names with their meaning, in one exposition that Prometheus' own parser reads."""
    from prometheus_client import CollectorRegistry, generate_latest

    serve_v1(manager, Task("a", PROMPT), [1])
    serve_v1(manager, Task("b", PROMPT), [1])
    registry = CollectorRegistry()
    registry.register(manager.fastdeploy_names())
    text = generate_latest(registry).decode()
    values = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    assert (
        values["fastdeploy:prefix_cache_token_num_total"] == values["fastdeploy:prefix_gpu_cache_token_num_total"] == 20
    )
    assert values["fastdeploy:prefix_cpu_cache_token_num_total"] == 0
    assert values["fastdeploy:prefix_ssd_cache_token_num_total"] == 0
    assert values["fastdeploy:hit_req_rate"] == 0.5 and values["fastdeploy:hit_token_rate"] == pytest.approx(20 / 44)
    assert values["fastdeploy:gpu_hit_token_rate"] == pytest.approx(20 / 44)
    assert values["fastdeploy:max_gpu_block_num"] == 32 and values["fastdeploy:max_cpu_block_num"] == 0
    assert values["fastdeploy:available_gpu_block_num"] == 32 and values["fastdeploy:free_gpu_block_num"] == 27
    assert values["fastdeploy:available_gpu_resource"] == pytest.approx(27 / 32)
    assert values["fastdeploy:gpu_cache_usage_perc"] == 0.0 and values["fastdeploy:send_cache_failed_num_total"] == 0
    assert values["fastdeploy:cache_config_info"] == 1 and 'block_size="4"' in text


def test_prompts_may_be_arrays(manager: PrefixCacheManager) -> None:
    """NumPy prompts of any integer type."""
    for number, kind in enumerate((np.int64, np.int32, np.uint16)):
        assert serve_v1(manager, Task(f"r{number}", np.array(PROMPT, kind)), [1]) == (20 if number else 0)

"""The vLLM connector under vLLM's own scheduler: blocks stored, reused, loaded; and what happens when loads fail."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: see docs/adapters/vllm_connector.md")
pytest.importorskip("torch", reason="needs vLLM with PyTorch")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_layout import KVCacheLayout

from fastdeploy_cache.adapters.vllm.connector import FastDeployCacheConnector
from fastdeploy_cache.errors import ConfigError, LayoutError
from tests.rigs import vllm_rig
from tests.rigs.process_ends import SECONDS, pids
from tests.rigs.stopping import stopped
from tests.rigs.vllm_rig import BLOCK_SIZE, Rig, expected_output

pytestmark = pytest.mark.processes

PROMPT = [100 + i for i in range(6 * BLOCK_SIZE + 3)]
NUM_PROMPT_BLOCKS = 6
NewRig = Callable[..., Rig]


def push_out(rig: Rig) -> None:
    """Fill vLLM's own blocks with other prompts; the CPU tier keeps what was in them."""
    for other in range(4):
        prompt = [500 + 7 * other + i for i in range(8 * BLOCK_SIZE)]
        assert list(rig.serve(f"filler-{other}", prompt).output_token_ids) == expected_output(
            prompt, 2, len(rig.workers)
        )


def assert_served(rig: Rig, request: Any, prompt: list[int]) -> None:
    """The output is what a model without a cache says; the books of both sides are in order."""
    num_tokens = request.max_tokens
    assert list(request.output_token_ids) == expected_output(prompt, num_tokens, len(rig.workers))
    pool = rig.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "all but vLLM's null block are free again"
    rig.cache.check_invariants()


# -- the interface


def test_nothing_of_the_released_interface_is_missing() -> None:
    """No abstract method is left, and every method takes what the base's takes, by the same names."""
    assert not FastDeployCacheConnector.__abstractmethods__
    for name, method in vars(FastDeployCacheConnector).items():
        base = getattr(KVConnectorBase_V1, name, None)
        if name.startswith("_") or base is None or not callable(base):
            continue
        ours = inspect.signature(getattr(FastDeployCacheConnector, name)).parameters
        theirs = inspect.signature(base).parameters
        assert list(ours) == list(theirs), f"{name} ({method})"
        assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()], name


def test_roles_are_kept_apart(new_rig: NewRig) -> None:
    """The scheduler's instance has no worker's half, and the other way round."""
    rig = new_rig()
    with pytest.raises(AssertionError, match="scheduler's"):
        rig.connector.get_block_ids_with_load_errors()
    with pytest.raises(AssertionError, match="worker's"):
        rig.workers[0].connector.reset_cache()


# -- stored, reused, loaded


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_prompt_comes_back_from_the_cpu_tier(new_rig: NewRig, tp_size: int, layerwise: bool) -> None:
    """Computed, stored, its blocks given to others, matched again, loaded: every byte is read as it was written."""
    rig = new_rig(tp_size=tp_size, layerwise_load=layerwise)
    assert_served(rig, rig.serve("first", PROMPT), PROMPT)
    assert rig.num_computed_tokens == len(PROMPT) + 1
    push_out(rig)
    assert_served(rig, rig.serve("again", PROMPT), PROMPT)
    assert rig.num_computed_tokens == len(PROMPT) - NUM_PROMPT_BLOCKS * BLOCK_SIZE + 1, "only the tail was computed"
    assert not rig.failed_blocks


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLNHC, KVCacheLayout.BLHNC])
def test_other_orders_of_memory(new_rig: NewRig, layout: KVCacheLayout) -> None:
    """Heads before tokens, blocks before layers: a layer's block is one piece of memory, and comes back as it was."""
    rig = new_rig(layout=layout)
    rig.serve("first", PROMPT)
    push_out(rig)
    assert_served(rig, rig.serve("again", PROMPT), PROMPT)
    assert rig.num_computed_tokens < BLOCK_SIZE


def test_a_longer_prompt_loads_behind_what_vllm_has_itself(new_rig: NewRig) -> None:
    """vLLM's own hit covers the front, the CPU tier what is behind it."""
    rig = new_rig()
    rig.serve("first", PROMPT)
    push_out(rig)
    front = PROMPT[: 2 * BLOCK_SIZE + 1]
    rig.serve("front", front)
    assert_served(rig, rig.serve("again", PROMPT), PROMPT)
    assert rig.num_computed_tokens == len(PROMPT) - NUM_PROMPT_BLOCKS * BLOCK_SIZE + 1


def test_output_is_stored_too(new_rig: NewRig) -> None:
    """A second turn finds the blocks of the first one's answer."""
    rig = new_rig()
    first = rig.serve("turn-1", PROMPT, 40)
    push_out(rig)
    prompt = list(first.all_token_ids)
    assert_served(rig, rig.serve("turn-2", prompt), prompt)
    num_full = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert rig.num_computed_tokens == len(prompt) - num_full + 1


def test_salts_keep_prompts_apart(new_rig: NewRig) -> None:
    """The same tokens under another salt find nothing; under the same one they do."""
    rig = new_rig()
    rig.serve("first", PROMPT, cache_salt="tenant-a")
    push_out(rig)
    rig.serve("other", PROMPT, cache_salt="tenant-b")
    assert rig.num_computed_tokens == len(PROMPT) + 1
    push_out(rig)
    rig.serve("same", PROMPT, cache_salt="tenant-a")
    assert rig.num_computed_tokens < BLOCK_SIZE


def test_preempted_requests_lose_nothing_but_time(new_rig: NewRig) -> None:
    """Too few blocks for all: vLLM preempts, blocks that are being copied are not given away, outputs are right."""
    rig = new_rig(num_blocks=20)
    prompts = {f"request-{i}": [300 * i + j + 10 for j in range(4 * BLOCK_SIZE)] for i in range(3)}
    requests = {name: rig.add(name, prompt, 60) for name, prompt in prompts.items()}
    rig.run()
    assert sum(request.num_preemptions for request in requests.values()) > 0, "the test must be tight"
    for name, request in requests.items():
        assert_served(rig, request, prompts[name])


def test_blocks_that_are_being_copied_are_not_given_away(new_rig: NewRig) -> None:
    """A request is aborted while its blocks are read: vLLM gets them back when the copy has ended, not before."""
    rig = new_rig()
    pool = rig.scheduler.kv_cache_manager.block_pool
    [pid] = pids(rig.cache._movement.client)
    rig.add("first", PROMPT)
    stopped(pid)
    rig.step()
    rig.step()
    assert rig.connector.has_pending_push_work()
    rig.scheduler.finish_requests("first", vllm_rig.ABORTED)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - NUM_PROMPT_BLOCKS
    os.kill(pid, signal.SIGCONT)
    rig.run()
    assert_served(rig, rig.serve("again", PROMPT), PROMPT)


def test_what_a_step_is_about_to_compute_is_not_stored_before_it(new_rig: NewRig) -> None:
    """Two requests of one prompt come in one step. vLLM gives the second the blocks that the first is to compute in
    that step; nothing is stored until it has been computed, and what is stored then is right."""
    rig = new_rig()
    for name in ("first", "second"):
        rig.add(name, PROMPT)
    output = rig.scheduler.schedule()
    assert set(output.num_scheduled_tokens) == {"first", "second"}
    assert output.num_scheduled_tokens["second"] < BLOCK_SIZE, "the test must share blocks"
    assert not rig.connector.has_pending_push_work()
    rig.execute(output)
    rig.run()
    push_out(rig)
    assert_served(rig, rig.serve("again", PROMPT), PROMPT)
    assert rig.num_computed_tokens < BLOCK_SIZE


def test_an_aborted_request_leaves_nothing_behind(new_rig: NewRig) -> None:
    """Aborted while its load is on the way: its blocks come free once the load has ended."""
    rig = new_rig()
    rig.serve("first", PROMPT)
    push_out(rig)
    request = rig.add("again", PROMPT)
    rig.step()
    rig.scheduler.finish_requests("again", vllm_rig.ABORTED)
    rig.run()
    assert request.is_finished()
    assert_served(rig, rig.serve("once-more", PROMPT), PROMPT)


def test_a_restarted_engine_finds_it_in_storage(new_rig: NewRig, tmp_path: Path) -> None:
    """Another engine over the same store fetches, loads and computes the tail only."""
    storage = {"folder": str(tmp_path / "store"), "weights_id": "arithmetic-1", "admission": "all"}
    first = new_rig(storage=storage, min_prefetch_tokens=1)
    first.serve("first", PROMPT)
    assert first.cache.storage.flush(SECONDS)
    first.close()
    second = new_rig(storage=storage, min_prefetch_tokens=1, prefetch_policy="wait_complete")
    assert_served(second, second.serve("again", PROMPT), PROMPT)
    assert second.num_computed_tokens < BLOCK_SIZE


@pytest.mark.parametrize("is_pushed_out", [False, True])
def test_what_is_asked_again_goes_to_disk_by_default(new_rig: NewRig, tmp_path: Path, is_pushed_out: bool) -> None:
    """The second request for a prompt has it written, whether vLLM found it on its GPU or in the CPU tier."""
    storage = {"folder": str(tmp_path / "store"), "weights_id": "arithmetic-1"}
    first = new_rig(storage=storage, min_prefetch_tokens=1)
    for number in range(2):
        first.serve(f"{number}", PROMPT)
        first.cache.storage.flush(SECONDS)
        stats = first.cache.stats().storage
        assert stats is not None and stats.num_written_blocks == number * NUM_PROMPT_BLOCKS
        if is_pushed_out:
            push_out(first)
    first.close()
    second = new_rig(storage=storage, min_prefetch_tokens=1, prefetch_policy="wait_complete")
    assert_served(second, second.serve("again", PROMPT), PROMPT)
    assert second.num_computed_tokens < BLOCK_SIZE


def test_a_reset_forgets(new_rig: NewRig) -> None:
    """After vLLM resets its caches, the connector's included, the prompt is computed anew."""
    rig = new_rig()
    rig.serve("first", PROMPT)
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert_served(rig, rig.serve("again", PROMPT), PROMPT)
    assert rig.num_computed_tokens == len(PROMPT) + 1


def test_a_reset_waits_for_copies_that_hold_blocks(new_rig: NewRig) -> None:
    """vLLM resets its blocks only while nobody holds one: the reset lets the copies on their way end first."""
    rig = new_rig()
    rig.add("first", PROMPT, 4)
    while not rig.connector.has_pending_push_work():
        rig.step()
    rig.scheduler.finish_requests("first", vllm_rig.ABORTED)
    assert rig.connector.has_pending_push_work()
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert not rig.connector.has_pending_push_work()
    rig.run()
    assert_served(rig, rig.serve("again", PROMPT), PROMPT)
    assert rig.num_computed_tokens == len(PROMPT) + 1


# -- failures


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_failed_load_is_computed_again(new_rig: NewRig, layerwise: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The rank hangs: its load ends at the deadline, its blocks are reported, vLLM recomputes, the output is right. One
    line of the log says so, and nothing is counted as a hit."""
    rig = new_rig(layerwise_load=layerwise, transfer={"task_timeout_seconds": 1.0})
    rig.serve("first", PROMPT)
    push_out(rig)
    [pid] = pids(rig.cache._movement.client)
    stopped(pid)
    assert_served(rig, rig.serve("again", PROMPT), PROMPT)
    [failed] = rig.failed_blocks
    assert len(failed) == NUM_PROMPT_BLOCKS
    assert caplog.text.count("event=load_failed") == 1
    assert sum(rig.cache.metrics.token_counts()[1]) == 0
    assert rig.cache.ranks.wait_ready(SECONDS)
    push_out(rig)
    assert_served(rig, rig.serve("later", PROMPT), PROMPT)
    assert rig.num_computed_tokens < BLOCK_SIZE, "the CPU tier has outlived its rank"


def test_what_failed_to_load_is_never_stored(new_rig: NewRig) -> None:
    """A request ends after its load has failed and before vLLM knows: its blocks hold anything, none is stored."""
    rig = new_rig(transfer={"task_timeout_seconds": 1.0})
    rig.serve("first", PROMPT)
    push_out(rig)
    [pid] = pids(rig.cache._movement.client)
    stopped(pid)
    rig.add("again", PROMPT)
    rig.step()
    assert rig.cache.wait_for_transfers(SECONDS) and rig.cache.ranks.wait_ready(SECONDS)
    rig.cache.reset()
    output = rig.scheduler.schedule()
    rig.scheduler.finish_requests("again", vllm_rig.ABORTED)
    assert not rig.connector.has_pending_push_work()
    rig.execute(output)
    assert [len(failed) for failed in rig.failed_blocks] == [NUM_PROMPT_BLOCKS]
    rig.run()
    assert_served(rig, rig.serve("later", PROMPT), PROMPT)
    assert rig.num_computed_tokens == len(PROMPT) + 1


def test_without_ranks_vllm_computes(new_rig: NewRig) -> None:
    """A rank that is gone for good is no failure: nothing is promised, so nothing can fail."""
    rig = new_rig(policy="fail", transfer={"max_restarts": 0})
    rig.serve("first", PROMPT)
    push_out(rig)
    rig.cache.ranks.kv_lost(0)
    assert_served(rig, rig.serve("again", PROMPT), PROMPT)
    assert rig.num_computed_tokens == len(PROMPT) + 1 and not rig.failed_blocks


# -- refusals


def test_scattered_blocks_are_refused(new_rig: NewRig) -> None:
    """A layout in which a block's heads lie apart names the layer, its shape and the remedy."""
    with pytest.raises(LayoutError, match=r"layers\.0.*\(24, 2, 16, 8\).*VLLM_KV_CACHE_LAYOUT"):
        new_rig(layout=KVCacheLayout.LHBNC)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"num_cpu_blocks": 0}, "no CPU tier"),
        ({"block_size": 16}, "block_size"),
        ({"layerwise_load": "yes"}, "layerwise_load is 'yes'"),
        ({"num_cpu_blok": 3}, "num_cpu_blocks"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    """Each by name, before anything is started."""
    config = vllm_rig.new_vllm_config(tmp_path, 1, "fail", **{"num_cpu_blocks": 8, **extra})
    with pytest.raises(ConfigError, match=message):
        FastDeployCacheConnector(config, KVConnectorRole.SCHEDULER, vllm_rig.new_kv_cache_config(8))


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    """Several KV cache groups, pipeline parallelism, a role in which vLLM gives blocks away while they are read."""
    config = vllm_rig.new_vllm_config(tmp_path, 1, "fail", num_cpu_blocks=8)
    two = vllm_rig.new_kv_cache_config(8)
    two.kv_cache_groups = two.kv_cache_groups * 2
    with pytest.raises(ConfigError, match="2 KV cache groups"):
        FastDeployCacheConnector(config, KVConnectorRole.WORKER, two)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2"):
        FastDeployCacheConnector(config, KVConnectorRole.WORKER, vllm_rig.new_kv_cache_config(8))
    config.parallel_config.pipeline_parallel_size = 1
    config.kv_transfer_config.kv_role = "kv_producer"
    with pytest.raises(ConfigError, match='use "kv_both"'):
        FastDeployCacheConnector(config, KVConnectorRole.SCHEDULER, vllm_rig.new_kv_cache_config(8))

"""The vLLM connector under vLLM's own scheduler for models with several KV cache groups."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: see docs/adapters/vllm_connector.md")
pytest.importorskip("torch", reason="needs vLLM with PyTorch")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from fastdeploy_cache.errors import ConfigError
from tests.rigs.process_ends import SECONDS, pids
from tests.rigs.vllm_grouped_model import SIZE, GroupedModel
from tests.rigs.vllm_rig import ABORTED, Rig

pytestmark = pytest.mark.processes

NewRig = Callable[..., Rig]
MODELS = {
    "windows": GroupedModel("window", "window", "full"),
    "chunks": GroupedModel("chunk", "full"),
    "states": GroupedModel("state", "full", "state"),
    "all": GroupedModel("window", "state", "full", "chunk"),
}
PROMPT = [100 + i for i in range(9 * SIZE + 3)]


def assert_served(rig: Rig, request: object, prompt: list[int]) -> None:
    """The output is what a model without a cache says; the books of both sides are in order."""
    expected = rig.model.expected_output(prompt, request.max_tokens, len(rig.workers))  # type: ignore[attr-defined]
    assert list(request.output_token_ids) == expected  # type: ignore[attr-defined]
    pool = rig.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "all but vLLM's null block are free again"
    rig.cache.check_invariants()


def push_out(rig: Rig) -> None:
    """Fill vLLM's own blocks with other prompts; the CPU tier keeps what was in them."""
    for other in range(6):
        prompt = [500 + 7 * other + i for i in range(8 * SIZE)]
        assert_served(rig, rig.serve(f"filler-{other}", prompt), prompt)


@pytest.mark.parametrize(("tp_size", "is_ahead"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_comes_back_from_the_cpu_tier(new_rig: NewRig, name: str, tp_size: int, is_ahead: bool) -> None:
    """Full KV and checkpoint: computed, stored, given to others, matched again, loaded; the rest is computed."""
    rig = new_rig(model=MODELS[name], tp_size=tp_size, num_blocks=60, num_cpu_blocks=200, is_ahead=is_ahead)
    assert_served(rig, rig.serve("first", PROMPT), PROMPT)
    assert rig.num_computed_tokens == len(PROMPT) + 1
    push_out(rig)
    assert_served(rig, rig.serve("again", PROMPT), PROMPT)
    assert rig.num_computed_tokens == len(PROMPT) - 9 * SIZE + 1, "only the tail was computed"


def test_the_output_of_a_request_comes_back_of_windows(new_rig: NewRig) -> None:
    """The last boundary of all is stored at the request's end, though its window has slid past it by then."""
    rig = new_rig(model=MODELS["windows"], num_blocks=60, num_cpu_blocks=200)
    first = rig.serve("first", PROMPT, 40)
    assert_served(rig, first, PROMPT)
    push_out(rig)
    longer = [*PROMPT, *first.output_token_ids, 7, 8, 9]
    assert_served(rig, rig.serve("again", longer), longer)
    assert rig.num_computed_tokens == len(longer) - (len(PROMPT) + 39) // SIZE * SIZE + 1


@pytest.mark.parametrize("name", ["windows", "states"])
def test_where_prompts_part(new_rig: NewRig, name: str) -> None:
    """Of a shared document the second request computes all, and leaves a checkpoint where they part: the third hits."""
    rig = new_rig(model=MODELS[name], num_blocks=60, num_cpu_blocks=200)
    document = PROMPT[: 6 * SIZE]
    for number, computed in enumerate((9 * SIZE + 1, 9 * SIZE + 1, 3 * SIZE + 1)):
        prompt = [*document, *range(300 + 90 * number, 300 + 90 * number + 3 * SIZE)]
        rig.scheduler.reset_prefix_cache()
        assert_served(rig, rig.serve(f"part-{number}", prompt), prompt)
        if name == "windows":
            assert rig.num_computed_tokens == computed


@pytest.mark.parametrize("name", MODELS)
def test_a_failed_load_is_computed_again(new_rig: NewRig, name: str) -> None:
    """The rank dies under the load: vLLM hears that the request's load has failed, and computes all of it."""
    rig = new_rig(model=MODELS[name], num_blocks=60, num_cpu_blocks=200, tp_size=2)
    rig.serve("first", PROMPT)
    push_out(rig)
    stopped_rank = pids(rig.cache._movement.client)[1]
    os.kill(stopped_rank, signal.SIGSTOP)
    rig.num_computed_tokens = 0
    request = rig.add("again", PROMPT)
    rig.step()
    os.kill(stopped_rank, signal.SIGKILL)
    rig.run()
    assert_served(rig, request, PROMPT)
    assert rig.num_computed_tokens == len(PROMPT) + 1
    assert rig.cache.ranks.wait_ready(SECONDS)
    push_out(rig)
    assert_served(rig, rig.serve("once more", PROMPT), PROMPT)


def finish(rig: Rig, request: Any, prompt: list[int]) -> None:
    """Serve it to its end; copies may still be on their way."""
    while not request.is_finished():
        rig.step()
    assert list(request.output_token_ids) == rig.model.expected_output(prompt, request.max_tokens, len(rig.workers))


@pytest.mark.parametrize("num_tokens", [2, 60])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_copied_late_is_kept_until_then(new_rig: NewRig, name: str, num_tokens: int) -> None:
    """The rank stands still while the request goes on, slides over its windows and ends, and somebody writes in all
    blocks that are free then: what comes back is what was there."""
    rig, prompt = new_rig(model=MODELS[name], num_blocks=70, num_cpu_blocks=200), PROMPT[: 7 * SIZE + 3]
    late = pids(rig.cache._movement.client)[0]
    os.kill(late, signal.SIGSTOP)
    first = rig.add("first", prompt, num_tokens)
    finish(rig, first, prompt)
    pool = rig.scheduler.kv_cache_manager.block_pool
    free = pool.get_new_blocks(pool.get_num_free_blocks())
    rig.model.overwrite(rig.workers[0].memory.flat()[0], pool.num_gpu_blocks, [block.block_id for block in free])
    pool.free_blocks(free)
    os.kill(late, signal.SIGCONT)
    rig.run()
    rig.scheduler.reset_prefix_cache()
    assert_served(rig, rig.serve("again", prompt, 20), prompt)
    assert rig.num_computed_tokens == len(prompt) - 7 * SIZE + 19, "nothing was found"
    longer = [*prompt, *first.output_token_ids]
    rig.scheduler.reset_prefix_cache()
    assert_served(rig, rig.serve("longer", longer, 20), longer)


def test_random_schedules(new_rig: NewRig) -> None:
    """320 of them, over every kind of group, half of them with steps scheduled ahead: no block or state is read before
    it was written, whatever is computed at once, aborted, preempted, forgotten, or late."""
    num_hit = 0
    for name, model in MODELS.items():
        for is_ahead, kept in ((False, model), (True, GroupedModel(*model.kinds, retention=0))):
            rig = new_rig(model=kept, num_blocks=44, num_cpu_blocks=90, is_ahead=is_ahead)
            for seed in range(40):
                num_hit += play(rig, f"{name}-{seed}", random.Random(seed))
            rig.close()
    assert num_hit > 5000, num_hit


def play(rig: Rig, name: str, choose: random.Random) -> int:
    """One schedule; returns the tokens that came from the CPU tier."""
    before = sum(rig.cache.metrics.token_counts()[1][1:])
    texts = [[choose.randint(1, 900) for _ in range(160)] for _ in range(2)]
    live: list[tuple[object, list[int]]] = []
    for number in range(choose.randint(6, 14)):
        text = choose.choice(texts)
        cut = choose.randint(1, 110)
        prompt = [*text[:cut], *([choose.randint(1, 900)] if choose.random() < 0.3 else [])]
        live.append((rig.add(f"{name}-{number}", prompt, choose.randint(1, 40)), prompt))
        for _ in range(choose.randint(0, 6)):
            if rig.scheduler.has_requests():
                rig.step()
        what = choose.random()
        if what < 0.15:
            request, _ = live.pop(choose.randrange(len(live)))
            rig.scheduler.finish_requests(request.request_id, ABORTED)  # type: ignore[attr-defined]
        elif what < 0.2:
            rig.connector.reset_cache()
        elif what < 0.3:
            late = pids(rig.cache._movement.client)[0]
            os.kill(late, signal.SIGSTOP)
            for _ in range(choose.randint(1, 5)):
                if rig.scheduler.has_requests():
                    rig.step()
            os.kill(late, signal.SIGCONT)
    rig.run()
    for request, prompt in live:
        assert_served(rig, request, prompt)
    return sum(rig.cache.metrics.token_counts()[1][1:]) - before


@pytest.mark.parametrize("name", MODELS)
def test_what_vllm_has_itself_is_stored_where_the_cpu_tier_has_lost_it(new_rig: NewRig, name: str) -> None:
    """A copy fails with its rank, and the prompt comes again, from vLLM's own cache: its checkpoint is copied then."""
    rig = new_rig(model=MODELS[name], num_blocks=70, num_cpu_blocks=200)
    late = pids(rig.cache._movement.client)[0]
    os.kill(late, signal.SIGSTOP)
    first = rig.add("first", PROMPT)
    finish(rig, first, PROMPT)
    os.kill(late, signal.SIGKILL)
    rig.run()
    assert rig.cache.ranks.wait_ready(SECONDS)
    assert_served(rig, rig.serve("hit", PROMPT), PROMPT)
    assert rig.num_computed_tokens < SIZE, "vLLM has it itself"
    rig.scheduler.reset_prefix_cache()
    assert_served(rig, rig.serve("again", PROMPT), PROMPT)
    assert rig.num_computed_tokens < SIZE


@pytest.mark.parametrize("name", ["windows", "states"])
def test_a_reset_takes_back_what_waits(new_rig: NewRig, name: str) -> None:
    """Requests that run are preempted by it: nothing of their checkpoints keeps a block of vLLM's pool."""
    rig = new_rig(model=MODELS[name], num_blocks=70, num_cpu_blocks=200)
    request = rig.add("running", PROMPT, 60)
    while request.num_output_tokens < 40:
        rig.step()
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.run()
    assert_served(rig, request, PROMPT)


def test_loads_wait_for_tasks(new_rig: NewRig) -> None:
    """Each is two tasks: what has no place in the queue is asked for again later, and not refused."""
    rig = new_rig(model=MODELS["windows"], num_blocks=120, num_cpu_blocks=200, transfer={"max_tasks_in_flight": 4})
    prompts = [[100 * number + i for i in range(5 * SIZE + 3)] for number in range(1, 5)]
    for number, prompt in enumerate(prompts):
        rig.serve(f"first-{number}", prompt)
    rig.scheduler.reset_prefix_cache()
    late = pids(rig.cache._movement.client)[0]
    os.kill(late, signal.SIGSTOP)
    rig.num_computed_tokens = 0
    requests = [rig.add(f"again-{number}", prompt) for number, prompt in enumerate(prompts)]
    for _ in range(3):
        rig.step()
    os.kill(late, signal.SIGCONT)
    rig.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert_served(rig, request, prompt)
    assert rig.num_computed_tokens == 4 * 4, "a load was refused"


def test_vllm_may_ask_without_groups(new_rig: NewRig) -> None:
    """As its `MultiConnector` does where another of its connectors knows none: nothing is left of the request."""
    rig = new_rig()
    request = rig.add("one", PROMPT)
    rig.step()
    assert rig.connector.request_finished(request, rig.scheduler.kv_cache_manager.get_block_ids("one")[0]) == (
        False,
        None,
    )
    assert not rig.connector.scheduler._sequences
    rig.scheduler.finish_requests("one", ABORTED)
    rig.run()


def test_a_version_that_hears_of_no_failed_load_is_refused(new_rig: NewRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.29 would compute on what has not come."""
    monkeypatch.delattr(KVConnectorBase_V1, "get_transfer_results")
    with pytest.raises(ConfigError, match="which cannot be told that the load of a request has failed"):
        new_rig(model=MODELS["chunks"])


def test_layers_one_by_one_are_refused(new_rig: NewRig) -> None:
    """Inside a step vLLM cannot be told that a load has failed."""
    with pytest.raises(ConfigError, match="layerwise_load is true, and the model has 2 KV cache groups"):
        new_rig(model=MODELS["chunks"], layerwise_load=True)

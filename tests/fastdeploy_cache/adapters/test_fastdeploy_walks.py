"""Whatever FastDeploy's schedulers do to a task, its blocks are filed under the tokens that were computed into them."""

from __future__ import annotations

import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from tests.rigs.fastdeploy_engine import (
    PROMPT,
    SUFFIX,
    Kernel,
    Task,
    give_up_v1,
    launch,
    new_config,
    serve_v0,
    serve_v1,
    with_cpu,
)
from tests.rigs.fastdeploy_walks import Engine


def test_outputs_of_a_cut_prompt_are_filed_behind_the_whole_prompt() -> None:
    """v0 with output caching: the cached part is cut off the prompt after the match; the answer is found behind all of
    it, and nothing is found under the rest alone."""
    with closing(with_cpu(32, 0, transfer_client="inline")) as manager:
        kernel = Kernel(manager)
        serve_v1(manager, Task("a", PROMPT), [1], kernel)
        task, answer = Task("b", list(PROMPT)), [7, 8, 9, 10, 11, 12, 13]
        common, own, _ = manager.request_block_ids(task, 4, 8)
        table, num_cached = common + own, len(common) * 4
        assert num_cached == 20
        task.prompt_token_ids = task.prompt_token_ids[num_cached:]
        kernel.compute(PROMPT + answer, table, num_cached, len(PROMPT) + len(answer) - 1)
        task.output_token_ids += answer
        manager.release_block_ids(task)
        assert serve_v0(manager, Task("c", PROMPT + answer), [1], kernel)[0] == 28
        assert serve_v1(manager, Task("d", [*PROMPT[20:], *answer, *answer]), [1], kernel) == 0


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    num_gpu=st.integers(14, 40),
    num_cpu=st.sampled_from([0, 8, 60]),
    outputs=st.booleans(),
    after_steps=st.booleans(),
    role=st.sampled_from(["mixed", "decode"]),
)
def test_random_schedulers(seed: int, num_gpu: int, num_cpu: int, outputs: bool, after_steps: bool, role: str) -> None:
    """Prompts cut and overwritten, outputs appended, tables extended, tasks given up at any time: after each step every
    block that can be found holds what was computed from the tokens that it is found by."""
    with closing(manager_of(num_gpu, num_cpu, outputs=outputs, after_steps=after_steps)) as manager:
        manager.parts.current.splitwise_role = role
        engine = Engine(manager, random.Random(seed), after_steps=after_steps)
        for _ in range(120):
            engine.walk()
            engine.check()
        engine.finish()
        gpu = manager.cache.stats().gpu
        assert gpu.num_private == gpu.num_callers == 0, "something was left behind"


@pytest.mark.processes
@pytest.mark.parametrize("seed", [1, 2])
def test_random_schedulers_over_ranks_and_a_store(tmp_path: Path, seed: int) -> None:
    """The same with blocks that go to a rank's CPU tier and to a file store, and come back: what is written before it
    is computed would be found here."""
    store = {"kind": "file", "folder": str(tmp_path), "weights_id": "w", "capacity_bytes": 10**7}
    config = new_config(24, 16, kvcache_storage_backend="file", storage=store)
    with closing(PrefixCacheManager(config, 1, load_timeout_seconds=1.0)) as manager:
        launch(manager, SUFFIX)
        engine = Engine(manager, random.Random(seed))
        for step in range(150):
            engine.walk()
            if step % 5 == 0:
                engine.check()
        engine.finish()
        manager.cache.storage.flush(10)
        engine.check()
        storage = manager.cache.stats().storage
        assert storage is not None and storage.num_written_blocks > 5 and engine.seen["hit"] > 5


def test_random_schedulers_get_everywhere() -> None:
    """The walks above are worth something: each of what they are about happens often."""
    seen: Counter[str] = Counter()
    for seed in range(15):
        with closing(manager_of(24, 30)) as manager:
            engine = Engine(manager, random.Random(seed))
            for _ in range(400):
                engine.walk()
            engine.finish()
        seen += engine.seen
    assert all(seen[name] > 20 for name in ("hit", "cut", "ahead", "said", "finished", "back", "spoilt", "refused")), (
        seen
    )


def test_tasks_of_many_threads_are_shown_by_each_others_matches() -> None:
    """Each thread serves tasks of its own, which say tokens while other threads' matches show their blocks: every call
    does what it says, and nothing is left."""
    with closing(PrefixCacheManager(new_config(200), 1)) as manager:

        def serve(thread: int) -> int:
            num_found = 0
            for number in range(150):
                task = Task(f"{thread}-{number}", [number % 7, *PROMPT])
                task.block_tables, num_matched, _ = manager.request_match_blocks(task, 4)
                num_found += num_matched
                task.block_tables += manager.allocate_gpu_blocks(12 - len(task.block_tables))
                manager.update_cache_blocks(task, 4, 23)
                for token in range(20):
                    task.output_token_ids.append(token)
                    manager.update_cache_blocks(task, 4, 23 + token)
                manager.cache_output_blocks(task, 4)
                give_up_v1(manager, task)
            return num_found

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # threads change places at almost every line
        try:
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(serve, range(4)))
        finally:
            sys.setswitchinterval(interval)
        assert sum(found) > 4 * 140 * 20, "each prompt is computed once or a few times, not by every task"
        manager.cache.check_invariants()
        gpu = manager.cache.stats().gpu
        assert gpu.num_private == gpu.num_callers == 0


def manager_of(num_gpu: int, num_cpu: int, *, outputs: bool = True, after_steps: bool = False) -> PrefixCacheManager:
    """Launched, copying in this process."""
    config = new_config(num_gpu, num_cpu, outputs=outputs, transfer_client="inline")
    manager = PrefixCacheManager(config, 1, schedules_ahead=not after_steps)
    launch(manager, SUFFIX)
    return manager

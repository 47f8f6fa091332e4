"""A hybrid model comes to rest: copies end, a match that is whole is settled, and a short window is no shortage."""

from __future__ import annotations

from collections import deque
from typing import Any

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.transfer_manager.kv.groups import KVGroup
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask
from tests.rigs.hybrid_requests import FULL, TEXT, computed, manager

MAX_TASKS = 100  # a story here needs fewer than forty


class Queue:
    """Stands between the cache and its client: what is asked for is done when the test says so, as ranks do it."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        client: Any = cache._movement.client
        self._submit = client.submit
        self._tasks: deque[TransferTask] = deque()
        self.num_done = 0
        client.submit = self._tasks.append

    def drain(self) -> None:
        """Do all that is asked for, and what is asked for because of that."""
        while self._tasks:
            self.num_done += 1
            assert self.num_done <= MAX_TASKS, f"tasks without end; the next is {self._tasks[0]}"
            self._submit(self._tasks.popleft())

    def num_loads(self) -> int:
        return sum(task.kind is TaskKind.SWAP_IN for task in self._tasks)


def windows(*reaches: int) -> KVLayout:
    groups = [KVGroup(kind="window", reach_tokens=reach, layers=(1 + index,)) for index, reach in enumerate(reaches)]
    return KVLayout(num_layers=1 + len(reaches), num_kv_heads=1, head_dim=2, groups=(FULL, *groups))


def compute_by_blocks(cache: PrefixCacheManager, request: Request, queue: Queue | None = None) -> None:
    """Each block is allocated and committed by itself, and copies run in between."""
    size = cache.config.block_size
    for end in range(size, request.num_tokens + size, size):
        cache.rows.allocate(request, 1)
        if queue is not None:
            queue.drain()
        cache.commit(request, min(end, request.num_tokens))
        cache.check_invariants()
        if queue is not None:
            queue.drain()


def test_copies_down_come_to_an_end_where_the_cpu_tier_is_small() -> None:
    """An image never pushes a block out that is copied into the same place again, whatever is coldest."""
    config = CacheConfig(
        block_size=2,
        num_gpu_blocks=20,
        num_gpu_units=(10,),
        num_cpu_blocks=10,
        layout=windows(7),
        transfer_client="inline",
        eviction_policy="mru",
        cpu_write_high_water=1.0,
    )
    with PrefixCacheManager(config) as cache:
        queue = Queue(cache)
        for number, size in enumerate((5, 3, 7, 3, 30, 9)):
            request = Request(request_id=str(number), prompt_token_ids=[100 * number + token for token in range(size)])
            cache.match(request)
            queue.drain()
            compute_by_blocks(cache, request, queue)
            cache.release(request)
            queue.drain()
            cache.check_invariants()
        assert queue.num_done > 0


def test_a_match_is_settled_once_another_request_has_brought_all_of_it() -> None:
    """What `poll` says is ready asks for no checkpoint at or in front of its hit, though its own loads still run."""
    with manager(
        num_cpu_blocks=60, cpu_write_policy="write_through", num_gpu_units=(6, 12), max_load_share=1.0
    ) as cache:
        cache.release(computed(cache, "first"))
        cache.life.sleep(tiers=("gpu",))
        cache.life.wake()
        queue = Queue(cache)
        waits = Request(request_id="waits", prompt_token_ids=[*TEXT, *range(50, 64)])
        match = cache.match(waits)
        assert match.num_coming_tokens == 16
        assert queue.num_loads()
        cache.release(computed(cache, "computes the same"))
        match = match.poll()
        assert (match.ready, match.num_tokens, match.num_coming_tokens) == (True, 16, 0)
        assert all(boundary > match.num_tokens for boundary in match.checkpoint_tokens)
        queue.drain()
        cache.release(waits)
        cache.check_invariants()


def test_a_short_window_lasts_while_a_long_one_slides() -> None:
    """A request with a checkpoint at each block keeps no units of the short window that only older ones read."""
    with manager(
        windows(5, 2),
        block_size=1,
        num_gpu_blocks=20,
        num_gpu_units=(10, 4),
        checkpoint_every_tokens=1,
    ) as cache:
        request = Request(request_id="one", prompt_token_ids=list(range(7)))
        cache.match(request)
        compute_by_blocks(cache, request)
        cache.release(request)
        cache.check_invariants()

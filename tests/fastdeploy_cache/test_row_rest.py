"""A hybrid model comes to rest: copies end, a match that is whole is settled, and a short window is no shortage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books.checkpoint import chain_of
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.requests.tables import RowBlocks
from fastdeploy_cache.transfer_manager.kv.groups import KVGroup
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask
from tests.rigs.held_tasks import Held
from tests.rigs.hybrid_requests import FULL, ONLY_WINDOW, STATE, TEXT, UNIFORM, computed, manager

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


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize(("kind", "reach"), [("window", 1), ("window", 2), ("window", 5), ("chunk", 4)])
def test_a_request_alone_in_the_least_pools_comes_to_its_end(block_size: int, kind: str, reach: int) -> None:
    """Also by steps, each of which takes a block before it commits, and with a snapshot at every block: windows keep
    the block behind the newest one."""
    group = KVGroup(kind="window" if kind == "window" else "chunk", reach_tokens=reach, layers=(2,))
    layout = KVLayout(num_layers=3, num_kv_heads=1, head_dim=2, groups=(FULL, STATE, group))
    units = tuple([row.num_least_units for row in layout.for_rank(1, block_size).rows[1:]])
    with manager(layout, block_size=block_size, num_gpu_blocks=40, num_gpu_units=units) as cache:
        request = Request(request_id="alone", prompt_token_ids=list(range(4 * block_size)))
        cache.match(request)
        slot = -1
        for end in range(block_size, request.num_tokens + 1, block_size):
            given = cache.rows.allocate(request, 1).tables[0].block_ids
            slot = given[0] if given else slot
            slot = (cache.rows.snapshot(request, end, [slot]) or [slot])[0]
            cache.commit(request, end)
        for token in range(12):
            (given_or_error,) = cache.rows.step([(request, [token], request.num_tokens)])
            assert isinstance(given_or_error, RowBlocks), given_or_error
            if not request.num_tokens % block_size:
                slot = (cache.rows.snapshot(request, request.num_tokens, [slot]) or [slot])[0]
        cache.release(request)
        cache.check_invariants()


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_what_makes_room_for_a_copy_may_take_what_was_to_be_copied_next(
    policy: Literal["write_back", "write_through"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run, or a checkpoint, that went meanwhile is passed over: the step that copies down does not fail."""
    fields = {"num_cpu_blocks": 20, "cpu_write_policy": policy, "cpu_write_high_water": 0.0}
    with manager(ONLY_WINDOW, checkpoint_every_tokens=4, **fields) as cache:
        rows, images, copies = cache._books.rows, cache._movement.images, cache._movement.copy_down
        assert rows is not None and images is not None
        with monkeypatch.context() as patched:
            patched.setattr(copies, "store", lambda *_, **__: 0)  # nothing is copied yet
            patched.setattr(copies, "look_ahead", lambda: None)
            for name, tokens in (("a", TEXT), ("b", [9] * 18)):
                request = Request(request_id=name, prompt_token_ids=tokens)
                cache.match(request)
                compute_by_blocks(cache, request)
                cache.release(request)

        def take_all(*_: object) -> bool:
            for run in reversed(list(cache._books.tree.runs())):
                for checkpoint in [each for each in chain_of(run) if not each.num_pins]:
                    rows.checkpoints.drop(checkpoint, Loss.CPU)
                rows.trimmer.trim(run, Loss.CPU)
            return True

        def room(**_: bool) -> Callable[[int], bool]:
            return take_all

        copies_of_images: Any = copies._images
        monkeypatch.setattr(rows, "make_room_below", take_all)
        monkeypatch.setattr(copies_of_images, "_room", room)
        with cache._books:
            if policy == "write_back":
                copies.look_ahead()
            else:
                path = [run for run in cache._books.tree.runs() if run.parent is not None]
                assert sum([len(list(chain_of(run))) for run in path]) > 1
                copies_of_images.store(path, into_free=False)
        assert not any(cache.stats().num_failed_steps.values())
        cache.check_invariants()


@pytest.mark.parametrize("layout", [UNIFORM, ONLY_WINDOW], ids=["uniform", "window"])
@pytest.mark.parametrize("has_landed", [True, False])
def test_a_copy_of_the_last_block_is_no_match_once_the_gpu_is_lost(layout: KVLayout, has_landed: bool) -> None:
    """The request has nothing then, not the copy alone: it counts its blocks from the beginning of its prompt."""
    with manager(layout, recompute_last_token=True) as cache:
        first = Request(request_id="first", prompt_token_ids=TEXT[:16])
        cache.match(first)
        (cache.rows.allocate if layout.groups else cache.allocate)(first, 4)
        cache.commit(first, 16)
        cache.release(first)
        held = Held(cache, (TaskKind.COPY,))
        request = Request(request_id="again", prompt_token_ids=TEXT[:16])
        match = cache.match(request)
        assert (match.num_tokens, match.num_coming_tokens) == (12, 3)
        if has_landed:
            held.go()
        cache.ranks.kv_lost(0)
        match.poll()
        held.go()
        match = match.poll()
        assert (match.ready, match.num_tokens, match.block_ids) == (True, 0, [])
        active = cache._requests.active(request)
        assert len(active.block_ids) == 0 and (active.rows is None or not any(active.rows.tables))
        cache.check_invariants()
        cache.release(request)
        cache.check_invariants()
        assert cache.stats().gpu.num_private == 0

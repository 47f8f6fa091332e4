"""KV arrays of a worker, and of a rank: attached, lost and attached again, and the CPU tier outlives them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.errors import IPCError, LayoutError, RankStartError
from fastdeploy_cache.transfer_manager.rank.transfer_client import KVArrays
from tests.rigs.faulty_engine import BLOCK_SIZE, LAYOUT, Engine, new_config
from tests.rigs.kv_worker import KVWorker, digest, kv_worker, layer_bytes
from tests.rigs.process_ends import SECONDS, pids
from tests.rigs.stopping import stopped

pytestmark = pytest.mark.processes
NUM_GPU, NUM_CPU = 8, 60
PROMPT = list(range(100, 100 + 5 * BLOCK_SIZE + 1))
FILLERS = [[1000 * other + i for i in range(8 * BLOCK_SIZE)] for other in range(1, 4)]


@contextlib.contextmanager
def cache_of(owner: str, tp_size: int = 1, **transfer: object) -> Iterator[PrefixCacheManager]:
    """Real ranks whose KV arrays somebody else than the engine owns."""
    with PrefixCacheManager(new_config(tp_size, NUM_GPU, NUM_CPU, kv_owner=owner, **transfer)) as cache:
        yield cache


def new_worker(tp_size: int = 1) -> contextlib.AbstractContextManager[KVWorker]:
    return kv_worker(LAYOUT.for_rank(tp_size, BLOCK_SIZE), NUM_GPU)


def push_out(engine: Engine) -> None:
    """Fill the GPU pool with other prefixes."""
    for filler in FILLERS:
        engine.serve(filler)


def hit_from_cpu(cache: PrefixCacheManager, engine: Engine, workers: list[KVWorker]) -> None:
    """The prompt comes from the CPU tier; the engine and the workers of all ranks see its very bytes."""
    request, match = engine.match(PROMPT, SECONDS)
    assert (match.num_gpu_tokens, match.num_cpu_tokens) == (0, 5 * BLOCK_SIZE)
    for rank, worker in enumerate(workers):
        views = cache.ranks.kv_views(rank)
        wanted = [digest(layer_bytes(views, layer, match.block_ids)) for layer in range(len(views))]
        assert worker.ask("digests", match.block_ids) == wanted
    cache.release(request)
    cache.check_invariants()


def serve_without_cpu_tier(cache: PrefixCacheManager) -> None:
    """A request goes through all its verbs at once, computing everything; nothing is in flight afterwards."""
    request = Request(request_id="alone", prompt_token_ids=PROMPT)
    match = cache.match(request).wait(SECONDS)
    assert match.ready and match.num_cpu_tokens == 0
    cache.allocate(request, 6 - len(match.block_ids))
    cache.commit(request, len(PROMPT))
    cache.release(request)
    assert cache.stats().num_transfers_in_flight == 0
    cache.check_invariants()


# -- the worker owns them


def test_without_a_worker_there_is_no_cpu_tier_and_no_harm() -> None:
    """Before `attach_kv` nothing is up, waiting for it is bounded, and the verbs work as without a CPU tier."""
    with cache_of("worker") as cache:
        assert not cache._movement.client.available and not cache.ranks.wait_ready(0.01)
        serve_without_cpu_tier(cache)
        request = Request(request_id="again", prompt_token_ids=PROMPT)
        assert cache.match(request).num_gpu_tokens == 5 * BLOCK_SIZE, "what is on the GPU is found"
        cache.release(request)
        assert cache.stats().num_swapped_out_blocks == 0
        for ask in (cache.ranks.kv_views, cache.ranks.kv_handle):
            with pytest.raises(LayoutError, match="attached"):
                ask(0)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_blocks_swap_out_of_and_into_a_workers_arrays(tp_size: int) -> None:
    """Each rank's worker hands its arrays over a pipe: what is loaded into them later is what was computed there."""
    with cache_of("worker", tp_size) as cache, contextlib.ExitStack() as stack:
        workers = [stack.enter_context(new_worker(tp_size)) for _ in range(tp_size)]
        for rank, worker in enumerate(workers):
            assert not cache._movement.client.available
            cache.ranks.attach_kv(rank, worker.make_kv())
        assert cache.ranks.wait_ready(SECONDS)
        engine = Engine(cache, tp_size)
        engine.serve(PROMPT)
        push_out(engine)
        hit_from_cpu(cache, engine, workers)
        for worker in workers:
            worker.ask("write", 3, 77)
        arrays = (array for r in range(tp_size) for v in cache.ranks.kv_views(r) for array in v.values())
        assert all((array[3].view(np.uint8) == 77).all() for array in arrays), "it is the worker's own memory"


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_cpu_tier_outlives_the_worker(tp_size: int) -> None:
    """One rank's worker is killed, `kv_lost`: GPU residency is gone on all ranks; with a new worker the prefix is
    loaded with its bytes on all of them."""
    with cache_of("worker", tp_size) as cache, contextlib.ExitStack() as stack:
        workers = [stack.enter_context(new_worker(tp_size)) for _ in range(tp_size)]
        for rank, worker in enumerate(workers):
            cache.ranks.attach_kv(rank, worker.make_kv())
        Engine(cache, tp_size).serve(PROMPT)
        workers[-1].kill()
        cache.ranks.kv_lost(tp_size - 1)
        assert not cache._movement.client.available
        assert (cache.stats().gpu.num_cached, cache.stats().cpu.num_cached) == (0, 5)
        serve_without_cpu_tier(cache)
        cache.ranks.kv_lost(tp_size - 1)  # what was served meanwhile was on no arrays
        workers[-1] = stack.enter_context(new_worker(tp_size))
        cache.ranks.attach_kv(tp_size - 1, workers[-1].make_kv())
        assert cache.ranks.wait_ready(SECONDS)
        hit_from_cpu(cache, Engine(cache, tp_size), workers)


def test_a_worker_can_be_replaced_at_once() -> None:
    """`kv_lost` and `attach_kv` right after each other: the rank gets each worker's own arrays, and none counts as a
    death."""
    with cache_of("worker", max_restarts=0, start_timeout_seconds=8.0) as cache, contextlib.ExitStack() as stack:
        cache.ranks.attach_kv(0, stack.enter_context(new_worker()).make_kv())
        Engine(cache, 1).serve(PROMPT)
        for _ in range(5):
            successor = stack.enter_context(new_worker())
            handle = successor.make_kv()
            cache.ranks.kv_lost(0)
            cache.ranks.attach_kv(0, handle)
            hit_from_cpu(cache, Engine(cache, 1), [successor])


def test_a_rank_that_cannot_attach_stays_without(
    rank_code: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    """The error has the rank's own words; when it works again, the same arrays are attached after all."""
    path = os.environ.get("PYTHONPATH", "")
    with cache_of("worker") as cache, new_worker() as worker:
        handle = worker.make_kv()
        rank_code("raise SystemExit('this installation is broken')")
        with pytest.raises(RankStartError, match=r"(?s)cannot attach.*this installation is broken"):
            cache.ranks.attach_kv(0, handle)
        assert not cache._movement.client.available
        serve_without_cpu_tier(cache)
        cache.ranks.kv_lost(0)
        eventually(lambda: cache._movement.client._processes.io.ranks[0].parked and cache.stats().ranks[0].pid is None)
        monkeypatch.setenv("PYTHONPATH", path)
        cache.ranks.attach_kv(0, handle)
        engine = Engine(cache, 1)
        engine.serve(PROMPT)
        push_out(engine)
        hit_from_cpu(cache, engine, [worker])


def test_arrays_that_cannot_be_attached_are_refused_and_others_taken() -> None:
    """A wrong layout, a dead worker's handle, arrays instead of a handle, a second attach: clear errors, no harm."""
    with cache_of("worker") as cache:
        other = dataclasses.replace(LAYOUT, num_layers=2).for_rank(1, BLOCK_SIZE)
        with kv_worker(other, NUM_GPU) as stranger, pytest.raises(LayoutError, match="2 layers; the layout has 3"):
            cache.ranks.attach_kv(0, stranger.make_kv())
        with kv_worker(LAYOUT.for_rank(1, BLOCK_SIZE), NUM_GPU - 1) as small, pytest.raises(LayoutError):
            cache.ranks.attach_kv(0, small.make_kv())
        with new_worker() as dead:
            handle = dead.make_kv()
            dead.kill()
            with pytest.raises(IPCError, match="cannot be opened"):
                cache.ranks.attach_kv(0, handle)
        with pytest.raises(LayoutError, match="KVHandle"):
            cache.ranks.attach_kv(0, [])
        assert not cache._movement.client.available
        with new_worker() as worker, new_worker() as second:
            cache.ranks.attach_kv(0, worker.make_kv())
            with pytest.raises(LayoutError, match="call kv_lost first"):
                cache.ranks.attach_kv(0, second.make_kv())
            engine = Engine(cache, 1)
            engine.serve(PROMPT)
            push_out(engine)
            hit_from_cpu(cache, engine, [worker])


@pytest.mark.parametrize("owner", ["engine", "transfer"])
def test_only_a_workers_arrays_are_attached(owner: str) -> None:
    """Where the engine or the rank owns them, `attach_kv` says so and changes nothing."""
    with cache_of(owner) as cache, new_worker() as worker:
        with pytest.raises(LayoutError, match=f"kv_owner is '{owner}'"):
            cache.ranks.attach_kv(0, worker.make_kv())
        Engine(cache, 1).serve(PROMPT)
        assert cache.stats().cpu.num_cached == 5


def test_kv_lost_with_tasks_in_flight_ends_them_all() -> None:
    """A load and a store of a stopped rank: both fail, their requests go on, no block and no task stays behind."""
    with cache_of("worker", task_timeout_seconds=1000.0) as cache, new_worker() as worker:
        cache.ranks.attach_kv(0, worker.make_kv())
        engine = Engine(cache, 1)
        engine.serve(PROMPT)
        push_out(engine)
        stopped(pids(cache._movement.client)[0])
        loading = Request(request_id="load", prompt_token_ids=PROMPT)
        match = cache.match(loading)
        assert match.num_coming_tokens == 5 * BLOCK_SIZE
        request = Request(request_id="store", prompt_token_ids=[7] * (2 * BLOCK_SIZE + 1))
        cache.match(request)
        cache.allocate(request, 3)
        cache.commit(request, request.num_tokens)
        cache.release(request)
        assert cache.stats().num_transfers_in_flight == 2
        cache.ranks.kv_lost(0)
        assert cache.wait_for_transfers(SECONDS)
        match = match.wait(SECONDS)
        assert match.ready and match.num_tokens == 0
        cache.release(loading)
        stats = cache.stats()
        assert (stats.gpu.num_in_flight, stats.cpu.num_in_flight, stats.gpu.num_free) == (0, 0, NUM_GPU)
        cache.check_invariants()
        with new_worker() as successor:
            cache.ranks.attach_kv(0, successor.make_kv())
            hit_from_cpu(cache, Engine(cache, 1), [successor])


def test_a_killed_rank_takes_the_workers_arrays_again(eventually: Callable[..., None]) -> None:
    """The rank dies, the worker lives: without any call the next incarnation has the arrays, GPU hits included."""
    with cache_of("worker") as cache, new_worker() as worker:
        cache.ranks.attach_kv(0, worker.make_kv())
        engine = Engine(cache, 1)
        engine.serve(PROMPT)
        os.kill(pids(cache._movement.client)[0], signal.SIGKILL)
        eventually(lambda: cache.stats().ranks[0].num_restarts == 1)
        assert cache.ranks.wait_ready(SECONDS)
        assert engine.serve(PROMPT).num_gpu_tokens == 5 * BLOCK_SIZE
        push_out(engine)
        hit_from_cpu(cache, engine, [worker])


def test_a_loss_that_is_told_in_two_steps_leaves_no_stale_block() -> None:
    """A load that a request starts while `kv_lost` is at work brings no GPU residency: its arrays are going."""
    with cache_of("worker") as cache, new_worker() as worker:
        cache.ranks.attach_kv(0, worker.make_kv())
        engine = Engine(cache, 1)
        engine.serve(PROMPT)
        push_out(engine)
        lose = cache._movement.client.kv_lost

        def lose_after_a_load(rank: int) -> None:
            request = Request(request_id="between", prompt_token_ids=PROMPT)
            cache.match(request).wait(SECONDS)
            cache.release(request)
            lose(rank)

        cache._movement.client.kv_lost = lose_after_a_load  # type: ignore[method-assign]
        cache.ranks.kv_lost(0)
        assert cache.stats().gpu.num_cached == 0
        cache._movement.client.kv_lost = lose  # type: ignore[method-assign]
        with new_worker() as successor:
            cache.ranks.attach_kv(0, successor.make_kv())
            hit_from_cpu(cache, Engine(cache, 1), [successor])


def test_no_task_begins_between_a_loss_and_the_ranks_end(eventually: Callable[..., None]) -> None:
    """A loss that another thread tells in the middle of the I/O thread's turn: it opens no door again."""
    with cache_of("worker") as cache, new_worker() as worker:
        cache.ranks.attach_kv(0, worker.make_kv())
        io = cache._movement.client._processes.io
        supervisor, told, seen = io.ranks[0], threading.Event(), list[tuple[bool, bool]]()
        tick, wait = supervisor.tick, io._poller.wait

        def lose_in_the_turn(now: float) -> None:
            tick(now)
            if not told.is_set():
                told.set()
                cache._movement.client.kv_lost(0)

        def note(seconds: float) -> list[Hashable]:
            seen.append((bool(io.changed), cache._movement.client.available))
            return wait(seconds)

        supervisor.tick, io._poller.wait = lose_in_the_turn, note
        io.wakeup.set()
        eventually(lambda: told.is_set() and cache.stats().ranks[0].pid is None)
        supervisor.tick, io._poller.wait = tick, wait
        assert (True, True) not in seen, "available, though a loss is known that has not been dealt with"


def test_nothing_that_was_computed_on_no_arrays_is_copied_down() -> None:
    """Another thread serves a request just as new arrays are ready: what it finds there was computed on none."""
    with cache_of("worker") as cache, new_worker() as worker:
        cache.ranks.attach_kv(0, worker.make_kv())
        cache.ranks.kv_lost(0)
        serve_without_cpu_tier(cache)
        attach = cache._movement.client.attach_kv

        def serve_once_attached(rank: int, kv: KVArrays) -> None:
            attach(rank, kv)
            assert cache.ranks.wait_ready(SECONDS)
            num_found = len(cache.match(request := Request(request_id="now", prompt_token_ids=PROMPT)).block_ids)
            cache.allocate(request, 6 - num_found)
            cache.commit(request, num_found * BLOCK_SIZE)  # it has computed nothing itself
            cache.release(request)

        cache._movement.client.attach_kv = serve_once_attached  # type: ignore[method-assign]
        with new_worker() as successor:
            cache.ranks.attach_kv(0, successor.make_kv())
            assert (cache.stats().gpu.num_cached, cache.stats().cpu.num_cached) == (0, 0)
            Engine(cache, 1).serve(PROMPT)


# -- the rank owns them


def mapped_here(name: str) -> int:
    """How many descriptors of memory of this name this process has."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += name in str(link.readlink())
    return found


def test_a_rank_makes_its_arrays_itself() -> None:
    """Its handle opens in a worker, views and worker see the same bytes, and blocks come back from the CPU tier."""
    with cache_of("transfer", 2) as cache, contextlib.ExitStack() as stack:
        workers = [stack.enter_context(new_worker(2)) for _ in range(2)]
        for rank, worker in enumerate(workers):
            worker.ask("open_kv", cache.ranks.kv_handle(rank).to_bytes().hex())
        engine = Engine(cache, 2)
        engine.serve(PROMPT)
        push_out(engine)
        hit_from_cpu(cache, engine, workers)


def test_a_ranks_death_loses_its_arrays_and_not_the_cpu_tier(eventually: Callable[..., None]) -> None:
    """The engine is told, GPU residency is gone; the new rank has new arrays, and the CPU tier's bytes come to them."""
    lost: list[int] = []
    config = new_config(2, NUM_GPU, NUM_CPU, kv_owner="transfer")
    with PrefixCacheManager(config, on_kv_lost=lost.append) as cache:
        Engine(cache, 2).serve(PROMPT)
        old = cache.ranks.kv_views(1)[0]["key"]
        assert old.any()
        request = Request(request_id="running", prompt_token_ids=[5] * (2 * BLOCK_SIZE + 1))
        cache.match(request)
        cache.allocate(request, 3)
        os.kill(pids(cache._movement.client)[1], signal.SIGKILL)
        eventually(lambda: lost == [1] and cache.stats().ranks[1].num_restarts == 1)
        assert cache.ranks.wait_ready(SECONDS)
        assert cache.stats().gpu.num_cached == 0
        assert old.any() and not cache.ranks.kv_views(1)[0]["key"].any(), "new memory, of zeros"
        cache.commit(request, request.num_tokens)  # it was void: it publishes nothing
        cache.release(request)
        assert (cache.stats().gpu.num_cached, cache.stats().cpu.num_cached) == (0, 5)
        with new_worker(2) as worker:
            worker.ask("open_kv", cache.ranks.kv_handle(1).to_bytes().hex())
            engine = Engine(cache, 2)
            request, match = engine.match(PROMPT, SECONDS)
            assert (match.num_gpu_tokens, match.num_cpu_tokens) == (0, 5 * BLOCK_SIZE)
            views = cache.ranks.kv_views(1)
            wanted = [digest(layer_bytes(views, layer, match.block_ids)) for layer in range(len(views))]
            assert worker.ask("digests", match.block_ids) == wanted
            cache.release(request)
        cache.check_invariants()


def test_a_ranks_death_with_tasks_in_flight_ends_them_all(eventually: Callable[..., None]) -> None:
    """A load of the dying rank fails before the loss is told; afterwards nothing is in flight or on the GPU."""
    with cache_of("transfer", task_timeout_seconds=1000.0) as cache:
        engine = Engine(cache, 1)
        engine.serve(PROMPT)
        push_out(engine)
        (pid,) = pids(cache._movement.client)
        stopped(pid)
        request = Request(request_id="load", prompt_token_ids=PROMPT)
        match = cache.match(request)
        assert match.num_coming_tokens == 5 * BLOCK_SIZE
        os.kill(pid, signal.SIGKILL)
        assert match.wait(SECONDS).num_tokens == 0
        cache.release(request)
        eventually(lambda: cache.stats().ranks[0].num_restarts == 1)
        assert cache.ranks.wait_ready(SECONDS)
        assert (cache.stats().gpu.num_in_flight, cache.stats().gpu.num_cached) == (0, 0)
        hit_from_cpu(cache, Engine(cache, 1), [])


def test_dead_arrays_are_given_up(eventually: Callable[..., None]) -> None:
    """Each death of a rank that owns its arrays frees them here, too: only the living ones are held."""
    with cache_of("transfer", max_restarts=10) as cache:
        num_held = mapped_here("kv-rank0")
        assert num_held > 0
        for death in range(1, 4):
            os.kill(pids(cache._movement.client)[0], signal.SIGKILL)
            eventually(lambda n=death: cache.stats().ranks[0].num_restarts == n)
            assert cache.ranks.wait_ready(SECONDS)
        assert mapped_here("kv-rank0") == num_held

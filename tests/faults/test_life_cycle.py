"""Pause, resume, sleep, wake, clear, update-weights, over real ranks and among traffic."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_cache import PrefixCacheManager, Request, StorageConfig
from fastdeploy_cache.errors import ConfigError, LifeCycleError, NotEnoughMemoryError, OutOfBlocksError
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.life_cycle import LifeCycleStatus
from tests.rigs.faulty_engine import BLOCK_SIZE, Engine, new_config

pytestmark = pytest.mark.processes

PROMPT = list(range(100, 100 + 6 * BLOCK_SIZE + 1))


def test_a_paused_cache_hits_on_the_gpu_and_moves_nothing() -> None:
    """What is on the GPU is found; what is below is not loaded; after resume it is."""
    with PrefixCacheManager(new_config(2, num_gpu=8, num_cpu=40)) as cache:
        engine = Engine(cache, 2)
        engine.serve(PROMPT)
        cache.life.pause()
        cache.life.pause()
        assert cache.life.status is LifeCycleStatus.PAUSED
        assert engine.serve(PROMPT).num_gpu_tokens == 24
        cache.blocks.evict(8)
        request, match = engine.match(PROMPT)
        assert (match.num_tokens, match.num_unloaded_tokens) == (0, 24)
        cache.release(request)
        assert cache.stats().num_transfers_in_flight == 0
        cache.life.resume()
        assert engine.serve(PROMPT).num_cpu_tokens == 24
        cache.check_invariants()


def test_pausing_answers_those_who_wait() -> None:
    """A match that waits for a load of a stopped rank is answered; the pause ends at its deadline, as before."""
    with PrefixCacheManager(new_config(1, num_gpu=8, num_cpu=40, heartbeat_timeout_seconds=60.0)) as cache:
        engine = Engine(cache, 1)
        engine.serve(PROMPT)
        cache.blocks.evict(8)
        pid = cache.stats().ranks[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        request = Request(request_id="waits", prompt_token_ids=PROMPT)
        match = cache.match(request)
        with pytest.raises(LifeCycleError, match="not ended in time: 1 copy;"):
            cache.life.pause(0.2)
        assert cache.life.status is LifeCycleStatus.RUNNING
        os.kill(pid, signal.SIGCONT)
        assert match.wait(10).num_cpu_tokens == 24
        cache.life.pause()
        cache.release(request)
        cache.check_invariants()


def test_a_rank_that_does_not_acknowledge_fails_the_change() -> None:
    """Nothing is in flight, but a rank is stopped: the change fails in time, and works once the rank goes on."""
    with PrefixCacheManager(new_config(2, num_gpu=8, num_cpu=8, heartbeat_timeout_seconds=60.0)) as cache:
        pid = cache.stats().ranks[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(LifeCycleError, match="not every rank has acknowledged"):
            cache.life.sleep(0.2)
        assert cache.life.status is LifeCycleStatus.RUNNING and cache.blocks.allocate(1) == [0]
        os.kill(pid, signal.SIGCONT)
        cache.life.sleep(10)
        assert cache.life.status is LifeCycleStatus.ASLEEP


def _backed_bytes(cache: PrefixCacheManager, rank: int) -> tuple[int, int]:
    """Bytes of memory behind a rank's KV arrays and its CPU blocks."""
    memory = cache._movement.client._memory[rank]  # type: ignore[attr-defined]
    kv, cpu = (os.fstat(segment.fd).st_blocks * 512 for segment in (memory.kv.segments[0], memory.cpu))
    return kv, cpu


@pytest.mark.parametrize("kind", ["processes", "inline"])
def test_sleep_gives_the_memory_back_and_wake_takes_it_again(kind: str) -> None:
    """The kernel holds no page of a tier that sleeps; what the other tier has is found again, byte for byte."""
    with PrefixCacheManager(new_config(1, num_gpu=8, num_cpu=40, kind=kind)) as cache:
        engine = Engine(cache, 1)
        engine.serve(PROMPT)
        full = _backed_bytes(cache, 0)
        assert all(full)
        assert cache.life.sleep(tiers=("gpu",)) > 0
        assert _backed_bytes(cache, 0) == (0, full[1])
        with pytest.raises(LifeCycleError, match="asleep; wake it"):
            cache.blocks.allocate(1)
        cache.life.wake()
        assert _backed_bytes(cache, 0) == full
        assert engine.serve(PROMPT).num_cpu_tokens == 24
        cache.life.sleep(tiers=("cpu",))
        assert _backed_bytes(cache, 0) == (full[0], 0)
        assert engine.serve(PROMPT).num_gpu_tokens == 24, "the GPU goes on"
        cache.life.sleep()
        assert _backed_bytes(cache, 0) == (0, 0)
        cache.life.wake()
        assert engine.serve(PROMPT).num_tokens == 0
        cache.check_invariants()


def test_requests_from_before_a_sleep_are_void() -> None:
    """Their blocks are theirs until release, but nothing of them counts or is published."""
    with PrefixCacheManager(new_config(1, num_gpu=16, num_cpu=16)) as cache:
        request = Request(request_id="a", prompt_token_ids=PROMPT)
        cache.match(request)
        cache.allocate(request, 7)
        cache.life.sleep(tiers=("gpu",))
        cache.life.wake()
        assert not cache.confirm(request, arrived=True)
        cache.commit(request, 24)
        cache.release(request)
        assert Engine(cache, 1).serve(PROMPT).num_tokens == 0
        cache.check_invariants()


def test_wrong_changes_are_refused_with_the_right_one_named() -> None:
    """From each state what cannot be; unknown tiers."""
    with PrefixCacheManager(new_config(1, num_gpu=8, num_cpu=8, kind="inline")) as cache:
        cache.life.wake()
        cache.life.pause()
        with pytest.raises(LifeCycleError, match="wake: the cache is paused; it has to be asleep"):
            cache.life.wake()
        cache.life.resume()
        with pytest.raises(ConfigError, match="one or both of gpu, cpu"):
            cache.life.sleep(tiers=("disk",))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="one or both"):
            cache.life.sleep(tiers=())
        cache.life.sleep()
        for change in (cache.life.pause, cache.life.resume):
            with pytest.raises(LifeCycleError, match="is asleep"):
                change()
        cache.life.clear()
        assert cache.life.status is LifeCycleStatus.ASLEEP


def test_new_weights_find_nothing_of_old_ones(tmp_path: Path) -> None:
    """With a store the new id is needed; neither memory nor storage hits; the old id finds the old bytes again."""
    store = StorageConfig(folder=str(tmp_path), weights_id="old", admission="all", capacity_bytes=10**7)
    config = dataclasses.replace(new_config(1, num_gpu=16, num_cpu=16), storage=store, min_prefetch_tokens=4)
    with PrefixCacheManager(config) as cache:
        engine = Engine(cache, 1)
        engine.serve(PROMPT)
        assert cache.storage.flush(10)
        with pytest.raises(ConfigError, match="give the new one"):
            cache.life.update_weights()
        assert cache.life.status is LifeCycleStatus.RUNNING
        cache.life.update_weights("new")
        request = Request(request_id="new", prompt_token_ids=PROMPT)
        assert cache.prefetch(request).wait(10)
        assert cache.match(request).wait(10).num_tokens == 0
        cache.release(request)
        cache.life.update_weights("old")
        assert cache.storage.is_attached and cache.storage.wait_settled(10)
        request = Request(request_id="old", prompt_token_ids=PROMPT)
        assert cache.prefetch(request).wait(10)
        match = cache.match(request).wait(10)
        engine.check(PROMPT, match.block_ids)
        assert match.num_storage_tokens > 0
        cache.release(request)


class Traffic:
    """Serves random prompts in a thread until told to stop; reads no wrong byte that counts."""

    def __init__(self, cache: PrefixCacheManager, name: str, seed: int) -> None:
        self.cache, self.name, self.choose = cache, name, random.Random(seed)
        self.engine, self.stopping = Engine(cache, 2), threading.Event()
        self.num_served = self.num_void = self.num_hits = 0
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        texts = [[(13 * i * i + 5 * text * (i // 8)) % 97 for i in range(40)] for text in range(4)]
        try:
            while not self.stopping.is_set():
                self._serve(self.choose.choice(texts)[: self.choose.randint(1, 40)])
        except BaseException as failure:
            self.failure = failure

    def _serve(self, tokens: list[int]) -> None:
        request = Request(request_id=self.name, prompt_token_ids=tokens)
        match = self.cache.match(request).wait(5)
        try:
            new = self.cache.allocate(request, -(-len(tokens) // BLOCK_SIZE) - len(match.block_ids))
        except (OutOfBlocksError, LifeCycleError):
            self.cache.release(request)
            return
        table = match.block_ids + new
        is_right = self._holds(tokens, match.block_ids)
        self.engine.compute(tokens, table, len(match.block_ids))
        if self.cache.confirm(request, arrived=True):
            assert is_right, "wrong bytes in a step that counts"
            self.cache.commit(request, len(tokens))
            self.num_served, self.num_hits = self.num_served + 1, self.num_hits + bool(match.num_tokens)
        else:
            self.num_void += 1
        self.cache.release(request)

    def _holds(self, tokens: list[int], table: list[int]) -> bool:
        return all(
            np.array_equal(memory, wanted)
            for i, block_id in enumerate(table)
            for memory, wanted in self.engine.block(tokens[: (i + 1) * BLOCK_SIZE], block_id)
        )


def test_100_random_changes_among_traffic() -> None:
    """Three threads serve while 100 changes come in random order: each ends, no wrong byte counts, the books add up."""
    choose = random.Random(5)
    with PrefixCacheManager(new_config(2, num_gpu=24, num_cpu=60)) as cache:
        traffic = [Traffic(cache, f"t{number}", number) for number in range(3)]
        num_done = dict.fromkeys(("pause", "resume", "sleep", "wake", "clear", "update_weights"), 0)
        for _ in range(100):
            verb = choose.choice(list(num_done))
            before = cache.life.status
            try:
                if verb == "sleep":
                    cache.life.sleep(20, tiers=choose.choice([("gpu",), ("cpu",), ("gpu", "cpu")]))
                else:
                    getattr(cache.life, verb)(timeout_seconds=20)
                num_done[verb] += 1
            except LifeCycleError as refused:
                if "it has to be" not in str(refused) or cache.life.status is not before:
                    raise
            cache.check_invariants()
            if cache.life.status is LifeCycleStatus.RUNNING:
                num_before = sum(t.num_served for t in traffic)
                pace = threading.Event()
                for _ in range(50):  # let some requests through
                    if sum(t.num_served for t in traffic) > num_before + 3:
                        break
                    pace.wait(0.01)
        if cache.life.status is LifeCycleStatus.ASLEEP:
            cache.life.wake()
        else:
            cache.life.resume()
        for each in traffic:
            each.stopping.set()
            each.thread.join(30)
            assert not each.thread.is_alive() and each.failure is None, each.failure
        assert cache.wait_for_transfers(10)
        cache.check_invariants()
        gpu = cache.stats().gpu
        assert gpu.num_private == gpu.num_protected == gpu.num_in_flight == 0
        assert all(num_done.values()), num_done
        assert sum(t.num_hits for t in traffic) > 50


def test_resuming_what_runs_disturbs_nobody(tmp_path: Path) -> None:
    """resume of a running cache, and a refused change, leave a prefetch from storage as it was."""
    store = StorageConfig(folder=str(tmp_path), weights_id="w", admission="all", capacity_bytes=10**7)
    config = dataclasses.replace(new_config(1, num_gpu=16, num_cpu=16), storage=store, min_prefetch_tokens=4)
    with PrefixCacheManager(config) as cache:
        Engine(cache, 1).serve(PROMPT)
        assert cache.storage.flush(10)
    with PrefixCacheManager(config) as cache:
        request = Request(request_id="a", prompt_token_ids=PROMPT)
        prefetch = cache.prefetch(request)
        cache.life.resume()
        cache.life.wake()
        with pytest.raises(ConfigError):
            cache.life.update_weights()
        assert prefetch.wait(10)
        assert cache.match(request).wait(10).num_storage_tokens == 24
        cache.release(request)


def test_a_wake_without_memory_sleeps_on_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second segment is not to be had: what was taken again goes back; later it wakes."""
    with PrefixCacheManager(new_config(1, num_gpu=8, num_cpu=8, kind="inline")) as cache:
        cache.life.sleep()
        segments = iter(range(100))
        back = SharedArray._back

        def short(array: SharedArray, name: str) -> None:
            if next(segments):
                raise NotEnoughMemoryError("no room")
            back(array, name)

        with monkeypatch.context() as patch:
            patch.setattr(SharedArray, "_back", short)
            with pytest.raises(NotEnoughMemoryError):
                cache.life.wake()
        assert cache.life.status is LifeCycleStatus.ASLEEP and _backed_bytes(cache, 0) == (0, 0)
        cache.life.wake()
        assert all(_backed_bytes(cache, 0))


@pytest.mark.parametrize("verb", ["sleep", "clear", "update_weights", "kv_lost"])
def test_what_a_caller_computed_before_is_not_cached_afterwards(verb: str) -> None:
    """Blocks taken and filled before: after the change `insert`, `swap_out` and `hand_over` publish nothing of them."""
    worker = {"kv_owner": "engine"}
    with PrefixCacheManager(new_config(1, num_gpu=16, num_cpu=16, kind="inline", **worker)) as cache:
        names = Request(request_id="names tokens", prompt_token_ids=PROMPT)
        ids = cache.blocks.allocate(6)
        if verb == "kv_lost":
            cache.ranks._forget_gpu(0, has_kv=None)
        else:
            getattr(cache.life, verb)()
        if verb == "sleep":
            cache.life.wake()
        assert cache.blocks.insert(names, ids).duplicate_ids == ids
        assert cache.blocks.copies.swap_out(names, ids).num_blocks == 0
        request = Request(request_id="a", prompt_token_ids=PROMPT)
        cache.match(request)
        cache.blocks.hand_over(request, ids)
        cache.commit(request, 24)
        cache.release(request)
        assert cache.blocks.lookup(names).num_blocks == 0
        cache.check_invariants()
        fresh = cache.blocks.allocate(6)
        assert cache.blocks.insert(names, fresh).duplicate_ids == []

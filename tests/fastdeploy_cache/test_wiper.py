"""What waits to be wiped is wiped, whatever fails in between."""

from __future__ import annotations

import itertools
import threading
from array import array

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books.block_pool import BlockPool
from fastdeploy_cache.errors import ControlError
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.cache_model import CacheModel

SECONDS = 30.0


def test_a_wipe_that_fails_is_repeated() -> None:
    """A rank that fails a wipe gets it again, as soon as anything changes; until then the blocks are nobody's."""
    model = CacheModel(2, 20, 0)
    model.serve(list(range(20)), stays=False, patient=True, namespace="secret")
    model.forget("secret")
    assert [task.kind for task in model.client.tasks] == [TaskKind.WIPE]
    model.land("rank died", 1)
    assert not model.client.tasks  # not at once: it would fail again and again
    model.check()
    model.serve([5, 6, 7], stays=False, patient=True)
    model.client.land_all()
    model.finish()


def test_a_wipe_that_gets_no_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else happens in the cache, and nobody waits for the report: a thread looks again."""
    model, num_calls, is_tried = CacheModel(2, 20, 0), itertools.count(), threading.Event()
    model.steps_may_fail = True
    model.client.auto = True
    model.serve(list(range(20)), stays=False, patient=True, namespace="secret")
    take_soiled = BlockPool.take_soiled

    def fail(pool: BlockPool) -> array[int]:
        if next(num_calls) < 2:  # at the end of the turn, and when the verb looks what is left
            raise MemoryError
        is_tried.set()
        return take_soiled(pool)

    monkeypatch.setattr(BlockPool, "take_soiled", fail)
    model.forget("secret")
    assert not is_tried.is_set() and is_tried.wait(SECONDS)
    assert model.cache.life.forget_namespace("secret", SECONDS).num_waiting_blocks == 0
    model.finish()


def test_without_a_thread_nothing_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would have to wait would have nobody to look after it: the verb says so, and all is found as before."""
    with PrefixCacheManager(
        CacheConfig(block_size=2, num_gpu_blocks=8, num_cpu_blocks=0, transfer_client="inline")
    ) as cache:
        request = Request(request_id="r", prompt_token_ids=[1, 2, 3, 4, 5], namespace="secret")
        cache.match(request)
        cache.allocate(request, 3)
        cache.commit(request, 4)
        cache.release(request)

        def fail(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as context:
            context.setattr(threading.Thread, "start", fail)
            with pytest.raises(ControlError, match=r"nothing was forgotten: .* can't start new thread"):
                cache.life.forget_namespace("secret", SECONDS)
        assert cache.match(request).num_tokens == 4
        cache.release(request)
        assert cache.life.forget_namespace("secret", SECONDS).num_gpu_blocks == 2


def test_the_wiper_may_close_the_cache() -> None:
    """Its thread takes along what others have queued, and so calls their callers, who may close the cache."""
    model = CacheModel(2, 20, 0)
    model.serve(list(range(20)), stays=False, patient=True, namespace="secret")
    model.forget("secret")
    wiper, ended = model.cache._movement.wiper, threading.Event()
    wiper.mishaps.contain = lambda step, call: (model.cache.close(), ended.set())  # type: ignore[method-assign, assignment]
    wiper._wake.set()
    assert ended.wait(SECONDS)
    thread = wiper._thread
    assert thread is not None
    thread.join(SECONDS)
    assert not thread.is_alive()

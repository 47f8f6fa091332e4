"""What is known of a store's content, and whose failures count: marks, breakers, weights, attaching."""

from __future__ import annotations

import threading

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request, StorageConfig
from fastdeploy_cache.errors import ClosedError, ConfigError
from fastdeploy_cache.policies.breaker import BreakerState
from fastdeploy_cache.storage.tier import StorageTier
from tests.rigs.simulated_storage import SimulatedStorage
from tests.rigs.storage_rig import STORE, A, Rig, stored

SECONDS = 10.0


def tier_of(rig: Rig) -> StorageTier:
    tier = rig.model.cache.storage._tier
    assert isinstance(tier, StorageTier)
    return tier


def served(rig: Rig, tokens: list[int]) -> None:
    rig.model.serve_and_copy(tokens)
    rig.land_all()


def test_a_match_that_grows_makes_room_for_what_it_loads_alone() -> None:
    """What others have computed of it meanwhile is held before room is counted; short of room, that much is found."""
    rig = Rig(stored(A), num_cpu=12, max_prefetch_share=1.0)
    rig.know(A)
    rig.prefetch(A)
    rig.store.land()
    live = rig.match(A)
    rig.model.serve(A[:33], stays=False, patient=True)
    rig.model.client.land_all()
    other = rig.match(list(range(5000, 5064)))
    assert rig.model.allocate(other, 16)
    rig.land_all()
    assert live.match.poll().num_tokens == 32
    rig.finish()


def test_pieces_follow_each_other_with_a_deadline_each() -> None:
    """Two at a time, so that a long prompt neither fills the queue nor shares one deadline."""
    rig = Rig(stored(A), num_cpu=12, max_prefetch_share=1.0)
    rig.know(A)
    rig.prefetch(A)
    rig.store.land()
    deadlines = [task.deadline for task in rig.store.tasks]
    assert len(deadlines) == 2
    rig.store.land()
    assert len(rig.store.tasks) == 2 and rig.store.tasks[-1].deadline > deadlines[-1]
    rig.land_all()
    rig.finish()


def test_one_missing_object_is_no_failure_of_the_store() -> None:
    """The pieces behind it are cancelled, and say nothing."""
    rig = Rig(stored(A), num_cpu=12, max_prefetch_share=1.0)
    rig.know(A)
    rig.store.max_read = 1
    for _ in range(4):
        rig.model.reset()
        rig.prefetch(A)
        rig.store.land_all()
    assert tier_of(rig).link.reading.state is BreakerState.CLOSED
    rig.finish()


def test_a_probe_tells_of_both_sides() -> None:
    """A store that cannot be written is read."""
    rig = Rig()
    link = tier_of(rig).link
    rig.store.probes_write = False
    for _ in range(3):
        with rig.model.cache._books:
            link.probe()
        rig.store.land_all()
    assert (link.reading.state, link.writing.state) == (BreakerState.CLOSED, BreakerState.OPEN)
    rig.finish()


@pytest.mark.parametrize("how", ["reattach", "lost"])
def test_another_store_is_known_to_have_nothing(how: str) -> None:
    """An empty one in its place, or one whose process died and may have lost what was not durable: all is offered
    again."""
    rig = Rig()
    served(rig, A)
    cache = rig.model.cache
    if how == "reattach":
        cache.storage.detach()
        rig.store = SimulatedStorage(rig.model.client)
        cache.storage.attach(STORE, client=rig.store)
        rig.store.land_all()
    else:
        rig.store.objects.clear()
        rig.store.come_back()
    assert not cache.storage.flush(0.0)
    rig.store.land_all()
    rig.store.answers_at_once = True
    assert cache.storage.flush(SECONDS) and len(rig.store.objects) == 10
    rig.finish()


@pytest.mark.parametrize("num_blocks", [10, 70])
def test_what_storage_declines_is_offered_once_a_use(num_blocks: int) -> None:
    """By an admission filter, which counts; also of a prompt that is copied in two steps, and by a flush."""
    tokens = list(range(4 * num_blocks + 1))
    rig = Rig(num_gpu=96, num_cpu=128)
    rig.store.declines = True
    rig.store.num_offers.clear()
    served(rig, tokens)
    rig.model.cache.storage.flush(0.0)
    rig.land_all()
    assert set(rig.store.num_offers.values()) == {1} and len(rig.store.num_offers) == num_blocks
    served(rig, tokens)
    assert set(rig.store.num_offers.values()) == {2}
    rig.finish()


def test_other_weights_forget_what_is_cached() -> None:
    """Attached under another id, storage never gets what the old weights have computed."""
    rig = Rig()
    served(rig, A)
    cache = rig.model.cache
    cache.storage.detach()
    rig.model.committed.clear()
    rig.store = SimulatedStorage(rig.model.client)
    cache.storage.attach(StorageConfig(kind=STORE.kind, weights_id="w2"), client=rig.store)
    rig.land_all()
    cache.storage.flush(0.0)
    rig.land_all()
    assert not rig.store.objects and rig.match(A).match.num_tokens == 0
    rig.finish()


def test_reset_with_an_id_needs_a_store() -> None:
    """There is nothing to open anew."""
    with (
        PrefixCacheManager(CacheConfig(num_gpu_blocks=4, transfer_client="inline")) as cache,
        pytest.raises(ConfigError, match="no store is attached"),
    ):
        cache.reset(weights_id="w2")


def test_on_ready_keeps_the_prefetch_policys_time() -> None:
    """A store that never answers: called when nobody may wait for it any more."""
    rig = Rig(stored(A), prefetch_policy="timeout", prefetch_timeout_seconds=0.05, prefetch_seconds_per_1024_tokens=0.0)
    rig.know(A)
    rig.prefetch(A)
    called = threading.Event()
    rig.match(A).match.on_ready(called.set)
    assert called.wait(SECONDS)
    rig.finish()


def test_a_waiting_prefetch_ends_with_its_store() -> None:
    """Detached while a prefetch waits for room: whoever waits for it hears of it."""
    rig = Rig(stored(A), num_cpu=8, max_prefetch_share=0.5)
    prefetch = rig.model.cache.prefetch(Request(request_id="a", prompt_token_ids=A))
    rig.store.land()
    rig.model.cache.storage.detach()
    assert prefetch.wait(SECONDS)
    rig.model.finish()


def test_attaching_is_one_at_a_time_and_before_the_end() -> None:
    """A second attach while the first is under way is refused, and so is one of a closed cache; nothing stays."""
    rig = Rig()
    cache = rig.model.cache
    cache.storage.detach()
    inside = SimulatedStorage(rig.model.client)
    refused = []

    class Slow(SimulatedStorage):
        def start(self, on_result: object, on_ready: object) -> None:
            with pytest.raises(ConfigError, match="detach it first"):
                cache.storage.attach(STORE, client=inside)
            refused.append(True)
            super().start(on_result, on_ready)  # type: ignore[arg-type]

    rig.store = Slow(rig.model.client)
    cache.storage.attach(STORE, client=rig.store)
    assert refused
    rig.finish()
    cache.close()
    with pytest.raises(ClosedError):
        cache.storage.attach(STORE, client=inside)


def test_no_write_goes_out_over_blocks_that_are_not_known_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be given out again, and what is filled into them be written under the hash of what was there."""
    rig = Rig()
    pool = rig.model.cache._books.pools[1]

    def fail(ids: object) -> None:
        raise MemoryError("no memory to note it")

    with monkeypatch.context() as patched:
        patched.setattr(pool, "begin_reading", fail)
        rig.model.serve_and_copy(A)
        assert not rig.store.tasks
    assert rig.model.cache.stats().num_failed_steps["write_out"]
    rig.model.steps_may_fail = True
    rig.finish()


def test_a_detach_waits_for_the_attach_beside_it() -> None:
    """Returning before the store is there, it would leave it attached, and under a name that no reset changes."""
    rig = Rig()
    cache = rig.model.cache
    cache.storage.detach()
    is_opening, may_open = threading.Event(), threading.Event()

    class Slow(SimulatedStorage):
        def start(self, on_result: object, on_ready: object) -> None:
            is_opening.set()
            assert may_open.wait(SECONDS)
            super().start(on_result, on_ready)  # type: ignore[arg-type]

    rig.store = Slow(rig.model.client)
    attaching = threading.Thread(target=lambda: cache.storage.attach(STORE, client=rig.store))
    attaching.start()
    assert is_opening.wait(SECONDS)
    detaching = threading.Thread(target=cache.storage.detach)
    detaching.start()
    detaching.join(0.1)  # it has come to an end, or it waits
    may_open.set()
    for thread in (attaching, detaching):
        thread.join(SECONDS)
    assert cache.stats().storage is None
    rig.finish()


def test_decoding_does_not_teach_the_prefill_speed() -> None:
    """A block that fills while decoding is not the work of one step."""
    config = CacheConfig(block_size=64, num_gpu_blocks=16, transfer_client="inline")
    with PrefixCacheManager(config) as cache:
        request = Request(request_id="a", prompt_token_ids=list(range(200)))
        cache.match(request)
        cache.allocate(request, 8)
        cache.commit(request, 200)
        learned = cache._movement.speeds.prefill.per_second
        for _ in range(300):
            request.append_output([7])
            cache.commit(request, request.num_tokens)
        assert learned is not None and cache._movement.speeds.prefill.per_second == learned


def test_two_changes_of_weights_come_one_after_the_other() -> None:
    """Side by side, the store of the one would be attached while the books have been forgotten for the other."""
    rig = Rig()
    cache = rig.model.cache
    cache.storage._given = STORE
    steps: list[str] = []
    second = threading.Thread(target=lambda: cache.reset(weights_id="w3"))

    def detach() -> None:
        steps.append("detach")
        if second.ident is None:
            second.start()
            second.join(0.2)  # it has come to an end, or it waits

    def attach(storage: StorageConfig) -> None:
        steps.append(f"attach {storage.weights_id}")

    cache.storage._detach, cache.storage.attach = detach, attach  # type: ignore[method-assign,assignment]
    cache.reset(weights_id="w2")
    second.join(SECONDS)
    assert steps == ["detach", "attach w2", "detach", "attach w3"]
    del cache.storage._detach, cache.storage.attach
    rig.finish()


def test_what_storage_brings_is_hashed_once() -> None:
    """The hashes that storage was asked by are the blocks' own; each block is counted once."""
    tokens = list(range(1000, 1000 + 40 * 4 + 1))
    source = Rig(num_cpu=100, num_gpu=100)
    source.model.serve_and_copy(tokens)
    source.land_all()
    rig = Rig(dict(source.store.objects), num_cpu=100, num_gpu=100)
    rig.know(tokens)
    rig.prefetch(tokens)
    rig.land_all()
    rig.match(tokens)
    rig.land_all()
    assert rig.model.cache.stats().num_hashed_blocks == 40
    rig.prefetch([*tokens, *range(5000, 5017)])  # its parent is the last of them
    rig.land_all()
    assert rig.model.cache.stats().num_hashed_blocks == 40 + 4
    rig.model.check()

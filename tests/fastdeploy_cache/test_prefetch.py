"""Queued requests: what is known of them, and that waiting ones never block each other."""

from __future__ import annotations

import random

import pytest

from fastdeploy_cache import Prefetch, Request
from fastdeploy_cache.config.cache import WRITE_POLICIES
from fastdeploy_cache.errors import ClosedError
from fastdeploy_cache.policies import EVICTION_POLICIES
from fastdeploy_cache.request import Image
from tests.rigs.cache_model import CacheModel, LiveRequest
from tests.rigs.storage_rig import Rig, stored

A, B, C = ([base + i for i in range(100)] for base in (1000, 2000, 3000))


def queued(tokens: list[int], **options: object) -> Request:
    return Request(request_id="queued", prompt_token_ids=tokens, **options)  # type: ignore[arg-type]


def counts(found: Prefetch) -> tuple[int, int, int]:
    return found.num_gpu_tokens, found.num_cpu_tokens, found.num_missing_tokens


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (C[:30], (0, 0, 30)),
        (B[:41], (40, 0, 1)),
        (B[:40], (36, 0, 4)),
        (A[:41], (8, 32, 1)),
        (A[:22] + C[:8], (8, 12, 10)),
        (A[:3], (0, 0, 3)),
        (A[:1], (0, 0, 1)),
    ],
)
def test_the_three_counts_add_up_and_are_what_a_match_finds(tokens: list[int], expected: tuple[int, int, int]) -> None:
    """On the GPU, in the CPU tier, in none; whole blocks, and one token is left to compute."""
    model = CacheModel(4, 12, 40)
    model.serve_and_copy(A[:40], B[:40])
    found = counts(model.cache.prefetch(queued(tokens)))
    assert found == expected
    assert sum(found) == len(tokens)
    match = model.must_match(tokens).match
    assert (match.num_tokens, match.num_coming_tokens + match.num_unloaded_tokens) == found[:2]
    model.finish()


def test_a_prompt_with_an_image_hits_what_was_foretold() -> None:
    """A match does not end inside the image, so its first blocks are no hit."""
    model, images = CacheModel(4, 40, 40), [Image(6, 30, b"cat")]
    model.serve(A[:40], stays=False, patient=True, images=images)
    tokens = A[:30] + B[:12]
    found = model.cache.prefetch(queued(tokens, images=images))
    assert found.num_gpu_tokens == model.must_match(tokens, images=images).match.num_tokens


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_it_takes_no_blocks_and_pins_nothing(write_policy: str) -> None:
    """Any number of queued requests: same books, nothing in flight, everything still to be had."""
    model = CacheModel(4, 12, 40, write_policy=write_policy)
    model.serve_and_copy(A[:40], B[:40])
    before = model.cache.stats()
    for tokens in (A[:41], B[:41], C[:41], A[:22]) * 3:
        model.cache.prefetch(queued(tokens))
        model.check()
    assert model.cache.stats() == before
    assert not model.client.tasks
    assert before.gpu.num_protected == 0
    assert model.allocate(model.must_match(C[:48]), 12)
    model.finish()


@pytest.mark.parametrize("policy", [policy for policy in EVICTION_POLICIES if policy not in {"fifo", "mru", "filo"}])
def test_a_queued_prefix_is_not_the_next_to_be_evicted(policy: str) -> None:
    """Of two prompts the older one is asked for: the other one goes."""
    model = CacheModel(4, 20, 0, policy=policy, clock=lambda: 0.0)
    model.serve_and_copy(A[:40], B[:40])
    assert counts(model.cache.prefetch(queued(A[:41]))) == (40, 0, 1)
    assert model.allocate(model.must_match(C[:40]), 10)
    assert counts(model.cache.prefetch(queued(A[:41]))) == (40, 0, 1)
    assert counts(model.cache.prefetch(queued(B[:41]))) == (0, 0, 41)
    model.finish()


def test_it_counts_as_no_use_and_no_request() -> None:
    """Hit rates hear of admitted requests, and `write_through_selective` of uses."""
    model = CacheModel(4, 20, 40, write_policy="write_through_selective")
    model.serve(A[:40], stays=False, patient=True)
    for _ in range(5):
        model.cache.prefetch(queued(A[:41]))
    stats = model.cache.stats()
    assert (stats.num_requests, stats.hit_rates["request"]) == (0, 0.0)
    model.serve(B[:40], stays=False, patient=True)
    assert not model.client.tasks
    model.serve(A[:40], stays=False, patient=True)
    assert len(model.client.tasks) == 1
    model.finish()


def test_without_prefix_caching_all_is_missing_and_a_closed_cache_says_so() -> None:
    """The verb is kept, and raises like the others."""
    model = CacheModel(4, 20, 0, enable_prefix_caching=False)
    live = model.must_match(A[:40])
    assert model.allocate(live, 10)
    model.cache.commit(live.request, 40)
    assert counts(model.cache.prefetch(queued(A[:41]))) == (0, 0, 41)
    model.cache.release(live.request)
    model.cache.close()
    with pytest.raises(ClosedError):
        model.cache.prefetch(queued(A[:41]))


class Scheduler:
    """Admits by prefetch, match and allocate; who is refused releases its match and queues again."""

    def __init__(self, model: CacheModel, prompts: list[list[int]], choose: random.Random) -> None:
        self.model, self.choose = model, choose
        self.queue = list(prompts)
        self.matched: list[LiveRequest] = []
        self.running: list[LiveRequest] = []
        self.num_refused = 0

    def step(self) -> None:
        """One of what could happen next."""
        able = [
            ("match", self.queue),
            ("admit", self.matched),
            ("finish", self.running),
            ("land", self.model.client.tasks),
        ]
        what = self.choose.choice([name for name, candidates in able if candidates])
        if what == "match":
            tokens = self.queue.pop(self.choose.randrange(len(self.queue)))
            self.model.cache.prefetch(queued(tokens))
            self.matched.append(self.model.must_match(tokens))
        elif what == "admit":
            self.admit(self.matched.pop(self.choose.randrange(len(self.matched))))
        elif what == "finish":
            live = self.running.pop(self.choose.randrange(len(self.running)))
            self.model.compute(live, live.request.num_tokens)
            self.model.release(live)
        else:
            self.model.land(self.choose.choice((None, None, "rank 0 died")), 1)
        self.model.check()

    def admit(self, live: LiveRequest) -> None:
        num_blocks = -(-live.request.num_tokens // self.model.size) - len(self.model.settle(live))
        if self.model.allocate(live, num_blocks):
            self.running.append(live)
            return
        self.num_refused += 1
        tokens = memoryview(live.request.tokens).cast("i").tolist()
        self.model.release(live)
        self.queue.append(tokens)


@pytest.mark.parametrize("seed", range(30))
def test_requests_that_do_not_fit_together_all_finish(seed: int) -> None:
    """Any order of matching, loading, admitting and finishing: nobody holds blocks while waiting for blocks."""
    choose = random.Random(seed)
    model = CacheModel(4, 12, 40, policy=choose.choice(EVICTION_POLICIES), write_policy=choose.choice(WRITE_POLICIES))
    model.serve_and_copy(A[:40], B[:40])
    scheduler = Scheduler(model, [A[:44], B[:44], A[:20] + C[:24], C[:32]], choose)
    for _ in range(2000):
        if not (scheduler.queue or scheduler.matched or scheduler.running):
            break
        scheduler.step()
    assert not (scheduler.queue or scheduler.matched or scheduler.running), "they block each other"
    model.finish()


def test_the_schedules_above_do_refuse() -> None:
    """Else they would show nothing."""
    model = CacheModel(4, 12, 40)
    scheduler = Scheduler(model, [A[:44], B[:44]], random.Random(0))
    scheduler.admit(model.must_match(scheduler.queue.pop()))
    scheduler.admit(model.must_match(scheduler.queue.pop()))
    assert (scheduler.num_refused, len(scheduler.running), len(scheduler.queue)) == (1, 1, 1)
    model.finish()


# -- a queue that does not fit


PROMPTS = [list(range(base, base + 41)) for base in range(10_000, 90_000, 10_000)]  # ten full blocks of four each


def with_queue(num_cpu: int = 32) -> tuple[Rig, list[Request]]:
    """Eight prompts are in storage; all are prefetched at once, and the CPU tier holds three of them."""
    rig = Rig({name: value for tokens in PROMPTS for name, value in stored(tokens).items()}, num_cpu=num_cpu)
    requests = []
    for number, tokens in enumerate(PROMPTS):
        rig.know(tokens)
        requests.append(Request(request_id=f"queued{number}", prompt_token_ids=tokens))
        rig.model.cache.prefetch(requests[-1])
        rig.store.land_all()
    return rig, requests


def served(rig: Rig, request: Request) -> tuple[int, int]:
    """Tokens that a match finds at once, and those that it has in the end."""
    match = rig.model.cache.match(request)
    at_once = match.num_tokens + sum(map(len, [match.coming_block_ids])) * 4
    rig.land_all()
    match = match.poll()
    rig.model.cache.allocate(request, 1)
    rig.model.cache.commit(request, 41)
    rig.model.cache.release(request)
    rig.land_all()
    return at_once, match.num_storage_tokens + match.num_cpu_tokens + match.num_gpu_tokens


def test_a_queue_larger_than_the_cpu_tier_hits_all_of_it() -> None:
    """What came first stays until it is matched, and the rest is read when its turn comes."""
    rig, requests = with_queue()
    found = [served(rig, request) for request in requests]
    assert [in_the_end for _, in_the_end in found] == [40] * 8
    assert [at_once for at_once, _ in found[:3]] == [40] * 3
    assert rig.model.cache.stats().storage.num_fetched_blocks == 80, "something was read twice"
    rig.finish()


def test_requests_that_go_unmatched_give_their_place_to_others() -> None:
    """Where the first three are called off, the next three can be fetched."""
    rig, requests = with_queue()
    for request in requests[:3]:
        rig.model.cache.end_prefetch(request)
    for request in requests[5:]:
        rig.model.cache.prefetch(request)
        rig.store.land_all()
    assert [served(rig, request)[0] for request in requests[5:]] == [40] * 3
    rig.finish()


def test_a_reset_lets_go_of_what_was_brought() -> None:
    """Nothing of it is there any more, so it takes nobody's place."""
    rig, requests = with_queue()
    rig.model.reset()
    for request in requests[5:]:
        rig.model.cache.prefetch(request)
        rig.store.land_all()
    assert [served(rig, request)[0] for request in requests[5:]] == [40] * 3
    rig.finish()


def test_what_an_engine_has_forgotten_is_kept_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that never says that a request has gone does not lose its prefetches for good."""
    rig, requests = with_queue()
    monkeypatch.setattr("fastdeploy_cache.storage.room._KEPT_SECONDS", 0.0)
    for request in requests[5:]:
        rig.model.cache.prefetch(request)
        rig.store.land_all()
    assert served(rig, requests[7])[0] == 40
    rig.finish()

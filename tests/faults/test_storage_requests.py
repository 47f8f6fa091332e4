"""What a store of one's own hears of requests, how little they feel of a slow one, and a walk through all faults."""

from __future__ import annotations

import dataclasses
import errno
import random
from pathlib import Path

import pytest

from fastdeploy_cache import PrefixCacheManager, Request
from tests.rigs.faulty_engine import BLOCK_SIZE, Engine
from tests.rigs.storage_engine import SECONDS, drained, fetched, storage_config
from tests.rigs.storage_hearing import BRANCH, LONG, TURN, Heard, asked, names, serve
from tests.rigs.storage_trouble import Eventually, InTrouble, metric, prompt, spoiled, stored

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_store_of_ones_own_hears_priority_and_tokens(tmp_path: Path, tp_size: int) -> None:
    """Each rank's: with every write, and the tokens with what a next engine looks up and reads, behind a hit, too."""
    storage, _ = spoiled(tmp_path)
    storage = dataclasses.replace(storage, options={**storage.options, "needs_token_ids": "1"})
    config = storage_config(tp_size, storage, eviction_policy="priority")
    heard, ranks = Heard(tmp_path / "record"), set(range(tp_size))
    with PrefixCacheManager(config) as cache:
        engine = Engine(cache, tp_size)
        for tokens, priority, first in ((LONG, 70, 0), (BRANCH, 20, 3), (TURN, 90, 6)):
            request = Request(request_id="own", prompt_token_ids=tokens, priority=priority)
            serve(cache, engine, request, tokens)
            assert cache.wait_for_transfers(SECONDS)
            drained(cache)
            writes = heard.new()
            assert {(line["call"], line["rank"], line["priority"]) for line in writes} == {
                ("write", rank, priority) for rank in ranks
            }
            assert {name for line in writes for name in line["hashes"]} == set(names(tokens)[first:])
    with PrefixCacheManager(config) as cache:
        engine = Engine(cache, tp_size)
        for tokens, first in ((LONG, 0), (TURN, 6)):
            num_tokens = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
            assert fetched(cache, engine, tokens) == (num_tokens - first * BLOCK_SIZE, num_tokens)
            reads = heard.new()
            assert {(line["call"], line["rank"]) for line in reads} == {
                (call, rank) for call in ("count_leading", "read") for rank in ranks
            }
            assert {name for line in reads for name in line["hashes"]} == set(names(tokens)[first:])


@pytest.mark.parametrize("policy", ["auto", "always"])
def test_no_request_asks_a_store_that_is_slower_than_computing(tmp_path: Path, policy: str) -> None:
    """Once the probe has measured it nobody looks it up, reads it or waits for it, though it has every prompt. With
    `always` the store serves them all."""
    storage, orders = spoiled(tmp_path)
    stored(storage_config(1, storage), *range(6))
    orders.give(read_seconds=0.05)
    config = storage_config(1, storage, 40, load_policy=policy, prefill_tokens_per_second=1e6)
    with PrefixCacheManager(config) as cache:
        drained(cache)
        engine, num_waiting, num_from_storage = Engine(cache, 1), 0, 0
        for turn in range(24):
            request = Request(request_id=f"turn {turn}", prompt_token_ids=prompt(turn % 6))
            num_waiting += not cache.prefetch(request).ready
            match = serve(cache, engine, request, prompt(turn % 6))
            num_from_storage += match.num_storage_tokens
            assert cache.wait_for_transfers(SECONDS)
        if policy == "always":
            assert num_waiting >= 1 and num_from_storage == 6 * 6 * BLOCK_SIZE
            return
        assert (num_waiting, num_from_storage) == (0, 0)
        assert (asked(cache, "lookup"), asked(cache, "prefetch")) == (0, 0)
        cache.check_invariants()


def test_a_store_that_became_slow_is_waited_for_once(tmp_path: Path, eventually: Eventually) -> None:
    """No longer than the prefetch policy says, though `auto` believed in it; what that read took is learned."""
    storage, orders = spoiled(tmp_path, task_timeout_seconds=30.0)
    timeout = {"prefetch_policy": "timeout", "prefetch_timeout_seconds": 0.2, "prefetch_seconds_per_1024_tokens": 0.0}
    config = storage_config(1, storage, 8, load_policy="auto", prefill_tokens_per_second=50.0, **timeout)
    stored(config, *range(4))
    with PrefixCacheManager(config) as cache:
        drained(cache)
        orders.give(read_seconds=1.0)  # two blocks at a time
        engine, request = Engine(cache, 1), Request(request_id="waits", prompt_token_ids=prompt(0))
        cache.prefetch(request)
        assert serve(cache, engine, request, prompt(0)).num_tokens == 0
        assert asked(cache, "prefetch") == 0  # it was the policy that ended the wait
        eventually(lambda: asked(cache, "prefetch") == 2)
        for number in range(1, 4):
            request = Request(request_id=f"goes on {number}", prompt_token_ids=prompt(number))
            assert cache.prefetch(request).ready and cache.match(request).ready
            cache.release(request)
        assert asked(cache, "lookup") == 1


# what goes wrong, and how many blocks of a prompt that is there can be had meanwhile
ALL_FAULTS: tuple[tuple[dict[str, object], int], ...] = (
    ({"slow_seconds": 0.02}, 6),
    ({"failures": -1}, 0),
    ({"claims": 4}, 6),
    ({"read_fewer": 2}, 2),
    ({"flip": True}, 0),
    ({"hanging": True}, 0),
    ({"errors": {"read": errno.EIO}}, 0),
    ({"errors": {"write": errno.EIO}}, 6),
    ({"errors": {"allocate": errno.ENOSPC}}, 6),
)


class Walk:
    """Requests over a few prompts, some waiting in a queue, at random."""

    def __init__(self, cache: PrefixCacheManager, engine: Engine, chance: random.Random) -> None:
        self.cache, self.engine, self.chance = cache, engine, chance
        self.queue: list[tuple[Request, list[int]]] = []
        self.num_queued = 0

    def step(self) -> None:
        verbs = [self.enqueue] * 4 + [self.serve] * 4 + [self.cache.reset, self.give_up]
        self.chance.choice(verbs)()
        self.cache.check_invariants()

    def enqueue(self, tokens: list[int] | None = None) -> None:
        self.num_queued += 1
        tokens = tokens or self.chance.choice((LONG, BRANCH, TURN, prompt(1), prompt(2)))
        request = Request(request_id=f"walk {self.num_queued}", prompt_token_ids=tokens)
        self.cache.prefetch(request)
        self.queue.insert(self.chance.randrange(len(self.queue) + 1), (request, tokens))

    def serve(self) -> int:
        """Somebody; returns how many tokens came from storage."""
        if not self.queue:
            self.enqueue()
        return serve(self.cache, self.engine, *self.queue.pop()).num_storage_tokens

    def serve_all(self) -> int:
        return sum(self.serve() for _ in range(len(self.queue)))

    def give_up(self) -> None:
        if self.queue:
            self.cache.end_prefetch(self.queue.pop()[0])


@pytest.mark.parametrize(("seed", "tp_size", "policy"), [(1, 1, "wait_complete"), (2, 2, "timeout")])
def test_a_walk_through_all_faults(
    tmp_path: Path, seed: int, tp_size: int, policy: str, eventually: Eventually
) -> None:
    """Slow, failing, lying, cut short, wrong bits, hanging: no wrong byte, books that add up, an end, and a return."""
    storage, orders = spoiled(tmp_path, task_timeout_seconds=1.0)
    chance = random.Random(seed)
    with PrefixCacheManager(storage_config(tp_size, storage, prefetch_policy=policy)) as cache:
        trouble = InTrouble(cache, eventually)
        walk, tier = Walk(cache, trouble.engine, chance), cache.storage._tier
        assert tier is not None
        for fault, most in chance.sample(ALL_FAULTS, len(ALL_FAULTS)):
            trouble.comes_back(LONG)
            cache.reset()
            orders.give(**fault)
            walk.enqueue(LONG)
            found = walk.serve_all()
            assert found == most * BLOCK_SIZE or (policy == "timeout" and found < most * BLOCK_SIZE)
            for _ in range(15):
                walk.step()
            orders.give()
            walk.serve_all()
            eventually(lambda: tier.link.client.available)
        trouble.comes_back(LONG)
        assert metric(cache, "task_failures_total", kind="lookup", rank="0")
        eventually(lambda: cache.stats().cpu.num_in_flight == 0)

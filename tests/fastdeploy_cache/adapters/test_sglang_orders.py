"""SGLang's cache under random schedules, odd orders of calls and changes of life: no wrong slot, none lost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fastdeploy_cache.adapters.sglang.radix_cache import HiRadixCache
from fastdeploy_cache.errors import RequestError
from tests.rigs.sglang_engine import Req, Scheduler


class Story:
    """A random schedule: branching requests, chunks, refusals, copies and failing loads."""

    def __init__(self, seed: int) -> None:
        self.choose = choose = random.Random(seed)
        size = choose.choice([1, 1, 2, 4])
        policy = choose.choice(["write_through", "write_back", "write_through_selective"])
        self.scheduler = Scheduler(48 * size, size, choose.choice([0, 64, 256]) * size, hicache_write_policy=policy)
        self.texts = [[(7 * i * i + text * (i // 9)) % 5 for i in range(60)] for text in range(4)]
        self.running: list[Req] = []
        self.num_found = 0

    def arrive(self) -> None:
        tokens = [*self.choose.choice(self.texts)[: self.choose.randint(1, 40)], self.choose.randint(0, 3)]
        req = Req("r", tokens, self.choose.choice([None, None, "lora"]))
        if self.scheduler.admit(req):
            self.num_found += len(req.prefix_indices)
            self.running.append(req)

    def go_on(self, req: Req) -> None:
        missing = len(req.origin_input_ids) + len(req.output_ids) - len(req.fill_ids)
        if missing > 1 or not req.output_ids:
            if missing:
                self.scheduler.compute(req, self.choose.randint(1, missing))
            self.scheduler.keep(req, chunked=self.choose.random() < 0.5)
            if len(req.fill_ids) == len(req.origin_input_ids) and not req.output_ids:
                req.output_ids.append(self.choose.randint(0, 4))
        elif self.choose.random() < 0.3 or not self.scheduler.decode(req, self.choose.randint(0, 4)):
            self.scheduler.cache.cache_finished_req(req, is_insert=self.choose.random() < 0.9)
            self.running.remove(req)

    def land(self) -> None:
        for _ in range(self.choose.choice([0, 0, 1, 3])):
            if self.scheduler.client.tasks:
                self.scheduler.client.land(self.choose.choice([None, None, "rank died"]))

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.choose.random() < 0.35 and len(self.running) < 4:
                self.arrive()
            elif self.running:
                self.go_on(self.choose.choice(self.running))
            self.land()
            if self.choose.random() < 0.01:
                self.scheduler.cache.reset()
            self.scheduler.manager.check_invariants()
        for req in self.running:
            self.scheduler.cache.cache_finished_req(req, is_insert=False)
        self.scheduler.close()


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules(seed: int) -> None:
    """No wrong slot is read and none is lost, whatever comes when."""
    story = Story(seed)
    story.run(150)
    assert story.num_found > 0


def test_without_a_prefix_cache_requests_keep_their_slots() -> None:
    """enable_prefix_caching off: nothing is adopted, nothing freed under a running request, all free at its end."""
    scheduler = Scheduler(16, 1, enable_prefix_caching=False)
    req = Req("a", list(range(8)))
    assert scheduler.admit(req)
    scheduler.compute(req, 8)
    scheduler.cache.cache_unfinished_req(req)
    assert scheduler.allocator.available_size() == 8 and scheduler.row(req).tolist() == list(range(8))
    scheduler.cache.cache_finished_req(req)
    scheduler.close()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("change", ["reset", "clear", "update_weights", "sleep"])
def test_requests_from_before_a_change_are_not_cached_and_end(change: str, page_size: int) -> None:
    """With a cached prefix and without: they finish, nothing of them is found, all slots come home."""
    scheduler = Scheduler(64, page_size)
    scheduler.serve(list(range(12)), [1])
    reqs = [Req("hit", list(range(16))), Req("cold", list(range(40, 52))), Req("goes on", list(range(15)))]
    for req in reqs:
        assert scheduler.admit(req)
        scheduler.compute(req, len(req.origin_input_ids) - len(req.fill_ids))
    scheduler.client.land_all()
    scheduler.client.auto = True
    if change == "reset":
        scheduler.cache.reset()
    else:
        getattr(scheduler.manager.life, change)()
    if change == "sleep":
        scheduler.manager.life.wake()
    scheduler.cache.cache_unfinished_req(reqs[2])
    for req in reqs:
        scheduler.cache.cache_finished_req(req)
    for req in reqs:
        assert len(scheduler.cache.match_prefix(req.origin_input_ids).device_indices) == 0, req.rid
    assert scheduler.cache.total_size() == 0
    scheduler.close()


def test_a_prefix_that_another_computed_meanwhile_voids_an_overlapped_load() -> None:
    """The cache keeps the other's slots: loading_check names the node, as the load's own slots are nobody's then."""
    scheduler, tokens = Scheduler(64, 1, 128), list(range(20))
    _, node = scheduler.load_ahead(tokens)
    own = scheduler.allocator.alloc(20)
    assert own is not None and scheduler.cache.insert(tokens, own) == 0, "adopted"
    scheduler.client.land_all()
    assert scheduler.cache.loading_check() == [node]
    scheduler.close()


def test_finishing_twice_is_refused_before_anything_is_freed() -> None:
    """Also for a prompt shorter than a page, which has no lock: somebody else's page stays theirs."""
    scheduler = Scheduler(16, 4)
    req = Req("a", [1, 2, 3])
    assert scheduler.admit(req)
    scheduler.compute(req, 3)
    scheduler.cache.cache_finished_req(req)
    other = scheduler.allocator.alloc(4)
    assert other is not None
    with pytest.raises(RequestError, match="row 0"):
        scheduler.cache.cache_finished_req(req)
    scheduler.allocator.free(other)
    scheduler.close()


@pytest.mark.parametrize("num_first", [10, 20])
def test_a_load_that_lands_between_match_and_load_back_leaves_no_hole(num_first: int) -> None:
    """Another request's load of a part, or of all, lands meanwhile: the caller's slots are those of its tokens."""
    scheduler = Scheduler(64, 1, 128)
    tokens = list(range(20))
    scheduler.serve(tokens, [1])
    scheduler.client.land_all()
    scheduler.cache.evict(20)
    scheduler.cache = cache = HiRadixCache(scheduler.manager, scheduler.pool, load_back_threshold=1, overlap_loads=True)
    first = cache.match_prefix(tokens[:num_first])
    cache.init_load_back(first.last_host_node, first.host_hit_length)
    match = cache.match_prefix(tokens)
    assert (len(match.device_indices), match.host_hit_length) == (0, 20)
    scheduler.client.land_all()
    loaded, node = cache.init_load_back(match.last_host_node, match.host_hit_length)
    scheduler.client.land_all()
    slots = np.concatenate([match.device_indices, loaded])
    assert len(slots) == node.num_tokens, "a hole, or a node deeper than the slots"
    scheduler.check(Req("second", tokens), tokens, slots)
    assert cache.loading_check() == []
    scheduler.close()

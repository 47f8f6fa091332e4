"""The block table that a caller counts by what it was told is the cache's, whatever lands between any two verbs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from fastdeploy_cache import Request, StorageConfig
from tests.rigs.cache_model import CacheModel, LiveRequest
from tests.rigs.simulated_storage import SimulatedStorage

SIZE = 4
STORE = StorageConfig(kind="tests.rigs.memory_storage:MemoryStorage", weights_id="w1")
PROMPT = list(range(100, 100 + 6 * SIZE + 1))
WHOLE = PROMPT[: 6 * SIZE]
OTHERS = [list(range(base, base + 5 * SIZE + 1)) for base in (1000, 2000, 3000, 4000)]


class Story:
    """A prompt of which something is on its way; `land` ends the next task, of a store or between tiers."""

    def __init__(self, model: CacheModel, tokens: list[int], store: SimulatedStorage | None = None) -> None:
        self.model, self.tokens, self.store = model, tokens, store
        self.has_more: list[bool] = []  # after each landing: whether anything is still on its way

    def match(self) -> LiveRequest:
        """The request, prefetched where there is a store."""
        if self.store is not None:
            queued = Request(request_id=f"r{self.model.num_requests + 1}", prompt_token_ids=self.tokens)
            self.model.cache.prefetch(queued)
        return self.model.must_match(self.tokens)

    def land(self, num_tasks: int, error: str | None = None) -> None:
        for _ in range(num_tasks):
            if self.model.client.tasks:
                self.model.client.land(error)
            elif self.store is not None and self.store.tasks:
                self.store.land(error)
        self.has_more.append(bool(self.model.client.tasks or (self.store is not None and self.store.tasks)))

    def check(self, live: LiveRequest) -> None:
        """What the cache files the request's tokens by is what its caller computes them into."""
        active = self.model.cache._requests.active(live.request)
        assert active.block_ids.tolist() == live.table, "the cache's table is not its caller's"
        self.model.check()


def _on_the_cpu_alone(**settings: object) -> CacheModel:
    """The prompt's copies, in the CPU tier only."""
    model = CacheModel(SIZE, 24, 64, **settings)  # type: ignore[arg-type]
    model.serve_and_copy(PROMPT[: 3 * SIZE + 1], PROMPT)
    model.kv_lost()
    return model


def one_load() -> Story:
    """The whole prefix comes in one load."""
    return Story(_on_the_cpu_alone(), PROMPT)


def two_loads() -> Story:
    """Half of it is being loaded for another request; this one's load brings the rest."""
    model = _on_the_cpu_alone()
    model.match(PROMPT[: 3 * SIZE + 1])
    return Story(model, PROMPT)


def a_copy_of_the_last_block() -> Story:
    """The prompt is cached whole; its last block is copied, so that the last token can be computed."""
    model = CacheModel(SIZE, 24, 64, recompute_last_token=True)
    model.serve_and_copy(WHOLE)
    return Story(model, WHOLE)


def pieces_from_storage() -> Story:
    """Nothing is here; storage brings piece after piece, and each brings a load."""
    settings: dict[str, object] = {"min_prefetch_tokens": SIZE, "prefetch_policy": "wait_complete"}
    model = CacheModel(SIZE, 24, 12, **settings)  # type: ignore[arg-type]
    store = SimulatedStorage(model.client)
    model.cache.storage.attach(STORE, client=store)
    store.land_all()
    model.serve_and_copy(PROMPT)
    while store.tasks or model.client.tasks:
        store.land_all()
        model.client.land_all()
    model.reset()
    return Story(model, PROMPT, store)


STORIES = (one_load, two_loads, a_copy_of_the_last_block, pieces_from_storage)


def play(story: Story, landings: tuple[int, ...], look: str, error: str | None) -> bool:
    """Match, look, allocate, commit, release, with so many landings in each gap; whether the caller saw less than had
    come when it allocated."""
    model = story.model
    live = story.match()
    story.land(landings[0], error)
    if look == "poll":
        model.look(live)
    elif look == "wait":
        model.settle(live)
    seen = live.match.num_tokens
    story.land(landings[1])
    requests = model.cache._requests
    had_more = len(requests.matcher.arrived(requests.active(live.request))[0]) * SIZE > seen
    assert model.allocate(live, -(-len(story.tokens) // SIZE) - len(live.match.block_ids))
    story.check(live)
    story.land(landings[2])
    model.compute(live, len(story.tokens))
    story.check(live)
    story.land(landings[3])
    model.release(live)
    again = model.must_match(story.tokens)
    model.client.land_all()
    model.settle(again)
    return had_more


@pytest.mark.parametrize("error", [None, "failed"])
@pytest.mark.parametrize("look", ["none", "poll", "wait"])
@pytest.mark.parametrize("new_story", STORIES)
def test_every_interleaving_of_landings(new_story: Callable[[], Story], look: str, error: str | None) -> None:
    """Whatever lands in whichever gap between two verbs: one table, right bytes at every later hit, books that add up.

    A block more in the cache's table than in its caller's, and all that is computed is filed one block off.
    """
    num_unseen, spent = 0, set[tuple[int, ...]]()
    for landings in itertools.product((0, 1, 2, 9), repeat=4):
        if any((*landings[:gap], fewer) in spent for gap in range(4) for fewer in range(landings[gap])):
            continue  # the same story: after fewer landings in that gap nothing was on its way any more
        story = new_story()
        num_unseen += play(story, landings, look, error)
        spent |= {landings[: gap + 1] for gap in range(4) if not story.has_more[gap]}
        while story.model.client.tasks or (story.store is not None and story.store.tasks):
            story.land(1)
        story.model.finish()
    if new_story is not a_copy_of_the_last_block and look != "wait" and error is None:
        assert num_unseen, "no story had a landing that its caller did not see"

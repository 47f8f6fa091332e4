"""Caches with a store that is used badly, each in one way, and the words that the doctor must find for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdeploy_cache import Request, StorageConfig
from tests.rigs.asker import Asker
from tests.rigs.sick_caches import NUM_PROMPTS, NUM_ROUNDS, prompt
from tests.rigs.simulated_storage import SimulatedStorage


class StoreAsker(Asker):
    """Both tiers hold three prompts, where nothing else is said; the store holds all that it takes."""

    def __init__(
        self,
        admission: str = "all",
        objects: dict[bytes, object] | None = None,
        num_cpu: int = 34,
        **config: object,
    ) -> None:
        given = {"min_prefetch_tokens": 4, "prefetch_policy": "wait_complete", "cpu_write_policy": "write_through"}
        super().__init__(num_gpu=34, num_cpu=num_cpu, **{**given, **config})
        self.store = SimulatedStorage(self.client, objects)
        settings = StorageConfig(folder="/nowhere", weights_id="w1", admission=admission)  # type: ignore[arg-type]
        self.cache.storage.attach(settings, client=self.store)
        self.land()

    def land(self) -> None:
        while self.store.tasks or self.client.tasks:
            self.store.land_all()
            self.client.land_all()

    def serve_one(self, tokens: Sequence[int], *, prefetch: bool = True) -> None:
        """A whole request, from its prefetch on, whose blocks are written before the next one."""
        self.num_requests += 1
        request = Request(request_id=f"r{self.num_requests}", prompt_token_ids=tokens)
        if prefetch:
            self.cache.prefetch(request)
            self.land()
        match = self.cache.match(request)
        self.land()
        self.admit(request, match)
        self.cache.commit(request, request.num_tokens)
        self.cache.release(request)
        self.land()

    def prefetched(self, tokens: Sequence[int], num_tasks: int) -> Request:
        """A queued request, when the store has answered so many tasks for it."""
        self.num_requests += 1
        request = Request(request_id=f"r{self.num_requests}", prompt_token_ids=tokens)
        self.cache.prefetch(request)
        for _ in range(num_tasks):
            self.store.land()
        return request

    def rounds(self, *, prefetch: bool = True, first: int = 0) -> StoreAsker:
        """A few prompts, in turn, again and again."""
        for number in list(range(NUM_PROMPTS)) * NUM_ROUNDS:
            self.serve_one(prompt(first + number), prefetch=prefetch)
        return self


def declining() -> StoreAsker:
    asker = StoreAsker("priority")
    asker.store.declines, asker.store.counts = True, {"num_declined": 320}
    return asker.rounds()


def other_weights() -> StoreAsker:
    """The third start; nothing that is asked for comes again."""
    asker = StoreAsker()
    asker.store.counts = {"num_other_weights": 2}
    for number in range(30):
        asker.serve_one(prompt(number))
    return asker


SICK_STORES: dict[str, tuple[str, Callable[[], StoreAsker], str]] = {
    "too short": (
        "too_short_to_fetch",
        lambda: StoreAsker(min_prefetch_tokens=64).rounds(),
        "Lower min_prefetch_tokens",
    ),
    "no prefetch": ("store_not_asked", lambda: StoreAsker().rounds(prefetch=False), "cache.prefetch(request)"),
    "no prefetch of short ones": (
        "store_not_asked",
        lambda: StoreAsker(min_prefetch_tokens=64).rounds(prefetch=False),
        "lower min_prefetch_tokens, which is 64",
    ),
    "admission": ("store_writes_nothing", declining, "storage.admission, which is 'priority'"),
    "write policy": (
        "store_writes_nothing",
        lambda: StoreAsker(storage_write_policy="write_through_selective", storage_write_min_uses=99).rounds(),
        "storage_write_policy to 'write_through'",
    ),
    "weights": ("weights_id_changes", other_weights, "storage.weights_id"),
}

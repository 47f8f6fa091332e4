"""Random verbs over three tiers, step by step."""

from __future__ import annotations

from typing import Any

from fastdeploy_cache import Request, StorageConfig
from tests.rigs.cache_model import CacheModel, LiveRequest
from tests.rigs.simulated_storage import SimulatedStorage

# Few prompts that share prefixes: what one request writes another finds.
PROMPTS = [[p % 3, 7, 8, *range(10 * (p % 4), 10 * (p % 4) + 14 + p % 5)] for p in range(12)]
OPERATIONS = (
    "prefetch", "prefetch", "match", "match", "match", "serve", "serve", "finish", "finish", "land", "land", "land",
    "store", "store", "store", "fail", "store_fails", "reset", "kv_lost", "lie", "part", "down", "end", "reattach",
    "come_back", "come_back", "come_back", "forget", "write_now", "flush", "drop", "look", "rush", "rush",
)  # fmt: skip
STORE = StorageConfig(kind="tests.rigs.memory_storage:MemoryStorage", weights_id="w1", breaker_seconds=1e-6)


class Walk:
    """A cache over simulated tiers, driven step by step."""

    def __init__(
        self, num_cpu: int, write_policy: str, storage_policy: str, prefetch_policy: str, **settings: Any
    ) -> None:
        self.model = CacheModel(
            2,
            14,
            num_cpu,
            write_policy=write_policy,
            storage_write_policy=storage_policy,
            prefetch_policy=prefetch_policy,
            min_prefetch_tokens=2,
            max_prefetch_share=1.0,
            load_policy="always",
            **settings,
        )
        self.store = SimulatedStorage(self.model.client)
        self.model.cache.storage.attach(STORE, client=self.store)
        self.queued: list[tuple[Request, list[int]]] = []

    def step(self, operation: str, number: int) -> None:
        getattr(self, f"do_{operation}")(number)
        self.model.check()

    def do_prefetch(self, number: int) -> None:
        """Queue the request that the next match will be."""
        request = Request(request_id=f"r{self.model.num_requests + 1}", prompt_token_ids=PROMPTS[number % len(PROMPTS)])
        self.model.cache.prefetch(request)
        self.queued.append((request, PROMPTS[number % len(PROMPTS)]))

    def do_come_back(self, number: int) -> None:
        """A patient request, whose pieces land one by one."""
        if not self.queued:
            while len(self.model.live) > number % 3:
                self.model.release(self.model.live[0])
            self.do_prefetch(number)
            num_early = number % 4
            for _ in range(min(num_early, len(self.store.tasks))):
                self.store.land()
            live = self.model.match(self.queued.pop()[1])
            while live is not None and (self.store.tasks or self.model.client.tasks):
                (self.store if self.store.tasks else self.model.client).land()
                self.model.check()
            if live is not None:
                self.grow(live)

    def do_forget(self, number: int) -> None:
        """Everything above storage is forgotten."""
        self.model.reset()

    def do_end(self, number: int) -> None:
        if self.queued:
            self.model.cache.end_prefetch(self.queued.pop()[0])

    def do_match(self, number: int) -> None:
        tokens = self.queued.pop()[1] if self.queued else PROMPTS[number % len(PROMPTS)]
        if len(self.model.live) < 3:
            self.model.match(tokens)

    def do_serve(self, number: int) -> None:
        """Some request gets its blocks and computes them."""
        if self.model.live:
            self.grow(self.model.live[number % len(self.model.live)])

    def grow(self, live: LiveRequest) -> None:
        num_missing = -(-live.request.num_tokens // 2) - len(self.model.settle(live))
        if num_missing <= 0 or self.model.allocate(live, num_missing):
            self.model.compute(live, self.model.computable(live))

    def do_look(self, number: int) -> None:
        if self.model.live and (live := self.model.live[number % len(self.model.live)]).table is None:
            self.model.look(live)

    def do_rush(self, number: int) -> None:
        """Some request waits for nothing: it takes blocks behind what it saw last, whatever has landed since."""
        if self.model.live:
            live = self.model.live[number % len(self.model.live)]
            num_seen = len(live.match.block_ids) if live.table is None else len(live.table)
            num_missing = -(-live.request.num_tokens // 2) - num_seen
            if num_missing <= 0 or self.model.allocate(live, num_missing):
                self.model.compute(live, self.model.computable(live))

    def do_finish(self, number: int) -> None:
        if self.model.live:
            self.model.release(self.model.live[number % len(self.model.live)])

    def do_write_now(self, number: int) -> None:
        if self.model.live:
            self.model.cache.write_to_storage(self.model.live[number % len(self.model.live)].request)

    def do_flush(self, number: int) -> None:
        """As far as it goes without waiting, or with a store that answers at once and copies that land meanwhile.
        Where it says that storage has everything, it has."""
        self.store.answers_at_once = number % 2 == 1
        for _ in range(3 if self.store.answers_at_once else 1):
            if self.store.answers_at_once:
                self.land_all()
            if self.model.cache.storage.flush(0.0) and not self.store.lies:
                tree = self.model.cache._books.tree
                cached = [tree.names.of(run, 0, run.num_blocks) for run in tree.runs() if run.epoch == tree.epoch]
                hashes = {run[i : i + 32] for run in cached for i in range(0, len(run), 32)}
                assert hashes <= self.store.objects.keys()
        self.store.answers_at_once = False

    def do_drop(self, number: int) -> None:
        """The store forgets some objects, and tells nobody."""
        self.store.drop(number % 8)

    def do_land(self, number: int) -> None:
        self.model.land(None, 1 + number % 3)

    def do_fail(self, number: int) -> None:
        self.model.land("failed", 1)

    def do_store(self, number: int) -> None:
        for _ in range(min(1 + number % 3, len(self.store.tasks))):
            self.store.land()

    def do_store_fails(self, number: int) -> None:
        if self.store.tasks:
            self.store.land("failed")

    def do_reset(self, number: int) -> None:
        if number % 4 == 0:
            self.model.reset()

    def do_kv_lost(self, number: int) -> None:
        if number % 4 == 0:
            self.model.kv_lost()

    def do_lie(self, number: int) -> None:
        self.store.lies = bool(number % 2)

    def do_part(self, number: int) -> None:
        self.store.max_read = number % 12 or 10**9

    def do_down(self, number: int) -> None:
        if number % 8:
            self.store.come_back()
        else:
            self.store.up = False

    def do_reattach(self, number: int) -> None:
        if number % 4 == 0:
            self.model.cache.storage.detach()
            self.store = SimulatedStorage(self.model.client, self.store.objects)
            self.model.cache.storage.attach(STORE, client=self.store)

    def land_all(self) -> None:
        while self.store.tasks or self.model.client.tasks:
            self.store.land_all()
            self.model.client.land_all()

    def finish(self) -> None:
        self.land_all()
        self.model.finish()
        assert self.model.client.gpu

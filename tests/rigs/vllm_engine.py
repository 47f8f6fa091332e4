"""An engine of vLLM's shape over simulated memory, which remembers what should be in each block."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache.adapters.vllm.manager import KVCacheBlocks, KVCacheManager
from fastdeploy_cache.errors import PromptTooLongError
from tests.rigs.simulated_client import SimulatedClient

SIZE = 4


def view(num_gpu: int = 8, num_cpu: int = 0, *, config: dict[str, Any] | None = None, **more: Any) -> KVCacheManager:
    """Over simulated memory; copies end at once."""
    client = SimulatedClient(num_gpu, num_cpu)
    client.auto = True
    cache = CacheConfig(
        block_size=SIZE, num_gpu_blocks=num_gpu, num_cpu_blocks=num_cpu, transfer_client="inline",
        load_policy="always", cpu_write_policy="write_through", **(config or {}),
    )  # fmt: skip
    return KVCacheManager(PrefixCacheManager(cache, client=client), **more)


def asks(name: str, tokens: list[int], **more: Any) -> SimpleNamespace:
    """An engine's request."""
    return SimpleNamespace(
        request_id=name, prompt_token_ids=tokens, all_token_ids=list(tokens), num_computed_tokens=0, **more
    )


def start(kv: KVCacheManager, request: SimpleNamespace) -> int:
    """Slots for the whole prompt, which is computed; returns the hit."""
    blocks, num_computed = kv.get_computed_blocks(request)
    num_new = len(request.all_token_ids) - num_computed
    assert kv.allocate_slots(request, num_new, blocks) is not None
    request.num_computed_tokens = len(request.all_token_ids)
    return num_computed


def serve(kv: KVCacheManager, request: SimpleNamespace) -> int:
    """A whole request; returns the hit."""
    num_computed = start(kv, request)
    kv.free(request)
    return num_computed


def ids(blocks: Any) -> list[int]:
    return [block.block_id for block in blocks]


TEXTS = [[(7 * i * i + text * (i // 9)) % 5 for i in range(60)] for text in range(3)]
_STEPS = {"arrive": 5, "look": 3, "admit": 7, "step": 12, "preempt": 1, "leave": 2, "take": 1, "land": 4, "rank": 0.3,
          "reset": 0.5}  # fmt: skip


class Engine:
    """Each token that it computes is written where its slot is; before it computes on, it looks at what is there."""

    def __init__(self, kv: KVCacheManager, choose: random.Random, *, schedules_ahead: bool) -> None:
        self.kv, self.choose, self.schedules_ahead = kv, choose, schedules_ahead
        client = kv.manager._movement.client
        assert isinstance(client, SimulatedClient)
        self.client = client
        self.waiting: list[SimpleNamespace] = []
        self.running: list[SimpleNamespace] = []
        self.looked: dict[str, tuple[KVCacheBlocks, int]] = {}  # what waiting requests were told, not used yet
        self.taken = KVCacheBlocks()
        self.num_requests = 0
        self.seen: Counter[str] = Counter()

    def content(self, request: SimpleNamespace, num_tokens: int) -> object:
        """What is in a block of which the request has computed positions up to `num_tokens`."""
        image = request.mm_hashes if request.mm_hashes and num_tokens > request.mm_positions[0]["offset"] else []
        return request.cache_salt, tuple(image), tuple(request.all_token_ids[:num_tokens])

    def check_computed(self, request: SimpleNamespace, table: list[int], num_computed: int) -> None:
        for block in range(-(-num_computed // SIZE)):
            held, full = self.client.gpu[table[block]], self.content(request, (block + 1) * SIZE)
            end = min(num_computed, (block + 1) * SIZE)
            # a copy of a whole block serves for all but its last token
            assert held in (self.content(request, end), full), "wrong KV"

    def walk(self) -> None:
        self.client.auto = self.choose.random() < 0.5
        getattr(self, self.choose.choices(list(_STEPS), list(_STEPS.values()))[0])()

    def arrive(self) -> None:
        self.num_requests += 1
        choose = self.choose
        tokens = choose.choice(TEXTS)[: choose.randint(1, 40)]
        image = [{"offset": 2, "length": 7}] if len(tokens) > 9 and choose.random() < 0.3 else []
        self.waiting.append(
            asks(
                f"r{self.num_requests}", tokens, cache_salt=choose.choice([None, None, "salt"]), num_preemptions=0,
                skip_reading_prefix_cache=choose.random() < 0.15, mm_positions=image, mm_hashes=["cat"] * len(image),
            )
        )  # fmt: skip

    def look(self) -> bool:
        """`get_computed_blocks` of a request that waits."""
        if not self.waiting:
            return False
        request = self.choose.choice(self.waiting)
        num_loaded = self.kv.manager.stats().num_swapped_in_blocks
        try:
            blocks, num_computed = self.kv.get_computed_blocks(request)
        except PromptTooLongError:
            self.end(request)
            return False
        assert num_computed < len(request.all_token_ids) and not (blocks and request.skip_reading_prefix_cache)
        self.check_computed(request, ids(blocks), num_computed)
        self.looked[request.request_id] = blocks, num_computed
        self.seen["hit"] += bool(blocks)
        self.seen["image hit"] += bool(num_computed > 2 and request.mm_hashes)
        self.seen["loaded"] += self.kv.manager.stats().num_swapped_in_blocks > num_loaded
        return True

    def admit(self) -> None:
        """First slots, for what was found now or some steps ago."""
        if self.choose.random() < 0.7:
            self.look()
        requests = [request for request in self.waiting if request.request_id in self.looked]
        if not requests:
            return
        request = self.choose.choice(requests)
        blocks, num_computed = self.looked.pop(request.request_id)
        is_held = ids(self.kv.get_blocks(request.request_id)) == ids(blocks)
        num_new = self.choose.randint(1, len(request.all_token_ids) - num_computed)
        try:
            new = self.kv.allocate_slots(request, num_new, blocks)
        except PromptTooLongError:  # it was not looked up before
            assert request.skip_reading_prefix_cache
            self.end(request)
            return
        if new is None:
            assert not self.kv.get_blocks(request.request_id)
            self.seen["refused" if is_held else "let go"] += 1
            return
        assert is_held, "slots behind blocks that were let go"
        self.seen["alone"] += self.kv._served[request.request_id].is_alone
        table = ids(self.kv.get_blocks(request.request_id))
        assert table == [*ids(blocks), *ids(new)]
        self.check_computed(request, table, num_computed)
        self.waiting.remove(request)
        self.running.append(request)
        request.num_computed_tokens = num_computed
        self.compute(request, num_new)

    def step(self) -> None:
        if not self.running:
            return
        request, choose = self.choose.choice(self.running), self.choose
        num_new = choose.randint(1, len(request.all_token_ids) - request.num_computed_tokens)
        num_drafts, before = choose.choice([0, 0, 5]), ids(self.kv.get_blocks(request.request_id))
        new = self.kv.allocate_slots(request, num_new, num_lookahead_tokens=num_drafts)
        table = ids(self.kv.get_blocks(request.request_id))
        if new is None:
            self.seen["refused while running"] += 1
            assert table == before, "a refusal changed something"
            return
        assert table == [*before, *ids(new)]
        self.check_computed(request, table, request.num_computed_tokens)
        self.compute(request, num_new, num_drafts)

    def compute(self, request: SimpleNamespace, num_new: int, num_drafts: int = 0) -> None:
        table, before = ids(self.kv.get_blocks(request.request_id)), request.num_computed_tokens
        for position in range(before, before + num_new):
            self.client.gpu[table[position // SIZE]] = self.content(request, position + 1)
        for block in range(-(-(before + num_new) // SIZE), -(-(before + num_new + num_drafts) // SIZE)):
            self.client.gpu[table[block]] = "a draft"
        request.num_computed_tokens += num_new
        if self.schedules_ahead:
            self.kv.cache_blocks(request, request.num_computed_tokens)
        if request.num_computed_tokens == len(request.all_token_ids):
            request.all_token_ids += [self.choose.randint(0, 4) for _ in range(self.choose.randint(1, 3))]

    def preempt(self) -> None:
        if self.running:
            request = self.running.pop(self.choose.randrange(len(self.running)))
            self.kv.free(request)
            request.num_computed_tokens, request.num_preemptions = 0, request.num_preemptions + 1
            self.waiting.append(request)
            self.seen["preempted"] += 1

    def leave(self) -> None:
        """A request has all it wants, or its user has gone."""
        requests = self.running or self.waiting
        if requests:
            self.end(self.choose.choice(requests))

    def end(self, request: SimpleNamespace) -> None:
        self.kv.free(request)
        self.looked.pop(request.request_id, None)
        (self.running if request in self.running else self.waiting).remove(request)

    def take(self) -> None:
        """Blocks outside all requests; nobody else writes there."""
        assert all(self.client.gpu[block.block_id] == "taken" for block in self.taken)
        self.kv.block_pool.free_blocks(self.taken)
        num_blocks = self.choose.randint(0, min(3, self.kv.get_num_free_blocks()))
        self.taken = self.kv.block_pool.get_new_blocks(num_blocks)
        for block in self.taken:
            self.client.gpu[block.block_id] = "taken"

    def land(self) -> None:
        for _ in range(min(2, len(self.client.tasks))):
            self.client.land(self.choose.choice([None, None, "rank died"]))

    def rank(self) -> None:
        self.client.up = self.choose.random() < 0.8

    def reset(self) -> None:
        """Between engines' runs it is granted, else refused."""
        is_used = bool(self.running or self.taken)
        if self.choose.random() < 0.2:
            while self.running:
                self.end(self.running[0])
            self.kv.block_pool.free_blocks(self.taken)
            self.taken, is_used = KVCacheBlocks(), False
        assert self.kv.reset_prefix_cache() is not is_used
        self.seen["reset"] += not is_used

    def finish(self) -> None:
        """All requests leave: nothing may stay in use."""
        while self.running or self.waiting:
            self.end([*self.running, *self.waiting][0])
        self.kv.block_pool.free_blocks(self.taken)
        self.taken = KVCacheBlocks()
        self.client.up = True
        self.client.land_all()
        self.check()
        stats = self.kv.manager.stats()
        assert (stats.num_requests, stats.gpu.num_protected, stats.gpu.num_private) == (0, 0, 0)
        assert self.kv.get_num_free_blocks() == self.kv.block_pool.num_gpu_blocks

    def check(self) -> None:
        """After each step: the manager's books, references, what can be had."""
        self.kv.manager.check_invariants()
        held = [*self.running, *self.waiting]
        counts = Counter(i for request in held for i in ids(self.kv.get_blocks(request.request_id)))
        counts.update(ids(self.taken))
        pool = self.kv.block_pool
        assert [block.ref_cnt for block in pool.blocks] == [counts[i] for i in range(pool.num_gpu_blocks)]
        free = ids(pool.free_block_queue.get_all_free_blocks())
        assert len({*free}) == len(free) == pool.free_block_queue.num_free_blocks
        assert not counts.keys() & {*free}
        for request in self.running:
            table = ids(self.kv.get_blocks(request.request_id))
            self.check_computed(request, table, request.num_computed_tokens)

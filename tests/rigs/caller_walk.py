"""Random verbs without a request, among those of requests and changes of life, step by step."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.books.block_hash import HASH_BYTES, BlockHasher, root_hash
from fastdeploy_cache.books.block_pool import RUN
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.books.run import GPU
from fastdeploy_cache.callers.copies import CallerLoad, CallerTransfer
from fastdeploy_cache.errors import BlockOwnerError, ControlError, LifeCycleError, OutOfBlocksError, RequestError
from fastdeploy_cache.life_cycle import LifeCycleStatus
from fastdeploy_cache.policies import EVICTION_POLICIES
from tests.rigs.cache_model import CacheModel, Prefix

TEXTS = [[(7 * i * i + text * (i // 9)) % 5 for i in range(60)] for text in range(4)]


@dataclass
class Caller:
    """What an adapter's caller holds."""

    model: CacheModel
    choose: random.Random
    ids: list[int] = field(default_factory=list)
    pins: list[tuple[PinnedPrefix, list[Prefix], int]] = field(default_factory=list)  # with contents and epoch
    filling: list[tuple[CallerTransfer, list[int], list[Prefix]]] = field(default_factory=list)
    loads: list[tuple[CallerLoad, list[Prefix], int]] = field(default_factory=list)
    generations: dict[int, int] = field(default_factory=dict)
    num_moved: dict[str, int] = field(default_factory=lambda: {"in": 0, "out": 0, "load": 0, "evict": 0})

    def request(self) -> Request:
        tokens = self.choose.choice(TEXTS)[: self.choose.randint(1, 48)]
        return Request(request_id="names tokens", prompt_token_ids=tokens)

    def prefixes(self, request: Request) -> list[Prefix]:
        size = self.model.size
        tokens = tuple(memoryview(request.tokens).cast("i"))
        return [("", tokens[: size * (n + 1)], ()) for n in range(request.num_tokens // size)]

    def born(self, ids: list[int]) -> None:
        """They are the caller's, or filled, from now on."""
        self.generations.update(dict.fromkeys(ids, self.model.cache.blocks.generation))

    def are_current(self, ids: list[int]) -> bool:
        return all(self.generations[i] == self.model.cache.blocks.generation for i in ids)

    def take(self) -> None:
        room = self.model.cache.stats().gpu
        num_blocks = self.choose.randint(0, 6)
        try:
            new = self.model.cache.blocks.allocate(num_blocks)
            self.born(new)
            self.ids += new
        except OutOfBlocksError as refused:
            num_evictable = room.num_cached - room.num_protected - self.model.cache._books.pools[0].num_read_of(RUN)
            assert refused.missing == num_blocks - room.num_free - max(0, num_evictable)  # noqa: PT017
        except LifeCycleError:
            assert self.model.cache.life.status is not LifeCycleStatus.RUNNING
        assert len(set(self.ids)) == len(self.ids)

    def give_back(self) -> None:
        num_blocks = self.choose.randint(0, len(self.ids))
        gone = self.ids[:num_blocks]
        self.model.cache.blocks.free(gone)
        self.ids = self.ids[num_blocks:]
        if gone:
            with pytest.raises(BlockOwnerError):
                self.model.cache.blocks.free([*self.ids, gone[0]])

    def insert(self) -> None:
        cache, request = self.model.cache, self.request()
        found = cache.blocks.lookup(request, touch=False)
        contents = self.prefixes(request)
        first = self.choose.randint(0, len(found.block_ids))
        ids = self.ids[: len(contents) - first]
        for block_id, content in zip(ids, contents[first:], strict=False):
            self.model.client.gpu[block_id] = content
        with_pin = self.choose.random() < 0.3
        done = cache.blocks.insert(request, ids, first_block=first, pin=with_pin, used=self.choose.random() < 0.7)
        if not self.are_current(ids):
            assert done.duplicate_ids == ids and done.num_blocks == first, "what may have gone was cached"
        elif done.num_blocks < first + len(ids) and GPU not in cache._books.asleep:
            self.model.committed |= set(contents[: done.num_blocks])  # memory ran out between two runs
            assert set(done.duplicate_ids) >= set(ids[done.num_blocks - first :]), "what is not cached is the caller's"
        elif ids and GPU not in cache._books.asleep:
            assert done.duplicate_ids == ids[: len(done.duplicate_ids)], "what is cached is a prefix"
            assert len(done.duplicate_ids) == min(len(ids), max(0, len(found.block_ids) - first))
            self.model.committed |= set(contents[: first + len(ids)])
        self.ids = [*done.duplicate_ids, *self.ids[len(ids) :]]
        if done.pinned is not None:
            self.pins.append((done.pinned, contents, self.model.epoch))
        with pytest.raises(RequestError):
            cache.blocks.insert(request, [0] * (len(contents) + 1))

    def pin(self) -> None:
        request = self.request()
        most = self.choose.choice([None, 1, 3])
        pinned = self.model.cache.blocks.pin(request, most)
        contents = self.prefixes(request)
        assert pinned.num_blocks <= (len(contents) if most is None else most)
        if pinned.num_blocks:
            assert contents[pinned.num_blocks - 1] in self.model.committed
        self.pins.append((pinned, contents, self.model.epoch))

    def unpin(self) -> None:
        if self.pins:
            number = self.choose.randrange(len(self.pins))
            self.model.cache.blocks.unpin(self.pins[number][0])
            del self.pins[number]

    def check_pins(self) -> None:
        """What is pinned on the GPU holds what it should."""
        for pinned, contents, epoch in self.pins:
            if epoch == self.model.epoch:
                for block_id, content in zip(pinned.block_ids, contents, strict=False):
                    assert self.model.client.gpu[block_id] == content, "wrong KV under a pin"

    def look(self) -> None:
        """Hashes and runs of what is found are those of its tokens."""
        cache, request = self.model.cache, self.request()
        found = cache.blocks.lookup(
            request, touch=self.choose.random() < 0.5, split=self.choose.random() < 0.5, hashes=True
        )
        num_gpu, size, num_blocks = len(found.block_ids), self.model.size, request.num_tokens // self.model.size
        joined = BlockHasher(size).extend(root_hash("", size), request.tokens, 0, num_blocks)
        chain = [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]
        assert found.gpu_hash == (chain[num_gpu - 1] if num_gpu else b"")
        assert found.last_hash == (chain[found.num_blocks - 1] if found.num_blocks else b"")
        most = self.choose.choice([None, num_gpu])
        runs = cache.blocks.view.runs_of(request, most)
        num_found = found.num_blocks if most is None else num_gpu
        assert [name for run in runs for name in run.hashes][:num_found] == chain[:num_found]
        ends = [run.first_block + len(run.hashes) for run in runs]
        assert [0, *ends[:-1]] == [run.first_block for run in runs] or not runs

    def use(self) -> None:
        cache, request = self.model.cache, self.request()
        num_found = cache.blocks.lookup(request, touch=False).num_blocks
        assert cache.blocks.note_use(request, num_found_blocks=self.choose.randint(0, num_found)) == num_found

    def evict_runs(self) -> None:
        num_blocks = self.choose.randint(1, 3)
        gone = self.model.cache.blocks.evict_runs(num_blocks)
        assert len(set(gone)) == len(gone) and not set(gone) & set(self.ids)
        self.born(gone)
        self.ids += gone
        self.num_moved["evict"] += len(gone)

    def load(self) -> None:
        request = self.request()
        ahead = self.choose.random() < 0.5
        first = len(self.model.cache.blocks.lookup(request, touch=False).block_ids)  # may raise: nothing is held yet
        load = self.model.cache.blocks.copies.load(request, ahead=ahead)
        self.num_moved["load"] += load.num_blocks if load is not None else 0
        if load is not None and ahead:
            contents = self.prefixes(request)[first : first + load.num_blocks]
            self.loads.append((load, contents, self.model.epoch))

    def end_load(self) -> None:
        if self.loads:
            number = self.choose.randrange(len(self.loads))
            load, contents, epoch = self.loads[number]
            came = load.succeeded
            if came and epoch == self.model.epoch:
                assert [self.model.client.gpu[i] for i in load.block_ids] == contents, "wrong KV ahead of a load"
            assert not set(load.block_ids) & set(self.ids), "blocks that are used ahead were given out"
            assert self.model.cache.blocks.copies.end_load(load) <= came, (
                "False, too, where the GPU's bytes have gone since"
            )
            del self.loads[number]

    def swap_out(self) -> None:
        request, cache = self.request(), self.model.cache
        contents = self.prefixes(request)
        first = self.choose.randint(0, cache.blocks.lookup(request).num_blocks)
        ids = self.ids[: len(contents) - first]
        for block_id, content in zip(ids, contents[first:], strict=False):
            self.model.client.gpu[block_id] = content
        transfer = cache.blocks.copies.swap_out(request, ids, first_block=first)
        self.num_moved["out"] += transfer.num_blocks
        assert not transfer.num_blocks or self.are_current(ids)
        if transfer.num_blocks:
            self.model.committed |= set(contents[: first + len(ids)])
            self.ids = self.ids[len(ids) :]
            if self.choose.random() < 0.5:  # given back while they are being read
                cache.blocks.free(ids)
            else:
                self.filling.append((transfer, ids, []))

    def swap_in(self) -> None:
        request, cache = self.request(), self.model.cache
        first = self.choose.randint(0, cache.blocks.lookup(request).num_blocks)
        ids = self.ids[: self.choose.randint(0, 5)]
        transfer = cache.blocks.copies.swap_in(request, ids, first_block=first)
        taken, self.ids = ids[: transfer.num_blocks], self.ids[transfer.num_blocks :]
        self.born(taken)
        self.num_moved["in"] += transfer.num_blocks
        if taken and self.choose.random() < 0.2:  # given back while they are being filled
            cache.blocks.free(taken)
            return
        self.filling.append((transfer, taken, self.prefixes(request)[first:]))

    def end_copies(self) -> None:
        for transfer, ids, contents in [each for each in self.filling if each[0].done]:
            if transfer.succeeded:
                assert [self.model.client.gpu[i] for i in ids] == contents[: len(ids)] or not contents, "wrong bytes"
            self.ids += ids
        self.filling = [each for each in self.filling if not each[0].done]

    def change_life(self) -> None:
        model, cache, client = self.model, self.model.cache, self.model.client
        client.land_all()
        self.end_copies()  # what has come may be gone afterwards
        client.auto = True
        before, asleep = cache.life.status, cache._books.asleep
        verb = self.choose.choice(["pause", "resume", "sleep", "wake", "clear", "update"])
        try:
            if verb == "sleep":
                tiers = self.choose.choice([("gpu",), ("cpu",), ("gpu", "cpu")])
                cache.life.sleep(5, tiers=tiers)  # type: ignore[arg-type]
                if "gpu" in tiers:
                    model.epoch += 1
            else:
                {
                    "pause": cache.life.pause,
                    "resume": cache.life.resume,
                    "wake": cache.life.wake,
                    "clear": cache.life.clear,
                    "update": cache.life.update_weights,
                }[verb]()
        except LifeCycleError:
            assert before is LifeCycleStatus.ASLEEP or verb == "wake"
            assert (cache.life.status, cache._books.asleep) == (before, asleep)
        else:
            if verb in ("clear", "update"):
                model.epoch += 1
                model.committed.clear()
        client.auto = False

    def operate(self) -> None:
        """What an operator does meanwhile: pins by tokens and by name, and another eviction policy."""
        control, insight = self.model.cache.control, self.model.cache.insight
        with contextlib.suppress(ControlError):  # too much is pinned, nothing is cached, or `reuse` cannot come back
            verb = self.choose.choice(["pin", "pin name", "unpin", "unpin", "policy"])
            if verb == "pin":
                control.pin(self.choose.choice(TEXTS)[: self.choose.randint(1, 12)], 1000)
            elif verb == "pin name" and (top := insight.top(5)):
                control.pin(self.choose.choice(top).name, 1000)
            elif verb == "unpin" and (pins := control.pins()):
                control.unpin(self.choose.choice(pins).name)
            elif verb == "policy":
                control.set_policy(self.choose.choice(EVICTION_POLICIES))
        kept = sum(pin.num_blocks for pin in control.pins())
        assert kept <= self.model.cache.stats().gpu.num_blocks // 4, "more is pinned than may be"

    def finish(self) -> None:
        for pin in self.model.cache.control.pins():
            self.model.cache.control.unpin(pin.name)
        self.model.client.land_all()
        self.end_copies()
        while self.loads:
            self.end_load()
        while self.pins:
            self.unpin()
        self.model.cache.blocks.free(self.ids)


STEPS = {
    "take": 4, "give_back": 2, "insert": 6, "pin": 3, "unpin": 2, "evict_runs": 1, "look": 1, "use": 1, "load": 3,
    "end_load": 2, "swap_out": 3, "swap_in": 3, "serve": 4, "match": 2, "land": 6, "change_life": 0.4, "down": 0.2,
    "reset": 0.1, "operate": 2,
}  # fmt: skip


def new_caller(seed: int, **settings: Any) -> Caller:
    """Of a cache of random sizes and policies."""
    choose = random.Random(seed)
    model = CacheModel(
        choose.randint(1, 4),
        choose.randint(6, 24),
        choose.choice([40, 12, 5, 0]),
        policy=choose.choice(["lru", "reuse", "slru"]),
        write_policy=choose.choice(["write_back", "write_through", "write_through_selective"]),
        **settings,
    )
    return Caller(model, choose)


def take_step(caller: Caller, step: str) -> None:
    """One step of a story; then the books are checked."""
    model, choose = caller.model, caller.choose
    running = model.cache.life.status is LifeCycleStatus.RUNNING
    if step == "serve" and running:
        text = choose.choice(TEXTS)[: choose.randint(1, 48)]
        model.serve(text, stays=choose.random() < 0.3, patient=choose.random() < 0.5)
    elif step == "match" and running and model.live:
        model.release(choose.choice(model.live))
    elif step == "land":
        model.land(choose.choice([None, None, None, "rank died"]), choose.randint(1, 4))
    elif step == "down":
        model.client.up = choose.random() < 0.7
    elif step == "reset":
        model.reset()
    elif hasattr(caller, step):
        getattr(caller, step)()
    caller.end_copies()
    caller.check_pins()
    model.check()

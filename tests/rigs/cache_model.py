"""A simple model of the cache: what may be found, and the content that every block must hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fastdeploy_cache import CacheConfig, Match, PrefixCacheManager, Request
from fastdeploy_cache.books.block_pool import FREE, RUN
from fastdeploy_cache.books.run import GPU
from fastdeploy_cache.errors import CommitError, OutOfBlocksError, PromptTooLongError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Clock
from fastdeploy_cache.launch.faults.listeners import Listeners
from fastdeploy_cache.request import Image
from tests.rigs.simulated_client import SimulatedClient
from tests.rigs.simulated_peers import SimulatedPeers
from tests.rigs.tap_mirror import TapMirror

Prefix = tuple[str, tuple[int, ...], tuple[Image, ...]]


class LiveRequest:
    """A request as an engine sees it."""

    def __init__(self, request: Request, match: Match, epoch: int, space: str = "") -> None:
        """`space`: its namespace, and how often that was forgotten before."""
        self.request, self.match, self.epoch, self.space = request, match, epoch, space
        self.table: list[int] | None = None  # None until the match is settled
        self.num_computed = 0
        self.num_assumed = 0  # blocks that it uses before their loads have ended; 0: it runs ahead of nothing


class CacheModel:
    """Drives a manager over simulated memory and checks each answer.

    The model is a set of all committed prefixes of full blocks. Each GPU block that is computed is marked with the
    whole prefix it stands for, so a block that may be read can be compared with what it should hold.
    """

    def __init__(
        self,
        block_size: int,
        num_gpu: int,
        num_cpu: int,
        *,
        policy: str = "lru",
        recompute_last_token: bool = False,
        write_policy: str = "write_through",
        clock: Clock | Callable[[], float] = SYSTEM_CLOCK,
        peers: Callable[[list[object]], SimulatedPeers] | None = None,
        **settings: Any,
    ) -> None:
        """`settings`: further ones of `CacheConfig`; `peers` gets the GPU's memory."""
        self.size, self.num_gpu, self.num_cpu = block_size, num_gpu, num_cpu
        self.client = SimulatedClient(num_gpu, num_cpu)
        self.peers = peers(self.client.gpu) if peers is not None else None
        config = CacheConfig(
            **{"load_policy": "always", **settings},
            block_size=block_size,
            num_gpu_blocks=num_gpu,
            num_cpu_blocks=num_cpu,
            transfer_client="inline",
            eviction_policy=policy,
            recompute_last_token=recompute_last_token,
            cpu_write_policy=write_policy,  # type: ignore[arg-type]
        )
        self.cache = PrefixCacheManager(config, client=self.client, peer_client=self.peers, clock=clock)
        self.mirror = TapMirror(self.cache._books.tree)
        self.listener = Listeners(self.cache._books.tree)
        self.live: list[LiveRequest] = []
        self.committed: set[Prefix] = set()
        self.epoch = 0
        self.num_forgotten = Counter[str]()  # by namespace
        self.num_requests = 0
        self.hint: Callable[[Request], object] = lambda request: None  # what each request says of its future
        self.num_loaded_tokens = 0
        self.steps_may_fail = False  # a test makes them fail

    def prefix(self, live: LiveRequest, num_blocks: int) -> Prefix:
        """What these blocks stand for: their tokens, and every image of which they hold a part."""
        num_tokens = self.size * num_blocks
        raw = live.request.tokens[: 4 * num_tokens]
        images = tuple(image for image in live.request.images if image.offset < num_tokens)
        return live.space, tuple(memoryview(raw).cast("i")), images

    def check_readable(self, live: LiveRequest, ids: list[int]) -> None:
        for i, block_id in enumerate(ids):
            assert self.client.gpu[block_id] == self.prefix(live, i + 1), "wrong KV served"

    def match(self, tokens: list[int], namespace: str = "", images: Sequence[Image] = ()) -> LiveRequest | None:
        self.num_requests += 1
        request = Request(
            request_id=f"r{self.num_requests}", prompt_token_ids=tokens, namespace=namespace, images=images
        )
        self.hint(request)
        try:
            match = self.cache.match(request)
        except PromptTooLongError:
            shares, num_most = self.cache._books.residency.shares, self.num_gpu
            if shares is not None:
                num_most = shares.most_blocks(GPU, shares.tenant_of(namespace))
            assert -(-len(tokens) // self.size) > num_most
            return None
        live = LiveRequest(request, match, self.epoch, self.space_of(namespace))
        self.check_readable(live, match.block_ids)
        found = match.num_tokens + match.num_coming_tokens
        if self.cache.storage.is_attached:  # what may still come from there is not known
            found = match.num_tokens
        assert found < len(tokens), "one token is left to compute"
        if found:
            assert self.prefix(live, -(-found // self.size)) in self.committed, "hit on what nobody committed"
        assert not any(image.offset < found < image.end for image in request.images), "a match ends inside an image"
        self.live.append(live)
        return live

    def space_of(self, namespace: str) -> str:
        """What parts prefixes: nothing that was computed before a namespace was forgotten is found after that."""
        number = self.num_forgotten[namespace]
        return f"{namespace}#{number}" if number else namespace

    def forget(self, namespace: str) -> None:
        """Nothing of a namespace is found any more, and nobody gets a block with what it had: see `check_free`."""
        self.cache.life.forget_namespace(namespace, 0)
        self.num_forgotten[namespace] += 1

    def check_free(self) -> None:
        """No free block holds anything of a namespace that was forgotten since, but for those that were free then and
        are to be wiped yet."""
        for pool, memory in zip(self.cache._books.pools, (self.client.gpu, self.client.cpu), strict=True):
            for block_id in pool.ids_of(FREE):
                content = memory[block_id]
                if isinstance(content, tuple) and not (pool.has_stale and pool._marks[block_id]):
                    namespace = content[0].partition("#")[0]
                    assert content[0] == self.space_of(namespace), f"{pool.name} {block_id} was given on unwiped"

    def wipe_all(self) -> None:
        """With the ranks up, all that waits to be wiped is, and nothing else is left tainted."""
        self.client.up = True
        for _ in range(100):
            with self.cache._books:
                self.cache._movement.wiper._not_before = 0.0  # as if it were later than after one that failed
                self.cache._movement.wiper.go_on()
            self.client.land_all()
        assert self.cache._movement.wiper.num_waiting == 0
        assert not any(pool.num_marked for pool in self.cache._books.pools), "what nobody holds is to be wiped yet"

    def must_match(self, tokens: list[int], namespace: str = "", images: Sequence[Image] = ()) -> LiveRequest:
        """`match` for a prompt that fits."""
        live = self.match(tokens, namespace, images)
        assert live is not None
        return live

    def run_ahead(self, live: LiveRequest, num_blocks: int) -> bool:
        """Take blocks behind those that are coming, and use all as if they were there."""
        if live.table is not None:
            return False
        try:
            new = self.cache.allocate(live.request, num_blocks, ahead_of_loads=True)
        except OutOfBlocksError:
            return False
        match = live.match.poll()
        if live.epoch == self.epoch:
            self.check_readable(live, match.block_ids)
        live.table = [*match.block_ids, *match.coming_block_ids, *new]
        live.num_computed = match.num_tokens + match.num_coming_tokens
        if match.coming_block_ids:
            live.num_assumed = len(live.table) - num_blocks
            assert match.load_ids
        for other in self.live:
            if other is not live:
                assert not set(new) & set(other.table or ()), "a block given to two requests"
        return True

    def confirm(self, live: LiveRequest) -> None:
        """The step ahead is over: what it read was right, or it is told so and starts over."""
        if self.cache.confirm(live.request, 0, arrived=True):
            assert live.table is not None
            if live.epoch == self.epoch:
                self.check_readable(live, live.table[: live.num_assumed])
            assert "lost" not in [self.client.gpu[i] for i in live.table[: live.num_assumed]]
            live.num_assumed = 0
        else:
            assert live.num_assumed, "nothing was ahead, and yet not confirmed"
            live.num_assumed, live.num_computed = 0, 0
            self.release(live)

    def table(self, live: LiveRequest) -> list[int]:
        """The request's blocks as its engine counts them: by what the last match that it saw says, and by `allocate`.

        To ask the cache once more would hide that the two have come apart.
        """
        if live.table is None:
            live.table, live.num_computed = list(live.match.block_ids), live.match.num_tokens
            self.num_loaded_tokens += live.match.num_cpu_tokens
        return live.table

    def look(self, live: LiveRequest) -> Match:
        """Poll the match, as an engine does between its steps."""
        live.match = live.match.poll()
        if live.epoch == self.epoch:
            self.check_readable(live, live.match.block_ids)
        return live.match

    def settle(self, live: LiveRequest) -> list[int]:
        if live.num_assumed:
            self.confirm(live)
        if live.table is None:
            match = live.match.wait(0)
            assert match.ready
            if live.epoch == self.epoch:
                self.check_readable(live, match.block_ids)
                assert match.explain().num_hit_tokens == match.num_tokens
            live.match = match
        return self.table(live)

    def allocate(self, live: LiveRequest, num_blocks: int) -> bool:
        before = self.cache.stats()
        try:
            new = self.cache.allocate(live.request, num_blocks)
        except OutOfBlocksError as refused:
            missing = refused.missing
        else:
            missing = 0
        if missing:
            num_evictable = (
                before.gpu.num_cached - before.gpu.num_protected - self.cache._books.pools[0].num_read_of(RUN)
            )
            room = before.gpu.num_free + max(0, num_evictable)
            if (shares := self.cache._books.residency.shares) is not None:
                room = shares.num_available(GPU, shares.tenant_of(live.request.namespace))
            assert missing == num_blocks - room
            after = self.cache.stats()
            assert (after.gpu, after.cpu) == (before.gpu, before.cpu), "a failed allocation left a trace"
            return False
        table = self.table(live)
        assert len(new) == num_blocks == len(set(new))
        for other in self.live:
            assert not set(new) & set(other.table or ()), "a block given to two requests"
        table += new
        return True

    def compute_some(self, live: LiveRequest, choose: random.Random) -> None:
        """A few tokens of output, and as much of it all as can be computed, or less."""
        live.request.append_output([choose.randint(0, 4) for _ in range(choose.randint(0, 4))])
        limit = self.computable(live)
        if live in self.live and limit >= live.num_computed:
            self.compute(live, choose.randint(live.num_computed, limit))

    def compute(self, live: LiveRequest, upto: int) -> None:
        table = self.settle(live)
        if live not in self.live:
            return
        for block in range(live.num_computed // self.size, upto // self.size):
            self.client.gpu[table[block]] = self.prefix(live, block + 1)
        self.cache.commit(live.request, upto)
        live.num_computed = upto
        if live.epoch == self.epoch:
            self.committed |= {self.prefix(live, n + 1) for n in range(upto // self.size)}

    def step(self, sampled: list[tuple[LiveRequest, list[int]]]) -> None:
        """A step of all of these: each has computed what fits in its blocks, and these tokens were sampled of it."""
        steps = []
        for live, tokens in sampled:
            upto = self.computable(live)
            if live not in self.live or upto < live.num_computed or live.epoch != self.epoch:
                continue  # whose blocks were lost is to be released
            for block in range(live.num_computed // self.size, upto // self.size):
                self.client.gpu[self.table(live)[block]] = self.prefix(live, block + 1)
            steps.append((live, tokens, upto))
        done = self.cache.step([(live.request, tokens, upto) for live, tokens, upto in steps])
        for (live, _, upto), answer in zip(steps, done, strict=True):
            if isinstance(answer, OutOfBlocksError):
                continue
            assert isinstance(answer, list), answer
            live.table, live.num_computed = [*self.table(live), *answer], upto
            assert len(live.table) == len(set(live.table)) >= live.request.num_tokens / self.size
            self.committed |= {self.prefix(live, n + 1) for n in range(upto // self.size)}

    def allow_all_computed(self) -> None:
        """After a commit that raised: what it was about may be found, as some of it may have been published."""
        for live in self.live:
            if live.table is not None:
                num_blocks = min(len(live.table), live.request.num_tokens // self.size)
                self.committed |= {self.prefix(live, n + 1) for n in range(num_blocks)}

    def computable(self, live: LiveRequest) -> int:
        """Tokens that the request has and that fit in its blocks."""
        return min(live.request.num_tokens, len(self.settle(live)) * self.size)

    def commit_too_much(self, live: LiveRequest) -> None:
        too_many = max(live.request.num_tokens, len(self.settle(live)) * self.size) + 1
        before = self.cache.stats()
        with pytest.raises(CommitError):
            self.cache.commit(live.request, too_many)
        assert self.cache.stats() == before

    def release(self, live: LiveRequest) -> None:
        if live.table is not None and live.epoch == self.epoch and not live.num_assumed:
            self.check_readable(live, live.table[: live.num_computed // self.size])
        self.cache.release(live.request)
        self.live.remove(live)

    def serve(
        self, tokens: list[int], stays: bool, patient: bool, images: Sequence[Image] = (), namespace: str = ""
    ) -> None:
        """A whole request at once, as engines do most of the time; a patient one waits for its loads."""
        live = self.match(tokens, namespace, images)
        if live is None:
            return
        if patient:
            self.client.land_all()
        num_missing = -(-len(tokens) // self.size) - len(self.settle(live))
        if self.allocate(live, num_missing):
            self.compute(live, len(tokens))
        else:
            stays = False
        if not stays:
            self.release(live)

    def serve_and_copy(self, *prompts: list[int]) -> None:
        """Whole requests one after the other, each copied to the CPU tier before the next."""
        for tokens in prompts:
            self.serve(tokens, stays=False, patient=True)
            self.client.land_all()

    def land(self, error: str | None, num_tasks: int) -> None:
        self.cache._movement.wiper._not_before = 0.0  # as if it were later than after a wipe that failed
        for _ in range(min(num_tasks, len(self.client.tasks))):
            self.client.land(error)

    def reset(self) -> None:
        self.cache.reset()
        self.epoch += 1
        if not self.cache.storage.is_attached:  # which forgets nothing
            self.committed.clear()

    def kv_lost(self) -> None:
        """The bytes of the GPU are gone; what the CPU tier has may still be found."""
        self.cache.ranks.kv_lost(0)
        self.epoch += 1

    def check(self) -> None:
        """The books add up, and taps have told of all that is in them."""
        self.cache.check_invariants()
        if self.num_forgotten:
            self.check_free()
        self.mirror.check()
        self.listener.check()

    def finish(self) -> None:
        """Everything ends: nothing may stay owned by a request or a task."""
        self.client.land_all()
        for live in list(self.live):
            self.release(live)
        self.client.land_all()
        if self.num_forgotten:
            self.wipe_all()
        for pin in self.cache.control.pins():
            self.cache.control.unpin(pin.name)
        self.check()
        stats = self.cache.stats()
        gpu, failed = stats.gpu, {step: n for step, n in stats.num_failed_steps.items() if n}
        assert self.steps_may_fail or not failed, "a step that verbs take along has failed, unseen by its caller"
        assert gpu.num_private == gpu.num_protected == gpu.num_in_flight == 0, "blocks left behind"
        self.cache.close()

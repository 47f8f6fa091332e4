"""What each request hit and missed, and why. Under the lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

import msgspec

from fastdeploy_cache.books.block_hash import namespace_label, root_hash
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.causes import NO_ROOM_TO_FETCH, Cause
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.ipc.clock import Clock
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.metrics.histogram import CALL_SECONDS, Histogram
from fastdeploy_cache.metrics.request_counts import TIERS
from fastdeploy_cache.policies.load_or_compute import LoadOrCompute
from fastdeploy_cache.requests.active_request import AHEAD, WAITING, ActiveRequest
from fastdeploy_cache.requests.explanation import Explanation, Hit, Hop, Miss
from fastdeploy_cache.requests.trail import MissedBlocks, Trail
from fastdeploy_cache.storage.prefetch import StoragePrefetch

_LOST_FROM = {Loss.GPU: "gpu", Loss.CPU: "cpu", Loss.UNITS: "gpu"}
_NOTHING = (0, 0, 0)
_LAST_PLACE, _PARTIAL_PLACE = Cause.LAST.place, Cause.PARTIAL.place


class Account(msgspec.Struct, gc=False, frozen=True):
    """What is kept of one request: tokens by tier, seconds of reads from storage, its trail, and what it missed of the
    blocks that it asked for."""

    request_id: str
    num_tokens: int
    at: float
    is_final: bool
    hit_tokens: tuple[int, int, int]
    trail: Trail
    read_seconds: float
    prefill_tokens_per_second: float | None
    misses: Sequence[MissedBlocks]


class Accounts:
    """Each request is counted once, when it is admitted, and its account is kept for a while.

    Attributes:
        missed_tokens: so far, by the place of the cause.
        saved_seconds: so far, by tier: what computing would have taken, by the prefill speed that was known then.
        move_seconds: so far, by tier: what moving took.
        match_times: seconds inside `match`, of requests that were admitted.
    """

    def __init__(self, config: CacheConfig, metrics: CacheMetrics, clock: Clock) -> None:
        self._now = clock.now
        self._size, self._num_ranks = config.block_size, config.transfer.tp_size
        self._block_bytes = config.block_bytes() * self._num_ranks
        self.metrics, self._counts_namespaces = metrics, config.insight.num_namespaces > 0
        self._recent: deque[Account] = deque(maxlen=config.num_explained_requests)
        self.missed_tokens = [0] * len(Cause)
        self.saved_seconds, self.move_seconds = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        self.match_times = Histogram(CALL_SECONDS)

    def follow(self, books: Books, speeds: LoadOrCompute) -> None:
        """Whose mishaps these are, and who knows the prefill speed."""
        self._mishaps, self._prefill, self._ages = books.mishaps, speeds.prefill, books.residency.ages
        self._policy = books.tree.policy

    def admit(self, active: ActiveRequest, now: float) -> None:
        """Count a request once, when it is first admitted: not while it waits, nor when it returns from preemption."""
        active.is_admitted = True
        self.match_times.add(active.trail.match_seconds)
        if active.request.counted:
            return
        if active.trail.idle_since and active.num_matched_blocks:
            self._ages.reuse_gaps.add(active.trail.matched_at - active.trail.idle_since)
        active.request.counted = True
        active.trail.owes_load_seconds = active.phase is AHEAD
        num_blocks = active.num_matched_blocks
        namespace = active.request.namespace
        self._mishaps.ask(
            "metrics", lambda: self._count(self._account(active, num_blocks, now, is_final=True), namespace), None
        )

    def loaded(self, active: ActiveRequest) -> None:
        """The loads that a request ran ahead of have ended: how long they took is known only now."""
        self.move_seconds[1] += active.trail.load_seconds if active.trail.owes_load_seconds else 0.0
        active.trail.owes_load_seconds = False

    def count_other(self, active: ActiveRequest, hit_tokens: tuple[int, int, int]) -> None:
        """Count a request that somebody else has matched, with the blocks that it has missed."""
        request, speed = active.request, self._prefill.per_second
        name, num_tokens = request.request_id, request.num_prompt_tokens
        now = self._now()
        misses = self._missed(active, -(-sum(hit_tokens) // self._size), now)
        account = Account(name, num_tokens, now, True, hit_tokens, active.trail, 0.0, speed, misses)
        self._mishaps.ask("metrics", lambda: self._count(account, request.namespace), None)

    def _count(self, account: Account, namespace: str) -> None:
        num_tokens, hit_tokens, size, missed = account.num_tokens, account.hit_tokens, self._size, self.missed_tokens
        self.metrics.record_request(num_tokens, hit_tokens)  # first: it may fail, and then nothing is counted
        if self._counts_namespaces:
            label = namespace_label(root_hash(namespace, size)) if namespace else "default"
            self.metrics.record_namespace(label, num_tokens, hit_tokens)
        num_behind = num_tokens
        if hit_tokens != _NOTHING:
            speed, saved, moved = account.prefill_tokens_per_second, self.saved_seconds, self.move_seconds
            moved[1] += account.trail.load_seconds
            moved[2] += account.read_seconds
            for tier, num in enumerate(hit_tokens):
                if num and speed:
                    saved[tier] += num / speed
            num_behind -= sum(hit_tokens)
        for cause, num_blocks, _, _, _ in account.misses:
            missed[cause.place] += num_blocks * size
            num_behind -= num_blocks * size
        if num_behind:
            missed[_LAST_PLACE] += 1
            missed[_PARTIAL_PLACE] += num_behind - 1
        self._recent.append(account)

    def _account(self, active: ActiveRequest, num_blocks: int, at: float, *, is_final: bool) -> Account:
        request, size, num_gpu = active.request, self._size, active.num_gpu_blocks
        if num_gpu < num_blocks:
            num_storage = active.num_storage_blocks(num_gpu, num_blocks)
            num_cpu = num_blocks - num_gpu - num_storage
            hit_tokens = (num_gpu * size + active.num_copied_tokens, num_cpu * size, num_storage * size)
        elif num_blocks or active.num_copied_tokens:  # the copy of a prompt's only block stands behind none
            hit_tokens = (num_blocks * size + active.num_copied_tokens, 0, 0)
        else:
            hit_tokens = _NOTHING
        misses, num_found, prefetch = active.trail.misses, active.asked.num_found, active.prefetch
        is_all_found = num_blocks == num_found == active.trail.num_searched_blocks and active.asked.num_asked
        if prefetch is not None or not is_all_found:
            misses = self._missed(active, num_blocks, at)
        return Account(
            request.request_id,
            request.num_tokens,
            at,
            is_final,
            hit_tokens,
            active.trail,
            prefetch.read_seconds if prefetch is not None and hit_tokens[2] else 0.0,
            self._prefill.per_second,
            misses,
        )

    def _missed(self, active: ActiveRequest, num_hit_blocks: int, at: float) -> Sequence[MissedBlocks]:
        """The full blocks that the match has asked for, behind those that it hit. `at`: when it was admitted."""
        if not active.asked.num_asked:
            num_blocks = (active.request.num_tokens - 1) // self._size
            off: MissedBlocks = (
                Cause.LIMIT,
                num_blocks,
                None,
                0.0,
                "enable_prefix_caching is off, or the tier is asleep",
            )
            return (off,) if num_blocks else ()
        num_found = max(active.asked.num_found, num_hit_blocks)  # memory may run out before what has come is noted
        parts = self._unused(active, num_hit_blocks, num_found, at) if num_found > num_hit_blocks else []
        block, prefetch = active.trail.num_searched_blocks, active.prefetch
        end_late = min(prefetch.first + prefetch.num_found, active.asked.num_asked) if prefetch is not None else 0
        if prefetch is not None and end_late > num_found:
            parts += self._not_fetched(prefetch, num_found, end_late, at)
        skip = max(num_found, end_late)
        for cause, num_blocks, kind, lost_at, detail in active.trail.misses:
            num_left = block + num_blocks - max(block, skip)
            block += num_blocks
            if num_left > 0:
                parts.append((cause, num_left, kind, lost_at, detail))
        return parts

    @staticmethod
    def _not_fetched(prefetch: StoragePrefetch, first: int, end: int, at: float) -> list[MissedBlocks]:
        """Blocks [first, end), which storage has, and which have not come."""
        end_asked = max(first, min(end, prefetch.first + prefetch.num_asked)) if prefetch.lacks_room else end
        detail = f"storage has it; its prefetch began {at - prefetch.began_at:.3f} s before, and had "
        detail += f"{prefetch.deadline - prefetch.began_at:.3f} s"
        late: MissedBlocks = (Cause.LATE, end_asked - first, None, 0.0, detail)
        room: MissedBlocks = (Cause.ROOM, end - end_asked, None, 0.0, NO_ROOM_TO_FETCH)
        return [part for part in (late, room) if part[1]]

    @staticmethod
    def _unused(active: ActiveRequest, first: int, end: int, at: float) -> list[MissedBlocks]:
        """Blocks [first, end), which a tier has and the request does not use."""
        parts: list[MissedBlocks] = []
        num_cut = end - active.trail.num_whole_blocks
        if active.num_unloaded_blocks and active.trail.refused_for is not None:
            cause, detail = active.trail.refused_for
        elif active.trail.has_failed_load:
            cause, detail = Cause.RANK, "its load failed"
        else:
            then = f"{'blocks were taken' if active.is_admitted else 'it is'} {at - active.trail.matched_at:.3f} s"
            cause, detail = Cause.LATE, f"{then} after the match, before its load had come"
        if end - num_cut > first:
            parts.append((cause, end - num_cut - first, None, 0.0, detail))
            first = end - num_cut
        if active.rows is None:
            parts.append((Cause.PARTIAL, end - first, None, 0.0, "it lies in an image"))
        else:
            num_whole = active.trail.num_whole_blocks
            at_last = f"the last checkpoint lies behind {num_whole} blocks" if num_whole else "none lies in front of it"
            parts.append((Cause.UNANCHORED, end - first, None, 0.0, at_last))
        return [part for part in parts if part[1] > 0]

    # -- looking back

    def of(self, active: ActiveRequest, num_readable_blocks: int) -> Explanation:
        """What is known of a request that is matched now. `num_readable_blocks`: that its caller may read."""
        if active.phase is WAITING:
            return self._explain(self._account(active, num_readable_blocks, self._now(), is_final=False))
        kept = self.recent(active.request.request_id) if active.request.counted else None
        return kept or self._explain(self._account(active, active.num_matched_blocks, self._now(), is_final=True))

    def recent(self, request_id: str) -> Explanation | None:
        """The account of one of the last requests; the newest of that id. None: it is not among them."""
        account = next((each for each in reversed(self._recent) if each.request_id == request_id), None)
        return self._explain(account) if account is not None else None

    def __len__(self) -> int:
        """How many of the last requests are remembered."""
        return len(self._recent)

    def last(self, num_requests: int) -> list[Account]:
        """The accounts of the last requests, the newest first."""
        return list(islice(reversed(self._recent), num_requests))

    def explained(self, accounts: Sequence[Account]) -> list[Explanation]:
        """What these say. Not under the lock: of a thousand it would take milliseconds."""
        return [self._explain(account) for account in accounts]

    def _explain(self, account: Account) -> Explanation:
        speed, size = account.prefill_tokens_per_second, self._size
        num_behind = account.num_tokens - sum(account.hit_tokens) - sum([part[1] for part in account.misses]) * size
        hits = [
            Hit(
                tier=tier,
                num_tokens=num_tokens,
                hops=self._hops(account, tier, num_tokens // size),
                saved_seconds=num_tokens / speed if speed else None,
            )
            for tier, num_tokens in zip(TIERS, account.hit_tokens, strict=True)
            if num_tokens
        ]
        misses = [
            Miss(
                cause=cause,
                num_tokens=num_blocks * size,
                tier=_LOST_FROM.get(kind) if kind is not None else None,
                seconds_ago=max(0.0, account.at - at) if kind is not None else None,
                policy=self._policy.name_at(at) if cause is Cause.EVICTED else None,
                detail=detail or None,
            )
            for cause, num_blocks, kind, at, detail in account.misses
        ]
        if num_behind > 1:
            misses.append(Miss(cause=Cause.PARTIAL, num_tokens=num_behind - 1))
        if num_behind:
            misses.append(Miss(cause=Cause.LAST, num_tokens=1))
        return Explanation(
            request_id=account.request_id,
            num_tokens=account.num_tokens,
            is_final=account.is_final,
            room_seconds=account.trail.room_seconds,
            hits=tuple(hits),
            misses=tuple(misses),
        )

    def _hops(self, account: Account, tier: str, num_blocks: int) -> tuple[Hop, ...]:
        """How so many blocks of a hit came to the GPU. Of a hybrid model a checkpoint came with them, and some of them
        may have been there."""
        num_bytes = account.trail.row_load_bytes * self._num_ranks or num_blocks * self._block_bytes
        load = Hop(source="cpu", target="gpu", num_bytes=num_bytes, seconds=account.trail.load_seconds)
        read = Hop(source="storage", target="cpu", num_bytes=num_bytes, seconds=account.read_seconds)
        return {"gpu": (), "cpu": (load,), "storage": (read, load)}[tier]

    def missed(self) -> tuple[int, Sequence[int]]:
        """Missed tokens so far: all that were asked for but those that were served, and the same for each cause."""
        num_tokens, hit_tokens = self.metrics.token_counts()
        return num_tokens - sum(hit_tokens), self.missed_tokens

    def missed_by_cause(self) -> dict[str, int]:
        """Missed tokens so far; every cause is there."""
        return {cause.value: self.missed_tokens[cause.place] for cause in Cause}

    def saved_by_tier(self) -> dict[str, float]:
        """Seconds of computing saved so far; every tier is there."""
        return dict(zip(TIERS, self.saved_seconds, strict=True))

    def moved_by_tier(self) -> dict[str, float]:
        """Seconds that moving took so far; every tier is there."""
        return dict(zip(TIERS, self.move_seconds, strict=True))

"""What is wrong with a cache, in plain words: the evidence, the setting to change, and what that can give at most.

It reads the configuration, the present state and the explanations of the last requests, and changes nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from fastdeploy_cache.books.block_marks import block_marks
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.causes import Cause
from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.explanation import Explanation, Miss
from fastdeploy_cache.insight.what_if import WhatIfRate
from fastdeploy_cache.policies.breaker import BreakerState
from fastdeploy_cache.stats import CacheStats

_MIN_SHARE = 0.1  # of all prompt tokens that one cause costs, before it is worth a word
_MIN_TAIL_SHARE = 0.25  # the same for the tails of prompts: some are always lost
_MIN_REQUESTS = 20  # fewer say nothing
_MIN_GAIN = 0.02  # of all prompt tokens, for which more blocks are worth a word
_MOST = 0.8  # of what the largest size gains
_MAX_LOOKED = 500  # prompts in the tree whose second blocks are compared


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong.

    Attributes:
        name: a word for it, which stays the same.
        evidence: a sentence with what was seen.
        advice: a sentence with what to change.
        share: of all prompt tokens that it costs, 0 to 1; None where that cannot be said.
    """

    name: str
    evidence: str
    advice: str
    share: float | None = None

    def __str__(self) -> str:
        gain = "" if self.share is None else f" At most {self.share:.0%} of all prompt tokens can be won by it."
        return f"{self.name}: {self.evidence} {self.advice}{gain}"


@dataclass(frozen=True)
class _Case:
    config: CacheConfig
    stats: CacheStats
    requests: Sequence[Explanation]
    books: Books
    rates: Sequence[WhatIfRate]
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum(each.num_tokens for each in self.requests))

    def misses(self, *causes: Cause) -> list[Miss]:
        return [miss for each in self.requests for miss in each.misses if miss.cause in causes]

    def share(self, misses: Sequence[Miss]) -> float:
        return sum(miss.num_tokens for miss in misses) / self.num_tokens if self.num_tokens else 0.0


def examine(
    config: CacheConfig,
    stats: CacheStats,
    requests: Sequence[Explanation],
    books: Books,
    rates: Sequence[WhatIfRate] = (),
) -> list[Finding]:
    """What is wrong, what costs most first. `requests`: the last ones; `rates`: of other sizes, where they are known.

    Takes the lock for a look at some prompts.
    """
    case = _Case(config, stats, requests, books, rates)
    findings = [finding for look in _NOW for finding in look(case)]
    if len(requests) >= _MIN_REQUESTS:
        findings += [finding for look in _BY_REQUESTS for finding in look(case)]
    return sorted(findings, key=lambda finding: -(finding.share if finding.share is not None else 1.0))


# -- what is so now


def _ranks(case: _Case) -> Iterator[Finding]:
    down = [str(status.rank) for status in case.stats.ranks if not status.up]
    if down:
        yield Finding(
            name="rank_down",
            evidence=f"Rank {', '.join(down)} is down, so nothing is loaded or copied.",
            advice="See its log (transfer.log_dir); it is started again by itself, up to transfer.max_restarts times.",
        )


def _store(case: _Case) -> Iterator[Finding]:
    storage = case.stats.storage
    if storage is None:
        return
    if storage.num_full_disks:
        yield Finding(
            name="disk_full",
            evidence=f"The disk of {storage.num_full_disks} ranks has no room, so less is written than should be.",
            advice="Free some of it, or lower storage.capacity_bytes.",
        )
    broken = [n for n, b in (("reads", storage.reading), ("writes", storage.writing)) if b is BreakerState.OPEN]
    if broken:
        yield Finding(
            name="breaker_open",
            evidence=f"The store has failed so often that {' and '.join(broken)} are not tried for a while.",
            advice="See the log for event=storage and its reason; the store is probed, and used again when it answers.",
        )


# -- what the last requests show


def _evicted(case: _Case) -> Iterator[Finding]:
    misses, config = case.misses(Cause.EVICTED), case.config
    for tier in ("cpu", "gpu"):
        lost = [miss for miss in misses if miss.tier == tier]
        if (share := case.share(lost)) < _MIN_SHARE:
            continue
        ages = [miss.seconds_ago for miss in lost if miss.seconds_ago is not None]
        num_gpu_blocks, num_cpu_blocks = config.pool_sizes()
        evidence = (
            f"{share:.0%} of all prompt tokens were missed because they had been evicted from the {tier.upper()} tier, "
            f"half of them less than {statistics.median(ages):.1f} seconds before."
        )
        if tier == "cpu":
            name, advice = "cpu_tier_short", f"Raise num_cpu_blocks, which is {num_cpu_blocks} now."
        elif num_cpu_blocks:
            name = "evicted_before_copied"
            advice = "Lower cpu_write_high_water, or set cpu_write_policy to 'write_through'."
        else:
            name = "gpu_short"
            advice = f"Give the cache a CPU tier (num_cpu_blocks), or more than {num_gpu_blocks} num_gpu_blocks."
        sizes = "" if name == "evicted_before_copied" else _size_that_pays(case)
        yield Finding(name=name, evidence=evidence, advice=advice + sizes, share=share)


def _size_that_pays(case: _Case) -> str:
    """A sentence on the smallest CPU tier with most of what the largest gives; nothing where no rates are known."""
    rates = {(rate.tier, rate.factor): rate for rate in case.rates if rate.policy == case.config.eviction_policy}
    if not rates:
        return ""
    now = rates["gpu", 1.0].token_hit_rate
    larger = [rate for (tier, _), rate in sorted(rates.items()) if tier == "cpu" and rate.token_hit_rate > now]
    most = larger[-1].token_hit_rate if larger else now
    if most - now < _MIN_GAIN:
        return " In the last hour a CPU tier of no size up to four times of this one would have hit more."
    best = next(rate for rate in larger if rate.token_hit_rate >= now + _MOST * (most - now))
    saved = f", and {best.saved_seconds:.0f} seconds of computing be saved" if best.saved_seconds is not None else ""
    return (
        f" With {best.num_blocks} blocks in the CPU tier {best.token_hit_rate:.0%} of the last hour's tokens would "
        f"hit{saved}; as it is, {now:.0%} would."
    )


def _simple(name: str, cause: Cause, what: str, advice: str) -> Callable[[_Case], Iterator[Finding]]:
    """A cause that is a finding by itself, with the detail that most of its tokens have."""

    def look(case: _Case) -> Iterator[Finding]:
        misses = case.misses(cause)
        if (share := case.share(misses)) >= _MIN_SHARE:
            details = [miss.detail for miss in misses if miss.detail is not None]
            detail = f" The last time: {details[0]}." if details else ""
            yield Finding(
                name=name,
                evidence=f"{share:.0%} of all prompt tokens were missed because {what}.{detail}",
                advice=advice,
                share=share,
            )

    return look


def _tails(case: _Case) -> Iterator[Finding]:
    misses, size = case.misses(Cause.PARTIAL), case.config.block_size
    if size > 16 and (share := case.share(misses)) >= _MIN_TAIL_SHARE:
        mean = case.num_tokens / len(case.requests)
        yield Finding(
            name="blocks_too_large",
            evidence=(
                f"{share:.0%} of all prompt tokens are in tails that fill no block: prompts have {mean:.0f} tokens on "
                f"average, and a block has {size}."
            ),
            advice="Use a smaller block_size, such as 16.",
            share=share,
        )


def _first_blocks(case: _Case) -> Iterator[Finding]:
    """Prompts that differ in their first block, and go on alike: nothing behind a difference can be shared."""
    share = case.share(case.misses(Cause.NEW, Cause.NEW_OR_FORGOTTEN, Cause.EVICTED))
    if share < _MIN_SHARE:
        return
    tree = case.books.tree
    size, seconds = tree.block_bytes, list[bytes]()
    with case.books:
        for root in islice(tree.roots.values(), _MAX_LOOKED):
            runs = [run for run in islice(root.children.values(), _MAX_LOOKED) if run.num_blocks > 1]
            seconds += [block_marks(run.tokens, size, 1, size) for run in runs]
    if len(seconds) < _MIN_REQUESTS:
        return
    num_alike = len(seconds) - len(set(seconds))
    if num_alike >= len(seconds) / 2:
        yield Finding(
            name="first_blocks_differ",
            evidence=(
                f"{num_alike} of {len(seconds)} cached prompts differ from others in their first block of "
                f"{case.config.block_size} tokens, and have the same second block: what follows cannot be shared."
            ),
            advice="Put what changes (a time, a name, a request's id) behind what stays, or leave it out.",
            share=share,
        )


_NOW = (_ranks, _store)
_BY_REQUESTS: tuple[Callable[[_Case], Iterator[Finding]], ...] = (
    _evicted,
    _tails,
    _first_blocks,
    _simple(
        "namespace_for_each",
        Cause.NAMESPACE,
        "the same tokens are cached under another namespace",
        "Give requests that may share what is cached the same namespace.",
    ),
    _simple(
        "tier_slow",
        Cause.SLOWER,
        "computing them was expected to be faster than loading them",
        "See `fastdeploy-cache bench transfer` for what copies reach here; load_policy = 'always' loads all the same.",
    ),
    _simple(
        "loads_late",
        Cause.LATE,
        "their load was not there in time",
        "Call prefetch when a request is queued, give match.wait more time, or raise prefetch_timeout_seconds.",
    ),
    _simple(
        "no_room_to_load",
        Cause.ROOM,
        "there was no room to load them",
        "Run fewer requests at a time, or raise num_gpu_blocks.",
    ),
    _simple("rank_failed", Cause.RANK, "a rank was down, or lost its memory", "See the ranks' log (transfer.log_dir)."),
    _simple("setting_forbids", Cause.LIMIT, "a setting does not allow them to be used", "Change that setting."),
    _simple("resets", Cause.RESET, "they were forgotten by a reset", "Reset only when the weights have changed."),
    _simple(
        "other_images",
        Cause.IMAGE,
        "they are cached with another image",
        "See that an image has the same hash each time that it is sent.",
    ),
)

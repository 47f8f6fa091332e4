"""What is wrong with a cache, in plain words: the evidence, the setting to change, and what that can give at most."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping

from fastdeploy_cache.books.causes import NO_ROOM_TO_FETCH, OTHER_WEIGHTS, ROW_SHORT, Cause
from fastdeploy_cache.errors import counted, duration, named
from fastdeploy_cache.insight.doctor.evidence import Evidence
from fastdeploy_cache.insight.doctor.finding import MIN_REQUESTS, MIN_SHARE, Finding
from fastdeploy_cache.insight.doctor.process_troubles import KINDS, ProcessTrouble
from fastdeploy_cache.insight.doctor.prompt_findings import PROMPT_FINDINGS
from fastdeploy_cache.insight.doctor.store_findings import STORE_FINDINGS, is_store_unused
from fastdeploy_cache.insight.what_if.what_if import WhatIfRate
from fastdeploy_cache.requests.explanation import Miss

_MIN_TAIL_SHARE = 0.25  # the same for the tails of prompts: some are always lost
_SMALL_BLOCK = 16  # tokens: a tail of one is not worth a word
_MIN_GAIN = 0.02  # of all prompt tokens, for which more blocks are worth a word
_MOST = 0.8  # of what the largest size gains


def examine(case: Evidence) -> list[Finding]:
    """What is wrong, what costs most first."""
    findings = [finding for look in _NOW for finding in look(case)]
    if case.num_requests >= MIN_REQUESTS:
        findings += [finding for look in _BY_REQUESTS for finding in look(case)]
    return sorted(findings, key=lambda finding: -(finding.share if finding.share is not None else 1.0))


# -- what is so now


def _processes(case: Evidence) -> Iterator[Finding]:
    down = {kind: [each for each in case.troubles if each.kind == kind] for kind in KINDS}
    if ranks := [str(each.rank) for each in down["transfer"] if each.state == "starting"]:
        yield Finding(
            name="rank_down",
            evidence=f"{named('Rank', ranks, 'is', 'are')} down, so nothing is loaded or copied.",
            advice="See its log (transfer.log_dir); it is started again by itself, up to transfer.max_restarts times.",
        )
    if ranks := [str(each.rank) for each in down["transfer"] if each.state == "off"]:
        yield Finding(
            name="rank_off",
            evidence=f"{named('Rank', ranks, 'has', 'have')} died too often, so nothing is loaded or copied.",
            advice=(
                "It is off: see its log (transfer.log_dir), mend what it died of, and call `fastdeploy-cache control "
                "restart-rank`; by itself it is tried again every transfer.off_retry_seconds only."
            ),
        )
    for kind, what in (("storage", "read from storage or written to it"), ("peer", "sent or received")):
        if ranks := [str(each.rank) for each in down[kind] if each.state == "starting"]:
            yield Finding(
                name=f"{kind}_process_down",
                evidence=f"{named('Rank', ranks, 'has', 'have')} no {kind} process now, so nothing is {what}.",
                advice="See its log (transfer.log_dir); it is started again by itself, as often as it takes.",
            )
    if waiting := [each for each in case.troubles if each.state == "short"]:
        yield Finding(
            name="process_waits",
            evidence=_sentence(waiting[0]) + (f" So do {len(waiting) - 1} more." if waiting[1:] else ""),
            advice=(
                "Raise the limit (of open files, `ulimit -n` before the start), or use less of it; the process is "
                "tried again every ten seconds."
            ),
        )


def _sentence(trouble: ProcessTrouble) -> str:
    text = str(trouble)
    return f"{text[0].upper()}{text[1:]}."


def _store(case: Evidence) -> Iterator[Finding]:
    if case.num_full_disks:
        yield Finding(
            name="disk_full",
            evidence=f"{counted(case.num_full_disks, 'disk')} without room: less is written than should be.",
            advice="Free some of it, or lower storage.capacity_bytes.",
        )
    if case.broken_operations:
        operations = " and ".join(f"{operation}s" for operation in case.broken_operations)
        yield Finding(
            name="breaker_open",
            evidence=f"The store has failed so often that {operations} are not tried for a while.",
            advice="See the log for event=storage and its reason; the store is probed, and used again when it answers.",
        )


# -- what the last requests show


def _evicted(case: Evidence) -> Iterator[Finding]:
    misses = [miss for miss in case.misses_for(Cause.EVICTED) if not _is_of_row(miss)]
    for tier in ("cpu", "gpu"):
        lost = [miss for miss in misses if miss.tier == tier]
        if (share := case.share(lost)) < MIN_SHARE:
            continue
        ages = [miss.seconds_ago for miss in lost if miss.seconds_ago is not None]
        num_gpu_blocks, num_cpu_blocks = case.num_gpu_blocks, case.num_cpu_blocks
        when = f", half of them less than {duration(statistics.median(ages))} before" if ages else ""
        evidence = (
            f"{share:.0%} of all prompt tokens were missed because they had been evicted from the {tier.upper()} tier"
            f"{when}."
        )
        if tier == "cpu" and is_store_unused(case):
            continue  # what it has lost lies in the store, or should
        if tier == "cpu":
            name, advice = "cpu_tier_short", f"Raise num_cpu_blocks, which is {num_cpu_blocks} now."
        elif num_cpu_blocks:
            name = "evicted_before_copied"
            advice = "Lower cpu_write_high_water, or set cpu_write_policy to 'write_through'."
            if num_cpu_blocks < num_gpu_blocks:
                advice = (
                    f"Raise num_cpu_blocks, which is {num_cpu_blocks} now: a CPU tier that is smaller than the GPU "
                    f"pool of {counted(num_gpu_blocks, 'block')} has no room for what leaves that."
                )
        else:
            name = "gpu_short"
            advice = f"Give the cache a CPU tier (num_cpu_blocks), or more than {num_gpu_blocks} num_gpu_blocks."
        sizes = "" if name == "evicted_before_copied" else _size_that_pays(case)
        yield Finding(name=name, evidence=evidence, advice=advice + sizes, share=share)


def _is_of_row(miss: Miss) -> bool:
    return miss.detail is not None and miss.detail.startswith(ROW_SHORT)


def _size_that_pays(case: Evidence) -> str:
    """Sentences on the smallest tiers with most of what larger ones give; nothing where no rates are known."""
    rates = {(rate.tier, rate.factor): rate for rate in case.rates if rate.policy == case.policy}
    if not rates:
        return ""
    now = rates["gpu", 1.0].token_hit_rate
    best = [_smallest(rates, tier, now) for tier in ("cpu", "gpu")]
    found = [rate for rate in best if rate is not None]
    bound = rates["gpu", 1.0].most_token_hit_rate
    most = "" if bound is None else f" No size at all would have hit more than {bound:.0%}."
    if not found:
        return f" In the last hour no size up to four times that of a tier would have hit more.{most}"
    words = {"cpu": "the CPU tier", "gpu": "the GPU pool"}
    texts = [
        f"with {counted(rate.num_blocks, 'block')} in {words[rate.tier]} {rate.token_hit_rate:.0%}{_saved(rate)}"
        for rate in found
    ]
    text = f" Of the last hour's tokens {now:.0%} would hit as it is, {', and '.join(texts)}."
    if any(rate.factor == max(factor for _, factor in rates) for rate in found):
        text += " Larger ones are not estimated; `fastdeploy-cache simulate` replays a recording with any size."
    return text + most


def _smallest(rates: Mapping[tuple[str, float], WhatIfRate], tier: str, now: float) -> WhatIfRate | None:
    """The smallest size of a tier with most of what its largest gains; None where that is too little."""
    larger = [rate for (of, _), rate in sorted(rates.items()) if of == tier and rate.token_hit_rate > now]
    most = max((rate.token_hit_rate for rate in larger), default=now)
    if most - now < _MIN_GAIN:
        return None
    return next(rate for rate in larger if rate.token_hit_rate >= now + _MOST * (most - now))


def _saved(rate: WhatIfRate) -> str:
    return f" (which saves {duration(rate.saved_seconds)} of computing)" if rate.saved_seconds is not None else ""


def _simple(
    name: str,
    cause: Cause,
    what: str,
    advice: str,
    *,
    more: Callable[[Evidence], str] = lambda _: "",
    chosen: Callable[[Miss], bool] = lambda _: True,
) -> Callable[[Evidence], Iterator[Finding]]:
    """A cause that is a finding by itself, or those `chosen` of it, with the detail of the last; `more`: evidence."""

    def look(case: Evidence) -> Iterator[Finding]:
        misses = [miss for miss in case.misses_for(cause) if chosen(miss)]
        if (share := case.share(misses)) >= MIN_SHARE:
            details = [miss.detail for miss in misses if miss.detail is not None]
            detail = f" The last time: {details[0]}." if details else ""
            yield Finding(
                name=name,
                evidence=f"{share:.0%} of all prompt tokens were missed because {what}.{detail}{more(case)}",
                advice=advice,
                share=share,
            )

    return look


def _tails(case: Evidence) -> Iterator[Finding]:
    misses, size = case.misses_for(Cause.PARTIAL), case.block_size
    if size > _SMALL_BLOCK and (share := case.share(misses)) >= _MIN_TAIL_SHARE:
        mean = case.num_tokens / case.num_requests
        yield Finding(
            name="blocks_too_large",
            evidence=(
                f"{share:.0%} of all prompt tokens are in tails that fill no block: prompts have "
                f"{counted(round(mean), 'token')} on average, and a block has {size}."
            ),
            advice="Use a smaller block_size, such as 16.",
            share=share,
        )


def _speeds(case: Evidence) -> str:
    if case.load_bytes_per_second is None or case.copy_bytes_per_second is None:
        return ""
    loads, copies = (speed / 1e9 for speed in (case.load_bytes_per_second, case.copy_bytes_per_second))
    return f" A rank loads {loads:.1f} GB in a second; a plain copy on this machine moves {copies:.1f}."


_NOW = (_processes, _store)
_BY_REQUESTS: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    *STORE_FINDINGS,
    _evicted,
    _tails,
    *PROMPT_FINDINGS,
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
        more=_speeds,
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
        chosen=lambda miss: miss.detail != NO_ROOM_TO_FETCH,
    ),
    _simple(
        "no_room_to_fetch",
        Cause.ROOM,
        "the CPU tier had no room for what storage has of them",
        "Raise num_cpu_blocks; max_prefetch_share says how much of them prefetches may take.",
        chosen=lambda miss: miss.detail == NO_ROOM_TO_FETCH,
    ),
    _simple("rank_failed", Cause.RANK, "a rank was down, or lost its memory", "See the ranks' log (transfer.log_dir)."),
    _simple("setting_forbids", Cause.LIMIT, "a setting does not allow them to be used", "Change that setting."),
    _simple(
        "resets",
        Cause.RESET,
        "they were forgotten by a reset",
        "Reset only when the weights have changed; if they had, nothing is wrong.",
        chosen=lambda miss: miss.detail != OTHER_WEIGHTS,
    ),
    _simple(
        "other_images",
        Cause.IMAGE,
        "they are cached with another image",
        "See that an image has the same hash each time that it is sent.",
    ),
    _simple(
        "row_short",
        Cause.EVICTED,
        "their checkpoints made room for others in a row of the model",
        "Raise num_gpu_units of that row, or give the cache a CPU tier (num_cpu_blocks), which keeps checkpoints, too.",
        chosen=_is_of_row,
    ),
    _simple(
        "expired",
        Cause.EXPIRED,
        "they had not been used for their tenant's time to live",
        "Raise keep_seconds of that tenant, if its prompts come back later than that.",
    ),
    _simple(
        "no_checkpoints",
        Cause.UNANCHORED,
        "no checkpoint lies behind them",
        "Take snapshots at Match.checkpoint_tokens, and see in config check that num_gpu_units has room for them.",
    ),
)

"""What is wrong with how a store below the CPU tier is used, which looks like a CPU tier that is too small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.insight.doctor.evidence import Evidence
from fastdeploy_cache.insight.doctor.finding import MIN_REQUESTS, MIN_SHARE, Finding

_MIN_SHORT = 0.5  # of the prefetches that asked for less than is fetched
_MIN_OTHER_WEIGHTS = 2  # one other is that of an update

# None of these has a share: what the store has, nobody has asked it.


def _not_asked(case: Evidence) -> Iterator[Finding]:
    store = case.storage
    if store is None or store.num_unasked_requests < MIN_REQUESTS or _lost(case) < MIN_SHARE:
        return
    advice = "Call cache.prefetch(request) when a request is queued"
    if 2 * store.num_long_unasked_requests < store.num_unasked_requests:
        advice += (
            f", and lower min_prefetch_tokens, which is {case.min_prefetch_tokens} now: most prompts have fewer tokens"
        )
    yield Finding(
        name="store_not_asked",
        evidence=(
            f"None of {store.num_unasked_requests} requests was prefetched, and match finds nothing in storage that "
            f"prefetch has not brought.{_evicted(case)}"
        ),
        advice=f"{advice}.",
    )


def _too_short(case: Evidence) -> Iterator[Finding]:
    store = case.storage
    if store is None or store.num_short_prefetches < max(MIN_REQUESTS, store.num_prefetches * _MIN_SHORT):
        return
    is_of_no_use = store.num_short_prefetches == store.num_prefetches and _lost(case) >= MIN_SHARE
    if not is_of_no_use and case.share(case.misses_for(Cause.EVICTED)) < MIN_SHARE:
        return
    yield Finding(
        name="too_short_to_fetch",
        evidence=(
            f"The store was not asked for {store.num_short_prefetches} of {store.num_prefetches} prompts that had "
            f"something to fetch: they missed fewer tokens than min_prefetch_tokens, which is "
            f"{case.min_prefetch_tokens}.{_evicted(case)}"
        ),
        advice=f"Lower min_prefetch_tokens; {case.block_size} fetches every block.",
    )


def _writes_nothing(case: Evidence) -> Iterator[Finding]:
    store = case.storage
    if store is None or store.num_written_blocks or case.share(case.misses_for(Cause.EVICTED)) < MIN_SHARE:
        return
    if store.num_declined_objects:
        seen = f"The store has declined all {store.num_declined_objects} objects that were offered to it."
        advice = "Give the store more memory: it declines what it has no room for."
        if store.admission is not None:
            advice = f"Set storage.admission, which is {store.admission!r} now, to 'all'."
    elif case.storage_write_policy not in ("", "write_through") and store.is_available and not case.broken_operations:
        seen = f"Nothing was written to the store: storage_write_policy is {case.storage_write_policy!r}."
        advice = "Set storage_write_policy to 'write_through'."
    else:
        return
    yield Finding(name="store_writes_nothing", evidence=f"{seen}{_evicted(case)}", advice=advice)


def _other_weights(case: Evidence) -> Iterator[Finding]:
    store = case.storage
    if store is None or store.num_other_weights < _MIN_OTHER_WEIGHTS or store.num_fetched_blocks or case.num_resets:
        return
    if _lost(case) >= MIN_SHARE:
        yield Finding(
            name="weights_id_changes",
            evidence=(
                f"The store keeps blocks of the same model under {store.num_other_weights} other names of weights, and "
                "since the start nothing was found under the present one."
            ),
            advice=(
                "Where the weights are the same, give the same storage.weights_id at every start: a revision, or "
                "weights_id_of(files)."
            ),
        )


def is_store_unused(case: Evidence) -> bool:
    """Whether what has left the CPU tier is not looked for in the store, or was never written to it."""
    return any(list(look(case)) for look in (_not_asked, _too_short, _writes_nothing))


def _lost(case: Evidence) -> float:
    """The share of prompt tokens that no tier had: the store may have them."""
    return case.share(case.misses_for(Cause.NEW, Cause.NEW_OR_FORGOTTEN, Cause.EVICTED))


def _evicted(case: Evidence) -> str:
    share = case.share(case.misses_for(Cause.EVICTED))
    return f" {share:.0%} of all prompt tokens had been evicted from the tiers above it." if share else ""


STORE_FINDINGS: Final = (_not_asked, _too_short, _writes_nothing, _other_weights)

"""What is wrong with how an engine brings its prompts: nothing of them can be found again, or not yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.insight.doctor.evidence import Evidence
from fastdeploy_cache.insight.doctor.finding import MIN_REQUESTS, MIN_SHARE, Finding

_MIN_SHARE_ALIKE = 0.5  # of the prompts that part from others in one block only


def _never_committed(case: Evidence) -> Iterator[Finding]:
    """It has no share: whether these prompts have anything in common, nobody can tell."""
    if _is_never_committed(case):
        yield Finding(
            name="never_committed",
            evidence=(
                f"{case.num_unpublished_requests} requests were released without a commit, nothing is cached, and no "
                f"token of the last {case.num_requests} requests was a hit."
            ),
            advice="Call cache.commit(request, num_computed_tokens), or step, when a step has computed its tokens.",
        )


def _is_never_committed(case: Evidence) -> bool:
    num_missed = sum([miss.num_tokens for miss in case.misses])
    misses = case.misses_for(Cause.NEW, Cause.NEW_OR_FORGOTTEN, Cause.UNCOMMITTED)
    is_cold = not case.num_cached_blocks and num_missed == case.num_tokens
    return is_cold and case.num_unpublished_requests >= MIN_REQUESTS and case.share(misses) >= MIN_SHARE


def _at_once(case: Evidence) -> Iterator[Finding]:
    share = case.share(case.misses_for(Cause.UNCOMMITTED))
    if share >= MIN_SHARE and not _is_never_committed(case):
        yield Finding(
            name="computed_at_once",
            evidence=(
                f"{share:.0%} of all prompt tokens were missed because another request was computing them, and had not "
                "committed them."
            ),
            advice=(
                "Hold back the match of a request while another one computes the same prefix: it then hits what that "
                "one has committed."
            ),
            share=share,
        )


def _parted(case: Evidence) -> Iterator[Finding]:
    """Prompts that differ in one block, and go on alike: nothing behind a difference can be shared."""
    share = case.share(case.misses_for(Cause.NEW, Cause.NEW_OR_FORGOTTEN, Cause.EVICTED))
    num_looked, num_alike, size = case.num_looked_prompts, case.num_alike_prompts, case.block_size
    if share < MIN_SHARE or num_looked < MIN_REQUESTS or num_alike < num_looked * _MIN_SHARE_ALIKE:
        return
    block = case.parted_at_block
    where, behind = f"their first block of {size} tokens", "have the same second block"
    if block != 0:
        where, behind = f"a block of {size} tokens", "have the same blocks behind it"
    if block:
        where += f" (tokens {block * size} to {(block + 1) * size - 1})"
    yield Finding(
        name="first_blocks_differ" if block == 0 else "later_blocks_differ",
        evidence=(
            f"{num_alike} of {num_looked} prompts differ from others in {where}, and {behind}: what follows cannot be "
            "shared."
        ),
        advice="Put what changes (a time, a name, a request's id) behind what stays, or leave it out.",
        share=share,
    )


PROMPT_FINDINGS: Final = (_never_committed, _at_once, _parted)

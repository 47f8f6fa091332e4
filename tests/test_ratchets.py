"""Figures of the code's shape and of what a request costs, as limits that may only fall.

A commit that lowers a figure lowers its limit here. A limit is raised only by a numbered decision, which says what is
bought for it (`DECISIONS.md`). Lines are those of `wc -l`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books.tokens import IS_NATIVE
from fastdeploy_cache.config.insight import InsightConfig
from tests.rigs import shape_figures as shape
from tests.rigs.call_counts import counted_apart

ENTRIES = {"fastdeploy_cache": 21, "transfer_manager": 14, "ipc": 18, "metrics": 16, "launch": 33}
LINES = {"fastdeploy_cache": 42_112, "transfer_manager": 14_067, "ipc": 2_195, "metrics": 1_380, "launch": 30_950}
ROOM_PAIRS, LONGEST_CHAIN = 97, 11
NAMES_OF_MANAGER = 30
NAMES_OF_PARTS = {
    ("insight/insight.py", "Insight"): 8,
    ("insight/control/control.py", "Control"): 13,
    ("life_cycle.py", "LifeCycle"): 10,
    ("ranks.py", "RankAccess"): 9,
    ("callers/blocks.py", "CallerBlocks"): 16,
    ("peers/peers.py", "Peers"): 14,
    ("storage/access.py", "StorageAccess"): 20,
}
CLASS_LINES = {("books/prefix_tree.py", "PrefixTree"): 204, ("books/residency.py", "Residency"): 250}
FIELDS_OF_A_REQUEST = 26
MODULES_WITH_A_CLOCK = 1  # the clock itself
# Calls of Python and of C: match, allocate, commit and release of a request, by what it finds on the GPU, with causes,
# recorder and what-if, and without the two that can be switched off.
CALLS = {
    ("whole prompt", "seen"): (96, 95),
    ("next turn", "seen"): (94, 89),
    ("branch", "seen"): (144, 127),
    ("whole prompt", "unseen"): (94, 83),
    ("next turn", "unseen"): (92, 77),
    ("branch", "unseen"): (142, 115),
}
_SIZE = 64


def hold(found: int, limit: int, what: str) -> None:
    """Not more than the limit."""
    assert found <= limit, f"{what}: {found}, and the limit is {limit}; see the head of this file"


@pytest.mark.parametrize("package", ENTRIES)
def test_entries_of_a_package(package: str) -> None:
    """What a reader meets first: files and folders directly in it."""
    hold(shape.num_entries(package), ENTRIES[package], f"entries of {package}")


@pytest.mark.parametrize("package", LINES)
def test_lines_of_a_package(package: str) -> None:
    """All of the product, package by package."""
    hold(shape.num_lines(shape.ROOT / package), LINES[package], f"lines of {package}")


def test_rooms_that_import_each_other() -> None:
    """How many pairs of rooms do, never in a circle of two, and how many rooms the longest chain has."""
    pairs = shape.room_pairs()
    assert not [pair for pair in pairs if pair[::-1] in pairs]
    hold(len(pairs), ROOM_PAIRS, "pairs of rooms")
    hold(shape.longest_chain(pairs), LONGEST_CHAIN, "the longest chain of rooms")


def test_names_of_the_manager_and_its_parts() -> None:
    """What users may call: not one more."""
    hold(len(shape.public_names(shape.CORE / "manager.py", "PrefixCacheManager")), NAMES_OF_MANAGER, "the manager")
    for (path, name), limit in NAMES_OF_PARTS.items():
        hold(len(shape.public_names(shape.CORE / path, name)), limit, name)


def test_classes_that_are_full() -> None:
    """They may not grow."""
    for (path, name), limit in CLASS_LINES.items():
        hold(shape.num_class_lines(shape.CORE / path, name), limit, f"lines of {name}")


def test_fields_of_a_request() -> None:
    """What is kept of each matched request."""
    fields = shape.fields_of(shape.CORE / "requests/active_request.py", "ActiveRequest")
    hold(len(fields), FIELDS_OF_A_REQUEST, "fields of ActiveRequest")


def test_modules_with_a_clock_of_their_own() -> None:
    """Modules that read time, make timers or draw lots: none but one, so that a test can hand in another."""
    found = shape.modules_with_a_clock("fastdeploy_cache", "transfer_manager", "ipc", "metrics")
    hold(len(found), MODULES_WITH_A_CLOCK, f"modules with a clock of their own ({', '.join(sorted(found))})")


def served(cache: PrefixCacheManager, name: str, tokens: np.ndarray) -> Callable[[], None]:
    """All verbs of a request that waits for nothing."""
    request, num_blocks = Request(request_id=name, prompt_token_ids=tokens), -(-len(tokens) // _SIZE)

    def serve() -> None:
        match = cache.match(request)
        cache.allocate(request, num_blocks - len(match.block_ids))
        cache.commit(request, len(tokens))
        cache.release(request)

    return serve


def count(kind: str, seeing: str) -> tuple[int, int]:
    """Calls of Python and of C, once everything has been done before."""
    insight = InsightConfig() if seeing == "seen" else InsightConfig(what_if=False, flight_recorder_bytes=0)
    config = CacheConfig(
        block_size=_SIZE, num_gpu_blocks=400, num_cpu_blocks=0, transfer_client="inline", insight=insight
    )
    found = (0, 0)
    with PrefixCacheManager(config) as cache:
        tokens = np.arange(10 * _SIZE, dtype=np.int32)
        served(cache, "first", tokens)()
        for number in range(4):
            if kind == "next turn":
                tokens = np.concatenate([tokens, np.arange(2 * _SIZE, dtype=np.int32) + 10_000 * (number + 1)])
            elif kind == "branch":
                tail = np.arange(2 * _SIZE, dtype=np.int32) + 10_000 * (number + 1)
                tokens = np.concatenate([tokens[: (8 - number) * _SIZE], tail])
            _, found = counted_apart(served(cache, f"{kind}{number}", tokens))
    return found


@pytest.mark.skipif(not IS_NATIVE, reason="calls are counted with the native part, which was not built here")
@pytest.mark.parametrize(("kind", "seeing"), CALLS)
def test_calls_of_a_request(kind: str, seeing: str) -> None:
    """The same number each time, on any machine. Newer Pythons call less, as they inline comprehensions."""
    limits, found = CALLS[kind, seeing], count(kind, seeing)
    hold(found[0], limits[0], f"calls of Python, {kind}, {seeing}")
    if sys.version_info < (3, 12):
        hold(found[1], limits[1], f"calls of C, {kind}, {seeing}")

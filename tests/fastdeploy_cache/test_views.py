"""What an operator sees of prefixes, requests and ranks; and that looking at many of them holds nobody up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from fastdeploy_cache.books.large_dict import SMALL
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.insight.looks import pieces
from fastdeploy_cache.insight.looks.prefix_views import PrefixView
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from tests.rigs.asker import Asker

SYSTEM = list(range(8))  # two blocks


def tails(first: int, last: int) -> list[list[int]]:
    return [[1000 * n + i for i in range(4)] for n in range(first, last)]


@pytest.fixture
def asker() -> Asker:
    """Prompts of one system prompt, of which the first was asked three times, and a prompt of its own."""
    asker = Asker(num_gpu=40)
    for tail in [*tails(1, 5), *tails(1, 2) * 2]:
        asker.serve([*SYSTEM, *tail])
    asker.serve([7] * 12, namespace="tenant-salt")
    return asker


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Every step of a look is a turn of its own, and these are called after each."""
    calls: list[Callable[[], object]] = []
    monkeypatch.setattr(pieces, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(SYSTEM_CLOCK, "sleep", lambda _: [call() for call in calls])
    return calls


def walk(views: tuple[PrefixView, ...]) -> Iterator[PrefixView]:
    for view in views:
        yield view
        yield from walk(view.children)


def test_the_most_used_prefixes_come_first(asker: Asker) -> None:
    """The system prompt, then the tail that was asked most; what leads to each is counted, and all are named apart."""
    system, tail, *others = asker.cache.insight.top(20)
    assert (system.num_tokens, system.num_prefix_tokens, system.num_uses, system.num_children) == (8, 8, 6, 4)
    assert (tail.num_tokens, tail.num_prefix_tokens, tail.num_uses, tail.num_children) == (4, 12, 3, 0)
    assert (system.num_blocks, system.num_gpu_blocks, system.num_cpu_blocks) == (2, 2, 0)
    assert [each.num_uses for each in others] == [1] * 4 and others[0].namespace not in {"default", system.namespace}
    names = {each.name for each in (system, tail, *others)}
    assert len(names) == 6 and all(len(name) == 16 for name in names)
    assert all(each.idle_seconds is not None and 0 <= each.idle_seconds < 3600 for each in (system, *others))


def test_no_more_are_shown_than_were_asked_for(asker: Asker) -> None:
    """Fewer are the first of more, by name."""
    everything = [each.name for each in asker.cache.insight.top(2000)]
    for num in range(1, 8):
        assert [each.name for each in asker.cache.insight.top(num)] == everything[:num]


def test_a_namespace_is_shown_by_a_digest(asker: Asker) -> None:
    """Its own name, which may be a tenant's salt, is in no view."""
    tree = asker.cache.insight.tree()
    assert {each.namespace for each in tree.children} > {"default"} and tree.num_namespaces == 2
    assert "tenant" not in json.dumps(tree.as_dict())


def test_the_tree_is_nested_and_says_what_it_leaves_out(asker: Asker) -> None:
    """Children hang below what leads to them, the most used first; depth and number of nodes are bounds."""
    tree = asker.cache.insight.tree()
    assert [len(each.children) for each in tree.children] == [4, 0] and tree.num_left_out == 0
    assert [each.num_uses for each in tree.children[0].children] == [3, 1, 1, 1] and tree.num_shown == 6
    flat = asker.cache.insight.tree(depth=1)
    assert [(len(each.children), each.num_left_out) for each in flat.children] == [(0, 4), (0, 0)]
    few = asker.cache.insight.tree(max_nodes=3)
    assert few.num_shown == 3 and few.num_left_out + few.children[0].num_left_out == 3
    found = few.as_dict()
    assert found["num_left_out"] == few.num_left_out and found["children"][0]["children"][0]["num_uses"] == 3


def test_tiers_and_what_is_held_are_shown() -> None:
    """Blocks of each tier of a run, and those that a running request keeps in place."""
    asker = Asker(num_gpu=8, num_cpu=20, cpu_write_policy="write_through")
    asker.serve([*SYSTEM, 1, 2, 3, 4])
    request, match = asker.match([*SYSTEM, *range(100, 110)])
    asker.admit(request, match)
    asker.cache.commit(request, request.num_tokens)
    first, other, mine = asker.cache.insight.top()
    assert (first.num_gpu_blocks, first.num_cpu_blocks, first.num_held_blocks, first.is_pinned) == (2, 2, 2, False)
    assert (other.num_blocks, other.num_cpu_blocks, other.num_held_blocks, other.num_uses) == (1, 1, 0, 1)
    assert (mine.num_blocks, mine.num_cpu_blocks, mine.num_held_blocks, mine.num_uses) == (2, 0, 2, 0)
    asker.cache.release(request)
    assert [each.num_held_blocks for each in asker.cache.insight.top()] == [2, 2, 0]  # the copy down reads them
    asker.client.land_all()
    assert [each.num_held_blocks for each in asker.cache.insight.top()] == [0, 0, 0]


def test_impossible_numbers_are_refused(asker: Asker) -> None:
    """The error says what was given and what can be."""
    insight = asker.cache.insight
    for call in (
        lambda: insight.top(0),
        lambda: insight.top(2001),
        lambda: insight.tree(depth=65),
        lambda: insight.tree(max_nodes=0),
        lambda: insight.requests(0),
        lambda: insight.top(True),
    ):
        with pytest.raises(ConfigError, match="use 1 to"):
            call()


def test_very_many_prompts_are_looked_through_in_pieces(between: list[Callable[[], object]]) -> None:
    """More children than one dictionary has: the most used are found, and the lock is given back in between."""
    asker = Asker(num_gpu=SMALL + 400, size=1)
    for number in range(SMALL + 300):
        request, match = asker.match([number])
        asker.cache.allocate(request, 1 - len(match.block_ids))
        asker.cache.commit(request, 1)
        asker.cache.release(request)
    for _ in range(2):
        asker.serve([1234])
    num_turns = []
    between.append(lambda: num_turns.append(1))
    tree = asker.cache.insight.tree(max_nodes=3)
    assert tree.children[0].num_uses == 3 and tree.num_left_out == SMALL + 297 and len(num_turns) > SMALL


def test_what_changes_meanwhile_is_shown_as_it_was_or_left_out(
    asker: Asker, between: list[Callable[[], object]]
) -> None:
    """Prompts that part, end, join and are evicted between any two steps: every view is one of something that was
    there, no look fails, and the books add up."""
    number = [0]

    def serve() -> None:
        number[0] += 1
        n = number[0] % 7
        asker.serve([*SYSTEM[: 4 + 4 * (n % 2)], *([500 + n] * 4), *([n % 3] * 4)])

    between.append(serve)
    for _ in range(20):
        views = [*asker.cache.insight.top(50), *walk(asker.cache.insight.tree().children)]
        assert views and all(each.num_gpu_blocks == each.num_blocks > 0 and len(each.name) == 16 for each in views)
        assert all(each.num_tokens <= each.num_prefix_tokens <= 16 for each in views)


def test_a_reset_meanwhile_leaves_nothing_to_show(asker: Asker, between: list[Callable[[], object]]) -> None:
    """What a reset has forgotten is not shown as cached, wherever the look is when it comes."""
    for step in range(1, 12):
        left = [step]

        def reset() -> None:
            left[0] -= 1  # noqa: B023 (of this round)
            if not left[0]:  # noqa: B023
                asker.cache.reset()

        between[:] = [reset]
        views = asker.cache.insight.top()
        assert left[0] > 0 or len(views) < 6
        asker.cache.check_invariants()


def test_requests_that_run_are_shown_with_what_they_have() -> None:
    """Phase, tokens, blocks and where the matched tokens came from; then they are among the recent ones."""
    asker = Asker(num_gpu=30, num_cpu=20, cpu_write_policy="write_through")
    asker.serve(SYSTEM)
    request, match = asker.match([*SYSTEM, *range(100, 106)])
    asker.admit(request, match)
    asker.match([9, 9, 9, 9, 9])
    view = asker.cache.insight.requests()
    first, second = view.running
    assert view.num_running == 2 and (first.request_id, first.phase, first.num_tokens) == ("r2", "settled", 14)
    assert first.num_blocks == 4 and first.matched_tokens == {"gpu": 8} and 0 <= first.running_seconds < 3600
    assert second.matched_tokens == {} and [each.request_id for each in view.recent] == ["r2", "r1"]
    assert asker.cache.insight.requests(1).num_running == 2 and len(asker.cache.insight.requests(1).running) == 1
    assert json.loads(json.dumps(view.as_dict()))["running"][0]["request_id"] == "r2"


def test_ranks_are_shown_with_what_they_have_to_do() -> None:
    """A copy down that has not ended is in flight, and no more once it has landed."""
    asker = Asker(num_gpu=30, num_cpu=20, cpu_write_policy="write_through")
    request, match = asker.match(SYSTEM)
    asker.admit(request, match)
    asker.cache.commit(request, 8)
    asker.cache.release(request)
    view = asker.cache.insight.ranks()
    assert (view.num_loads_in_flight, view.num_copies_down_in_flight) == (0, 1) and view.ranks[0].up
    asker.client.land_all()
    assert asker.cache.insight.ranks().num_copies_down_in_flight == 0

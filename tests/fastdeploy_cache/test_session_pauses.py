"""What `reuse` makes of sessions: the pauses that are expected, and the classes that they make."""

from __future__ import annotations

import random

import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.books.leaves.policy import SessionHint
from fastdeploy_cache.policies import session_pauses
from fastdeploy_cache.policies.reuse_classes import (
    ENDED_CLASS,
    NUM_CLASSES,
    NUM_GOING,
    NUM_PAUSES,
    PENDING_CLASS,
    ancestors_of,
    private_class,
    session_class,
    shared_class,
)
from fastdeploy_cache.policies.session_pauses import MAX_SESSIONS, MAX_TOOLS, SessionPauses
from fastdeploy_cache.request import session_number


def asked(session: int, *, tool: int = 0, answer: int = 10) -> SessionHint:
    return SessionHint(session=session, going=0, tool=tool, num_answer_tokens=answer)


def test_a_quick_session_is_expected_sooner_than_a_slow_one() -> None:
    """Each by its own past; a new one as most are. How much longer the rare ones pause counts two octaves at most."""
    pauses, rng, now = SessionPauses(), random.Random(1), 0.0
    due = [(0.0, number) for number in range(20)]  # the even ones ask each second, the odd ones each minute
    found = dict[int, int]()
    for _ in range(5000):
        now, number = due.pop(due.index(min(due)))
        found[number] = pauses.forecast(asked(number + 1), now, 1000, tool_call_pending=False)
        due.append((now + (1000.0 if number % 2 == 0 else 60_000.0) * rng.uniform(0.7, 1.4), number))
    quick, slow = ([found[number] for number in range(first, 20, 2)] for first in (0, 1))
    new = pauses.forecast(asked(99), now, 1000, tool_call_pending=False)
    assert min(quick) - 3 <= new < min(slow)
    assert min(slow) - max(quick) >= 6, "an octave at least"


def test_tools_have_pauses_of_their_own() -> None:
    """One tool takes a second, another a minute: sessions that call both in turn are expected accordingly."""
    pauses, rng, now = SessionPauses(), random.Random(1), 0.0
    bins = dict[int, list[int]]()
    for _ in range(3000):
        tool = 7 if rng.random() < 0.5 else 9
        bins.setdefault(tool, []).append(pauses.forecast(asked(1, tool=tool), now, 1000, tool_call_pending=True))
        now += (1000.0 if tool == 7 else 60_000.0) * rng.uniform(0.8, 1.2)
    assert sum(bins[9][-100:]) / 100 - sum(bins[7][-100:]) / 100 > 12


def test_sessions_and_tools_take_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that asked last are remembered; one that has ended is not."""
    assert MAX_SESSIONS <= 2**15 and MAX_TOOLS <= 2**10
    monkeypatch.setattr(session_pauses, "MAX_SESSIONS", 100)
    monkeypatch.setattr(session_pauses, "MAX_TOOLS", 10)
    pauses = SessionPauses()
    for number in range(2000):
        pauses.forecast(asked(1 + number % 300, tool=number % 50), float(number), 10, tool_call_pending=False)
    assert len(pauses) == 100
    assert len(pauses._tools) <= 10
    pauses.forget(1 + 1999 % 300)
    pauses.forget(12345)
    assert len(pauses) == 99


def test_facts_that_never_change_break_nothing() -> None:
    """No answer has a length, and all pauses are alike, for 150,000 pauses: what is forecast stays what it was."""
    pauses, found = SessionPauses(), list[int]()
    for number in range(150_000):
        hint = asked(1 + number % 200, answer=0)
        found.append(pauses.forecast(hint, number * 10.0, 1000, tool_call_pending=False))
    assert len(set(found[20_000:])) == 1
    assert abs(found[-1] - 6 * (11 - 4)) <= 2, "2 seconds are 11 octaves"


def test_odd_times_and_sizes_are_taken() -> None:
    """A clock that goes back, an answer of no token, a prompt of millions: a bin within the bounds."""
    pauses = SessionPauses()
    for now in (5.0, 1.0, 1e15, 0.0):
        for answer in (0, 2**31):
            found = pauses.forecast(asked(3, answer=answer), now, 2**40, tool_call_pending=True)
            assert 0 <= found < NUM_PAUSES


def test_no_two_classes_share_a_number() -> None:
    """Shared, private by what is said, ended, pending and sessions: each number once, all below the last."""
    private = {
        private_class(turn, gap, size, going)
        for turn in (1, 2, 3, 5, 9)
        for gap in (0, 5000, 20_000, 70_000)
        for size in (0, 2048, 4096, 8192)
        for going in range(NUM_GOING)
    }
    assert len(private) == (1 + 4 * 4) * 4 * NUM_GOING
    sessions = {session_class(pause, going) for pause in range(NUM_PAUSES) for going in range(NUM_GOING)}
    shared = {shared_class(num) for num in range(100)}
    all_of_them = [*private, *sessions, *shared, ENDED_CLASS, PENDING_CLASS]
    assert len(set(all_of_them)) == len(all_of_them)
    assert max(all_of_them) < NUM_CLASSES < 2**15
    groups = {number: ancestors_of(number) for number in all_of_them}
    assert groups[ENDED_CLASS] == groups[PENDING_CLASS] == ()
    assert len({groups[number] for number in sessions}) == NUM_GOING
    assert len({groups[number] for number in shared}) == 1
    assert {len(groups[number]) for number in private} == {1, 2}


def test_what_a_request_says_of_its_session() -> None:
    """Numbers for names, the same for the same namespace and session; what is no chance counts as none."""
    request = Request(request_id="r", prompt_token_ids=[1, 2], namespace="n", session_id="s")
    request.append_output([3, 4, 5])
    request.tool_name = "grep"
    said = request.session_hint
    assert said is not None
    assert said.session == session_number("n", "s") != session_number("", "s") != session_number("ns", "")
    assert (said.going, said.num_answer_tokens) == (0, 3)
    assert 0 < said.tool < 2**32
    levels = []
    for chance in (0, 0.1, 0.3, 0.5, 0.75, 1, 1.0, -0.1, 1.1, float("nan"), True, "much", None):
        request.will_go_on = chance  # type: ignore[assignment]
        assert request.session_hint is not None
        levels.append(request.session_hint.going)
    assert levels == [1, 1, 2, 3, 4, 4, 4, 0, 0, 0, 0, 0, 0]
    assert Request(request_id="r", prompt_token_ids=[1]).session_hint is None

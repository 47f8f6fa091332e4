"""How long sessions pause until they ask again, as far as their past tells.

The logarithm of the next pause is forecast by a linear regression over what is known of the session: recursive least
squares, which forgets slowly. Only the forecast's bin counts for `reuse`, and what each bin is worth is learned from
what came of it. So a forecast that is off by a constant costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from math import log2
from typing import Any

import msgspec
import numpy as np

from fastdeploy_cache.books.leaves.policy import SessionHint
from fastdeploy_cache.policies.reuse_classes import NUM_PAUSES

MAX_SESSIONS, MAX_TOOLS = 32_768, 1024  # that are remembered: those that asked last
_NUM_FACTS = 8
_KEEP = 0.9995  # of what was learned, for each pause that is learned of
_SOLVE_EVERY = 64  # pauses
_FIRST_OCTAVE, _BINS_PER_OCTAVE = 4.0, 6.0  # the first bin ends at 16 ms, the last one at 9 hours
_QUICK = 0.3  # the weight of the last pause in a session's quick average
_SLOW_START = 3.0  # pauses that a session's slow average begins with
_USUAL = 15.0  # of the logarithm of a pause in milliseconds, where nothing is known: 33 s
_OUTLIER_OCTAVES = 2.0  # a pause counts as so much longer than the mean at most: how much longer says little
_MEAN_WEIGHT = 0.01  # of a pause in the mean of all

_RIDGE = np.eye(_NUM_FACTS) * 10.0  # so many pauses speak for weights of 0
Array = np.ndarray[Any, np.dtype[np.float64]]


class _Session(msgspec.Struct, gc=False, eq=False):
    asked_at: float  # in milliseconds
    quick: float  # logarithms of pauses: averages, and the last one
    slow: float
    last: float
    turn: int = 0
    tool: int = 0
    facts: tuple[float, ...] = ()


class SessionPauses:
    """One thread at a time."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        self._tools: OrderedDict[int, float] = OrderedDict()  # the quick average of pauses by tool
        self._products, self._targets = _RIDGE.copy(), np.zeros(_NUM_FACTS)
        self._weights: list[float] = [0.0] * _NUM_FACTS
        self._num_learned = 0
        self._mean = _USUAL

    def __len__(self) -> int:
        return len(self._sessions)

    def forecast(self, hint: SessionHint, now: float, num_tokens: int, *, tool_call_pending: bool) -> int:
        """A request of a session is over, at `now` in milliseconds: the bin of the pause that follows."""
        session = self._sessions.pop(hint.session, None)
        if session is None:
            session = _Session(now, quick=self._mean, slow=self._mean, last=self._mean)
            if len(self._sessions) >= MAX_SESSIONS:
                self._sessions.popitem(last=False)
        else:
            self._learn(session, log2(1 + max(0.0, now - session.asked_at)))
        session.turn, session.asked_at, session.tool = session.turn + 1, now, hint.tool
        session.facts = (
            1.0,
            log2(1 + hint.num_answer_tokens) - 8.0,
            session.quick - _USUAL,
            session.slow - _USUAL,
            session.last - _USUAL,
            log2(session.turn) - 5.0,
            self._tools.get(hint.tool, self._mean) - _USUAL if hint.tool else log2(1 + num_tokens) - 16.0,
            1.0 if tool_call_pending else 0.0,
        )
        self._sessions[hint.session] = session
        pause = _USUAL + sum([weight * fact for weight, fact in zip(self._weights, session.facts, strict=True)])
        return max(0, min(NUM_PAUSES - 1, int((pause - _FIRST_OCTAVE) * _BINS_PER_OCTAVE)))

    def forget(self, session: int) -> None:
        """It has ended."""
        self._sessions.pop(session, None)

    def _learn(self, session: _Session, pause: float) -> None:
        """This is how long it has paused."""
        pause = min(pause, self._mean + _OUTLIER_OCTAVES)
        self._mean += _MEAN_WEIGHT * (pause - self._mean)
        facts = np.array(session.facts)
        self._products *= _KEEP
        self._products += np.outer(facts, facts) + (1 - _KEEP) * _RIDGE  # which stays: facts may never change
        self._targets *= _KEEP
        self._targets += facts * (pause - _USUAL)
        self._num_learned += 1
        if not self._num_learned % _SOLVE_EVERY:
            self._weights = np.linalg.solve(self._products, self._targets).tolist()
        session.last = pause
        session.quick += _QUICK * (pause - session.quick) if session.turn > 1 else pause - session.quick
        session.slow += (pause - session.slow) / (session.turn + _SLOW_START)
        if session.tool:
            past = self._tools.pop(session.tool, pause)
            if len(self._tools) >= MAX_TOOLS:
                self._tools.popitem(last=False)
            self._tools[session.tool] = past + _QUICK * (pause - past)

"""What agents say of a story's requests, beside what its users do: hints between any two acts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.errors import ControlError, LifeCycleError, PromptTooLongError, RequestError
from fastdeploy_cache.launch.faults.stage import Home
from fastdeploy_cache.launch.faults.story import Act

_NUM_SESSIONS, _CHANCES = 3, (None, None, 0.1, 0.9)
_RETAIN_SECONDS: Final = 0.5
_FORGETS_ONE_OF, _FORGET_SECONDS = 3, 2.0
T = TypeVar("T")


class Hinted(Protocol):
    """A user, as far as an agent knows one."""

    engine: Home
    cache: PrefixCacheManager

    def call(self, verb: str, call: Callable[[], T], limit_seconds: float = 0.0) -> T:
        """Call a verb, which has to come back in time."""
        ...


class Agent:
    """One beside each user. What it says follows from the user's acts, so that a story stays what it is without it."""

    def __init__(self, user: Hinted, texts: Sequence[Sequence[int]]) -> None:
        self._user, self._texts, self._cache = user, texts, user.cache
        self._kept: list[str] = []  # names of what it retains

    def name(self, request: Request, number: int) -> None:
        """Say what the request of this number is of."""
        if number % 4:
            request.session_id = f"s{number % _NUM_SESSIONS}"
        request.will_go_on, request.tool_name = _CHANCES[number % len(_CHANCES)], "grep" if number % 5 == 0 else ""
        request.tool_call_pending, request.session_ended = number % 6 == 0, number % 7 == 0

    def speak(self, act: Act) -> None:
        """Say something after an act, or nothing."""
        sessions, number = self._cache.sessions, act.first + 3 * act.second + 5 * act.third
        text = list(self._texts[act.first % len(self._texts)][: 4 + act.second % 32])
        of: str | list[int] = f"s{act.second % _NUM_SESSIONS}" if act.third % 2 else text
        space = "tenant" if act.third % 8 == 7 else ""
        hints: list[tuple[str, Callable[[], object]]] = [
            ("retain", lambda: self._kept.append(sessions.retain(of, _RETAIN_SECONDS, namespace=space).name)),
            ("supersede", lambda: sessions.supersede(of, len(text) // 2, namespace=space)),
            ("demote", lambda: sessions.demote(of, namespace=space)),
            ("prefetch hint", lambda: sessions.prefetch(of, namespace=space, tier="gpu" if number % 3 else "cpu")),
            ("release_session", lambda: sessions.release_session(f"s{act.second % _NUM_SESSIONS}", namespace=space)),
        ]
        if len(self._kept) > 1:
            self.let_go()
        (verb, hint), seconds = hints[number % len(hints)], 0.0
        if self._user.engine.settings.tenants and space and not number % _FORGETS_ONE_OF:
            verb, seconds = "forget_namespace", _FORGET_SECONDS
            hint = partial(self._cache.life.forget_namespace, space, seconds)
        try:
            self._user.call(verb, hint, seconds)
            self._user.engine.seen[f"hint: {verb}"] += 1
        except (ControlError, RequestError, LifeCycleError, PromptTooLongError):
            return  # nothing of it is cached, a model of several rows, a cache that is asleep, or more than fits

    def let_go(self) -> None:
        """It retains nothing any more."""
        while self._kept:
            name = self._kept.pop()
            with contextlib.suppress(ControlError):  # its time is over, or a reset has ended it
                self._user.call("unpin", partial(self._cache.control.unpin, name))

"""Instances of one role: whose turn it is, and who has hung lately."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.server.upstream import NotSentError, Place, Question, Upstream, WholeAnswer

_HUNG_SECONDS = 15.0  # so long an instance that did not answer is asked after all others


@dataclass(eq=False)
class Load:
    """How busy an instance is with one request, in tokens that are computed: until it says something, and then."""

    prompt_tokens: float
    open_tokens: float

    @property
    def tokens(self) -> float:
        """Both together."""
        return self.prompt_tokens + self.open_tokens

    def note_prompt_computed(self) -> None:
        """The instance has said something: only the answer is left to do."""
        self.prompt_tokens = 0.0


class Instances:
    """URLs of instances of one role, used in turn. For one event loop."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Raises `LaunchError` for what is no http://HOST:PORT."""
        self._places = [place_of(url) for url in urls]
        self._turns = itertools.count()
        self._loads: defaultdict[Place, set[Load]] = defaultdict(set)
        self._hung_until: dict[Place, float] = {}

    def __len__(self) -> int:
        return len(self._places)

    def in_turn(self) -> list[Place]:
        """Each once; a call later the next one is first. Who has hung lately is last."""
        turn = next(self._turns)
        places = [self._places[(turn + index) % len(self)] for index in range(len(self))]
        return sorted(places, key=self.is_hung)

    def in_order(self) -> list[Place]:
        """Each once, for what is no work: it takes nobody's turn. Who has hung lately is last."""
        return sorted(self._places, key=self.is_hung)

    def load(self, place: Place) -> float:
        """How busy it is with what it was asked here, in tokens that are computed."""
        return sum(load.tokens for load in self._loads[place])

    @contextmanager
    def loaded(self, *loads: tuple[Place, Load]) -> Iterator[None]:
        """So busy these are meanwhile, with something else than a request to them."""
        for place, load in loads:
            self._loads[place].add(load)
        try:
            yield
        finally:
            for place, load in loads:
                self._loads[place].discard(load)

    @asynccontextmanager
    async def asked(
        self, upstream: Upstream, place: Place, question: Question, load: Load | None = None
    ) -> AsyncIterator[WholeAnswer]:
        """A request to one of them, which is a `load` to it until it is over. If it hangs, that is noted, and it gets
        no other one before its health answers.

        Raises what `Upstream.ask` raises; `NotSentError`, too, where it still hangs.
        """
        load = load or Load(0.0, 0.0)
        self._loads[place].add(load)
        try:
            if not await self._may_take(upstream, place):
                raise NotSentError("it has hung, and does not answer for its health either", is_late=True)
            async with upstream.ask(place, question) as answer:
                yield answer
        except NotSentError as error:
            if error.is_late:
                self._note_hung(place)
            raise
        except TimeoutError:
            self._note_hung(place)
            raise
        finally:
            self._loads[place].discard(load)

    def _note_hung(self, place: Place) -> None:
        """It did not answer in time: who comes next need not wait for that again."""
        self._hung_until[place] = time.monotonic() + _HUNG_SECONDS

    def is_hung(self, place: Place) -> bool:
        """Whether that was lately."""
        return time.monotonic() < self._hung_until.get(place, 0.0)

    async def _may_take(self, upstream: Upstream, place: Place) -> bool:
        """Whether it has not hung, or answers again."""
        if place not in self._hung_until:
            return True
        if not await upstream.is_healthy(place):
            return False
        self._hung_until.pop(place, None)
        return True


def place_of(url: str) -> Place:
    """Where an instance is. Raises `LaunchError` for what is no http://HOST:PORT."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme != "http" or not parts.hostname or port is None or parts.path.strip("/"):
        raise LaunchError(f"{url!r} is no instance's URL; use http://HOST:PORT")
    return parts.hostname, port

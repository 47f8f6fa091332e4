"""Which instance gets a prompt: that where the least is left to do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fastdeploy_cache.events import PrefixFound
from fastdeploy_cache.launch.server.instances import Instances, Load
from fastdeploy_cache.launch.server.prefix_lookup import PrefixLookup, PromptKnown
from fastdeploy_cache.launch.server.upstream import Place

ROUTE_HEADER = "X-Cache-Route"
_NOTHING = PrefixFound()
_MOST_LOOKING = 32  # prompts that are looked up at a time: one takes some milliseconds


@dataclass(frozen=True)
class Costs:
    """What work costs, in tokens that are computed.

    Attributes:
        loaded_token: a token that is cached below the GPU.
        open_request: a request that is being answered, beside the prompt of one that has not said anything yet.
        moved_token: a token that one instance has cached and lends to another one. None: they do not lend.
    """

    loaded_token: float = 0.1
    open_request: float = 16.0
    moved_token: float | None = None

    def of(self, prompt: PromptKnown, place: Place, lenders: Collection[Place] = ()) -> float:
        """What a prompt costs at an instance until its first token is computed. `lenders`: who may be asked to lend."""
        lender = self.lender_of(prompt, place, lenders)
        return self._alone(prompt, place) if lender is None else self._borrowing(prompt, place, lender)

    def lender_of(self, prompt: PromptKnown, place: Place, lenders: Collection[Place]) -> Place | None:
        """The instance from which it should have what it lacks; None: computing that is cheaper, or nobody has it."""
        others = [other for other in lenders if other != place and other in prompt.found]
        if self.moved_token is None or not others or prompt.num_prompts > 1:  # an offer is of one prompt
            return None
        lender = max(others, key=lambda other: prompt.found[other].num_tokens)
        return lender if self._borrowing(prompt, place, lender) < self._alone(prompt, place) else None

    def _alone(self, prompt: PromptKnown, place: Place) -> float:
        found = prompt.found.get(place, _NOTHING)
        below = found.num_cpu_tokens + found.num_disk_tokens
        return prompt.num_tokens - found.num_tokens + self.loaded_token * below

    def _borrowing(self, prompt: PromptKnown, place: Place, lender: Place) -> float:
        """Asking the lender is like a request to it."""
        num_more = prompt.found[lender].num_tokens - prompt.found.get(place, _NOTHING).num_tokens
        moved = self.moved_token or 0.0
        return self._alone(prompt, place) - num_more + moved * num_more + self.open_request


class Chooser:
    """Orders instances for prompts. For one event loop.

    Attributes:
        num_routed: answers that instances gave, by place and reason.
        num_tokens: of the prompts that were looked up, by place: all of them, and those that were cached there.
    """

    def __init__(self, lookup: PrefixLookup | None = None, costs: Costs | None = None) -> None:
        """`lookup` knows what instances have; where it is None, they take turns."""
        self.lookup, self._costs, self._looking = lookup, costs or Costs(), asyncio.Semaphore(_MOST_LOOKING)
        self.num_routed: Counter[tuple[Place, str]] = Counter()
        self.num_tokens: Counter[tuple[Place, str]] = Counter()

    async def look_up(self, body: bytes, path: str) -> PromptKnown | None:
        """What is known of the prompts in a body."""
        if self.lookup is None or self._looking.locked():  # it would wait for those before it
            return None
        async with self._looking:
            return await asyncio.to_thread(self.lookup.look_up, body, path)  # others are answered meanwhile

    def choose(self, instances: Instances, prompt: PromptKnown | None, *, may_lend: bool = False) -> Choice:
        """Those of one role in the order in which they are asked. Who has hung lately is last. `may_lend`: one of them
        may be asked to lend another one what it has."""
        turn = instances.in_turn()
        if prompt is None or not any(place in prompt.found for place in turn):
            return Choice(self, turn, "turn" if self.lookup is None else "unknown", prompt, self._costs)
        lenders = [place for place in turn if not instances.is_hung(place)] if may_lend else []
        cost = {place: self._costs.of(prompt, place, lenders) + instances.load(place) for place in turn}
        order = sorted(turn, key=lambda place: (instances.is_hung(place), cost[place]))
        lender = self._costs.lender_of(prompt, order[0], lenders)
        return Choice(self, order, _reason(order, cost, prompt), prompt, self._costs, lender)


@dataclass(frozen=True)
class Choice:
    """Instances in the order in which they are asked for a prompt, and why the first of them is the first."""

    _chooser: Chooser
    places: Sequence[Place]
    reason: str
    _prompt: PromptKnown | None
    _costs: Costs
    lender: Place | None = None  # who should lend the first of them what it lacks

    def load_of(self, place: Place) -> Load:
        """How busy an instance is with it, where it borrows nothing."""
        computed = self._costs.of(self._prompt, place) if self._prompt is not None else 0.0
        return Load(computed, self._costs.open_request)

    def answered(self, place: Place) -> str:
        """It is counted that this instance answers; returns why it was asked, for a header."""
        reason = self.reason if place == self.places[0] else "next"
        self._chooser.num_routed[place, reason] += 1
        words = ["{}:{}".format(*place), f"reason={reason}"]
        if self._prompt is not None and place in self._prompt.found:
            num_cached = self._prompt.found[place].num_tokens
            self._chooser.num_tokens[place, "prompt"] += self._prompt.num_tokens
            self._chooser.num_tokens[place, "cached"] += num_cached
            words += [f"prompt_tokens={self._prompt.num_tokens}", f"cached_tokens={num_cached}"]
        return "; ".join(words)


def _reason(order: Sequence[Place], cost: dict[Place, float], prompt: PromptKnown) -> str:
    """Why the first of them is the first: docs/routers.md of the source has a table."""
    first = order[0]
    cached = {place: prompt.found.get(place, _NOTHING).num_tokens for place in order}
    if any(cost[place] < cost[first] for place in order):
        return "hung"  # a better one is, lately
    if len(set(cost.values())) == 1:
        return "turn"
    return "prefix" if cached[first] == max(cached.values()) > min(cached.values()) else "load"

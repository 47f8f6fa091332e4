"""Why a request hit or missed what it did: a value to read, to log, or to send as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fastdeploy_cache.books.causes import TEXTS, Cause
from fastdeploy_cache.errors import counted, duration

_TIER_TEXTS = {"gpu": "the GPU", "cpu": "the CPU tier", "storage": "storage"}


@dataclass(frozen=True, kw_only=True)
class Hop:
    """A way that the bytes of a hit went.

    Attributes:
        source, target: tiers, `cpu` to `gpu` or `storage` to `cpu`.
        num_bytes: that were moved, of all ranks together.
        seconds: that the slowest rank spent on moving; what several requests waited for counts for each. A request's
            copies to the GPU are timed together, whatever tier they began in.
    """

    source: str
    target: str
    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        way = f"from {_TIER_TEXTS[self.source]} to {_TIER_TEXTS[self.target]}"
        size = f"{self.num_bytes / 2**20:.1f} MiB" if self.num_bytes >= 2**20 else f"{self.num_bytes / 2**10:.1f} KiB"
        return f"{size} {way} in {self.seconds * 1000:.1f} ms"


@dataclass(frozen=True, kw_only=True)
class Hit:
    """Tokens that came from a tier.

    Attributes:
        tier: `gpu`, `cpu` or `storage`.
        num_tokens: of them.
        hops: the ways that their bytes went, in order; none for what was on the GPU.
        saved_seconds: that computing them would have taken, by the prefill speed seen so far; None: not known yet.
    """

    tier: str
    num_tokens: int
    hops: tuple[Hop, ...]
    saved_seconds: float | None

    def __str__(self) -> str:
        text = f"{_tokens(self.num_tokens)} came from {_TIER_TEXTS[self.tier]}"
        if self.hops:
            text += ": " + ", then ".join(map(str, self.hops))
        if self.saved_seconds is not None:
            text += f"; computing them takes about {self.saved_seconds * 1000:.1f} ms"
        return text + "."


@dataclass(frozen=True, kw_only=True)
class Miss:
    """Tokens that had to be computed, for one cause.

    Attributes:
        cause: see `Cause`.
        num_tokens: of them.
        tier: that they were lost from, where that is known: `gpu`, `cpu`.
        seconds_ago: how long before the match they were lost, where that is known.
        policy: the eviction policy, where they were evicted.
        detail: further evidence, such as the numbers that were compared.
    """

    cause: Cause
    num_tokens: int
    tier: str | None = None
    seconds_ago: float | None = None
    policy: str | None = None
    detail: str | None = None

    def __str__(self) -> str:
        when = "some time" if self.seconds_ago is None else duration(self.seconds_ago)
        where = "cache" if self.tier is None else _TIER_TEXTS[self.tier].removeprefix("the ")
        detail = "" if self.detail is None else f" ({self.detail})"
        text = TEXTS[self.cause].format(when=when, where=where, policy=self.policy)
        return f"{_tokens(self.num_tokens, 'was', 'were')} missed ({self.cause}): {text}{detail}."


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Where the tokens of a request's prompt came from. `hits` and `misses` add up to `num_tokens`.

    Attributes:
        request_id: of the request.
        num_tokens: of its prompt.
        is_final: False while more of it may still come; then what is coming is counted as missed, with the cause late.
        room_seconds: that the match waited for GPU blocks which copies in flight held; 0.0: it did not wait for any.
        hits: by tier; only tiers that served something.
        misses: from the first missed token to the last.
    """

    request_id: str
    num_tokens: int
    is_final: bool
    hits: tuple[Hit, ...]
    misses: tuple[Miss, ...]
    room_seconds: float = 0.0

    @property
    def num_hit_tokens(self) -> int:
        """Tokens that did not have to be computed."""
        return sum(hit.num_tokens for hit in self.hits)

    def missed_tokens(self) -> dict[Cause, int]:
        """The missed tokens by cause."""
        counts: dict[Cause, int] = {}
        for miss in self.misses:
            counts[miss.cause] = counts.get(miss.cause, 0) + miss.num_tokens
        return counts

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        share = 100 * self.num_hit_tokens / self.num_tokens if self.num_tokens else 0.0
        head = (
            f"Request {self.request_id!r}: {self.num_hit_tokens} of {counted(self.num_tokens, 'prompt token')} "
            f"({share:.0f} %) came from the cache."
        )
        rest = [f"  {part}" for part in (*self.hits, *self.misses)]
        if self.room_seconds:
            waited = f"The match waited {duration(self.room_seconds)} for GPU blocks that copies in flight held."
            rest.insert(0, f"  {waited}")
        return "\n".join([head if self.is_final else f"{head[:-1]} so far.", *rest])


def _tokens(num_tokens: int, one: str = "", many: str = "") -> str:
    return f"{counted(num_tokens, 'token')} {one if num_tokens == 1 else many}".rstrip()

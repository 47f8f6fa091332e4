"""What engines and their users know of the world that they are in, and users of their engine."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache.launch.faults.kv_bytes import Content, KVBytes
from fastdeploy_cache.launch.faults.row_bytes import RowBytes
from fastdeploy_cache.launch.faults.story import Settings

Prefix = tuple[str, tuple[int, ...]]  # of whole blocks: their space, the tokens
Mail = tuple[bytes, list[int], str]  # an offer, the prompt that it is of, its namespace


class Watch(Protocol):
    """A further oracle over one manager."""

    def check(self) -> None:
        """Raise `AssertionError` where something is wrong. Called in a turn."""
        ...


class Findable(Protocol):
    """Prefixes that may be found."""

    def add(self, prefix: Prefix) -> None:
        """One more is computed."""
        ...

    def forget(self, first_step: int) -> None:
        """The cache has forgotten all that was computed before that step."""
        ...

    def may_find(self, prefix: Prefix, *, is_old: bool) -> bool:
        """Whether somebody has computed it; since the last reset, unless who finds it `is_old`, from before that."""
        ...


class Host(Protocol):
    """What engines and their users run on: a simulated machine, or this one."""

    @property
    def chance(self) -> random.Random:
        """What users draw from."""
        ...

    @property
    def num_steps(self) -> int:
        """How far all has come; the books are looked at every so many steps."""
        ...

    @property
    def step_seconds(self) -> float:
        """How long one takes, about."""
        ...

    def now(self) -> float:
        """Seconds, of a clock that never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for nothing but time."""
        ...

    def new_lock(self) -> AbstractContextManager[object]:
        """One thread at a time."""
        ...

    def new_guard(self) -> AbstractContextManager[object]:
        """The same around what contains no step of a simulated machine, where it is one step anyway."""
        ...

    def start_thread(self, name: str, run: Callable[..., object], *arguments: object) -> StoryThread:
        """A thread of this process."""
        ...

    def failing(self) -> AbstractContextManager[None]:
        """Lines of what is called in it may fail, where a fault says so."""
        ...

    def is_planted(self, error: BaseException) -> bool:
        """Whether a fault has raised it."""
        ...

    @property
    def num_planted(self) -> int:
        """How often faults have raised."""
        ...

    def left_behind(self) -> dict[str, list[str]]:
        """What this process still has after its end in order, by what it is."""
        ...


class StoryThread(Protocol):
    """A thread that somebody waits for."""

    def is_alive(self) -> bool:
        """Whether it still runs."""
        ...


class GivenUpError(Exception):
    """A user's verb got no memory, and its user does without what it was for."""


class StoryStage(Protocol):
    """A world, as its engines see it."""

    host: Host
    findings: Any
    counts: Counter[str]
    watches: Sequence[Callable[[PrefixCacheManager], Watch]]
    engines: Any

    @property
    def has_stalled(self) -> bool:
        """Whether a thread of an engine, or all of them, had no processor for a while."""
        ...

    def store_of(self, number: int, num_bytes: int, slot_bytes: int) -> dict[str, Any]:
        """Where that engine's store is, and how large: fields of `StorageConfig`."""
        ...

    def committed_by(self, number: int, settings: Settings) -> Findable:
        """What that engine may find: what it has committed itself, and what others have that hand it over."""
        ...

    def find(self, kind: str, text: str, error: BaseException | None = None) -> None:
        """Something is wrong: the run ends."""
        ...

    def verb(self, number: int, name: str, limit_seconds: float = 0.0) -> AbstractContextManager[None]:
        """A verb of that engine is called: it has to come back in time."""
        ...

    def waiting_tasks(self, cache: PrefixCacheManager) -> Iterator[tuple[str, float]]:
        """Tasks that were accepted and have not been sent, and how long that was ago."""
        ...


class Home(Protocol):
    """An engine, as its users see it."""

    world: StoryStage
    number: int
    settings: Settings
    content: Content
    committed: Findable
    mail: deque[Mail]
    kv: list[KVBytes]  # of the full row, by rank
    row_kv: list[RowBytes]  # of the others
    users: Any  # of the present process
    positions: list[int]
    seen: Counter[str]
    stepping: AbstractContextManager[object]
    num_lives: int
    num_steps: int
    weights: int
    workers: Any  # that make the KV arrays, or None

    @property
    def weights_id(self) -> str:
        """The name of the model's weights now."""
        ...

    def is_being_told(self, rank: int) -> bool:
        """The model sees new arrays of the rank, and the cache does not know yet that it does."""
        ...

    def config(self) -> CacheConfig:
        """What the cache is made of."""
        ...

    def check(self, cache: PrefixCacheManager, watches: Sequence[Watch]) -> None:
        """All that must be so at any time."""
        ...

    def look_at_free_blocks(self) -> None:
        """What nobody owns is nobody's to write."""
        ...


def file_store(folder: str, num_bytes: int, slot_bytes: int) -> dict[str, Any]:
    """A folder of so many bytes, in slabs of a few slots."""
    return {"folder": folder, "capacity_bytes": num_bytes, "slab_bytes": 8 * slot_bytes}

"""What an operator does with a running cache: `cache.control`."""

from __future__ import annotations

import numbers
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.tokens import TokenIds
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import ControlError
from fastdeploy_cache.insight.insight import Insight
from fastdeploy_cache.insight.seen import Seen
from fastdeploy_cache.request import Image

if TYPE_CHECKING:
    from fastdeploy_cache.insight.control.messages import HintVerbs, LifeVerbs, OwnLife, Subject
    from fastdeploy_cache.insight.control.pins import Pins, PinView
    from fastdeploy_cache.insight.control.policy_change import PolicyView
    from fastdeploy_cache.insight.control.server import ControlServer
    from fastdeploy_cache.insight.control.verified import Verified


class Control:
    """Pins, the eviction policy, a check of the books, and the socket at which all of this and `cache.insight` can be
    asked from outside. Any thread."""

    def __init__(
        self,
        config: CacheConfig,
        books: Books,
        insight: Insight,
        seen: Seen,
        life: OwnLife,
        *,
        sessions: HintVerbs,
        restart: Callable[[int | None], list[int]],
        check: Callable[[], None],
    ) -> None:
        """`sessions`: what takes hints. `restart`: see `RankAccess`. `check` raises `AssertionError` where the books do
        not add up."""
        self._config, self._books, self._insight, self._seen = config, books, insight, seen
        self._life, self._restart, self._check = life, restart, check
        self._sessions = sessions
        self._server: ControlServer | None = None
        self._changing = threading.Lock()  # of the fields above and below; never held in a turn
        self._pins: Pins | None = None

    # -- the socket

    def open(self, path: str | Path) -> None:
        """Answer at a unix socket there, for this user alone (docs/control.md of the source says more), until `close`.

        Raises:
            ControlError: it is open already, or this is no path.
            IPCError: another process listens there, others may enter its folder, or something else is in the way.
        """
        from fastdeploy_cache.insight.control.server import ControlServer  # late: most caches have none

        if not isinstance(path, str | Path):
            raise ControlError(f"cannot open a control socket at {path!r}; give its path as text")
        with self._books:
            self._books.check_open()
        with self._changing:
            if self._server is not None:
                raise ControlError(f"cannot open a control socket at {path}: one is open already; close it first")
            self._server = ControlServer(Path(path))
            self._server.start(self.subject(None))

    def open_configured(self) -> None:
        """`open` at `insight.control_socket`, where that is set."""
        if (path := self._config.insight.control_socket) is not None:
            self.open(path)

    def close(self) -> None:
        """Take the socket away. Waits until what is being answered is. Safe to call twice."""
        with self._changing:
            server, self._server = self._server, None
        if server is not None:
            server.stop()

    def end(self) -> None:
        """The cache is closed: `close`, and no pin ends any more."""
        self.close()
        if self._pins is not None:
            self._pins.close()

    def subject(self, life: LifeVerbs | None) -> Subject:
        """What a server answers with. `life`: who stops an engine with its cache; None: the cache alone is stopped."""
        from fastdeploy_cache.insight.control.messages import Subject

        forget = self._life.forget_namespace
        return Subject(life or self._life, self._insight, self._seen, self, self._sessions, forget)

    # -- looks

    def status(self) -> dict[str, Any]:
        """The state of the cache as one document, for JSON."""
        policy, num_pins = self._books.tree.policy.name, len(self._pins.all()) if self._pins is not None else 0
        own = {"role": self._config.role, "life_cycle": self._life.status, "eviction_policy": policy}
        return {**own, "pins": num_pins, **self._seen.facts()}

    def pins(self) -> list[PinView]:
        """The pins that are in force, the next to end first."""
        return self._pins.all() if self._pins is not None else []

    # -- actions

    def pin(
        self, prefix: str | TokenIds, seconds: float, *, namespace: str = "", images: Sequence[Image] = ()
    ) -> PinView:
        """Keep a prefix in its tiers for so many seconds: the one of a name that `cache.insight` shows, or what is
        cached of these token ids, with `images` as a request has them. Pinned once more, it stays from now on for the
        seconds given now.

        A reset, sleep and the loss of KV arrays end pins. There are at most 64, and together they have at most
        `insight.max_pinned_share` of the GPU's blocks.

        Raises:
            ControlError: nothing of it is cached, or it would be more than that; nothing was changed.
            RequestError: these are no token ids.
            ClosedError: the manager is closed.
        """
        from fastdeploy_cache.insight.control.pins import MAX_PIN_SECONDS

        if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real) or not 0 < seconds <= MAX_PIN_SECONDS:
            raise ControlError(f"pin for {seconds!r} seconds; use more than 0, and {MAX_PIN_SECONDS:.0f} at most")
        pins = self._some_pins()
        if isinstance(prefix, str):
            return pins.pin_named(prefix, float(seconds))
        return pins.pin_tokens(prefix, namespace, float(seconds), images)

    def unpin(self, name: str) -> int:
        """End the pin of that name; returns how many blocks it kept. Raises `ControlError`: there is none."""
        return self._some_pins().unpin(name)

    def policy(self) -> PolicyView:
        """The eviction policy, and those that `set_policy` knows."""
        from fastdeploy_cache.insight.control.policy_change import policy_now

        return policy_now(self._books, self._config)

    def set_policy(self, name: str) -> PolicyView:
        """Evict by another policy from now on. What is cached, and how often it was used, stays known.

        Raises:
            ControlError: no policy of that name, or one that cannot follow the present one; nothing was changed.
            ClosedError: the manager is closed.
        """
        from fastdeploy_cache.insight.control.policy_change import change_policy

        with self._changing:
            view = change_policy(self._books, self._config, self._books.clock.age, name)
            self._seen.follow_policy(view.name)
            return view

    def restart_ranks(self, rank: int | None = None) -> list[int]:
        """See `cache.ranks.restart`."""
        return self._restart(rank)

    def verify(self, *, checksums: bool = False) -> Verified:
        """Check that the books of all rooms add up. It holds the lock while it walks the whole tree, which takes some
        microseconds for each block (3.3 seconds for a million): for doubt, and not for every minute.

        With `checksums` the answer also says what of the bytes in storage is checked when; none are kept for blocks in
        memory.

        Raises:
            ControlError: more than five million blocks are cached, so verbs would wait too long.
            ClosedError: the manager is closed.
        """
        from fastdeploy_cache.insight.control.verified import verified

        return verified(self._books, self._check, checksums=checksums)

    def _some_pins(self) -> Pins:
        from fastdeploy_cache.insight.control.pins import Pins

        with self._changing:
            if self._pins is None:
                with self._books:
                    self._books.check_open()
                    self._pins = Pins(self._books, self._config.insight.max_pinned_share)
            return self._pins

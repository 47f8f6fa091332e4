"""One answer being generated."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastdeploy_cache import Match, Request
from fastdeploy_cache.errors import CacheError
from fastdeploy_cache.launch.reference_engine.sampling import Sampling
from fastdeploy_cache.peers.transfers import Receive, Send
from fastdeploy_cache.requests.explanation import Explanation
from fastdeploy_cache.requests.match import Prefetch


class GenerationError(CacheError):
    """The engine could not produce the answer; the message says why."""


class GenerationTimeoutError(GenerationError):
    """It has not come in the time that was given; it may still."""


class GenerationRefusedError(GenerationError):
    """The request can never be served as given."""


class GenerationBusyError(GenerationError):
    """Not now: this client has as much under way as it may."""


@dataclass(eq=False)
class Generation:
    """A request on its way through the engine.

    The engine thread fills it; any one other thread may take its tokens with `next_token`. A prefill has no tokens, but
    a send (`wait_send`). An event loop looks at both without waiting, each time that `on_change` calls it.
    """

    request: Request
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "sent" (a prefill), "cancelled" or "error"
    queued: float = field(default_factory=time.monotonic)
    cancelled: bool = False  # see `Intake.cancel`
    cancel_reason: str = "cancelled"  # how it finishes then
    error: str | None = None
    # of its first admission
    num_gpu_tokens: int = 0
    num_cpu_tokens: int = 0
    num_storage_tokens: int = 0
    explain: Callable[[], Explanation] | None = None  # see `Match.explain`
    num_peer_tokens: int = 0  # received of another instance; the match then finds them on the GPU
    matched: float | None = None
    first_token: float | None = None
    # of the engine
    match: Match | None = None  # while it waits for its loads, or runs ahead of them
    load_deadline: float = 0.0
    block_ids: list[int] = field(default_factory=list)
    rows: object = None  # of a hybrid model: see `block_tables.RequestUnits`
    num_computed_tokens: int = 0
    is_ahead: bool = False  # it runs on blocks that have yet to be confirmed
    load_ids: tuple[int, ...] = ()  # of the loads that bring them
    # of other instances
    num_offered_tokens: int = 0  # a prefill: so many are computed, for another instance, and none is sampled
    send: Send | None = None
    offer: bytes | None = None  # of another instance's blocks, that is still to be taken
    is_lent: bool = False  # that one has cached all that it offers
    receive: Receive | None = None  # what comes of it, until the match
    receive_error: str | None = None  # why nothing has come
    prefetch: Prefetch | None = None
    _offered: threading.Event = field(default_factory=threading.Event)
    _tokens: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)
    _changed: Callable[[], None] = field(default=lambda: None)

    @property
    def num_wanted_tokens(self) -> int:
        """Tokens to be computed before it is sampled, or has been sent."""
        return self.num_offered_tokens or self.request.num_tokens

    @property
    def is_prefilled(self) -> bool:
        """A prefill of which all is computed."""
        return 0 < self.num_offered_tokens == self.num_computed_tokens

    @property
    def is_receiving(self) -> bool:
        """Blocks of another instance are on their way: it is not to be matched yet."""
        return self.receive is not None and not self.receive.done

    @property
    def is_borrowing(self) -> bool:
        """Another instance is asked for what it has of the prompt, or sends it: it is not to be matched yet."""
        return self.prefetch is not None and self.prefetch.is_borrowing

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were cached, in any tier."""
        return self.num_gpu_tokens + self.num_cpu_tokens + self.num_storage_tokens

    @property
    def seconds_to_first_token(self) -> float:
        """The time from its match (so loads count; its wait in the queue does not) to the first token."""
        if self.matched is None or self.first_token is None:
            raise GenerationError("the request has no first token yet")
        return self.first_token - self.matched

    def note_match(self, now: float, match: Match, load_seconds: float) -> None:
        """It was matched; its loads have `load_seconds`. A preempted one keeps the time of its first match."""
        self.match, self.load_deadline = match, now + load_seconds
        if self.matched is None:
            self.matched = now

    def note_refusal(self) -> None:
        """There was no room: it waits without a match, as if it had not been looked at."""
        self.match = None
        if not self.output:
            self.matched = None

    def note_admission(self, match: Match) -> None:
        """It got its blocks; a preempted one keeps the figures of its first admission."""
        self.match = match if self.is_ahead else None
        self.block_ids = [*match.block_ids, *match.coming_block_ids]
        self.num_computed_tokens = match.num_tokens + match.num_coming_tokens
        self.load_ids = match.load_ids
        self._note_hits(match)

    def note_confirmed(self) -> None:
        """It ran ahead of its loads, and they have come."""
        assert self.match is not None
        self._note_hits(self.match.poll())
        self.match = None

    def _note_hits(self, match: Match) -> None:
        if not self.output:
            self.num_gpu_tokens = match.num_gpu_tokens
            self.num_cpu_tokens = match.num_cpu_tokens
            self.num_storage_tokens = match.num_storage_tokens
            self.explain = match.explain

    def push(self, token_id: int) -> None:
        """A sampled token."""
        if self.first_token is None:
            self.first_token = time.monotonic()
        self.output.append(token_id)
        self._tokens.put(token_id)
        self._changed()

    def note_send(self, send: Send) -> None:
        """Its blocks are offered; they are computed from now on."""
        self.send = send
        self._offered.set()
        self._changed()

    def finish(self, reason: str, error: str | None = None) -> None:
        """No more tokens."""
        self.finish_reason, self.error = reason, error
        self._tokens.put(None)
        self._offered.set()
        self._changed()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, on the engine's thread, after each token, the send and the end. It must not raise.

        Look at what is there after this call: what came while it was made may have been told to nobody.
        """
        self._changed = callback

    def wait_send(self, timeout_seconds: float) -> Send:
        """The send of a prefill, once its blocks are offered.

        Raises:
            GenerationTimeoutError: the time is over.
            GenerationError: the engine failed it.
        """
        if not self._offered.wait(timeout_seconds):
            text = f"not begun within {timeout_seconds} s; the engine is overloaded, paused or asleep"
            raise GenerationTimeoutError(text)
        if self.send is None:
            raise GenerationError(self.error or "the request was cancelled")
        return self.send

    def next_token(self, timeout_seconds: float) -> int | None:
        """The next token, None after the last.

        Raises:
            GenerationTimeoutError: the time is over.
            GenerationError: the engine failed it.
        """
        try:
            token = self._tokens.get(timeout=timeout_seconds)
        except queue.Empty as error:
            raise GenerationTimeoutError(
                f"no token within {timeout_seconds} s; the engine is overloaded, paused or asleep"
            ) from error
        if token is None and self.error is not None:
            raise GenerationError(self.error)
        return token

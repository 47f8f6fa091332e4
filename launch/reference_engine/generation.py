"""One answer being generated."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field

from fastdeploy_cache import Match, Request


class GenerationError(Exception):
    """The engine could not produce the answer; the message says why."""


class GenerationRefusedError(GenerationError):
    """The request can never be served as given."""


@dataclass(eq=False)
class Generation:
    """A request on its way through the engine.

    The engine thread fills it; any one other thread may take its tokens with `next_token`.
    """

    request: Request
    max_new_tokens: int
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop" (end token), "length", "cancelled" or "error"
    cancelled: bool = False  # set by whoever no longer wants the answer
    error: str | None = None
    # of its first admission
    num_gpu_tokens: int = 0
    num_cpu_tokens: int = 0
    num_storage_tokens: int = 0
    matched: float | None = None
    first_token: float | None = None
    # of the engine
    match: Match | None = None  # while it waits for its loads, or runs ahead of them
    load_deadline: float = 0.0
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    is_ahead: bool = False  # it runs on blocks that have yet to be confirmed
    load_ids: tuple[int, ...] = ()  # of the loads that bring them
    _tokens: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, in any tier."""
        return self.num_gpu_tokens + self.num_cpu_tokens + self.num_storage_tokens

    @property
    def seconds_to_first_token(self) -> float:
        """From its match (so loads count; its wait in the queue does not) to the first token."""
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

    def push(self, token_id: int) -> None:
        """A sampled token."""
        if self.first_token is None:
            self.first_token = time.monotonic()
        self.output.append(token_id)
        self._tokens.put(token_id)

    def finish(self, reason: str, error: str | None = None) -> None:
        """No more tokens."""
        self.finish_reason, self.error = reason, error
        self._tokens.put(None)

    def next_token(self, timeout_seconds: float) -> int | None:
        """The next token, None after the last.

        Raises:
            GenerationError: the engine failed it, or the time is over.
        """
        try:
            token = self._tokens.get(timeout=timeout_seconds)
        except queue.Empty as error:
            raise GenerationError(
                f"no token within {timeout_seconds} s; the engine is overloaded, paused or asleep"
            ) from error
        if token is None and self.error is not None:
            raise GenerationError(self.error)
        return token

"""What requests have used, noted in a few bytes for whoever learns from it in another process."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from fastdeploy_cache.books.block_hash import TOKEN_BYTES, root_hash
from fastdeploy_cache.books.block_marks import MARK_BYTES, block_marks, with_extras
from fastdeploy_cache.books.leaves.policy import NO_SESSION, Hints
from fastdeploy_cache.books.run import Run

# bytes of the record; seconds; namespace; prompt tokens; blocks asked for; priority and seconds to keep; flags; and a
# `SessionHint`: session, going, tool, tokens of the answer
HEADER = struct.Struct("<IdQIIffBQBII")
HAS_PRIORITY, HAS_KEEP_SECONDS, SESSION_ENDED, TOOL_CALL_PENDING, FORGOTTEN = 1, 2, 4, 8, 16
_MAX_WAITING = 4096  # records
_FLUSH_RECORDS, _FLUSH_SECONDS = 32, 1.0


class User(Hints, Protocol):
    """What of a request is noted: see `Request`."""

    num_prompt_tokens: int
    session_id: str
    will_go_on: float | None

    @property
    def namespace(self) -> str: ...


class References:
    """A record for each request that is released: its time, its tokens, and a mark of four bytes for each of its
    blocks (see `block_marks`). No tokens are in it. Under the lock, but for `take`.

    A record is dropped, and counted, where nobody takes those before it.
    """

    def __init__(self, block_bytes: int, clock: Callable[[], float], when_due: Callable[[], None]) -> None:
        """`when_due` is called, under the lock, when records should be taken."""
        self._block_bytes, self._clock, self._when_due = block_bytes, clock, when_due
        self._records: deque[bytes] = deque()
        self._taken_at = 0.0
        self.num_lost = 0

    def note(self, path: Sequence[Run], request: User, num_asked_blocks: int) -> None:
        """A request whose prefix lies on `path` is released, and had looked for so many blocks."""
        marks = b"".join([self._marks_of(run) for run in path])
        priority, keep_seconds = request.priority, request.keep_seconds
        flags = (priority is not None) * HAS_PRIORITY | (keep_seconds is not None) * HAS_KEEP_SECONDS
        flags |= request.session_ended * SESSION_ENDED | request.tool_call_pending * TOOL_CALL_PENDING
        root = path[0].parent if path else None
        name = root.hashes if root is not None else root_hash(request.namespace, self._block_bytes // TOKEN_BYTES)
        now, number, num_bytes = self._clock(), int.from_bytes(name[:8]), HEADER.size + len(marks)
        sizes, hint = (request.num_prompt_tokens, num_asked_blocks), NO_SESSION
        if request.session_id or request.will_go_on is not None:
            hint = request.session_hint or NO_SESSION
        head = HEADER.pack(num_bytes, now, number, *sizes, priority or 0.0, keep_seconds or 0.0, flags, *hint)
        self._add(head + marks, now)

    def _marks_of(self, run: Run) -> bytes:
        """The run keeps them: what many requests use is read once."""
        num_known = len(run.block_marks) // MARK_BYTES
        if num_known == run.num_blocks:
            return run.block_marks
        size = self._block_bytes
        new = block_marks(run.tokens, num_known * size, run.num_blocks - num_known, size)
        if run.extras is not None:
            new = with_extras(new, run.extras, num_known)
        run.block_marks += new
        return run.block_marks

    def note_forgotten(self) -> None:
        """Nothing that was used counts any more."""
        now = self._clock()
        self._add(HEADER.pack(HEADER.size, now, 0, 0, 0, 0.0, 0.0, FORGOTTEN, *NO_SESSION), now)

    def take(self) -> bytes:
        """The records so far, one behind the other. Any thread."""
        records = self._records
        return b"".join([records.popleft() for _ in range(len(records))])

    def _add(self, record: bytes, now: float) -> None:
        if len(self._records) >= _MAX_WAITING:
            self.num_lost += 1
        else:
            self._records.append(record)
        if len(self._records) >= _FLUSH_RECORDS or now - self._taken_at >= _FLUSH_SECONDS:
            self._taken_at = now
            self._when_due()

"""What a caller holds of a send or a receive."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fastdeploy_cache.books.mishaps import call_user
from fastdeploy_cache.ipc.clock import Event, seconds_to_wait
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.transfer_manager.task import TransferResult

logger = event_log(__name__)

OTHERS = "others"  # the label of all peers behind the first few: names come from outside
_REASONS = ("gone", "late", "refused", "failed", "cancelled", "full")


class PeerTransfer:
    """A send or a receive on its way. Any thread.

    It ends by itself, at the configured deadline at the latest. `reason` of one that came to nothing: `gone` (the other
    side, or what it had), `late`, `refused`, `failed`, `cancelled`, `full` (a peer process has no place for it now).
    """

    def __init__(self, request_id: str, number: int, num_blocks: int, done: Event) -> None:
        self.request_id = request_id
        self.number = number
        self.num_blocks = num_blocks  # that are to be moved
        self.reason: str | None = None
        self.error: str | None = None
        self._done = done
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """It has ended, well or not."""
        return self._done.is_set()

    @property
    def succeeded(self) -> bool:
        """It has ended well, on all ranks of both sides."""
        return self.done and self.reason is None

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until it has ended; whether it succeeded in time."""
        self._done.wait(seconds_to_wait("wait", timeout_seconds))
        return self.succeeded

    def on_done(self, call: Callable[[], None]) -> None:
        """Have it called once it has ended: by the cache's thread, or here and now."""
        with self._lock:
            if not self.done:
                self._calls.append(call)
                return
        call_user(call)

    def end(self, why: tuple[str, str] | None) -> None:
        """The cache says how it ended: reason and error, None where it succeeded. Only the first call counts.

        Not under the manager's lock.
        """
        with self._lock:
            if self.done:
                return
            if why is not None:
                self.reason, self.error = why
            self._done.set()
            calls, self._calls = self._calls, []
        for call in calls:
            call_user(call)


class Send(PeerTransfer):
    """The blocks of a prompt, offered to another instance: `offer` is what its `receive` takes, as bytes."""

    def __init__(self, request_id: str, number: int, num_blocks: int, done: Event, offer: bytes) -> None:
        super().__init__(request_id, number, num_blocks, done)
        self.offer = offer


class Receive(PeerTransfer):
    """Blocks of a prompt on their way from another instance; `num_blocks` of them were not here. Once it has ended,
    `match` finds what came."""


def why_of(result: TransferResult) -> tuple[str, str] | None:
    """Reason and error of a peer's task that has failed, None of one that has not."""
    failures = [r for r in result.ranks if r.error is not None]
    readers = sorted({r.peer for r in result.ranks if r.peer})
    if not failures and len(readers) > 1:  # each rank goes with the first who asks it
        return "gone", f"{' and '.join(readers)} have read parts of it, and none all; an offer is for one receive"
    if not failures:
        return None
    # one rank's failure makes the others leave: theirs says less
    told = [(r, *str(r.error).partition(": ")) for r in failures]
    told.sort(key=lambda each: each[1] == "cancelled")
    rank, reason, _, text = told[0]
    if reason not in _REASONS:  # a process that died, or a task that found no room
        return ("failed" if rank.was_tried else "full"), f"rank {rank.rank}: {rank.error}"
    return reason, f"rank {rank.rank}: {text}"

"""What looks after the flight recorder: its files, the alerts that write one, and the recording that never ends."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Forgotten, GpuForgotten, PolicyChanged, StatusChanged
from fastdeploy_cache.books.run import CPU, GPU
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import LifeCycleError, RecordingError, reason_of
from fastdeploy_cache.insight.flight.file import head, pieces, write_whole
from fastdeploy_cache.insight.flight.files import FlightFolder, GrowingFile
from fastdeploy_cache.insight.flight.header import header_of
from fastdeploy_cache.insight.flight.recorder import FlightRecorder, RingPart
from fastdeploy_cache.insight.flight.records import STATUSES, TASK_KINDS, RecordKind
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.movement.block_mover import TaskEnded
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.policies import EVICTION_POLICIES
from fastdeploy_cache.policies.breaker import BreakerState
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.storage.access import StorageAccess
from fastdeploy_cache.storage.prefetch import StorageTaskEnded
from fastdeploy_cache.transfer_manager.task import TransferResult

logger = event_log(__name__)

REASONS = ("asked", "rank_down", "breaker_open", "invariants", "stuck_turn", "recording")
_GO_BY_HINTS, _GOES_BY_ENDS = ("priority", "pin"), "reuse"
_ALERT_SECONDS = 600.0  # between two files that alerts have written
_LOOK_SECONDS = 1.0
_STOP_SECONDS = 5.0


class FlightKeeper:
    """Tells the recorder of what no request does, and writes its files.

    A thread of its own looks at ranks and breakers each second, and writes, where there is a folder to write to; else
    there is none. Nobody waits for it: what the ring has dropped before it was written is counted, and noted in the
    next file.
    """

    def __init__(
        self,
        config: CacheConfig,
        books: Books,
        movement: Movement,
        storage: StorageAccess,
        *,
        live: Iterable[ActiveRequest],
    ) -> None:
        """`live`: the requests that are matched now, to be asked under the lock."""
        insight = config.insight
        clock, self._now = books.clock.age, books.clock.now
        if clock is not self._now:  # somebody else's: no verb fails by it
            clock = functools.partial(books.mishaps.ask, "metrics", clock, 0.0)
        self._config, self._books, self._clock, self._live = config, books, clock, live
        self._client, self._storage = movement.client, storage
        self.recorder = FlightRecorder(
            books,
            config.block_size,
            insight.flight_recorder_bytes,
            has_hints=config.eviction_policy in _GO_BY_HINTS or config.storage is not None,
            has_rest=config.eviction_policy == _GOES_BY_ENDS or config.recompute_last_token,
            policy=config.eviction_policy,
            clock=clock,
        )
        self._secret = books.clock.random_bytes(32)  # never written: files tell equal things, and not which
        self._ranks: dict[int, tuple[bool, int]] = {}
        self._breakers = [BreakerState.CLOSED, BreakerState.CLOSED]
        self._alerts: FlightFolder | None = None
        if insight.flight_folder:
            self._alerts = FlightFolder(Path(insight.flight_folder), "flight", insight.num_flight_files)
        self._recording = threading.Lock()
        self._pending: str | None = None  # the alert that is to be written
        self._written_at = -_ALERT_SECONDS
        self._record: GrowingFile | None = None
        if insight.record_folder:
            folder = FlightFolder(Path(insight.record_folder), "record", insight.num_record_files)
            self._record = GrowingFile(folder, insight.record_bytes, self._recording_head)
        self._known = (1, 0)  # what of the ring is recorded: the serial of a part, and how many of its notes
        self._num_lost = 0  # parts that were not recorded, whole or in part, since the last file began
        self._first_policy = config.eviction_policy  # when the part begins that is being recorded
        self._num_recorded = 0  # notes, in all files
        self._is_failing = False
        self._wake, self._is_over = books.clock.event(), False
        self._thread: threading.Thread | None = None
        self._follow()

    def _follow(self) -> None:
        books = self._books
        books.listen(TaskEnded, lambda ended: self._on_task(ended.result))
        books.listen(StorageTaskEnded, lambda ended: self._on_task(ended.result))
        books.listen(Forgotten, lambda _: self._note(RecordKind.RESET, books.tree.epoch))
        books.listen(GpuForgotten, lambda gone: self._note(RecordKind.GPU_FORGOTTEN, gone.rank))
        books.listen(StatusChanged, self._on_status)
        books.listen(PolicyChanged, self._on_policy)

    def start(self) -> None:
        """Begin to look, where there is a folder to write to."""
        if self._alerts is not None or self._record is not None:
            self._thread = threading.Thread(target=self._run, name="flight", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write what is left of the recording, and end. Safe to call twice."""
        self._is_over = True
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_STOP_SECONDS)

    # -- what no request does; under the lock

    def _note(self, kind: RecordKind, *fields: float) -> None:
        self.recorder.note((kind, self._clock(), *fields))

    def _on_task(self, result: TransferResult) -> None:
        task, failed = result.task, result.error is not None
        seconds = max([rank.seconds for rank in result.ranks], default=0.0)
        num_bytes = max([rank.num_bytes for rank in result.ranks], default=0)
        kind, num_blocks = TASK_KINDS.index(task.kind), len(task.destination_ids) or len(task.source_ids)
        self._note(RecordKind.TASK_ENDED, task.task_id, kind, num_blocks, seconds, num_bytes, failed)
        if failed:
            self._look()

    def _on_status(self, changed: StatusChanged) -> None:
        asleep = sum(1 << tier for tier in (GPU, CPU) if tier in self._books.asleep)
        self._note(RecordKind.STATUS, STATUSES.index(changed.status), asleep)

    def _on_policy(self, changed: PolicyChanged) -> None:
        self._note(RecordKind.POLICY, EVICTION_POLICIES.index(changed.name))
        self.recorder.follow(changed.name, has_rest=changed.name == _GOES_BY_ENDS)

    def _look(self) -> None:
        """Note ranks and breakers that have changed since the last look."""
        for status in self._client.statuses():
            now, before = (status.up, status.num_restarts), self._ranks.get(status.rank, (True, 0))
            if now != before:
                self._note(RecordKind.RANK, status.rank, status.up, status.num_restarts)
                # it may have been down, and be up again, since the last look
                has_died = (before[0] and not status.up) or status.num_restarts > before[1]
                if has_died and not self._books.is_closed:
                    self._alert("rank_down")
            self._ranks[status.rank] = now
        stats, _ = self._storage.stats()
        states = [stats.reading, stats.writing] if stats is not None else [BreakerState.CLOSED] * 2
        for side, state in enumerate(states):
            if state is not self._breakers[side]:
                self._note(RecordKind.BREAKER, side, state)
                if state is BreakerState.OPEN:
                    self._alert("breaker_open")
        self._breakers = states

    def _alert(self, reason: str) -> None:
        self._note(RecordKind.ALERT, REASONS.index(reason))
        if self._alerts is not None and self._now() - self._written_at >= _ALERT_SECONDS:
            self._pending = self._pending or reason
            self._wake.set()

    @contextlib.contextmanager
    def alerting(self, reason: str) -> Iterator[None]:
        """An `AssertionError` in here is an alert. Not under the lock."""
        try:
            yield
        except AssertionError:
            with contextlib.suppress(LifeCycleError), self._books:
                self._alert(reason)
            raise

    # -- files; not under the lock

    def write(self, path: Path, reason: str = "asked") -> None:
        """Write the ring as it is now. Any thread.

        Raises:
            RecordingError: the file cannot be written.
            LifeCycleError: a turn of another thread does not end.
        """
        write_whole(path, self._recorded(reason))

    def _recorded(self, reason: str) -> list[bytes]:
        is_settled = reason != "stuck_turn"
        with self._books if is_settled else contextlib.nullcontext():
            if is_settled:
                self._look()
            parts, num_dropped = self.recorder.parts(), self.recorder.num_dropped
            if is_settled:
                parts.append(parts[-1]._replace(notes=self.recorder.marked(self._live)))
        header = self._header(reason, num_dropped, parts[0].policy)
        return [head(header), *[data for part in parts for data in pieces(part, self._secret)]]

    def write_to_folder(self, reason: str, folder_path: Path | None = None) -> Path:
        """The same, to a new file in this folder, or in `insight.flight_folder`; returns its path. Raises as `write`
        does. Only in the latter the oldest files go."""
        files = FlightFolder(folder_path, "flight", sys.maxsize) if folder_path is not None else self._alerts
        if files is None:
            raise RecordingError(
                "no flight recording is written, as insight.flight_folder is not set; name a folder, or a new file"
            )
        parts = self._recorded(reason)
        with files.next_path() as (path, folder):
            write_whole(path, parts, folder)
        return path

    def _header(self, reason: str, num_dropped: int, policy: str) -> dict[str, Any]:
        config = dataclasses.replace(self._config, eviction_policy=policy)
        return header_of(
            config,
            reason=reason,
            clock_seconds=self._clock(),
            unix_seconds=self._books.clock.unix(),
            num_dropped=num_dropped,
        )

    def _recording_head(self) -> bytes:
        """The begin of the next file of the recording; what went before is in the other files, or lost."""
        header = self._header("recording", self._num_recorded + self._num_lost, self._first_policy)
        return head(header | {"num_lost_parts": self._num_lost})

    def _run(self) -> None:
        while not self._is_over:
            self._wake.wait(_LOOK_SECONDS)
            self._wake.clear()
            try:
                with self._books:
                    self._look()
            except LifeCycleError:
                self._alert("stuck_turn")
            self._write_alert()
            self.flush()
        self._write_alert()
        self.flush()
        if self._record is not None:
            self._record.close()

    def _write_alert(self) -> None:
        reason, self._pending = self._pending, None
        if reason is None or self._alerts is None:
            return
        self._written_at = self._now()
        try:
            path = self.write_to_folder(reason)
        except (RecordingError, LifeCycleError) as error:
            logger.warning("event=flight_not_written reason=%s error=%r", reason, reason_of(error))
            return
        logger.warning("event=flight_written reason=%s path=%s", reason, path)

    def flush(self) -> None:
        """Record what has come into the ring since the last time."""
        if self._record is not None:
            with self._recording:
                self._write_on(self._record)

    def _write_on(self, record: GrowingFile) -> None:
        try:
            with self._books:
                parts, has_gap = self.recorder.parts(self._known), self.recorder.is_full
                if self.recorder.is_half_full:  # no request comes: else the oldest notes would go unseen
                    self.recorder.roll()
        except LifeCycleError:
            return
        gone = parts.pop() if has_gap else None  # its oldest notes may be: what is left would be behind a gap
        if parts and parts[0].serial != self._known[0]:  # it was dropped before all of it was seen
            self._num_lost += parts[0].serial - self._known[0]
        for part in parts:
            try:
                self._write_part(record, part)
            except RecordingError as error:  # the next file begins with the next part
                self._num_lost += 1
                if not self._is_failing:
                    logger.warning("event=flight_record_stopped error=%r", reason_of(error))
                self._is_failing = True
        if gone is not None:
            self._known = gone.serial, sys.maxsize
            self._num_lost += 1

    def _write_part(self, record: GrowingFile, part: RingPart) -> None:
        serial, num_known = self._known
        if part.serial != serial:
            num_known = 0
        notes = list(part.notes)
        self._known = (part.serial, num_known + len(notes))
        self._first_policy = part.policy
        if notes and not num_known and (record.is_full or self._num_lost):  # no file has a gap
            record.begin()
            self._num_lost, self._is_failing = 0, False
        if notes and record.is_open:
            for data in pieces(part, self._secret):
                record.write(data)
        self._num_recorded += len(notes)

"""The way to a store: its client, whether it works (breakers, probes), and tasks for it. Under the lock."""

from __future__ import annotations

import functools
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.books.block_pool import TASK
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.run import CPU, Run
from fastdeploy_cache.books.tenants.shares import REST
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.movement.outbox import InFlight, Outbox
from fastdeploy_cache.policies.breaker import Breaker
from fastdeploy_cache.policies.load_or_compute import LoadOrCompute
from fastdeploy_cache.storage.news import StoreListening
from fastdeploy_cache.transfer_manager.storage.client import StorageClient
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.keys import owner_mark
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult, TransferTask

logger = event_log(__name__)

_NUM_PROBE_BLOCKS = 8  # at most: one alone would show the latency and nothing else
_RISING = ("num_evicted", "num_declined", "num_damaged")  # of what a store says of itself, since its process began
_NO_IDS = np.empty(0, np.int32)


class StorageLink:
    """A failure counts for the side (reading, writing) whose task was tried and failed; what was cancelled, refused or
    lost with a process that another task has killed says nothing of the store."""

    def __init__(
        self,
        storage: StorageConfig,
        books: Books,
        client: StorageClient,
        speeds: LoadOrCompute,
        on_result: Callable[[TransferResult], None],
        *,
        sharing: Collection[str] = (),
    ) -> None:
        """`on_result` is what the client is started with. `sharing`: the namespaces that have a share of the store."""
        self._sharing = frozenset(sharing)
        self._books, self._tree, self._pool = books, books.tree, books.pools[CPU]
        self._timeout_seconds, self._clock = storage.task_timeout_seconds, books.clock
        self.client, self.speeds = client, speeds
        self.reading, self.writing = (Breaker(storage.breaker_failures, storage.breaker_seconds) for _ in range(2))
        self.tasks = InFlight(books.clock)
        self.outbox = Outbox(client, on_result, books.mishaps, self.tasks)
        books.add_outlet(self.outbox)
        self.counts: dict[int, dict[str, int]] = {}  # by rank: what its store says of itself
        self.ended_counts = Counter[str]()  # of these, what the processes before them had counted
        self.is_quiet = False  # nothing is to be started
        self.news = StoreListening(books, self._ask_news)
        self._has_rows = books.rows is not None
        self._next_task_id = 1
        self._probes: dict[int, array[int]] = {}
        self.is_detached = False  # a store whose thread was held up may open after that: nobody would own a probe then

    def close(self) -> None:
        """Nothing is on its way any more, and nothing will be."""
        self._books.remove_outlet(self.outbox)

    def be_quiet(self, quiet: bool) -> None:
        """Start nothing from now on, or go on."""
        self.is_quiet = quiet

    @property
    def is_unfit(self) -> bool:
        """Whether it names blocks by their tokens: pages of checkpoints have none."""
        return self._has_rows and self.client.needs_token_ids

    def warn_if_unfit(self) -> None:
        """Say so, once it is open."""
        if self.is_unfit:
            logger.error(
                "event=storage_unfit reason='it asks for token ids, and has no names for checkpoints' remedy=%r",
                "use a store that goes by hashes, such as file, valkey or mooncake",
            )

    @property
    def held_ids(self) -> list[int]:
        """CPU blocks that are lent to probes."""
        return [i for ids in self._probes.values() for i in ids]

    @property
    def is_probing(self) -> bool:
        """Whether a probe, or a question for news, is on its way."""
        return bool(self._probes or self.news.asked)

    def can(self, kind: TaskKind) -> bool:
        """Whether to give it a task now. Where it was left alone for long enough, a probe is sent."""
        if self.is_quiet or self.is_unfit:
            return False
        breaker = self._breaker(kind)
        if breaker.is_probe_due(self._clock.now()) and not self._probes:
            self._tree.mishaps.contain("client", self.probe)
        if not breaker.is_closed:
            return False
        return self._tree.mishaps.ask("client", lambda: self.client.has_room(kind), otherwise=False)

    def cancel(self, task_ids: Iterable[int]) -> None:
        """Nobody wants these any more; what has begun may still succeed."""
        for task_id in task_ids:
            self._tree.mishaps.contain("client", functools.partial(self.client.cancel, task_id))

    def probe(self) -> None:
        """Find out whether the store works and how fast it reads, with blocks lent to it."""
        residency = self._tree.residency
        num_room = residency.num_available(CPU, REST)
        num_blocks = min(_NUM_PROBE_BLOCKS, max(1, self._pool.num_blocks // 4), num_room)
        if not num_blocks or not self.client.available or self.is_quiet or self.is_detached:
            return
        ids = self._books.take(num_blocks, CPU, TASK, REST)
        try:
            task = self.new_task(
                TaskKind.PROBE,
                "",
                self._clock.random_bytes(num_blocks * HASH_BYTES),
                destinations=ids,
                token_ids=bytes(num_blocks * self._tree.block_bytes) if self.client.needs_token_ids else b"",
            )
            self.outbox.put(task, self._probes, ids)
        except BaseException:
            self._pool.free(ids, TASK)
            raise
        for breaker in (self.reading, self.writing):
            if not breaker.is_closed:
                breaker.begin_probe()

    def end_probe(self, result: TransferResult) -> None:
        """A probe has ended: it tells of both sides."""
        self._pool.free(self._probes.pop(result.task.task_id), TASK)
        now, was_tried = self._clock.now(), result.error is None or result.is_failure
        with self._reporting(result):
            self.reading.probe_ended(result.error is None if was_tried else None, now)
            self.writing.probe_ended(result.error is None and result.num_blocks > 0 if was_tried else None, now)
        if result.error is None:
            self.note_read(result)
        self.note_counts(result)

    def judge(self, result: TransferResult) -> None:
        """Another task has ended: what it says of the store."""
        breaker = self._breaker(result.task.kind)
        with self._reporting(result):
            if result.error is None:
                breaker.succeeded()
            elif result.is_failure:
                breaker.failed(self._clock.now())
        self.note_counts(result)

    def _breaker(self, kind: TaskKind) -> Breaker:
        return self.writing if kind is TaskKind.WRITE else self.reading

    @contextmanager
    def _reporting(self, result: TransferResult) -> Iterator[None]:
        """Say which side is used from now on, and which is not any more."""
        sides = (("read", self.reading), ("write", self.writing))
        before = [breaker.is_closed for _, breaker in sides]
        yield
        for (side, breaker), was_closed in zip(sides, before, strict=True):
            if breaker.is_closed is not was_closed:
                state = "closed" if breaker.is_closed else "open"
                logger.warning("event=storage_breaker side=%s state=%s error=%r", side, state, result.error)

    def note_counts(self, result: TransferResult) -> None:
        """What each rank's store says of itself."""
        for rank, counts in [(each.rank, each.counts) for each in result.ranks if each.counts is not None]:
            before = self.counts.get(rank, {})
            opened, known = counts.get("opened_ns", 0), before.get("opened_ns", 0)
            if opened > known:  # another process, which counts from 0 on
                self.ended_counts.update({name: before.get(name, 0) for name in _RISING})
                self.counts[rank] = counts
            elif opened == known:  # answers overtake each other
                self.counts[rank] = counts | {name: max(counts.get(name, 0), before.get(name, 0)) for name in _RISING}

    def _ask_news(self, asked: dict[int, None]) -> None:
        if self.is_quiet or self.is_detached or not self.client.available or not self.client.has_room(TaskKind.LOOKUP):
            return
        self.outbox.put(self.new_task(TaskKind.LOOKUP, "", b""), asked, None)

    def above(self, run: Run, end: int) -> bytes:
        """The hashes of the blocks before a block of a run, where its owner has a share of the store; else none."""
        if not self._sharing or run.root().namespace not in self._sharing:
            return b""
        *before, _ = run.path()
        names = [self._tree.names.of(each, 0, each.num_blocks) for each in before]
        return b"".join(names) + self._tree.names.of(run, 0, end)

    def note_read(self, result: TransferResult) -> None:
        """How long the slowest rank took for how many bytes."""
        slowest = max(result.ranks, key=lambda r: r.seconds)
        self.speeds.storage.note(slowest.num_bytes, slowest.seconds)

    def new_task(
        self,
        kind: TaskKind,
        namespace: str,
        hashes: bytes,
        *,
        sources: array[int] | None = None,
        destinations: array[int] | None = None,
        token_ids: bytes = b"",
        priority: float | None = None,
        detail: bytes = b"",
        deadline: float = 0.0,
    ) -> TransferTask:
        """A task of a namespace's objects, with its own deadline, or a later one, for `outbox.put`."""
        task_id, self._next_task_id = self._next_task_id, self._next_task_id + 1
        return TransferTask(
            task_id=task_id,
            kind=kind,
            source_ids=np.frombuffer(sources, np.int32) if sources is not None else _NO_IDS,
            destination_ids=np.frombuffer(destinations, np.int32) if destinations is not None else _NO_IDS,
            deadline=max(deadline, self._clock.now() + self._timeout_seconds),
            hashes=hashes,
            token_ids=token_ids,
            priority=priority,
            detail=detail,
            owner=owner_mark(namespace),
            listener=self.news.listener,
        )

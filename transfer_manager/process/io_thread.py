"""The I/O thread of the processes of one kind: it owns every socket, process and task in flight."""

from __future__ import annotations

import functools
import logging

from fastdeploy_cache.errors import CodecError, IPCError, QueueDisconnectedError, counted, named
from fastdeploy_cache.ipc.clock import Clock
from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.poller import Poller, Wakeup
from fastdeploy_cache.ipc.task_queue import TaskQueue
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.process.callbacks import Callbacks
from fastdeploy_cache.transfer_manager.process.flights import Flight
from fastdeploy_cache.transfer_manager.process.owner import ProcessKind, ProcessOwner
from fastdeploy_cache.transfer_manager.process.supervisor import Phase, RankSupervisor
from fastdeploy_cache.transfer_manager.process.task_flow import TaskFlow
from fastdeploy_cache.transfer_manager.process.wire import (
    EXIT_REFUSED,
    DoneMessage,
    FromProcess,
    ReadyMessage,
    StopMessage,
    TaskMessage,
)
from fastdeploy_cache.transfer_manager.task import Lane

_KILLED_SECONDS = 5.0  # at the end, for processes that were killed to be reaped


class ProcessIO:
    """`run` is the thread. Others use `tasks`, and set `stopping` or `changed` and then `wakeup`.

    It spawns the processes, so that its end (which is the client's, or the engine's) is theirs. It never takes a lock
    of the caller except inside its callbacks.
    """

    def __init__(
        self, config: TransferConfig, kind: ProcessKind, owner: ProcessOwner, callbacks: Callbacks, clock: Clock
    ) -> None:
        self._config, self._kind, self._owner, self.callbacks = config, kind, owner, callbacks
        self._now = clock.now
        new_queue = functools.partial(TaskQueue, len(Lane), config.max_tasks_in_flight)
        self.ranks = [
            RankSupervisor(rank, config, signal, new_queue, owner.spawn, process_name=kind.name)
            for rank, signal in enumerate(owner.signals)
        ]
        self.tasks = TaskFlow(owner.signals, callbacks, config.max_tasks_in_flight, kind.in_order, clock)
        self.changed: set[int] = set()  # under the lock of `tasks`: ranks for which something has come or gone
        self.stopping = False
        self.started = clock.event()
        self.to_restart: set[int] = set()  # under the same lock: ranks that somebody wants to be tried again
        self._start_before = 0.0
        self._came_up: list[RankSupervisor] = []  # in this turn
        self.start_failure: str | None = None
        self.wakeup = Wakeup()
        self._stuck: dict[int, int] = {}  # rank -> the task that it is being killed for
        self._poller = Poller(clock)
        for rank in self.ranks:
            rank.parked = not owner.may_run(rank.rank)
        if any(rank.parked for rank in self.ranks):  # who brings what they lack comes later: nobody waits for it here
            self.started.set()

    def run(self) -> None:
        """The thread: until `stopping` is set; then processes end and every task is answered."""
        try:
            self._poller.register(self.wakeup.fd, self.wakeup)
            self._start_before = self._now() + self._config.start_timeout_seconds
            for rank in self.ranks:
                rank.tick(self._now())
                self._watch(rank)
            while not self.stopping:
                self._turn()
        finally:  # also when an invariant broke: callers must get their answers and no process may stay
            self._shut_down()

    def _turn(self) -> None:
        died = False
        for key in self._poller.wait(self._next_timeout()):
            if key is self.wakeup:
                # Cleared before the queue is looked at: the other way round, a task that was accepted in between
                # would have its wake-up taken away, and lie until something else wakes this thread.
                self.wakeup.clear()
            elif isinstance(key, RankSupervisor):
                self._receive(key)
            else:  # the number of a rank whose process has ended
                died = True
        now = self._now()
        if self.changed:
            self._follow_changes()
        if self.to_restart:
            self._restart(now)
        self._send()  # before the housekeeping: tasks do not wait for it
        if died:
            self._reap(now)
        self._kill_stuck(now)
        for rank in self.ranks:
            self._tick(rank, now)
        self._note_all_ready()
        # After it: who waits for a rank and hears that it is up submits at once, and would be told that it is not.
        came_up, self._came_up = self._came_up, []
        for rank in came_up:
            if rank.phase is Phase.READY:
                self._owner.note_up(rank.rank)

    def _tick(self, rank: RankSupervisor, now: float) -> None:
        has_failed = rank.phase in (Phase.DOWN, Phase.OFF) and not self.started.is_set()
        if has_failed and rank.shortage and not self._kind.is_optional and now < self._start_before:
            has_failed = False  # it may have what it needs a moment later
        if has_failed and (not self._kind.is_optional or rank.exit_code == EXIT_REFUSED):
            # What is refused is refused by each rank: the reason comes first.
            what = (
                "" if rank.exit_code == EXIT_REFUSED else f"start of {counted(self._config.tp_size, 'rank')} failed: "
            )
            self.start_failure = f"{what}{rank.last_failure}"
            self.stopping = True
            return
        had_process = rank.process is not None
        rank.tick(now)
        if not had_process:
            self._watch(rank)

    def _note_all_ready(self) -> None:
        # Under the lock that guards `changed`: a worker that takes its arrays back just after the look at `changed`
        # clears `all_ready`, and setting it after that would let tasks begin on arrays that are gone.
        with self.tasks.lock:
            is_ready = not self.changed and all(rank.is_usable for rank in self.ranks)
            is_new = is_ready and not self.tasks.all_ready.is_set()
            if is_new:
                self.tasks.all_ready.set()
                self.started.set()
        if is_new:
            self.callbacks.call(self.callbacks.on_ready)

    def _follow_changes(self) -> None:
        """Start ranks for which all is there now; end those that work on what is gone, so that nothing writes there."""
        # Emptied before it is dealt with: what changes meanwhile is noted for the next turn, and keeps `all_ready`
        # from being set at the end of this one. Emptied afterwards, it would take that note away unseen.
        with self.tasks.lock:
            changed, self.changed = self.changed, set()
        for number in changed:
            rank = self.ranks[number]
            rank.parked = not self._owner.may_run(number)
            reason = self._owner.follow(number)
            if reason is not None:
                self.tasks.all_ready.clear()
                rank.kill(reason, blamed=False)

    def _restart(self, now: float) -> None:
        with self.tasks.lock:
            numbers, self.to_restart = self.to_restart, set()
        for number in numbers:
            self.ranks[number].restart(now)

    def _next_timeout(self) -> float:
        now = self._now()
        waits = [rank.next_tick(now) for rank in self.ranks]
        owed = self.tasks.flights.stuck_at() if self.tasks.flights.all() else {}
        # those of a rank that is dying end when it is reaped
        waits += [at - now for (rank, _), (at, _) in owed.items() if not self.ranks[rank].dying]
        if not (self._kind.is_optional or self.started.is_set()) and any(rank.shortage for rank in self.ranks):
            waits.append(self._start_before - now)
        return max(0.0, min(waits))

    def _watch(self, rank: RankSupervisor) -> None:
        if rank.process is not None and rank.queue is not None:
            self._poller.register(rank.queue.fd, rank)
            self._poller.register(rank.process.pidfd, rank.rank)

    # -- what processes say

    def _receive(self, rank: RankSupervisor) -> None:
        while rank.queue is not None:
            try:
                if (data := rank.queue.get()) is None:
                    return
                message: FromProcess = decode(data, FromProcess)
            except CodecError as error:
                rank.kill(f"it sent what is no message: {error}")
                return
            if message.incarnation != rank.incarnation:
                continue
            if isinstance(message, ReadyMessage):
                self._note_ready(rank, message)
            else:
                self._note_done(rank, message)

    def _note_ready(self, rank: RankSupervisor, ready: ReadyMessage) -> None:
        reason = self._owner.take_report(rank.rank, ready.report, rank.num_restarts)
        if reason is not None:
            rank.kill(reason)
            return
        rank.note_ready(ready.lane, self._now())
        if rank.phase is Phase.READY:
            self._came_up.append(rank)

    def _note_done(self, rank: RankSupervisor, done: DoneMessage) -> None:
        if done.result.rank != rank.rank:
            rank.kill(f"it answers as rank {done.result.rank}")
            return
        flight = self.tasks.flights.get(done.task_id)
        if flight is not None:
            self.tasks.answer(flight, done.result)

    # -- tasks

    def _send(self) -> None:
        for task in self.tasks.take_queued():
            ranks = self.ranks
            # It was accepted while all were ready; one may have died since, and the others must not begin without it.
            if not self.tasks.all_ready.is_set():
                usable = [rank for rank in ranks if rank.is_usable]
                if not usable or task.kind.needs_all_ranks:
                    down = [rank.rank for rank in ranks if not rank.is_usable]
                    who = f"{named('rank', down, 'is', 'are')} down" if down else "the ranks are not ready"
                    self.tasks.refuse(task, who)
                    continue
                ranks = usable
            flight = self.tasks.flights.add(task, [rank.rank for rank in ranks])
            for rank in ranks:
                assert rank.queue is not None
                try:
                    rank.queue.put(encode(TaskMessage(rank.incarnation, task)), task.kind.lane)
                except IPCError as error:
                    if isinstance(error, QueueDisconnectedError):  # alive or not, it can never be reached again
                        rank.cut_off(self._now())
                    self._fail(flight, rank, str(error))

    def _fail(self, flight: Flight, rank: RankSupervisor, error: str, *, was_tried: bool = False) -> None:
        """A rank is gone or never got the task."""
        # First: whoever hears of the failure and waits for the ranks, to try again, must not find them ready still.
        if not rank.is_usable:
            self.tasks.all_ready.clear()
        self.tasks.fail(flight, rank.rank, error, was_tried=was_tried)

    def _kill_stuck(self, now: float) -> None:
        flights = self.tasks.flights
        for (rank, lane), (at, owed) in flights.stuck_at().items():
            if now >= at:
                task_id = flights.at_work(rank, lane, self.ranks[rank].is_at) or owed
                # The first one stays blamed: until the rank is reaped, those behind it pass their deadlines, too, and
                # the rank has never begun them.
                self._stuck.setdefault(rank, task_id)
                self.ranks[rank].kill(f"task {task_id} passed its deadline")

    # -- ends

    def _reap(self, now: float) -> None:
        """A reaped process writes no more: only now may its tasks end and their destinations be given out again."""
        for rank in self.ranks:
            process, queue = rank.process, rank.queue
            if process is None or queue is None or process.reap() is None:
                continue
            # Answers that it sent before it died count. Without this look, the poller may have told of the death and
            # of an answer in one turn, or of the death first, and a task that succeeded would fail.
            self._receive(rank)
            self._poller.unregister(queue.fd)
            self._poller.unregister(process.pidfd)
            self.tasks.all_ready.clear()
            rank.reap(now)
            self._note_death(rank, is_blamed=rank.blamed and not rank.shortage)

    def _note_death(self, rank: RankSupervisor, *, is_blamed: bool) -> None:
        failure, flights = rank.last_failure, self.tasks.flights
        stuck = self._stuck.pop(rank.rank, None)
        tried = {stuck} if stuck is not None else flights.working_on(rank.rank, rank.is_at)
        for flight in flights.of_rank(rank.rank):
            self._fail(flight, rank, failure.splitlines()[0], was_tried=flight.task.task_id in tried)
        self._owner.note_death(rank.rank, failure, is_blamed=is_blamed)

    def _shut_down(self) -> None:
        # Under the lock: a task that is accepted meanwhile is either in the queue that is emptied below, or refused.
        with self.tasks.lock:
            self.tasks.is_open = False
        self.tasks.all_ready.clear()
        self._ask_to_stop()
        self._wait_until_reaped(self._now() + self._config.stop_timeout_seconds)
        for rank in self.ranks:
            rank.kill("it did not stop when asked")
        self._wait_until_reaped(self._now() + _KILLED_SECONDS)
        for task in self.tasks.take_queued():
            self.tasks.refuse(task, "the client has stopped")
        self._owner.note_stopped()
        self.started.set()

    def _ask_to_stop(self) -> None:
        """A process stops when it has done what came before: of that, what it has not begun and nobody will use is
        cancelled. Seconds of queued copies would else stand before the stop, and it would be killed for being late."""
        self.tasks.cancel_unbegun()
        for rank in self.ranks:
            starting = rank.phase is Phase.STARTING
            rank.retire()
            if rank.queue is None:
                continue
            try:
                if starting:
                    rank.kill("the engine stops before it was ready", level=logging.INFO)  # as when Ctrl-C is early
                else:
                    for lane in Lane:
                        rank.queue.put(encode(StopMessage()), lane)
            except IPCError:
                rank.kill("it cannot be asked to stop")

    def _wait_until_reaped(self, deadline: float) -> None:
        while any(rank.process is not None for rank in self.ranks):
            now = self._now()
            if now >= deadline:
                return
            # Answers are read meanwhile: a rank that ends in order writes its last ones first, and would stop in that,
            # with a full queue, until it is killed for being late.
            for key in self._poller.wait(deadline - now):
                if key is self.wakeup:
                    self.wakeup.clear()
                elif isinstance(key, RankSupervisor):
                    self._receive(key)
            self._reap(self._now())

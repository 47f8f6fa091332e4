"""One rank over all its incarnations: start, watch, kill, reap, restart, give up."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from fastdeploy_cache.errors import IPCError
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.ipc.shortage import EXIT_SHORT, SHORT_END, Patience, is_shortage, limit_of
from fastdeploy_cache.ipc.task_queue import TaskQueue
from fastdeploy_cache.transfer_manager.client import ProcessHealth
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.process.wire import EXIT_REFUSED
from fastdeploy_cache.transfer_manager.process.words import RankSignal
from fastdeploy_cache.transfer_manager.task import Lane

logger = event_log(__name__)

_END_SECONDS = 1.0  # for a process whose queue is disconnected to end by itself
_MAX_DOUBLINGS = 30  # of the pause before a restart; more would overflow after a thousand deaths


class Phase(Enum):
    """Where a rank is in its life.

    ::

        STARTING --ready--> READY --asked--> STOPPING
            |                 |                 |
            +------exit-------+------exit-------+--> DOWN --backoff over--> STARTING
                              |                       |
                              +--too many deaths-------> OFF --much later, or asked--> STARTING

    A process that cannot be spawned, or ends while it starts, for want of descriptors, threads or memory has not died:
    it is DOWN until it can.
    """

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    DOWN = "down"
    OFF = "off"


class Process(Protocol):
    """What the supervisor needs of an operating-system process; see `ChildProcess`."""

    pid: int
    pidfd: int

    def kill(self) -> None: ...
    def reap(self) -> int | None: ...
    def log_tail(self) -> str: ...
    def close(self) -> None: ...


class RestartPolicy:
    """How long to wait after a death, or whether to give up. Pure: the caller brings the time."""

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._deaths: deque[float] = deque()

    def delay_seconds(self, now: float) -> float | None:
        """Record a death at `now`: the pause before the restart, None for no more restarts."""
        self._deaths.append(now)
        while now - self._deaths[0] > self._config.restart_window_seconds:
            self._deaths.popleft()
        if len(self._deaths) > self._config.max_restarts:
            return None
        return self._config.restart_backoff_seconds * 2.0 ** min(len(self._deaths) - 1, _MAX_DOUBLINGS)

    def forget(self) -> None:
        """Count from nothing again."""
        self._deaths.clear()


class RankSupervisor:
    """Keeps one rank alive. All methods are called by one thread, with the time; none waits."""

    def __init__(
        self,
        rank: int,
        config: TransferConfig,
        signal: RankSignal,
        new_queue: Callable[[], TaskQueue],
        spawn: Callable[[int, int, tuple[int, ...]], Process],
        *,
        process_name: str = "transfer",
    ) -> None:
        """`spawn(rank, incarnation, its ends of the queue)` starts a process, which the log calls by `process_name`."""
        self.rank = rank
        self._name = process_name
        self.phase = Phase.DOWN
        self.incarnation = 0
        self.process: Process | None = None
        self.queue: TaskQueue | None = None
        self.last_failure = ""
        self.exit_code: int | None = None  # of the last process
        self.num_restarts = 0
        self.blamed = True  # for its death, if it dies now: it counts against it
        self.shortage = ""  # what it cannot be started for the want of, now
        self.is_off = False  # it has died too often
        self.parked = False  # what it works on is not there: not started (again) until it is
        # Each lane is ready by itself. Taken for the whole, the first one would let tasks of the other lane be sent to
        # a thread that is not there yet, and that may never be.
        self._ready_lanes: set[Lane] = set()
        self._config = config
        self._signal = signal
        self._new_queue = new_queue
        self._spawn = spawn
        self._policy, self._patience = RestartPolicy(config), Patience()
        self._heartbeat = 0
        self._last_beat = 0.0
        self._ready_before = 0.0
        self._restart_at = 0.0
        self._killed_for = ""
        self._is_ending, self._end_before = False, math.inf

    @property
    def num_busy_lanes(self) -> int:
        """Lanes of the present process that work on a task."""
        return self._signal.num_busy_lanes if self.phase is Phase.READY else 0

    def is_at(self, lane: Lane, task_id: int) -> bool:
        """Whether a lane of the process works on this task, or did when it died."""
        return self._signal.is_at(lane, task_id)

    def launch(self, now: float) -> None:
        """Start the next incarnation on a fresh queue; a failure to spawn counts as a death, but for a shortage."""
        assert self.process is None and self.phase in (Phase.DOWN, Phase.OFF)
        # Before anything of the new process exists: what the old one had sent, and nobody had read, carries its number
        # and is left alone, so its answer to a task cannot be taken for the new one's.
        self.incarnation += 1
        self.phase = Phase.STARTING
        # The old process is reaped and the new one is not there: nobody else writes these words now. A heartbeat left
        # standing would be taken for the new one's first.
        self._signal.reset()
        self._heartbeat, self._last_beat = 0, now
        self._ready_lanes.clear()
        self._ready_before = now + self._config.start_timeout_seconds
        self._killed_for = ""
        self._is_ending, self._end_before = False, math.inf
        self.blamed = True
        try:
            self.queue = self._new_queue()
            self.process = self._spawn(self.rank, self.incarnation, self.queue.rank_fds)
            self.queue.hand_over()
        except (OSError, ValueError, IPCError) as error:  # ValueError: a name that no file or message can have
            failure = f"rank {self.rank} cannot be spawned: {error}"
            if is_shortage(error):
                self._put_off(now, f"{failure}; {limit_of(error)}")
                return
            self._died(now, failure)
        self.num_restarts, self.shortage = self.incarnation - 1, ""

    def _put_off(self, now: float, failure: str) -> None:
        """It has never been ready, so nothing has died, and its number is free for the next try."""
        self.incarnation -= 1
        self._drop()
        self.phase = Phase.OFF if self.is_off else Phase.DOWN
        level = logging.DEBUG if self._patience.is_tried else logging.WARNING  # said once
        pause = self._patience.pause_seconds()
        self._restart_at = now + pause
        self.last_failure = self.shortage = failure
        text = "event=rank_waits process=%s rank=%d first_pause_seconds=%.1f reason=%r"
        logger.log(level, text, self._name, self.rank, pause, failure)

    def note_ready(self, lane: Lane, now: float) -> None:
        """A lane's ready message came; with the last one the rank is ready."""
        self._ready_lanes.add(lane)
        if self.phase is Phase.STARTING and len(self._ready_lanes) == len(Lane):
            self.phase, self.is_off = Phase.READY, False
            self._last_beat = now  # its first beat comes after this message, however long the start took
            if self._patience.is_tried:
                logger.warning("event=rank_waits_no_more process=%s rank=%d", self._name, self.rank)
                self._patience.reset()
            logger.info("event=rank_ready process=%s rank=%d incarnation=%d", self._name, self.rank, self.incarnation)

    def kill(self, reason: str, blamed: bool = True, level: int = logging.WARNING) -> None:
        """SIGKILL it; its death is noticed like any other. One that has ended by itself says how, and not this."""
        if self.process is None or self._killed_for:
            return
        self._is_ending, self._end_before, self.blamed = True, math.inf, blamed
        if self.process.reap() is None:
            text = "event=rank_killed process=%s rank=%d incarnation=%d reason=%r"
            logger.log(level, text, self._name, self.rank, self.incarnation, reason)
            # Only the first reason: a rank that is killed for a stuck task falls silent, too, and would then be said to
            # have died of the silence that the kill has caused.
            self._killed_for = reason
            self.process.kill()

    def cut_off(self, now: float) -> None:
        """Its queue is disconnected: it can never be reached again. Nearly always it is ending, which closes the queue
        before anybody can be told how it ends; where it does not end by itself, it is killed a moment later."""
        if not self._is_ending:
            self._is_ending, self._end_before = True, now + _END_SECONDS

    @property
    def dying(self) -> bool:
        """Killed or ended, but not reaped: its pid descriptor tells when it is gone, no deadline matters until then."""
        return self.process is not None and self._is_ending

    @property
    def state(self) -> ProcessHealth:
        """The phase, as callers are told of it. Any thread."""
        if self.phase is Phase.READY:
            return ProcessHealth.READY
        if self.parked:
            return ProcessHealth.PARKED
        if self.shortage:
            return ProcessHealth.SHORT
        return ProcessHealth.OFF if self.is_off else ProcessHealth.STARTING

    @property
    def is_usable(self) -> bool:
        """Whether tasks may be sent to it."""
        return self.phase is Phase.READY and not self.parked and not self.dying

    def reap(self, now: float) -> bool:
        """True when the process was there and is now gone; plans the restart."""
        if self.process is None or (code := self.process.reap()) is None:
            return False
        self.exit_code = code
        reason = f"rank {self.rank} exited with code {code}"
        if self._killed_for:
            reason += f", killed because {self._killed_for}"
        tail = self.process.log_tail()
        refusal = _refusal(tail, self.rank) if code in (EXIT_REFUSED, EXIT_SHORT) else ""
        failure = f"rank {self.rank}: {refusal}" if refusal else f"{reason}; end of its log:\n{tail or '(empty)'}"
        is_short = code == EXIT_SHORT or (code in (1, 127) and SHORT_END.match(tail.rpartition("\n")[2]))
        if is_short and self.phase is Phase.STARTING:
            self._put_off(now, failure if refusal else f"{reason}: {tail.rpartition(chr(10))[2]}")
        else:
            self._died(now, failure)
        return True

    def tick(self, now: float) -> None:
        """Look at deadlines: start-up, heartbeat, restart."""
        if self.phase in (Phase.DOWN, Phase.OFF) and self.process is None:
            if now >= self._restart_at and not self.parked:
                self.launch(now)
        elif now >= self._end_before:
            self.kill("its queue is disconnected")
        elif self.phase is Phase.STARTING and now >= self._ready_before:
            self.kill(f"it was not ready within {self._config.start_timeout_seconds} s")
        elif self.phase is Phase.READY:
            # While the process runs, the word is only compared: it has one writer, and a value that this side wrote
            # could hide a beat that came in between.
            beat = self._signal.heartbeat
            if beat != self._heartbeat:
                self._heartbeat, self._last_beat = beat, now
            elif now - self._last_beat >= self._config.heartbeat_timeout_seconds:
                self.kill(f"it gave no sign of life for {now - self._last_beat:.1f} s")

    def next_tick(self, now: float) -> float:
        """Seconds until `tick` has something to look at."""
        if self.phase in (Phase.DOWN, Phase.OFF) and not self.parked:
            return max(0.0, self._restart_at - now)
        if self.phase is Phase.STARTING and not self.dying:
            return max(0.0, self._ready_before - now)
        return max(0.0, min(self._config.heartbeat_timeout_seconds / 4, self._end_before - now))

    def restart(self, now: float) -> None:
        """Start it now, however often it has died; nothing where it runs, or has nothing to work on."""
        if self.process is None:
            self._policy.forget()
            self._patience.reset()
            self.phase, self.is_off, self._restart_at = Phase.DOWN, False, now

    def retire(self) -> None:
        """No restart after the next exit."""
        self._restart_at = math.inf
        self.phase = Phase.STOPPING if self.process is not None else Phase.OFF

    def _died(self, now: float, failure: str) -> None:
        self.last_failure = failure
        was_stopping = self.phase is Phase.STOPPING
        self.phase = Phase.OFF if was_stopping else Phase.DOWN
        self._drop()
        self._patience.reset()
        if was_stopping:
            return
        if self.parked or not self.blamed:  # killed for want of what it works on: no fault of its own
            self._restart_at = now
            return
        delay = self._policy.delay_seconds(now)
        if delay is None or self.is_off:  # one that is off has one try at a time, until it has been ready
            self.phase, self.is_off = Phase.OFF, True
            pause = self._config.off_retry_seconds
            self._restart_at = now + pause
            text = "event=rank_off process=%s rank=%d tiers_below_gpu=off next_try_in_seconds=%.0f failure=%r"
            logger.error(text, self._name, self.rank, pause, failure)
        else:
            self._restart_at = now + delay
            # What the first process of an optional kind refuses ends the start with an error, which says it.
            is_told = self.exit_code == EXIT_REFUSED and self.incarnation == 1
            level = logging.INFO if is_told else logging.WARNING
            text = "event=rank_died process=%s rank=%d restart_in_seconds=%.2f failure=%r"
            logger.log(level, text, self._name, self.rank, delay, failure)

    def _drop(self) -> None:
        """Close the process and its queue: a task in it that the process had not read must reach no other one."""
        if self.process is not None:
            self.process.close()
            self.process = None
        if self.queue is not None:
            self.queue.close()
            self.queue = None


def _refusal(log_tail: str, rank: int) -> str:
    """The reason in the last line of a process that refused to start; empty where there is none."""
    line = log_tail.splitlines()[-1] if log_tail else ""
    with contextlib.suppress(ValueError):  # it is text
        line = str(json.loads(line)["message"])
    return line.partition(f"event=cannot_start rank={rank} reason=")[2].strip()

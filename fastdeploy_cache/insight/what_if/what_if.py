"""What other sizes of the tiers would have hit: estimated live, by a process beside the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from fastdeploy_cache.books.block_pool import RUN
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Forgotten
from fastdeploy_cache.books.references import References
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.insight.what_if.setup import (
    Plan,
    ResultBoard,
    WhatIfResult,
    plans_for,
    reason_for_none,
    setup_for,
)
from fastdeploy_cache.ipc.codec import encode
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.ipc.shared_array import SharedArray

logger = event_log(__name__)

_PROGRAM = "fastdeploy_cache.what_if"
_PIPE_BYTES = 2**20
_MAX_UNSENT_BYTES = 4 * 2**20
_END_SECONDS = 5.0
_WINDOW_SECONDS = 3600.0
MIN_REQUESTS = 10  # in the window
_LENGTH = struct.Struct("<I")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhatIfRate:
    """What a tier of another size would have hit in the last hour, the other tier being as it is.

    Attributes:
        tier: gpu or cpu.
        factor: of its present size; of the GPU pool's for a CPU tier that is not there.
        policy: the eviction policy: that in use, or lru.
        num_blocks: of that tier then.
        token_hit_rate: 0 to 1, of all prompt tokens; an estimate.
        most_token_hit_rate: that no size of any tier, under any policy, would have gone over: the tokens that somebody
            had used before. It is counted, not estimated. None: not known, as requests were left out.
        saved_seconds: of computing; None while the prefill speed is not known.
    """

    tier: str
    factor: float
    policy: str
    num_blocks: int
    token_hit_rate: float
    saved_seconds: float | None
    most_token_hit_rate: float | None = None


class WhatIf:
    """Hands a few bytes for each request to the process and reads its results. Nothing here waits for it.

    Any thread; `start` and `close` by one at a time.
    """

    def __init__(self, config: CacheConfig, books: Books, prefill_speed: Callable[[], float | None]) -> None:
        """`prefill_speed`: tokens per second, of one request."""
        self._config, self._books, self._prefill_speed = config, books, prefill_speed
        self._plans = plans_for(config)
        self._sending, self._starting = threading.Lock(), threading.Lock()
        self._owner_pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._board: tuple[ResultBoard, Sequence[Plan]] | None = None  # what is found, and of what
        self._array: SharedArray | None = None
        self._unsent, self._is_closed, self._is_bounded = b"", False, False

    @property
    def is_on(self) -> bool:
        """Whether the process runs, as far as is known."""
        return self._process is not None

    def start(self) -> None:
        """Start the process, unless it runs or there is a `reason_for_none`. What is used from now on counts.

        One that cannot start costs its estimates only; it is logged.
        """
        with self._starting:  # of several that ask first at a time, one
            is_wanted = reason_for_none(self._config) is None
            if self._process is None and is_wanted and not self._is_closed and not self._books.is_closed:
                self._start()

    def follow(self, policy: str) -> None:
        """Another eviction policy is in force: estimate that one, too. What was used so far counts no more, unless it
        was estimated already. The caller holds no lock."""
        with self._starting:
            is_running = self._process is not None
            if self._is_closed or policy in {plan.policy for plan in self._plans}:
                return
            with self._sending:
                self._books.note_references(None)
                self._end()
                self._config = dataclasses.replace(self._config, eviction_policy=policy)
                self._plans, self._unsent = plans_for(self._config), b""
            if is_running:
                self._start()

    def _start(self) -> None:
        plans = self._plans
        try:
            with contextlib.ExitStack() as undo:
                array = SharedArray.create("fastdeploy_what_if", ResultBoard.num_words(len(plans)) * 8)
                undo.callback(array.close)
                process = self._spawn(array.fd)
                undo.pop_all()
        except (OSError, MemoryError) as error:  # `NotEnoughMemoryError` is one of these
            logger.warning("event=what_if_not_started reason=%r", str(error))
            return
        self._array, self._board, self._process = array, (ResultBoard(array, len(plans)), plans), process
        # What is cached already, or comes from elsewhere, was used by nobody that the process has seen.
        is_all_seen = self._config.storage is None and self._config.peer is None
        references = References(self._config.block_size * 4, self._books.clock.age, self._when_due)
        with self._books:
            num_cached = sum([pool.count(RUN) for pool in self._books.pools])
            self._is_bounded = is_all_seen and not num_cached
            self._books.ignore(Forgotten, self._on_forgotten)
            self._books.listen(Forgotten, self._on_forgotten)
            self._books.note_references(references)

    def _spawn(self, result_fd: int) -> subprocess.Popen[bytes]:
        setup = encode(setup_for(self._config, _WINDOW_SECONDS, result_fd))
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(result_fd,),
            start_new_session=True,  # a signal to the engine's process group is the engine's to deal with
        )
        assert process.stdin is not None
        fd = process.stdin.fileno()
        with contextlib.suppress(OSError):  # the system's limit on pipes: it takes less at a time
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(fd, False)
        with contextlib.suppress(BrokenPipeError):  # it has ended: the first record will find that
            os.write(fd, _LENGTH.pack(len(setup)) + setup)
        return process

    def rates(self) -> list[WhatIfRate]:
        """One for each tier, factor and policy; none before there are enough requests, or where the process is gone."""
        self._send()
        board, plans = self._board or (None, ())
        result = board.read() if board is not None and self._process is not None else None
        if result is None or result.num_window_requests < MIN_REQUESTS:
            return []
        speed, most = self._prefill_speed(), self._most_hit_tokens(result)
        return [
            WhatIfRate(
                tier=plan.tier,
                factor=plan.factor,
                policy=plan.policy,
                num_blocks=plan.num_gpu_blocks if plan.tier == "gpu" else plan.num_cpu_blocks,
                token_hit_rate=hit_tokens / result.num_window_tokens,
                saved_seconds=hit_tokens / speed if speed else None,
                most_token_hit_rate=most / result.num_window_tokens if most is not None else None,
            )
            for plan, hit_tokens in zip(plans, result.hit_tokens, strict=True)
        ]

    def _most_hit_tokens(self, result: WhatIfResult) -> int | None:
        """What no cache would have gone over; None where something may be hit that the process has not seen used."""
        if self.num_lost_requests or not self._is_bounded:
            return None
        copied = self._config.block_size - 1 if self._config.recompute_last_token else 0  # of a prompt cached whole
        return min(result.seen_tokens + copied * result.num_window_requests, result.num_window_tokens)

    @property
    def num_seen_requests(self) -> int:
        """That the process has served to its small caches so far."""
        self._send()
        board, _ = self._board or (None, ())
        result = board.read() if board is not None else None
        return result.num_requests if result is not None else 0

    @property
    def num_lost_requests(self) -> int:
        """That it has not been told of, as it could not follow: the rates are worth less then."""
        references = self._books.references
        return references.num_lost if references is not None else 0

    def close(self) -> None:
        """End the process. Safe to call twice."""
        with self._starting, self._sending:
            self._is_closed = True
            self._books.note_references(None)
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and os.getpid() == self._owner_pid:  # else it is our parent's: this is a fork
            process.kill()  # it has nothing to lose
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        if process is not None:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        if self._array is not None:
            self._array.close()
        self._array = self._board = None  # its view would keep the memory

    def _on_forgotten(self, _: Forgotten) -> None:
        if self._books.references is not None:
            self._books.references.note_forgotten()

    def _when_due(self) -> None:
        self._books.call_later(self._send)

    def _send(self) -> None:
        """Write what there is, as far as the pipe takes it. One thread at a time; another one leaves it to that."""
        references = self._books.references
        if references is None or not self._sending.acquire(blocking=False):
            return
        try:
            process = self._process
            if process is None or process.stdin is None:
                return
            if len(self._unsent) < _MAX_UNSENT_BYTES:  # else the records wait where they are, or are counted as lost
                self._unsent += references.take()
            try:
                self._unsent = self._unsent[os.write(process.stdin.fileno(), self._unsent) :] if self._unsent else b""
            except BlockingIOError:
                return
            except BrokenPipeError:
                logger.warning("event=what_if_ended status=%s", process.poll())
                self._books.note_references(None)
                self._end()
        finally:
            self._sending.release()

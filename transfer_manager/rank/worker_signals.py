"""The words in shared memory that model workers of FastDeploy look at, under the names that they know.

Names, sizes and values are FastDeploy's: `NAME.SUFFIX` in /dev/shm, int32 words, one for each rank or one in all;
of `prefix_tree_status` 0 is NORMAL, 1 UPDATING, -1 CLEARING, -2 CLEARED. Its engine makes some of them before it starts
a cache manager, and looks at its own: these are attached, and what is missing is made.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

import numpy as np

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.named_signal import NamedSignal

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1  # those who write these words wake nobody
READY = ("cache_ready_signal", "cache_transfer_inited_signal", "swap_space_ready_signal")
BY_RANK = (*READY, "cache_task_inflight")
IN_ALL = ("cache_task_broadcast_signal", "cache_task_is_paused", "prefix_tree_status")


class TreeStatus(IntEnum):
    """Values of `prefix_tree_status`. A worker asks for UPDATING or CLEARING; the cache answers NORMAL or CLEARED."""

    NORMAL = 0
    UPDATING = 1
    CLEARING = -1
    CLEARED = -2


_ANSWERS = {
    int(TreeStatus.UPDATING): (TreeStatus.UPDATING, TreeStatus.NORMAL),
    int(TreeStatus.CLEARING): (TreeStatus.CLEARING, TreeStatus.CLEARED),
}


class Signal:
    """Words under a name, as FastDeploy's `IPCSignal` shows them: `value` and `clear`."""

    def __init__(self, value: np.ndarray[tuple[int], np.dtype[np.int32]], named: NamedSignal | None = None) -> None:
        """`named`: of which these are the words; without it they have no name."""
        self.value, self._named = value, named

    def clear(self) -> None:
        """Remove the name, as its engine does at its end; the words stay valid for those who have them."""
        if self._named is not None:
            self._named.remove_name()


class WorkerSignals:
    """The words, and a thread that keeps them true and answers what is asked by `prefix_tree_status`.

    `cache_task_broadcast_signal` stays 0: tasks reach ranks through a queue of their own.
    """

    def __init__(
        self,
        suffix: int | str,
        tp_size: int,
        *,
        on_asked: Callable[[TreeStatus], bool],
        state: Callable[[], tuple[bool, int]],
    ) -> None:
        """Attach the words that are there, make the others, and start the thread.

        `on_asked` does what a worker asks for, in the thread, and says whether it could; `state` gives whether the
        cache is paused, and how many tasks are in flight.

        Raises:
            IPCError: another engine's cache manager holds these names, or words of another size are there; nothing of
                this one is left.
        """
        self._words: dict[str, NamedSignal] = {}
        # the engine of FastDeploy closes no cache manager: the names are removed when its process ends, too
        self._close_words = weakref.finalize(self, _close_all, self._words, os.getpid())
        self._on_asked, self._state, self._tp_size = on_asked, state, tp_size
        try:
            for name, num_words in [*((n, tp_size) for n in BY_RANK), *((n, 1) for n in IN_ALL)]:
                self._words[name] = NamedSignal.attach_or_create(name, suffix, num_words)
        except BaseException:
            self._close_words()
            raise
        self._words["cache_task_broadcast_signal"].set(0, 0)
        self._stopping = SYSTEM_CLOCK.event()
        self._thread = threading.Thread(target=self._run, name="worker-signals", daemon=True)
        self._thread.start()

    def signal(self, name: str) -> Signal:
        """The words of that name, int32 [1] or [ranks]."""
        return Signal(self._words[name].words, self._words[name])

    def set_ready(self, *, with_swap_space: bool) -> None:
        """Every rank has its KV arrays, and its CPU blocks where there are any."""
        self._set_ready(READY if with_swap_space else READY[:-1], 1)

    def _set_ready(self, names: Sequence[str], value: int) -> None:
        for name in names:
            for rank in range(self._tp_size):
                self._words[name].set(rank, value)

    def close(self) -> None:
        """End the thread, say that nothing is ready any more, remove the names that were made here. Safe to call
        twice."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        self._set_ready(READY, 0)
        self._close_words()

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            self.refresh()
            asked = _ANSWERS.get(int(self._words["prefix_tree_status"].words[0]))
            if asked is not None and self._on_asked(asked[0]):
                if int(self._words["prefix_tree_status"].words[0]) == asked[0]:  # else it asks for something new
                    self._words["prefix_tree_status"].set(0, asked[1])
                logger.info("event=prefix_tree_status asked=%s answer=%s", asked[0].name, asked[1].name)

    def refresh(self) -> None:
        """Write what the cache is doing now."""
        is_paused, num_in_flight = self._state()
        self._words["cache_task_is_paused"].set(0, int(is_paused))
        for rank in range(self._tp_size):
            self._words["cache_task_inflight"].set(rank, num_in_flight)


def _close_all(words: Mapping[str, NamedSignal], pid: int) -> None:
    """Close them in the process that made them: a fork has the words, the lock and this call too, and may end first."""
    if os.getpid() == pid:
        for named in words.values():
            named.close()

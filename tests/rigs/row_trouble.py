"""What may happen to instances that hand hybrid prompts over, at any time."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence

from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.transfer_manager.client import RankStatus
from tests.rigs.float64_engine import WAIT_SECONDS, Float64Engine, Served


class Trouble:
    """One thing at a time: each call draws whether something happens, or what hangs goes on."""

    def __init__(self, draw: random.Random, kinds: dict[str, Callable[[], None]]) -> None:
        self.draw, self.kinds = draw, kinds
        self.seen = Counter[str]()
        self._go_on: Callable[[], None] | None = None  # of what hangs

    def __call__(self) -> None:
        """Before and after verbs that start copies, and between steps."""
        if self._go_on is not None and self.draw.random() < 0.2:
            self.end()
        elif self._go_on is None and self.draw.random() < 0.02:
            what = self.draw.choice(list(self.kinds))
            self.seen[what] += 1
            self.kinds[what]()

    def hang(self, pause: Callable[[], None], go_on: Callable[[], None]) -> None:
        """It does not answer until `end`."""
        pause()
        self._go_on = go_on

    def end(self) -> None:
        """What hangs goes on."""
        go_on, self._go_on = self._go_on, None
        if go_on is not None:
            go_on()


def signal_one(statuses: Sequence[RankStatus], number: signal.Signals, draw: random.Random) -> int | None:
    """Signal one of the processes that are up; which."""
    pids = [each.pid for each in statuses if each.up and each.pid]
    if not pids:
        return None
    pid = draw.choice(pids)
    with contextlib.suppress(ProcessLookupError):  # it was killed a moment ago, and is not reaped yet
        os.kill(pid, number)
    return pid


def compute(engine: Float64Engine, served: Served) -> None:
    """To its end; each logit is that from scratch. Where copies hold the room that it needs, it waits for them."""
    is_over, num_waits = False, 0
    while not is_over:
        try:
            is_over, num_waits = engine.step(served), 0
        except OutOfBlocksError:
            num_waits += 1
            assert num_waits < 20, "one request alone does not fit"
            engine.cache.wait_for_transfers(WAIT_SECONDS)
        engine.disturb()
    engine.check(served)
    engine.end(served)

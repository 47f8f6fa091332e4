"""What dies, hangs and goes on under the stories of `chaos_rig`: ranks, model workers, storage processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from fastdeploy_cache import PrefixCacheManager
from tests.rigs.chaos_rig import SECONDS, Driver, Fault
from tests.rigs.kv_worker import KVWorker
from tests.rigs.leaks import child_pids


def signal_child(pid: int | None, number: signal.Signals) -> None:
    """Nothing where it has ended; never another process that has got its number."""
    if pid is None or pid not in child_pids():
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class RankFaults:
    """Ranks that die, hang and go on."""

    def __init__(self, driver: Driver) -> None:
        self._cache = driver.cache
        self._stopped: list[int | None] = []
        self.num_absent = 0  # workers whose arrays are gone: until they are back no rank runs

    def all(self) -> dict[str, Fault]:
        return {"kill": self.kill, "kill all": self.kill_all, "stop": self.stop, "stop, kill": self.stop_and_kill}

    def send(self, rank: int, number: signal.Signals) -> int | None:
        """Signal a rank's process, which may be starting, or not be there at all; returns its number."""
        pid = self._cache.stats().ranks[rank].pid
        signal_child(pid, number)
        return pid

    def recover(self) -> None:
        """Nothing is stopped any more, and all ranks are up, unless their arrays are gone."""
        while self._stopped:
            signal_child(self._stopped.pop(), signal.SIGCONT)
        if not self.num_absent:
            assert self._cache.ranks.wait_ready(SECONDS), "the ranks do not come back"

    def kill(self, rank: int) -> Iterator[None]:
        self.send(rank, signal.SIGKILL)
        yield
        self.recover()

    def kill_all(self, _: int) -> Iterator[None]:
        for rank in range(self._cache.config.transfer.tp_size):
            self.send(rank, signal.SIGKILL)
        yield
        self.recover()

    def stop(self, rank: int) -> Iterator[None]:
        """Its tasks end late, or it is replaced at their deadline."""
        pid = self.send(rank, signal.SIGSTOP)
        self._stopped.append(pid)
        yield
        signal_child(pid, signal.SIGCONT)

    def stop_and_kill(self, rank: int) -> Iterator[None]:
        """It dies with tasks that it has not done."""
        pid = self.send(rank, signal.SIGSTOP)
        self._stopped.append(pid)
        yield
        signal_child(pid, signal.SIGKILL)
        yield
        self.recover()


class Workers(RankFaults):
    """Model workers that own the KV arrays. One dies, unnoticed at first; another comes with new arrays."""

    def __init__(self, driver: Driver, cleanup: contextlib.ExitStack) -> None:
        super().__init__(driver)
        layout = driver.cache.config.rank_layout()
        assert layout is not None
        self._layout, self._cleanup = layout, cleanup
        self._workers: dict[int, KVWorker] = {}
        for rank in range(self._cache.config.transfer.tp_size):
            self._attach(rank)
        driver.kv.refresh()

    def _attach(self, rank: int) -> None:
        worker = self._workers[rank] = KVWorker(self._layout, self._cache.config.pool_sizes()[0])
        self._cleanup.callback(worker.kill)
        self._cache.ranks.attach_kv(rank, worker.make_kv())

    def all(self) -> dict[str, Fault]:
        return {**super().all(), "worker": self.worker_dies, "worker again": self.worker_dies}

    def worker_dies(self, rank: int) -> Iterator[None]:
        if rank not in self._workers:
            return
        self._workers.pop(rank).kill()
        yield
        self._cache.ranks.kv_lost(rank)
        self.num_absent += 1
        yield
        self._attach(rank)
        self.num_absent -= 1
        self.recover()


class StorageFaults:
    """Storage processes that die, hang and go on. They come back ever later, so few of them die."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        tier = cache.storage._tier
        assert tier is not None
        self._client = tier.link.client

    def all(self) -> dict[str, Fault]:
        return {"storage kill": self.kill, "storage stop": self.stop}

    def kill(self, rank: int) -> Iterator[None]:
        signal_child(self._client.statuses()[rank].pid, signal.SIGKILL)
        yield

    def stop(self, rank: int) -> Iterator[None]:
        """Its reads and writes end late, or it is replaced at their deadline."""
        pid = self._client.statuses()[rank].pid
        signal_child(pid, signal.SIGSTOP)
        yield
        signal_child(pid, signal.SIGCONT)

"""Workers that make the KV arrays of an engine (`kv_owner = "worker"`), as the model's processes of vLLM do.

Here they are of the engine's own process; the ranks reach their arrays as those of any other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.errors import CacheError, ClosedError, NotEnoughMemoryError
from fastdeploy_cache.launch.faults.stage import StoryStage
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVMemory, KVViews

_MOST_SECONDS, _PAUSE_SECONDS = 300.0, 0.1

Stepping = AbstractContextManager[object]
Hears = Callable[[int], None]  # of a rank
Call = Callable[[str, Callable[[], None], float], None]  # a verb, the call of it, the seconds that it may take


class KVWorkers:
    """One for each rank. Any thread; one arrives at a time."""

    def __init__(
        self, world: StoryStage, cache: PrefixCacheManager, stepping: Stepping, on_new: Hears, on_told: Hears
    ) -> None:
        """`stepping`: the model computes nothing. `on_new`: it sees other arrays of the rank from now on, and the cache
        does not know yet. `on_told`: it does."""
        layout = cache.config.rank_layout()
        assert layout is not None
        self._world, self._cache, self._layout = world, cache, layout
        self._stepping, self._on_new, self._on_told = stepping, on_new, on_told
        self._memories: dict[int, KVMemory] = {}
        self._arriving = world.host.new_lock()

    def views(self) -> list[KVViews]:
        """What the model reads and writes, by rank."""
        return [self._memories[rank].views() for rank in sorted(self._memories)]

    def replace(self, rank: int, call: Call, meanwhile: Callable[[], None]) -> None:
        """The rank's worker has died if it had one, which the cache is told. Another one comes, dies `meanwhile`, and
        is replaced, too. Comes back when the rank has the last one's arrays, or with a finding.

        Raises:
            ClosedError: the cache is closed.
        """
        host, ranks = self._world.host, self._cache.ranks
        deadline, transfer = host.now() + _MOST_SECONDS, self._cache.config.transfer
        attach_seconds = transfer.start_timeout_seconds + transfer.stop_timeout_seconds

        def tell(verb: str, told: Callable[[], None], seconds: float) -> None:
            call(verb, told, seconds)
            self._on_told(rank)

        with self._arriving:
            # What is computed on other arrays before the cache has heard that the rank's are gone would be copied down
            # from those of before, and found: `kv_lost` comes first.
            with self._stepping:
                call("kv_lost", partial(ranks.kv_lost, rank), 0.0)
                self._make(rank)
                self._on_told(rank)
            meanwhile()
            while host.now() < deadline:
                handle = self._make(rank)
                try:
                    tell("attach_kv", partial(ranks.attach_kv, rank, handle), attach_seconds)
                    return
                except ClosedError:
                    raise
                except CacheError:  # its process has died, or gets no memory
                    tell("kv_lost", partial(ranks.kv_lost, rank), 0.0)
                host.sleep(_PAUSE_SECONDS)
        self._world.find("takes no arrays", f"rank {rank}: {ranks.statuses()}")

    def _make(self, rank: int) -> KVHandle:
        """Arrays of a new worker, which the model computes on from now on; when there is memory for them."""
        while True:
            try:
                memory = KVMemory.create(self._layout, self._cache.config.pool_sizes()[0])
                break
            except (NotEnoughMemoryError, OSError):
                self._world.host.sleep(_PAUSE_SECONDS)
        if (before := self._memories.get(rank)) is not None:
            before.close()
        self._memories[rank] = memory
        self._on_new(rank)
        return memory.handle()

    def leave(self) -> None:
        """The engine ends."""
        while self._memories:
            self._memories.popitem()[1].close()

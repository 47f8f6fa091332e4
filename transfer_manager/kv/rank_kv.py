"""The KV arrays of ranks as the engine knows them: its own, a worker's, or the rank's."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_cache.errors import LayoutError
from fastdeploy_cache.ipc.clock import Event
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVMemory


@dataclass(eq=False)
class Attaching:
    """Somebody waits for a rank to attach."""

    done: Event
    error: str | None = None


class RankKV:
    """One rank's KV arrays. `memory` is set where they can be mapped here, `handle` where they are known at all.

    Callers' threads attach and drop, the I/O thread starts processes: what is dropped is closed by that thread only, or
    a process might inherit another file under the number of a descriptor that was just closed.
    """

    def __init__(self, rank: int, layout: RankLayout, num_gpu_blocks: int, owned: KVMemory | None) -> None:
        """`owned`: those of the engine side, which live as long as it does."""
        self.rank = rank
        self._known: tuple[KVMemory | None, KVHandle | None] = (owned, owned.inherited() if owned is not None else None)
        self.attaching: Attaching | None = None
        self._given: object = None  # what the last process of the rank was told; of the I/O thread alone
        self._layout = layout
        self._num_gpu_blocks = num_gpu_blocks
        self._dropped: list[KVMemory] = []

    @property
    def handle(self) -> KVHandle | None:
        """What a new process of the rank is told; None: nobody has attached any."""
        return self._known[1]

    def take(self, handle: KVHandle) -> None:
        """Hold the arrays behind a handle, so that they outlive who gave it (memory of a GPU they do not). Those that
        are held until then have gone.

        Raises:
            LayoutError, IPCError: they do not fit the layout, or cannot be reached.
        """
        if all(segment.kind == "cuda" for segment in handle.segments):
            sizes = [segment.num_bytes for segment in handle.segments]
            self._layout.check_places(handle.places, sizes, self._num_gpu_blocks)
            known: tuple[KVMemory | None, KVHandle] = (None, handle)
        else:
            memory = KVMemory.open(self._layout, self._num_gpu_blocks, handle)
            known = (memory, memory.inherited())
        self.drop()
        self._known = known

    def drop(self) -> None:
        """The arrays are gone; `sweep` closes them."""
        (memory, _), self._known = self._known, (None, None)
        if memory is not None:
            self._dropped.append(memory)

    def end_attaching(self, error: str | None = None) -> None:
        """Tell whoever waits in `attach_kv`, if somebody does."""
        waiting, self.attaching = self.attaching, None
        if waiting is not None:
            waiting.error = error
            waiting.done.set()

    def sweep(self) -> None:
        """Close what was dropped. The I/O thread, or after its end."""
        while self._dropped:
            self._dropped.pop().close()

    def follow(self) -> str | None:
        """The I/O thread, after a change: why a process that has the arrays attached must go, if it must."""
        self.sweep()
        # Compared, and not noted by `drop`: a note that another thread makes while this one takes it down is lost, and
        # the process would go on with arrays that are gone.
        return "its KV arrays are gone" if self._known is not self._given else None

    def for_process(self) -> tuple[KVHandle | None, tuple[int, ...]]:
        """The handle for a new process of the rank, and the descriptors that it has to inherit."""
        memory, handle = self._given = self._known
        return handle, tuple(segment.fd for segment in memory.segments) if memory is not None else ()

    def mapped(self) -> KVMemory:
        """The arrays, where they are in CPU memory. Raises `LayoutError` where not."""
        memory, handle = self._known
        if memory is None:
            where = "are on a GPU" if handle is not None else "are not attached yet (attach_kv)"
            raise LayoutError(f"the KV arrays of rank {self.rank} {where}; there is nothing to map")
        return memory

    def for_worker(self) -> KVHandle:
        """The handle for another process. Raises `LayoutError` where there are no arrays."""
        memory, handle = self._known
        if memory is not None:
            return memory.handle()
        if handle is None:
            raise LayoutError(f"nobody has attached KV arrays of rank {self.rank}")
        return handle

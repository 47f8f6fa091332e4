"""Blocks that come from other instances: room for them, and how they join the tree. Under the lock."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_pool import REQUEST, TASK
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import NamespaceForgotten
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.growing import insert
from fastdeploy_cache.books.path import coming_and_cold, coming_ids, num_gpu
from fastdeploy_cache.books.residency import FORGOTTEN
from fastdeploy_cache.books.run import GPU, Pin
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.peers.end_checkpoints import EndCheckpoints
from fastdeploy_cache.peers.transfers import Receive
from fastdeploy_cache.request import Request
from fastdeploy_cache.transfer_manager.peer.messages import Detail, EndReceiveDetail, ReceiveDetail
from fastdeploy_cache.transfer_manager.peer.offer import Offer
from fastdeploy_cache.transfer_manager.task import TaskKind

Why = tuple[str, str]


@dataclass(eq=False)
class OpenReceive:
    """Blocks [first, first + len(ids)) of a prompt; what is before them is pinned. Of a hybrid model, the checkpoint
    behind them, too: its `units` by row while they are the task's; once it is here, itself, which is pinned."""

    receive: Receive
    namespace: str
    keys: BlockKeys
    generation: int
    source_name: str
    first: int = 0
    task_id: int = -1
    pin: Pin | None = None  # once it has landed: on all of it
    ids: array[int] = field(default_factory=lambda: array("i"))  # the task's
    units: list[array[int]] | None = None
    checkpoint: Checkpoint | None = None
    loads: list[Transfer] = field(default_factory=list)  # that bring what is before them
    is_answered: bool = False
    is_lent: bool = False  # all of it was there when it was asked for
    why: Why | None = None
    is_wanted: bool = True


# Hands out a new task, notes it in the dictionary, and returns its id.
Put = Callable[[TaskKind, "array[int]", Detail, dict[int, OpenReceive], OpenReceive], int]


class PeerReceives:
    """The ids belong to the task until every rank has answered: then nothing writes into them any more. A receive that
    has landed keeps its blocks where they are until its request is matched, or it is cancelled."""

    def __init__(
        self, books: Books, movement: Movement, put: Put, on_load: Callable[[OpenReceive], None], most_inner: int
    ) -> None:
        """`on_load`: a load that a receive waits for has ended; a turn of its own. `most_inner`: see
        `EndCheckpoints`."""
        self._books, self._tree, self._put, self._on_load = books, books.tree, put, on_load
        self._loader, self._copy_down = movement.loader, movement.copy_down
        self._ends = EndCheckpoints(books, movement.images, most_inner)
        self._by_task: dict[int, OpenReceive] = {}
        self._by_request: dict[str, OpenReceive] = {}  # that are wanted
        books.listen(NamespaceForgotten, self._on_namespace_forgotten)

    def __len__(self) -> int:
        return len(self._by_task)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    @property
    def pins(self) -> list[Pin]:
        """On what is before them, and on what has landed."""
        everyone = {*self._by_task.values(), *self._by_request.values()}
        return [each.pin for each in everyone if each.pin is not None]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints at which they end, of those that are here."""
        everyone = {*self._by_task.values(), *self._by_request.values()}
        return [each.checkpoint for each in everyone if each.checkpoint is not None]

    @property
    def held_units(self) -> list[list[array[int]]]:
        """Units on the GPU that are on their way, of each by row."""
        return [each.units for each in self._by_task.values() if each.units is not None]

    @property
    def loads(self) -> list[Transfer]:
        """That are waited for, once for each who waits."""
        return [load for each in self._by_task.values() for load in each.loads]

    @property
    def held_ids(self) -> list[int]:
        """GPU blocks that are on their way."""
        return [block_id for each in self._by_task.values() for block_id in each.ids]

    def begin(self, request: Request, keys: BlockKeys, offer: Offer, number: int, slot: int) -> OpenReceive:
        """Take room for what of an offer is not here, and start.

        Raises:
            OutOfBlocksError: there is none; nothing was changed.
            MemoryError: likewise.
        """
        receive = Receive(request.request_id, number, 0, self._books.clock.event())
        mine = OpenReceive(receive, request.namespace, keys, self._tree.generation, offer.source.name)
        try:
            self._reserve(mine, offer.num_blocks)
            receive.num_blocks = len(mine.ids)
            detail = ReceiveDetail(
                source=offer.source,
                number=offer.number,
                first_block=mine.first,
                num_blocks=offer.num_blocks,
                receive_number=number,
                slot=slot,
                units=b"".join([each.tobytes() for each in mine.units]) if mine.units is not None else None,
            )
            self._by_request[request.request_id] = mine
            mine.task_id = self._put(TaskKind.RECEIVE, mine.ids, detail, self._by_task, mine)
        except BaseException:
            self._by_request.pop(request.request_id, None)
            self._tree.pools[0].free(mine.ids, TASK)
            self._ends.free(mine.units)
            self._ends.unpin(mine.checkpoint)
            self._tree.move_pin(mine.pin, None, 0)
            raise
        for load in mine.loads:
            load.num_waiting += 1
        return mine

    def _reserve(self, mine: OpenReceive, num_blocks: int) -> None:
        """Pin what is here of so many blocks, load what is in the CPU tier alone, and take room for all else. What it
        has taken when it raises is the caller's to give back."""
        tree, tenant = self._tree, self._books.tenant_of(mine.namespace)
        path, num_found = tree.find(mine.namespace, mine.keys, num_blocks)
        mine.pin = tree.move_pin(None, *tree.place(path, num_found))
        num_coming, parts = coming_and_cold(path, num_found)
        num_cold = sum(n for _, _, n in parts)
        mine.checkpoint = self._ends.keep(mine.pin, num_blocks)
        short = num_blocks - num_found + num_cold - tree.residency.num_available(GPU, tenant)
        if short > 0:
            raise OutOfBlocksError(short, num_coming)
        if mine.checkpoint is None:
            self._ends.check_room(num_blocks)  # before a load starts, which would evict for nothing
        if num_cold and not self._loader.start(parts, num_cold):
            num_found -= num_cold  # what cannot be loaded is received
            self._ends.unpin(mine.checkpoint)
            mine.checkpoint = None
            mine.pin = tree.move_pin(mine.pin, *tree.place(path, num_found))
            self._ends.check_room(num_blocks)
        _, loads = coming_ids(path, num_gpu(path, num_found), num_found)
        if mine.checkpoint is None:
            mine.units = self._ends.take(num_blocks)
        mine.first, mine.ids = num_found, self._books.take(num_blocks - num_found, GPU, TASK, tenant)
        for load in loads:  # the end of each may be the last that was missing
            load.on_done.append(functools.partial(self._on_load, mine))
        mine.loads = loads

    def answered(self, task_id: int, why: Why | None) -> OpenReceive:
        """Every rank has answered, or is reaped."""
        mine = self._by_task[task_id]
        mine.is_answered, mine.why = True, why
        return mine

    def try_land(self, mine: OpenReceive) -> bool:
        """Let the blocks join the tree, once they and what is before them are here; whether it is over now."""
        if not mine.is_answered or mine.task_id not in self._by_task:
            return False
        if mine.why is None and not all(load.done.is_set() for load in mine.loads):
            return False
        del self._by_task[mine.task_id]
        for load in mine.loads:
            load.num_waiting -= 1
        mine.loads = []
        if mine.why is None:
            mine.why = self._why_not(mine)
        if mine.why is not None:
            self._tree.pools[0].free(mine.ids, TASK)
        elif not self._tree.mishaps.contain("landing", lambda: self._land(mine)):
            mine.why = "failed", "this instance's books could not take what had come; see its log"
        self._ends.free(mine.units)
        mine.ids, mine.units = array("i"), None
        if mine.why is not None:
            self._let_go(mine)
        return True

    def _why_not(self, mine: OpenReceive) -> Why | None:
        if not mine.is_wanted:
            return "cancelled", "its request was matched, or gave it up, before it had come"
        if mine.generation != self._tree.generation:
            return "cancelled", "the cache was reset, slept or lost its KV arrays meanwhile"
        if mine.pin is not None:
            num_here = num_gpu(mine.pin.run.path(), mine.first)
            if num_here < mine.first:
                return "failed", f"the {mine.first} blocks before it were to come from the CPU tier; {num_here} did"
        return None

    def _land(self, mine: OpenReceive) -> None:
        if mine.ids:
            self._insert(mine)
        if mine.units is not None:
            assert mine.pin is not None, "a checkpoint behind no blocks"
            mine.checkpoint, is_taken = self._ends.publish(mine.pin, mine.first + len(mine.ids), mine.units)
            mine.units = None if is_taken else mine.units

    def _insert(self, mine: OpenReceive) -> None:
        tree, pin = self._tree, mine.pin
        at = (pin.run, pin.end) if pin is not None else (tree.root(mine.namespace), 0)
        tree.pools[0].hand_over(mine.ids, TASK, REQUEST)
        try:
            done = insert(tree, at, mine.keys, mine.first, mine.ids)
        except BaseException:
            tree.pools[0].free(mine.ids, REQUEST)
            raise
        tree.pools[0].free(done.duplicates, REQUEST)  # computed here meanwhile
        tree.pools[0].free_each(islice(mine.ids, done.num_blocks, None), REQUEST)
        mine.pin = tree.move_pin(pin, done.run, done.end)
        self._copy_down.committed(done.run, done.num_blocks)

    def forget(self, request_id: str) -> Receive | None:
        """Its request is matched, or wants it no more: what has landed may be evicted, what is on its way need not
        come. Returns it where it has not ended."""
        mine = self._by_request.pop(request_id, None)
        if mine is None:
            return None
        mine.is_wanted = False
        if mine.task_id in self._by_task:
            self._end(mine)
            return mine.receive
        self._let_go(mine)
        return None

    def failing(self, task_id: int) -> None:
        """One rank has failed it: what the others bring is worth nothing."""
        if (mine := self._by_task.get(task_id)) is not None:
            self._end(mine)

    def _end(self, mine: OpenReceive) -> None:
        number = mine.receive.number
        detail = EndReceiveDetail(receive_number=number)
        self._put(TaskKind.END_RECEIVE, array("i"), detail, {}, mine)  # nobody waits for its end

    def cancel_all(self) -> None:
        """Nothing is to be moved now. What has landed stays until it is matched."""
        for request_id, mine in list(self._by_request.items()):
            if mine.task_id in self._by_task:
                self.forget(request_id)

    def _on_namespace_forgotten(self, forgotten: NamespaceForgotten) -> None:
        """What is on its way joins nothing, and nobody else may see it; what has landed is held for nobody."""
        for mine in {*self._by_task.values(), *self._by_request.values()}:
            if mine.namespace == forgotten.namespace:
                mine.generation = FORGOTTEN
                if mine.task_id not in self._by_task:
                    self.forget(mine.receive.request_id)

    def _let_go(self, mine: OpenReceive) -> None:
        if self._by_request.get(mine.receive.request_id) is mine:
            del self._by_request[mine.receive.request_id]
        checkpoint, mine.checkpoint = mine.checkpoint, None
        self._ends.unpin(checkpoint)  # first: its path is pinned as long as it is
        pin, mine.pin = mine.pin, None
        if pin is not None:
            self._books.let_go(pin)

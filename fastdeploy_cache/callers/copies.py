"""Copies from and into blocks that their caller owns, and loads into the tree."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence

from fastdeploy_cache.books.arrivals import insert_copies
from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_pool import TASK
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Copied
from fastdeploy_cache.books.path import Part, coming_and_cold, coming_ids, cpu_ids, gpu_ids, num_gpu
from fastdeploy_cache.books.run import CPU, GPU, Pin, Run
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.callers.anchored_copies import AnchoredCopies, Sequenced, free_left
from fastdeploy_cache.callers.finder import Finder
from fastdeploy_cache.callers.own_blocks import OwnIds, Reading, as_first, as_ids, cargo_of
from fastdeploy_cache.callers.own_units import CallerUnits
from fastdeploy_cache.callers.transfers import CallerLoad, CallerTransfer
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.ipc.clock import seconds_to_wait
from fastdeploy_cache.movement.cargo import CallersBlocks
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.request import Request
from fastdeploy_cache.transfer_manager.task import TaskKind


class BlockCopies:
    """Moves bytes for callers: `cache.blocks.copies`. Any thread; each verb is a turn of its own.

    From the call until it has ended, what is copied into a caller's block belongs to the task. Blocks may be given back
    at any time: those that are copied from or into are free once that has ended.
    """

    def __init__(
        self,
        config: CacheConfig,
        books: Books,
        movement: Movement,
        finder: Finder,
        *,
        own: tuple[OwnIds, OwnIds],
        units: CallerUnits,
    ) -> None:
        """`own`: callers' blocks, by tier."""
        self._config, self._books, self._tree = config, books, books.tree
        self._mover, self._loader = movement.mover, movement.loader
        self._own, self._units, self._finder = own, units, finder
        self._anchored: AnchoredCopies | None = None
        if books.rows is not None:
            self._anchored = AnchoredCopies(books, movement.mover, own[GPU], units, config.checkpoints_per_path)
        self.ahead: dict[Transfer, int] = {}  # how often callers use its destinations before it has ended

    def copy(
        self,
        source_ids: Sequence[int],
        destination_ids: Sequence[int],
        *,
        kind: TaskKind = TaskKind.COPY,
        num_tokens: int | None = None,
        timeout_seconds: float | None = None,
    ) -> bool:
        """Copy blocks on every rank, both lists the caller's: within the GPU (of each the first `num_tokens` tokens),
        or with `kind` from the CPU tier (`SWAP_IN`) or to it (`SWAP_OUT`).

        Waits; False where a rank failed or the time was over: what the destinations hold is unknown then.

        Raises:
            BlockOwnerError: a block is not the caller's; nothing was copied.
        """
        seconds = seconds_to_wait("copy", timeout_seconds, self._config.transfer.task_timeout_seconds)
        sources, destinations = as_ids(source_ids), as_ids(destination_ids)
        if len(sources) != len(destinations):
            raise RequestError(f"copy of {len(sources)} blocks into {len(destinations)}; give as many")
        if not kind.is_swap:
            raise RequestError(f"copy of kind {kind!r}; use TaskKind.COPY, SWAP_IN or SWAP_OUT")
        if num_tokens is not None and not 1 <= operator.index(num_tokens) <= self._config.block_size:
            raise RequestError(f"copy of {num_tokens} tokens of each block; a block has {self._config.block_size}")
        with self._books:
            self._books.check_uniform("blocks.copies.copy")
            source_tier = CPU if kind is TaskKind.SWAP_IN else GPU
            source, tier = self._books.pools[source_tier], CPU if kind is TaskKind.SWAP_OUT else GPU
            self._own[source_tier].check(sources)
            self._own[tier].check(destinations)
            if not sources or not self._mover.can(kind):
                return not sources
            reading, oldest = Reading((source, sources)), self._own[source_tier].oldest(sources)
            cargo = cargo_of(self._books, [(self._own[tier], destinations)], reading, oldest)
            transfer = self._send(kind, sources, cargo, num_tokens)
        return CallerTransfer((transfer,), len(sources), self._books.clock).wait(seconds)

    def swap_in(
        self,
        request: Request,
        block_ids: Sequence[int],
        *,
        first_block: int = 0,
        units: Sequence[Sequence[int]] | None = None,
    ) -> CallerTransfer:
        """Copy the request's blocks from `first_block` on from the CPU tier into the caller's `block_ids`.

        As many leading ones as are there; none where the ranks cannot take a task now. What has not succeeded has
        changed nothing but the destinations' bytes.

        Of a hybrid model all or none, together with the checkpoint behind the last of them. Its `units` are those of
        `blocks.units.positions`, by row; -1 stands for one that is not to be filled. Where the CPU tier has not all of
        that, or no task can start, `num_checkpoint_blocks` of the answer is None.

        Raises:
            BlockOwnerError: a block or a unit is not the caller's, or is given twice; nothing was changed.
            RequestError: units of other rows or of another boundary; nothing was changed.
        """
        ids, first_block = as_ids(block_ids), as_first(first_block)
        with self._books:
            self._own[GPU].check(ids)
            path, num_found = self._finder.find(request, first_block + len(ids))
            sources = cpu_ids(path, first_block, num_found)
            if self._anchored is not None:
                path = path if num_found == first_block + len(ids) else []
                return self._anchored.swap_in(path, first_block, sources, ids, self._given(units))
            self._refuse(units)
            if not sources or not self._mover.can(TaskKind.SWAP_IN):
                return CallerTransfer((), 0, self._books.clock)
            destinations, pins = ids[: len(sources)], [self._pin_at(path, first_block + len(sources))]
            # The pin keeps the blocks, though not each of their copies: one that is spare, as its block is on the GPU,
            # would be freed and filled with another block under the task.
            reading = Reading((self._books.pools[CPU], sources))
            cargo = cargo_of(self._books, [(self._own[GPU], destinations)], reading, self._tree.generation, pins=pins)
            transfer = self._send(TaskKind.SWAP_IN, sources, cargo)
            self._tree.policy.touch(path)
        return CallerTransfer((transfer,), len(sources), self._books.clock)

    def swap_out(
        self,
        request: Request,
        block_ids: Sequence[int],
        *,
        first_block: int = 0,
        generation: int | None = None,
        units: Sequence[Sequence[int]] | None = None,
    ) -> CallerTransfer:
        """Copy the caller's `block_ids`, which hold the request's blocks from `first_block` on, to the CPU tier, where
        they are found from then on; of these only what is not cached, and as much as there is room for.

        The caller must not write them until it has ended. None where they are of an older generation, as in `insert`.

        Of a hybrid model all or none, together with the checkpoint behind the last of them, of which the caller's
        `units` hold what `blocks.units.positions` says, by row. Where nothing was begun, as that is there, or not all
        of it has room, `num_checkpoint_blocks` of the answer is None.

        Raises:
            BlockOwnerError: a block or a unit is not the caller's, or is given twice; nothing was changed.
            RequestError: more blocks than the tokens fill; units of other rows or of another boundary; or the blocks
                before `first_block` of a hybrid model are not cached. Nothing was changed.
        """
        ids, keys, first_block = as_ids(block_ids), self._finder.keys(request), as_first(first_block)
        if (num_blocks := first_block + len(ids)) > request.num_tokens // self._config.block_size:
            raise RequestError(f"swap_out of {num_blocks} blocks for {request.num_tokens} tokens; only full ones count")
        with self._books:
            self._own[GPU].check(ids)
            path, num_found = self._tree.find(request.namespace, keys, num_blocks)
            enabled = self._config.enable_prefix_caching and GPU not in self._books.asleep
            enabled = enabled and self._own[GPU].are_current(ids, generation)
            sequence = Sequenced(request.namespace, keys, path, num_found)
            if self._anchored is not None:
                given = self._given(units)
                return self._anchored.swap_out(sequence, first_block, ids, given, generation, enabled=enabled)
            self._refuse(units)
            if num_found < first_block or not enabled or not self._mover.can(TaskKind.SWAP_OUT):
                return CallerTransfer((), 0, self._books.clock)
            return self._copy_down(sequence, ids[num_found - first_block :])

    def load(self, request: Request, num_blocks: int | None = None, *, ahead: bool = False) -> CallerLoad | None:
        """Bring the request's cached prefix, at most `num_blocks` blocks, from the CPU tier to the GPU, where it stays
        cached: all of it or nothing. None where it does not fit, or no task can start now. Pin it first, to keep it.

        With `ahead` the caller may use the blocks before they have come, layer by layer (`LayerProgress.wait_layer`);
        they are given to nobody else until `end_load`, and what was computed on them counts if that returns True.
        """
        with self._books:
            self._books.check_uniform("blocks.copies.load")
            path, num_found = self._finder.find(request, num_blocks)
            _, parts = coming_and_cold(path, num_found)
            if sum(n for _, _, n in parts) and not self._start_load(path, num_found, parts):
                return None
            ids, transfers = coming_ids(path, num_gpu(path, num_found), num_found)
            listed = ids.tolist()  # first: it may need memory, as may the next
            pinned = self._books.pin_prefix(path, num_found) if ahead else None
            for transfer in transfers if ahead else ():
                self._mover.use_ahead(transfer)
                self.ahead[transfer] = self.ahead.get(transfer, 0) + 1
            return CallerLoad(transfers, listed, pinned, self._tree.generation, self._books.clock)

    def end_load(self, load: CallerLoad, timeout_seconds: float = 0.0) -> bool:
        """The caller uses the blocks of an `ahead` load no more, or only as cached ones; whether all of it has come.

        Waits for it up to `timeout_seconds`. Once for each load.
        """
        load.wait(timeout_seconds)
        with self._books:
            came = load.succeeded and self._tree.generations.last_gpu_loss <= load.generation
            pinned = load.pinned
            if pinned is not None:  # others may have computed the same meanwhile: then theirs are the cached ones
                path = pinned.pin.run.path() if pinned.pin is not None else []
                ids = gpu_ids(path, pinned.num_blocks if path else 0).tolist()  # first: it may need memory
                came = came and ids[len(ids) - len(load.block_ids) :] == load.block_ids
            transfers = load.end()
            for transfer in transfers:
                self.ahead[transfer] -= 1
                if not self.ahead[transfer]:
                    del self.ahead[transfer]
                self._mover.end_ahead(transfer)
            if pinned is not None:
                self._books.unpin_prefix(pinned)
        return came

    # -- under the lock

    @property
    def kept_ids(self) -> list[int]:
        """CPU blocks of copies of which another part is on its way."""
        return self._anchored.kept_ids if self._anchored is not None else []

    @staticmethod
    def _given(units: Sequence[Sequence[int]] | None) -> Sequence[Sequence[int]]:
        if units is None:
            raise RequestError("no units are given, and this model has several rows; see `blocks.units.positions`")
        return units

    @staticmethod
    def _refuse(units: Sequence[Sequence[int]] | None) -> None:
        if units is not None:
            raise RequestError("units are given, and all layers of this model keep everything; leave them out")

    def _send(
        self, kind: TaskKind, sources: array[int], cargo: CallersBlocks, num_tokens: int | None = None
    ) -> Transfer:
        """Where it cannot be sent, the blocks go home as after a copy that has failed."""
        try:
            return self._mover.copy_for_caller(kind, sources, cargo, num_tokens)
        except BaseException:
            cargo.give(False)
            raise

    def _copy_down(self, sequence: Sequenced, sources: array[int]) -> CallerTransfer:
        """Start copying the blocks behind what was found, as many as there is room for."""
        namespace, keys, path, num_found = sequence
        pins = [self._pin_at(path, num_found)] if num_found else []
        destinations = self._room_below(len(sources), pins)
        if not destinations:
            return CallerTransfer((), 0, self._books.clock)
        del sources[len(destinations) :]
        try:
            reading = Reading((self._books.pools[GPU], sources))
        except BaseException:
            self._books.pools[CPU].free(destinations, TASK)
            raise
        began = self._tree.generation

        def end(succeeded: bool) -> None:
            is_valid = succeeded and began == self._tree.generation
            self._end_copies(namespace, keys, num_found, destinations if is_valid else array("i"))
            free_left(self._books.pools[CPU], destinations)
            reading.end()

        transfer = self._send(TaskKind.SWAP_OUT, sources, CallersBlocks(self._books, destinations, pins, end))
        return CallerTransfer((transfer,), len(sources), self._books.clock)

    def _start_load(self, path: list[Run], num_found: int, parts: list[Part]) -> bool:
        pin = self._tree.move_pin(None, *self._tree.place(path, num_found))  # or the eviction might take its beginning
        try:
            return self._loader.start(parts, sum(n for _, _, n in parts))
        finally:
            self._tree.move_pin(pin, None, 0)

    def _pin_at(self, path: list[Run], num_blocks: int) -> Pin:
        run, end = self._tree.place(path, num_blocks)
        assert run is not None
        return Pin(run, end)

    def _room_below(self, num_blocks: int, pins: list[Pin]) -> array[int]:
        """Up to so many CPU blocks, the task's; never at the cost of what is pinned here."""
        for pin in pins:
            self._tree.pin(pin)
        try:
            return self._books.take(min(num_blocks, self._tree.residency.num_available(CPU)), CPU, TASK)
        finally:
            for pin in pins:
                self._tree.unpin(pin)

    def _end_copies(self, namespace: str, keys: BlockKeys, first: int, ids: array[int]) -> None:
        """Copies have come to the CPU tier: they join the tree and may go on to storage."""
        try:
            run = insert_copies(self._tree, namespace, keys, first, ids, stored=False) if ids else None
            if run is not None:
                num_joined, (path, _) = run.num_blocks, self._tree.find(namespace, keys, first + len(ids))
                self._books.note(Copied(Pin(path[-1], path[-1].cpu_end), num_blocks=num_joined))  # it joined its parent
        except MemoryError:  # what has not joined goes home
            self._tree.mishaps.note("landing")

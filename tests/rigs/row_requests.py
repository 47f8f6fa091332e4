"""Requests on a bench of rows: what an engine does, by the books alone."""

from __future__ import annotations

from array import array

from fastdeploy_cache.books.block_pool import REQUEST, TASK
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.growing import grow, insert
from fastdeploy_cache.books.leaves.policy import Asked
from fastdeploy_cache.books.path import coming_and_cold, gpu_ids
from fastdeploy_cache.books.run import GPU, Run
from tests.rigs.hybrid_models import read_blocks
from tests.rigs.row_bench import SIZE, Going, Load, RowBench


class RowRequests:
    """Matches, computes, publishes and releases."""

    def __init__(self, bench: RowBench) -> None:
        self.bench = bench

    def begin(self) -> None:
        """Match: go on at the deepest checkpoint on the GPU, or load what lies behind that."""
        request = self.bench.prompt()
        path, deepest, on_gpu = self.bench.ask(request)
        going = Going(request, self.bench.keys_of(request), request.keys(SIZE))
        going.tables, going.own = [{} for _ in self.bench.rows], [set() for _ in self.bench.rows]
        self.bench.going.append(going)
        chosen = deepest if deepest is not None and self.bench.random.random() < 0.7 else on_gpu
        if chosen is None:
            return
        going.pin = self.bench.tree.move_pin(None, *self.bench.tree.place(path, chosen.boundary))
        for checkpoint in {id(each): each for each in (chosen, on_gpu) if each is not None}.values():
            self._keep(going, checkpoint)
        going.target, going.fallback = chosen, on_gpu
        if chosen is not on_gpu and not self._load(going, path, chosen):
            chosen = on_gpu
            going.target = on_gpu
        if not going.loads:
            self.settle(going)

    def _keep(self, going: Going, checkpoint: Checkpoint) -> None:
        self.bench.row_books.checkpoints.pin(checkpoint)
        going.anchors.append(checkpoint)

    def _load(self, going: Going, path: list[Run], chosen: Checkpoint) -> bool:
        """Start to load blocks and units, in tasks of their own: both or neither."""
        num_coming, parts = coming_and_cold(path, chosen.boundary)
        num_cold, counts = sum(n for _, _, n in parts), self.bench.row_books.checkpoints.sizes.counts(chosen.boundary)
        has_units = chosen.units is not None or any(
            load.checkpoint is chosen and load.units for load in self.bench.tasks
        )
        if num_coming or (has_units and chosen.units is None):
            return False
        if num_cold > self.bench.books.residency.num_available(GPU) or not (has_units or self.bench.have(counts)):
            return False
        if num_cold:
            transfer = self.bench.transfer(GPU)
            ids = self.bench.books.take(num_cold, GPU, TASK)
            self.bench.fill(transfer, parts, ids)
            going.loads.append(Load(transfer))
        if not has_units:
            going.loads.append(self._load_units(chosen, counts))
        self.bench.tasks += going.loads
        self.bench.num_loads += 1
        return True

    def _load_units(self, checkpoint: Checkpoint, counts: tuple[int, ...]) -> Load:
        pin = self.bench.hold(checkpoint)
        units = [self.bench.row_books.take(row, count, TASK) for row, count in enumerate(counts)]
        return Load(checkpoint=checkpoint, pin=pin, units=units)

    def settle(self, going: Going) -> None:
        """The match is fixed at the target if all of it is on the GPU by now, else at the fallback."""
        going.loads = []
        target, fallback = going.target, going.fallback
        path = going.pin.run.path() if going.pin is not None else []
        if target is not fallback and target is not None:
            is_there = target.units is not None and len(gpu_ids(path, target.boundary)) == target.boundary
            if going.is_stale or not is_there:
                target = fallback
        going.target = going.fallback = None
        boundary = target.boundary if target is not None else 0
        if going.pin is not None and not going.is_stale:
            for checkpoint in [each for each in going.anchors if each is not target]:
                self._drop_anchor(going, checkpoint)
            going.pin = self.bench.tree.move_pin(going.pin, *self.bench.tree.place(path, boundary))
        if target is None or going.is_stale:
            return
        going.block_ids = gpu_ids(path, boundary).tolist()
        going.num_committed = boundary
        for row, ids in enumerate(self.bench.row_books.checkpoints.unit_ids(target)):
            first = self.bench.rows[row].first_block(boundary)
            going.tables[row] = dict(zip(range(first, boundary), ids, strict=True))

    def _drop_anchor(self, going: Going, checkpoint: Checkpoint) -> None:
        going.anchors.remove(checkpoint)
        self.bench.row_books.checkpoints.unpin(checkpoint)

    def advance(self, going: Going) -> None:
        """Compute a block: read what is read behind the boundary, write what is new, commit, perhaps publish."""
        m, request = going.num_blocks, going.request
        if m == (request.num_tokens - 1) // SIZE or going.loads or going.is_stale:
            return
        counts = [int(row.kind != "state" or not going.own[n]) for n, row in enumerate(self.bench.rows)]
        if self.bench.books.residency.num_available(GPU) < 1 or not self.bench.have(counts):
            return
        self.read(going)
        (block,) = self.bench.books.take(1, GPU, REQUEST)
        self.bench.memory.tiers[0][block] = ("full", going.keys[m + 1])
        self.bench.oracle.written(GPU, [block])
        going.block_ids.append(block)
        for number, (row, count) in enumerate(zip(self.bench.rows, counts, strict=True)):
            if count:
                (unit,) = self.bench.row_books.take(number, 1, REQUEST)
                going.own[number].add(unit)
            else:
                (unit,) = going.own[number]  # the live state, which is written in place
            if row.kind == "state":
                going.tables[number] = {}
            going.tables[number][m] = unit
            self.bench.units(number)[unit] = (number, going.keys[m + 1])
        if self.bench.random.random() < 0.7:
            self.commit(going)
            if self.bench.random.random() < 0.6:
                self.publish(going)
        self.slide(going)

    def read(self, going: Going) -> None:
        """All that a kernel reads behind the boundary is there, and is what was written: nobody's else."""
        m, keys, memory = going.num_blocks, going.keys, self.bench.memory.tiers[0]
        for position, block in enumerate(going.block_ids):
            assert memory.get(block) == ("full", keys[position + 1]), "a full block was overwritten"
        for number, row in enumerate(self.bench.rows):
            units = self.bench.units(number)
            for position in read_blocks(row.kind, row.reach_tokens, m, SIZE):
                held = units.get(going.tables[number][position])
                assert held == (number, keys[position + 1]), "a unit was overwritten"

    def commit(self, going: Going) -> None:
        """What is computed joins the tree."""
        start, pin = going.num_committed, going.pin
        ids = array("i", going.block_ids[start:])
        if not ids:
            return
        if pin is None or not grow(self.bench.tree, pin, going.block_keys, start, ids):
            at = (pin.run, pin.end) if pin is not None else (self.bench.tree.root(going.request.namespace), 0)
            done = insert(self.bench.tree, at, going.block_keys, start, ids, duplicates=going.duplicates)
            going.pin, going.duplicates = self.bench.tree.move_pin(pin, done.run, done.end), done.duplicates
        going.num_committed = going.num_blocks

    def publish(self, going: Going) -> None:
        """A checkpoint at the boundary; states are copied into a slot for it. Without one there is none."""
        m, pin = going.num_blocks, going.pin
        if pin is None or going.num_committed < m:
            return
        states = [int(row.kind == "state") for row in self.bench.rows]
        if not self.bench.have(states):
            return
        units: list[array[int]] = []
        slots: list[tuple[int, int]] = []
        for number, row in enumerate(self.bench.rows):
            if row.kind == "state":
                (slot,) = self.bench.row_books.take(number, 1, REQUEST)
                self.bench.units(number)[slot] = (number, going.keys[m])
                slots.append((number, slot))
                units.append(array("i", [slot]))
            else:
                table = going.tables[number]
                units.append(array("i", [table[position] for position in range(row.first_block(m), m)]))
        try:
            checkpoint, is_taken = self.bench.row_books.checkpoints.publish(pin.run, pin.end, m, units, REQUEST)
        except MemoryError:
            is_taken = False
        if not is_taken:
            for number, slot in slots:
                self.bench.pools[number].pool.free(array("i", [slot]), REQUEST)
            return
        for number, ids in enumerate(units):
            going.own[number].difference_update(ids)
        going.anchors.append(checkpoint)  # it is pinned for us
        if self.bench.random.random() < 0.3:
            self.bench.row_books.limit_path(checkpoint, self.bench.random.randint(0, 3))
        self.bench.count("published")

    def slide(self, going: Going) -> None:
        """What lies in front of every window is nobody's any more: private units, and pins of checkpoints."""
        m = going.num_blocks
        for number, row in enumerate(self.bench.rows):
            first, table = row.first_block(m), going.tables[number]
            for position in [each for each in table if each < first]:
                unit = table.pop(position)
                if unit in going.own[number]:
                    going.own[number].discard(unit)
                    self.bench.pools[number].pool.free(array("i", [unit]), REQUEST)
        for checkpoint in list(going.anchors):
            if all(row.first_block(m) >= checkpoint.boundary for row in self.bench.rows):
                self._drop_anchor(going, checkpoint)

    def release(self, going: Going) -> None:
        """It is used, or was preempted; what is its own goes home."""
        self.bench.going.remove(going)
        if going.loads:
            self.settle(going)
        private = array("i", going.block_ids[going.num_committed :])
        if private:
            self.bench.books.pools[GPU].free(private, REQUEST)
        if going.duplicates:
            self.bench.books.pools[GPU].free(going.duplicates, REQUEST)
        for pool, own in zip(self.bench.pools, going.own, strict=True):
            pool.pool.free(array("i", own), REQUEST)
        if going.pin is not None and not going.is_stale and going.num_committed:
            path = going.pin.run.path()
            self.bench.books.use(path, going.request, Asked(0, 0))
            for checkpoint in going.anchors:
                self.bench.row_books.checkpoints.use(checkpoint)
        for checkpoint in list(going.anchors):
            self._drop_anchor(going, checkpoint)
        if going.pin is not None:
            self.bench.books.let_go(going.pin)

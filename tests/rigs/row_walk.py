"""Random walks over the books of a hybrid model: requests, copies that end apart, resets, lost memory, short pools."""

from __future__ import annotations

from fastdeploy_cache.books.block_pool import REQUEST, RUN, TASK
from fastdeploy_cache.books.row_invariants import check_rows
from fastdeploy_cache.books.run import CPU, GPU
from fastdeploy_cache.books.tier_loss import drop_cpu, drop_gpu
from fastdeploy_cache.launch.faults.listeners import Listeners
from fastdeploy_cache.policies.eviction import RANKING_POLICIES
from tests.rigs.row_bench import SIZE, RowBench
from tests.rigs.row_copies import RowCopies
from tests.rigs.row_requests import RowRequests


class RowWalk:
    """`step` does something at random, and asks for a prompt."""

    def __init__(self, seed: int, model: str, policy: str, *, scarcity: float = 0.0) -> None:
        """`scarcity`: how often taking units gets no memory."""
        self.bench = RowBench(seed, model, policy, scarcity=scarcity)
        self.requests = RowRequests(self.bench)
        self.copies = RowCopies(self.bench, self.requests.settle)
        self.listener = Listeners(self.bench.tree, self.bench.rows, seed=seed)

    def press(self) -> None:
        """Somebody takes blocks or units, as many as there are at most, and gives them back."""
        draw = self.bench.random
        if draw.random() < 0.7:
            tier = draw.choice([GPU, GPU, GPU, CPU])
            if most := self.bench.books.residency.num_available(tier):
                ids = self.bench.books.take(draw.randint(1, most), tier, REQUEST)
                for block in ids:
                    self.bench.memory.tiers[tier][block] = ("garbage", 0)
                self.bench.oracle.written(tier, ids)
                self.bench.books.pools[tier].free(ids, REQUEST)
            return
        row = draw.randrange(len(self.bench.rows))
        if most := self.bench.pools[row].num_available:
            units = self.bench.row_books.take(row, draw.randint(1, most), REQUEST)
            for unit in units:
                self.bench.units(row)[unit] = ("garbage", 0)
            self.bench.pools[row].pool.free(units, REQUEST)

    def lose(self) -> None:
        """A reset, lost arrays of a rank, or a CPU tier that gives its memory back."""
        kind = self.bench.random.choice(["reset", "gpu", "cpu"])
        self.bench.count(kind)
        if kind == "cpu":
            while self.bench.tasks:
                self.copies.end_task()
            for going in self.bench.going:
                if going.target is not None and going.target.units is None:
                    self.requests.settle(going)
            self.bench.memory.tiers[1].clear()
            drop_cpu(self.bench.books)
            return
        (self.bench.oracle.forget if kind == "reset" else self.bench.oracle.forget_gpu)()
        if kind == "reset":
            self.bench.tree.reset()
        else:
            self.bench.memory.lose_gpu()
            drop_gpu(self.bench.tree)
        for going in self.bench.going:
            going.is_stale = True

    def hold_prefix(self) -> None:
        """A caller or an operator pins a prefix, or takes a pin back."""
        if self.bench.pinned and self.bench.random.random() < 0.6:
            self.bench.books.unpin_prefix(self.bench.pinned.pop(self.bench.random.randrange(len(self.bench.pinned))))
            return
        request = self.bench.prompt()
        path, found = self.bench.tree.find(request.namespace, request.keys(SIZE), request.num_tokens // SIZE)
        if found:
            self.bench.pinned.append(self.bench.books.pin_prefix(path, found))

    def change_policy(self) -> None:
        """Checkpoints are ranked by another policy; a few at a time are told to it."""
        policy = self.bench.row_books.checkpoints.policy
        while policy.move_some():
            pass
        chosen = self.bench.random.choice(list(RANKING_POLICIES.values()))
        self.bench.row_books.follow_with(chosen(self.bench.clock.now))
        for _ in range(self.bench.random.randint(0, 3)):
            policy.move_some()

    def step(self) -> None:
        """One of all that can happen, often a request's."""
        draw = self.bench.random
        self.bench.clock.advance(draw.random())
        what = draw.random()
        if what < 0.2 and len(self.bench.going) < 4:
            self.requests.begin()
        elif what < 0.48 and self.bench.going:
            self.requests.advance(draw.choice(self.bench.going))
        elif what < 0.62 and self.bench.going:
            self.requests.release(draw.choice(self.bench.going))
        elif what < 0.74:
            self.copies.store()
        elif what < 0.87 and self.bench.tasks:
            self.copies.end_task()
        elif what < 0.96:
            self.press()
        elif what < 0.98:
            self.hold_prefix()
        elif what < 0.985:
            self.lose()
        elif what < 0.99:
            self.change_policy()
        else:
            with self.bench.books:
                pass
        self.bench.ask()
        self.listener.check()

    def check(self) -> None:
        """All promises, recounted."""
        pins = [each for going in self.bench.going for each in going.anchors]
        pins += [task.checkpoint for task in self.bench.tasks if task.checkpoint is not None]
        pins += [pinned.checkpoint for pinned in self.bench.pinned if pinned.checkpoint is not None]
        check_rows(self.bench.tree, self.bench.row_books, pins)
        bench = self.bench
        for number, pool in enumerate(bench.distinct):
            rows = [row for row, each in enumerate(bench.pools) if each is pool]
            own = [unit for going in bench.going for row in rows for unit in going.own[row]]
            flying = [unit for task in bench.tasks if task.units for row in rows for unit in task.units[row]]
            assert sorted(own) == pool.pool.ids_of(REQUEST), f"pool {number}: a request's units are noted otherwise"
            assert sorted(flying) == pool.pool.ids_of(TASK), f"pool {number}: a task's units are noted otherwise"
        for tier in (GPU, CPU):
            ids = sorted(block for run in self.bench.tree.runs() for block in run.ids_in(tier))
            assert ids == self.bench.books.pools[tier].ids_of(RUN), "blocks of runs are noted otherwise"
            protected = sum(run.num_in(tier, run.num_held) for run in self.bench.tree.runs())
            assert self.bench.tree.residency.num_protected[tier] == protected, "held blocks miscounted"


def walked(seed: int, model: str, policy: str, num_steps: int, *, scarcity: float = 0.0) -> RowWalk:
    """A walk of so many steps, whose promises are checked now and then."""
    walk = RowWalk(seed, model, policy, scarcity=scarcity)
    for step in range(num_steps):
        walk.step()
        if not step % 25:
            walk.check()
    walk.check()
    return walk

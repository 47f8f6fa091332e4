"""Random copies of a caller's own blocks and units of a hybrid model, among the verbs of requests, step by step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.callers.transfers import CallerTransfer
from fastdeploy_cache.errors import BlockOwnerError, OutOfBlocksError, RequestError
from fastdeploy_cache.transfer_manager.task import LEFT_OUT
from tests.rigs.hybrid_requests import picture
from tests.rigs.row_story import PROMPTS, SIZE, RowStory
from tests.rigs.simulated_client import SimulatedClient

Contents = tuple[int, ...]  # the tokens that a block or a unit stands for
STEPS = {
    "take": 5, "give_back": 2, "swap_out": 8, "swap_in": 8, "pin": 2, "unpin": 2, "use": 1, "refused": 2,
    "serve": 6, "land": 9, "down": 0.3,
}  # fmt: skip


@dataclass
class Filling:
    """A copy on its way, the ids that are lent to it, and what they must hold behind a copy up."""

    transfer: CallerTransfer
    block_ids: list[int]
    units: list[list[int]]
    blocks_hold: list[Contents] = field(default_factory=list)
    units_hold: list[list[Contents]] = field(default_factory=list)


class RowCaller:
    """What an adapter's caller holds, and what each id of it holds."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.client = SimulatedClient(24, 14, 2)
        self.story = RowStory(seed, lambda: 0.0, 14, client=self.client)
        self.cache = self.story.cache
        self.block_ids: list[int] = []
        self.units: list[list[int]] = [[], []]
        self.generations: dict[tuple[str | int, int], int] = {}
        self.filling: list[Filling] = []
        self.pins: list[tuple[PinnedPrefix, Request, int]] = []
        self.num_moved = {"in": 0, "out": 0, "left out": 0, "failed": 0, "stale": 0, "refused": 0, "pinned": 0}

    # -- its own

    def take(self) -> None:
        generation = self.cache.blocks.generation
        for row in range(3):
            number = self.choose.randint(0, 2)
            try:
                if row == 2:
                    new = self.cache.blocks.allocate(number)
                    self.generations |= dict.fromkeys([("block", each) for each in new], generation)
                    self.block_ids += new
                else:
                    new = self.cache.blocks.units.allocate(row, number)
                    self.generations |= dict.fromkeys([(row, each) for each in new], generation)
                    self.units[row] += new
            except OutOfBlocksError:
                continue
        for ids in (self.block_ids, *self.units):
            assert len(set(ids)) == len(ids), "an id was given twice"

    def give_back(self) -> None:
        number = self.choose.randint(0, len(self.block_ids))
        self.cache.blocks.free(self.block_ids[:number])
        del self.block_ids[:number]
        for row, units in enumerate(self.units):
            number = self.choose.randint(0, len(units))
            gone = units[:number]
            self.cache.blocks.units.free(row, gone)
            del units[:number]
            if gone:
                with pytest.raises(BlockOwnerError):
                    self.cache.blocks.units.free(row, [*units, gone[0]])

    def request(self) -> Request:
        tokens = self.choose.choice(PROMPTS)
        return Request(request_id="names tokens", prompt_token_ids=tokens[: self.choose.randint(1, len(tokens))])

    def contents(self, request: Request, position: int) -> Contents:
        """What block `position` of it stands for; of a state, that behind that block."""
        return tuple(request.token_ids(0, (position + 1) * SIZE).tolist())

    # -- copies

    def lend(self, first: int, boundary: int, *, some: bool) -> tuple[list[int], list[list[int]]] | None:
        """Blocks for [first, boundary), and units for a checkpoint there, of which `some` may be left out."""
        wanted = [len(positions) for positions in self.cache.blocks.units.positions(boundary)]
        if len(self.block_ids) < boundary - first or any(len(u) < n for u, n in zip(self.units, wanted, strict=True)):
            return None
        units = [own[:number] for own, number in zip(self.units, wanted, strict=True)]
        if some and self.choose.random() < 0.4:
            units = [[LEFT_OUT if self.choose.random() < 0.4 else unit for unit in each] for each in units]
        return self.block_ids[: boundary - first], units

    def swap_out(self) -> None:
        request, blocks = self.request(), self.cache.blocks
        boundary = request.num_tokens // SIZE
        first = self.choose.randint(0, min(boundary, blocks.lookup(request, touch=False).num_blocks))
        lent = self.lend(first, boundary, some=False)
        if lent is None:
            return
        ids, units = lent
        for block_id, position in zip(ids, range(first, boundary), strict=True):
            self.client.gpu[block_id] = self.contents(request, position)
        for row, (each, positions) in enumerate(zip(units, blocks.units.positions(boundary), strict=True)):
            self.client.units[row].update(
                {unit: self.contents(request, position) for unit, position in zip(each, positions, strict=True)}
            )
        transfer = blocks.copies.swap_out(request, ids, first_block=first, units=units)
        if transfer.num_checkpoint_blocks is None:
            assert not transfer.num_blocks and transfer.succeeded
            return
        names = [("block", each) for each in ids] + [(row, each) for row, of in enumerate(units) for each in of]
        if not all(self.generations[name] == blocks.generation for name in names):  # type: ignore[index]
            raise AssertionError("what may have gone was stored")
        assert transfer.num_checkpoint_blocks == boundary
        self.num_moved["out"] += 1
        self.lent(Filling(transfer, ids, units), may_free=True)

    def swap_in(self) -> None:
        request, blocks = self.request(), self.cache.blocks
        found = blocks.lookup(request, touch=self.choose.random() < 0.5)
        boundary = found.num_checkpoint_blocks or 0
        if self.choose.random() < 0.3:
            boundary = request.num_tokens // SIZE
        first = boundary if self.choose.random() < 0.2 else self.choose.randint(0, boundary)
        lent = self.lend(first, boundary, some=True)
        if lent is None or not boundary:
            return
        ids, units = lent
        before = [[self.client.units[row].get(each) for each in of] for row, of in enumerate(self.units)]
        transfer = blocks.copies.swap_in(request, ids, first_block=first, units=units)
        if transfer.num_checkpoint_blocks is None:
            assert not transfer.num_blocks
            return
        assert transfer.num_checkpoint_blocks == boundary <= found.num_blocks
        positions = blocks.units.positions(boundary)
        num_left_out = sum(unit == LEFT_OUT for each in units for unit in each)
        self.num_moved["in"] += 1
        self.num_moved["left out"] += num_left_out
        filling = Filling(transfer, ids, [[], []], [self.contents(request, i) for i in range(first, boundary)])
        for row, (each, of) in enumerate(zip(units, positions, strict=True)):
            there = [(unit, self.contents(request, i)) for unit, i in zip(each, of, strict=True) if unit != LEFT_OUT]
            filling.units[row] = [unit for unit, _ in there]
            filling.units_hold.append([content for _, content in there])
            assert [self.client.units[row].get(unit) for unit in self.units[row]] == before[row]
        self.lent(filling, may_free=self.choose.random() < 0.3)

    def lent(self, filling: Filling, *, may_free: bool) -> None:
        """They are the copy's until it has ended; some are given back on the way."""
        generation = self.cache.blocks.generation
        self.block_ids = [each for each in self.block_ids if each not in filling.block_ids]
        for row, units in enumerate(filling.units):
            self.units[row] = [each for each in self.units[row] if each not in units]
            if filling.units_hold:
                self.generations |= dict.fromkeys([(row, each) for each in units], generation)
        if filling.units_hold:
            self.generations |= dict.fromkeys([("block", each) for each in filling.block_ids], generation)
        if may_free and self.choose.random() < 0.5:
            self.cache.blocks.free(filling.block_ids)
            for row, units in enumerate(filling.units):
                self.cache.blocks.units.free(row, units)
        else:
            self.filling.append(filling)

    def end_copies(self) -> None:
        done = [each for each in self.filling if each.transfer.done]
        self.filling = [each for each in self.filling if each not in done]
        for each in done:
            if not each.transfer.succeeded:
                self.num_moved["failed"] += 1
            elif each.units_hold:
                assert [self.client.gpu[i] for i in each.block_ids] == each.blocks_hold, "wrong full KV"
                for row, units in enumerate(each.units):
                    assert [self.client.units[row][i] for i in units] == each.units_hold[row], "wrong units"
            self.block_ids += each.block_ids
            for row, units in enumerate(each.units):
                self.units[row] += units

    # -- pins, uses, and what is refused

    def pin(self) -> None:
        request = self.request()
        pinned = self.cache.blocks.pin(request)
        self.pins.append((pinned, request, self.cache.blocks.generation))

    def unpin(self) -> None:
        if self.pins:
            self.cache.blocks.unpin(self.pins.pop(self.choose.randrange(len(self.pins)))[0])

    def check_pins(self) -> None:
        """The boundary that a pin has named can be had as long as it is pinned."""
        for pinned, request, generation in self.pins:
            if generation == self.cache.blocks.generation and pinned.num_checkpoint_blocks is not None:
                found = self.cache.blocks.lookup(request, touch=False).num_checkpoint_blocks
                assert found is not None and found >= pinned.num_checkpoint_blocks, "a pinned checkpoint has gone"
                self.num_moved["pinned"] += 1

    def use(self) -> None:
        request = self.request()
        num_found = self.cache.blocks.lookup(request, touch=False).num_blocks
        assert self.cache.blocks.note_use(request, num_found_blocks=self.choose.randint(0, num_found)) == num_found

    def refused(self) -> None:
        """Units that cannot be those of the boundary: an error, and nothing has changed."""
        request, blocks = self.request(), self.cache.blocks
        boundary = request.num_tokens // SIZE
        found = blocks.lookup(request, touch=False).num_blocks
        lent = self.lend(0, boundary, some=False)
        if lent is None or not boundary or not any(lent[1]):
            return
        ids, units = lent
        row = next(row for row, each in enumerate(units) if each)
        bad: list[list[list[int]]] = [
            units[:1],
            [*units, []],
            [each[1:] if n == row else each for n, each in enumerate(units)],
        ]
        bad.append([[each[0]] * 2 if n == row else each for n, each in enumerate(units)])
        bad.append([[9_999] * len(each) if n == row else each for n, each in enumerate(units)])
        if len(units[1]) > 1:
            bad.append([units[0], [units[1][0]] * len(units[1])])
        before = picture(self.cache)
        for wrong in bad:
            for verb in (blocks.copies.swap_out, blocks.copies.swap_in):
                with pytest.raises((RequestError, BlockOwnerError)):
                    verb(request, ids, units=wrong)
        with pytest.raises((RequestError, BlockOwnerError)):
            blocks.copies.swap_out(request, ids, units=[[LEFT_OUT] * len(each) for each in units])
        with pytest.raises(RequestError):  # more than the tokens fill
            blocks.copies.swap_out(request, ids, first_block=1, units=units)
        if found < boundary:
            with pytest.raises(RequestError):
                blocks.copies.swap_out(request, ids[found + 1 :], first_block=found + 1, units=units)
        assert picture(self.cache) == before
        self.num_moved["refused"] += 1

    # -- others

    def serve(self) -> None:
        self.num_moved["stale"] += self.story.step() == "reset"

    def land(self) -> None:
        for _ in range(self.choose.randint(1, 4)):
            if self.client.tasks:
                if self.choose.random() < 0.4:
                    self.client.tasks.rotate(self.choose.randint(0, 2))  # two lanes
                self.client.land("rank died" if self.choose.random() < 0.1 else None)

    def down(self) -> None:
        self.client.up = self.choose.random() < 0.7

    def step(self) -> None:
        """One of all that can happen; then the books are checked."""
        getattr(self, self.choose.choices(list(STEPS), list(STEPS.values()))[0])()
        self.end_copies()
        self.check_pins()
        self.cache.check_invariants()

    def finish(self) -> None:
        """All is given back, and nothing is left of it."""
        self.client.up = True
        self.client.land_all()
        self.end_copies()
        while self.pins:
            self.unpin()
        self.cache.blocks.free(self.block_ids)
        for row, units in enumerate(self.units):
            self.cache.blocks.units.free(row, units)
        self.cache.check_invariants()
        self.story.finish()

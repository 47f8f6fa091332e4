"""The books of a hybrid model on a bench: simulated memory, requests and tasks, and the oracle beside them."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_pool import BlockPool, Owner
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.checkpoints import RowSizes
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.row_books import RowBooks, usable_checkpoints
from fastdeploy_cache.books.run import Pin, Run
from fastdeploy_cache.books.transfer import Segment, Transfer
from fastdeploy_cache.books.unit_pool import UnitPool
from fastdeploy_cache.policies.eviction import RANKING_POLICIES
from fastdeploy_cache.request import Request
from fastdeploy_cache.transfer_manager.kv.groups import Row
from tests.rigs.manual_clock import ManualClock
from tests.rigs.row_oracle import Key, Keys, Memory, Oracle, blocks_of

SIZE = 4  # tokens of a block
IMAGE = (6, 8, "cat")  # tokens 6 to 13: two boundaries lie inside
MODELS: dict[str, tuple[tuple[Row, ...], bool]] = {  # rows behind the full one, and whether windows share a pool
    "window and state": ((Row("window", 10, SIZE), Row("state", 0, SIZE)), False),
    "two windows": ((Row("window", 6, SIZE), Row("window", 14, SIZE)), True),
    "chunk and window": ((Row("chunk", 12, SIZE), Row("window", 5, SIZE)), False),
    "state": ((Row("state", 0, SIZE),), False),
    "chunk": ((Row("chunk", 8, SIZE),), False),
}


@dataclass(eq=False)
class Going:
    """A request: what it holds of the full row and of each other row."""

    request: Request
    keys: list[Key]
    block_keys: BlockKeys
    pin: Pin | None = None
    anchors: list[Checkpoint] = field(default_factory=list)  # that it pins, once for each
    block_ids: list[int] = field(default_factory=list)
    duplicates: array[int] = field(default_factory=lambda: array("i"))
    num_committed: int = 0
    tables: list[dict[int, int]] = field(default_factory=list)  # by row: units by position
    own: list[set[int]] = field(default_factory=list)  # by row: units of these that are its own
    loads: list[Load] = field(default_factory=list)
    fallback: Checkpoint | None = None
    target: Checkpoint | None = None
    is_stale: bool = False
    is_used: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)


@dataclass(eq=False)
class Load:
    """A task in flight: blocks of runs, or one checkpoint's units or image."""

    transfer: Transfer | None = None
    checkpoint: Checkpoint | None = None
    pin: Pin | None = None
    units: list[array[int]] = field(default_factory=list)
    pages: array[int] | None = None
    is_done: bool = False


def _make_scarce(pool: UnitPool, draw: random.Random, share: float) -> None:
    take = pool.take

    def take_or_fail(units: array[int], giver: Owner) -> None:
        if draw.random() < share:
            raise MemoryError
        take(units, giver)

    pool.take = take_or_fail  # type: ignore[method-assign]


class RowBench:
    """`ask` compares what the tree finds with what the oracle finds."""

    def __init__(self, seed: int, model: str, policy: str, *, scarcity: float = 0.0) -> None:
        """`scarcity`: how often taking units gets no memory."""
        self.random = draw = random.Random(seed)
        self.rows, share = MODELS[model]
        self.clock = clock = ManualClock()
        pools = (BlockPool("GPU", draw.choice([10, 16, 30])), BlockPool("CPU", draw.choice([0, 12, 40, 80])))
        self.tree = PrefixTree(SIZE, pools, RANKING_POLICIES[policy](clock.now), 1 << 16, clock)
        self.books = Books(self.tree, clock)
        least = [2 * row.num_request_units for row in self.rows]
        if share:
            self.pools = [UnitPool("GPU rows", sum(least) + draw.choice([0, 8]))] * len(self.rows)
        else:
            named = zip(self.rows, least, strict=True)
            self.pools = [UnitPool(f"GPU {row}", number + draw.choice([0, 3, 12])) for row, number in named]
        sizes = RowSizes(self.rows, [100 * (number + 1) for number in range(len(self.rows))], 150)
        ranking = RANKING_POLICIES[policy](clock.now)
        self.row_books = self.books.rows = RowBooks(self.tree, sizes, self.pools, ranking, clock)
        if draw.random() < 0.6:
            self._go_in_pieces()
        if scarcity:
            for pool in {id(pool): pool for pool in self.pools}.values():
                _make_scarce(pool, draw, scarcity)
        self.distinct = list({id(pool): pool for pool in self.pools}.values())
        self.memory, self.names = Memory(len(self.distinct)), Keys()
        self.oracle = Oracle(self.tree, self.row_books, self.memory, self.names)
        self.going: list[Going] = []
        self.tasks: list[Load] = []
        self.pinned: list[PinnedPrefix] = []
        self.num_cases = self.num_hits = self.num_loads = self.num_requests = self.next_task = 0
        self.counts: dict[str, int] = {}

    def _go_in_pieces(self) -> None:
        """Resets and trimming remove a run or two at a time, as they do of large trees."""
        draw, clear, trim = self.random, self.tree.graves.clear, self.row_books.trimmer.trim
        self.tree.graves.clear = lambda num_runs: clear(min(num_runs, draw.randint(0, 2)))  # type: ignore[method-assign]
        self.tree.residency.trim = lambda run, why: trim(run, why, draw.randint(0, 2))

    def prompt(self, *, most: int = 12) -> Request:
        """Blocks of two letters, so that prompts share prefixes and part everywhere."""
        draw = self.random
        if self.going and draw.random() < 0.5:
            tokens = draw.choice(self.going).request.token_ids(0, most * SIZE)
            blocks = [int(token) for token in tokens[::SIZE] if token < 9][: draw.randint(1, most)]
        else:
            blocks = []
        while len(blocks) < most and draw.random() < 0.8:
            blocks.append(draw.randint(1, 2))
        tokens = [int(letter) for letter in blocks for _ in range(SIZE)] + [9]
        self.num_requests += 1
        has_image = draw.random() < 0.3 and len(tokens) > IMAGE[0] + IMAGE[1]
        return Request(
            request_id=str(self.num_requests),
            prompt_token_ids=tokens,
            namespace=draw.choice(["", "", "tenant"]),
            images=[IMAGE] if has_image else [],
            match_inside_images=draw.random() < 0.5,
        )

    def keys_of(self, request: Request) -> list[Key]:
        keys, number = request.keys(SIZE), request.num_tokens // SIZE
        return self.names.of(request.namespace, [keys.key(block, 4 * SIZE) for block in range(number)])

    def ask(self, request: Request | None = None) -> tuple[list[Run], Checkpoint | None, Checkpoint | None]:
        """Find a prompt's checkpoints, and compare them with the oracle's."""
        request = self.prompt() if request is None else request
        keys, most = self.keys_of(request), (request.num_tokens - 1) // SIZE
        path, found = self.tree.find(request.namespace, request.keys(SIZE), most)
        deepest, on_gpu = usable_checkpoints(path, found, request, SIZE)
        ours = (deepest.boundary if deepest else 0, on_gpu.boundary if on_gpu else 0)
        theirs = self.oracle.deepest(request, keys, most)
        assert ours == theirs, f"the tree finds boundaries {ours}, memory has {theirs}"
        self.num_cases += 1
        self.num_hits += ours[0] > 0
        return path, deepest, on_gpu

    def transfer(self, tier: object) -> Transfer:
        self.next_task += 1
        return Transfer(self.next_task, tier, self.books.clock.event())  # type: ignore[arg-type]

    def fill(self, transfer: Transfer, parts: list[tuple[Run, int, int]], ids: array[int]) -> None:
        start = 0
        for run, first, number in parts:
            segment = Segment(transfer, run, first, ids[start : start + number])
            transfer.segments.append(segment)
            self.tree.pin(segment)
            start += number

    def hold(self, checkpoint: Checkpoint) -> Pin:
        pin = Pin(checkpoint.run, checkpoint.end)
        self.tree.pin(pin)
        self.row_books.checkpoints.pin(checkpoint)
        return pin

    def let_go(self, checkpoint: Checkpoint, pin: Pin) -> None:
        self.row_books.checkpoints.unpin(checkpoint)
        self.tree.unpin(pin)

    def have(self, counts: tuple[int, ...] | list[int]) -> bool:
        """Whether so many units of each row can be had."""
        needed: dict[int, int] = {}
        for pool, count in zip(self.pools, counts, strict=True):
            needed[id(pool)] = needed.get(id(pool), 0) + count
        return all(needed[id(pool)] <= pool.num_available for pool in self.pools)

    def units(self, row: int) -> dict[int, object]:
        return self.memory.units[self.distinct.index(self.pools[row])]

    def keys_to(self, checkpoint: Checkpoint) -> list[Key]:
        path = checkpoint.run.path()
        roots = [*self.tree.roots.items(), *(("gone", root) for root in self.tree.graves.all_roots())]
        namespace = next((name for name, root in roots if root is path[0].parent), "gone")
        return self.names.of(namespace, blocks_of(path, 4 * SIZE))

    def key_of(self, checkpoint: Checkpoint) -> Key:
        return self.keys_to(checkpoint)[checkpoint.boundary]

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

"""An engine of a hybrid model that writes into each unit which tokens it stands for, and reads what it is shown."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.requests.tables import RowBlocks, RowTable
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask
from tests.rigs.hybrid_requests import BOTH
from tests.rigs.simulated_client import SimulatedClient

SIZE = 4
PROMPTS = [[letter] * (4 * length) for letter in (1, 2) for length in (2, 3, 5)] + [[1] * 8 + [2] * 11, [1] * 6]


@dataclasses.dataclass(eq=False)
class Served:
    """One request as the engine knows it."""

    request: Request
    block_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    tables: list[dict[int, int]] = dataclasses.field(default_factory=list)  # by row: position to unit
    slot: int = -1  # that it writes
    read_slot: int = -1  # in which the state behind what is computed is


class RowStory:
    """Steps of such an engine, the same each time. A verb that raises `MemoryError` has changed nothing."""

    def __init__(
        self,
        seed: int,
        clock: Callable[[], float],
        num_cpu_blocks: int = 0,
        *,
        state_copy: bool = False,
        client: SimulatedClient | None = None,
    ) -> None:
        """`state_copy`: its kernels write a state where they read it. `client`: has the memory, and is late."""
        units = (3 + 2 * state_copy, 8) if num_cpu_blocks else (8, 14)
        config = CacheConfig(
            block_size=SIZE, num_gpu_blocks=24, layout=BOTH, transfer_client="inline", num_gpu_units=units,
            checkpoint_every_tokens=8, checkpoints_per_path=2, num_cpu_blocks=num_cpu_blocks,
            cpu_write_policy="write_through", state_copy=state_copy,
        )  # fmt: skip
        self.cache = PrefixCacheManager(config, clock=clock, client=client)
        self._pages: dict[int, list[list[object]]] = {}  # by its first page, what an image holds
        self.num_loaded = self.num_copied = 0
        self._client = client
        if client is None:
            self._follow_images()
        layout = config.rank_layout()
        assert layout is not None
        self._rows, self._choose = layout.rows[1:], random.Random(seed)
        # what each unit holds
        self._memory: list[dict[int, object]] = [{} for _ in self._rows] if client is None else client.units
        self._going: list[Served] = []
        self._num_made = 0

    def _follow_images(self) -> None:
        """What units stand for moves with their bytes."""
        client: Any = self.cache._movement.client
        submit = client.submit

        def moved(task: TransferTask) -> None:
            if task.kind is TaskKind.SWAP_OUT and task.units:
                held = zip(self._memory, task.units, strict=True)
                self._pages[int(task.destination_ids[0])] = [[row.get(int(unit)) for unit in ids] for row, ids in held]
            if task.kind is TaskKind.SWAP_IN and task.units:
                self.num_loaded += 1
                image = self._pages[int(task.source_ids[0])]
                for row, ids, contents in zip(self._memory, task.units, image, strict=True):
                    row.update({int(unit): each for unit, each in zip(ids, contents, strict=True) if each is not None})
            if task.kind is TaskKind.COPY and task.row:
                self.num_copied += 1
                self._memory[task.row - 1][int(task.destination_ids[0])] = self._memory[task.row - 1][
                    int(task.source_ids[0])
                ]
            submit(task)

        client.submit = moved

    def step(self) -> str:
        """The name of what it does; it may raise on the way."""
        names = ("begin", "compute", "compute", "compute", "decode", "decode", "end", "preempt", "look", "reset")
        self.doing = self._choose.choices(names, (4, 4, 4, 4, 4, 4, 3, 1, 1, 0.2))[0]
        getattr(self, f"_{self.doing}")()
        self.check()
        return self.doing

    def check(self) -> None:
        """The books add up, and all that somebody is going to read is there."""
        self.cache.check_invariants()
        for served in self._going:
            self._read(served)

    def finish(self) -> None:
        """All requests go, and the cache is closed."""
        while self._going:
            self.cache.release(self._going.pop().request)
        self.check()
        self.cache.close()

    # -- verbs

    def _begin(self) -> None:
        self._num_made += 1
        prompt = self._choose.choice(PROMPTS)
        self._start(Request(request_id=f"r{self._num_made}", prompt_token_ids=prompt))

    def _start(self, request: Request) -> None:
        match = self.cache.match(request)
        try:
            for _ in range(2):  # a load, and the copy of what it has brought
                if match.num_coming_tokens and self._choose.random() < 0.9:  # else it goes on with what was there
                    match = match.poll()
        except BaseException:
            self.cache.release(request)
            raise
        served = Served(request, list(match.block_ids), match.num_tokens, [{} for _ in self._rows])
        self._note(served, match.tables)
        served.read_slot = match.tables[0].block_ids[0] if match.num_tokens else -1
        if self.cache.config.state_copy:
            served.slot = served.read_slot
        self._going.append(served)
        self._read(served)
        self._allocate(served, -(-request.num_tokens // SIZE) - len(served.block_ids))

    def _allocate(self, served: Served, num_blocks: int) -> None:
        try:
            new = self.cache.rows.allocate(served.request, num_blocks)
        except BaseException as error:
            self._end(served)
            if not isinstance(error, OutOfBlocksError):
                raise
            return
        self._got(served, new)

    def _got(self, served: Served, new: RowBlocks) -> None:
        served.block_ids += new.block_ids
        self._note(served, new.tables)
        if new.tables and new.tables[0].block_ids:
            (served.slot,) = new.tables[0].block_ids

    def _note(self, served: Served, tables: tuple[RowTable, ...]) -> None:
        for table, said in zip(served.tables, tables, strict=False):
            table.update({said.first_block + place: unit for place, unit in enumerate(said.block_ids)})

    def _compute(self) -> None:
        """A piece of a prompt, with a snapshot where a block ends, half the time."""
        if served := self._any(lambda each: each.num_computed < each.request.num_tokens):
            self._compute_to(served, self._choose.randint(served.num_computed + 1, served.request.num_tokens))
            self.cache.commit(served.request, served.num_computed)

    def _compute_to(self, served: Served, num_tokens: int) -> None:
        self._read(served)
        tokens = served.request.token_ids(0, num_tokens).tolist()
        for position in range(served.num_computed // SIZE, -(-num_tokens // SIZE)):
            content = tuple(tokens[: (position + 1) * SIZE])
            if self._client is not None:
                self._client.gpu[served.block_ids[position]] = content
            self._memory[1][served.tables[1][position]] = content
        self._memory[0][served.slot] = tuple(tokens)
        served.num_computed, served.read_slot = num_tokens, served.slot
        if not num_tokens % SIZE and self._choose.random() < 0.6:
            fresh = self.cache.rows.snapshot(served.request, num_tokens, [served.slot])
            if fresh is not None:
                (served.slot,) = fresh

    def _decode(self) -> None:
        """One token more by `rows.step`; the last one was computed before."""
        served = self._any(lambda each: each.num_computed == each.request.num_tokens)
        if served is None:
            return
        num_computed = served.num_computed
        (new,) = self.cache.rows.step([(served.request, [self._choose.randint(1, 2)], num_computed)])
        if isinstance(new, RowBlocks):
            self._got(served, new)
            self._compute_to(served, num_computed + 1)
            self.cache.commit(served.request, served.num_computed)
        elif isinstance(new, MemoryError):
            raise new

    def _end(self, served: Served | None = None) -> None:
        served = served or self._any(lambda _: True)
        if served is not None:
            self._going.remove(served)
            self.cache.release(served.request)

    def _preempt(self) -> None:
        """It goes, and comes back at once."""
        if served := self._any(lambda _: True):
            self._end(served)
            self._start(served.request)

    def _look(self) -> None:
        prompt = self._choose.choice(PROMPTS)
        self.cache.prefetch(Request(request_id="look", prompt_token_ids=prompt))

    def _reset(self) -> None:
        self.cache.reset()

    # -- reading

    def _any(self, fits: Callable[[Served], bool]) -> Served | None:
        fitting = [each for each in self._going if fits(each)]
        return self._choose.choice(fitting) if fitting else None

    def _read(self, served: Served) -> None:
        """What the next token needs: the state behind all before it, and the window in front of it."""
        tokens, num_tokens = tuple(served.request.token_ids(0, served.num_computed).tolist()), served.num_computed
        if num_tokens:
            assert self._memory[0][served.read_slot] == tokens, f"{served.request!r} reads another state"
        for position in range(self._rows[1].first_block(num_tokens // SIZE), -(-num_tokens // SIZE)):
            end = (position + 1) * SIZE
            content = self._memory[1][served.tables[1][position]]
            assert isinstance(content, tuple), f"{served.request!r} reads {content} in block {position}"
            assert content[:num_tokens] == tokens[:end], f"{served.request!r} reads another block {position}"
        for position in range(num_tokens // SIZE if self._client is not None else 0):
            content = self._client.gpu[served.block_ids[position]]  # type: ignore[union-attr]
            assert content == tokens[: (position + 1) * SIZE], f"{served.request!r} reads other full KV"

"""A hybrid model in the simulator: its rows at the scale of a trace, and how a request is served."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from fastdeploy_cache import CacheConfig, KVGroup, KVLayout, Match, PrefixCacheManager, Request, StatePart
from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout

_PAGE_BYTES = 1024  # that stand for a block of the full row: what a unit has more or less is kept to a thousandth
_PIECE_TOKENS = 4096  # of a prompt that is computed at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridModel:
    """A model's layout, of one rank, whose blocks are the trace's."""

    layout: RankLayout
    block_size: int
    config: CacheConfig
    grows: bool

    @classmethod
    def of(cls, config: CacheConfig, block_size: int, *, grows: bool = False) -> HybridModel | None:
        """That of a configuration; None where all its layers keep everything.

        `grows`: its `num_gpu_units` are those of its `num_gpu_blocks`, and in a larger pool there are more of them.

        Raises:
            LaunchError: chunks or regular checkpoints that are no multiple of the trace's blocks.
        """
        if config.layout is None or not config.layout.groups:
            return None
        layout = config.layout.for_rank(config.transfer.tp_size, block_size)
        for row in layout.rows:
            if row.kind == "chunk" and row.reach_tokens % block_size:
                raise LaunchError(f"chunks of {row.reach_tokens} tokens are no multiple of --block-size {block_size}")
        if (every := config.checkpoint_every_tokens) % block_size:
            raise LaunchError(f"checkpoint_every_tokens {every} is no multiple of --block-size {block_size}")
        return cls(layout=layout, block_size=block_size, config=config, grows=grows)

    def settings(self, num_gpu_blocks: int) -> dict[str, object]:
        """Settings of a cache in which one token stands for a block: its rows hold as many blocks as the model's, and
        have the same share of the bytes."""
        groups = [KVGroup(kind="full", layers=(0,)), *map(self._group, range(1, len(self.layout.rows)))]
        layout = KVLayout(
            num_layers=len(groups),
            num_kv_heads=1,
            head_dim=_PAGE_BYTES,
            value_head_dim=0,
            dtype="uint8",
            groups=tuple(groups),
        )
        return {
            "layout": layout,
            "num_gpu_units": self._num_units(num_gpu_blocks),
            "checkpoint_every_tokens": self.config.checkpoint_every_tokens // self.block_size,
            "checkpoints_per_path": self.config.checkpoints_per_path,
            "load_policy": "always",  # by the clock of a trace nothing takes any time
        }

    def _group(self, number: int) -> KVGroup:
        row = self.layout.rows[number]
        size = max(1, round(self.layout.unit_bytes(number) * _PAGE_BYTES / self.layout.block_bytes))
        if row.kind == "state":
            parts = (StatePart(name="state", shape=(size,), dtype="uint8"),)
            return KVGroup(kind="state", layers=(number,), parts=parts)
        reach = row.num_checkpoint_units + 1 if row.kind == "window" else row.reach_tokens // self.block_size
        return KVGroup(kind=row.kind, reach_tokens=reach, layers=(number,), head_dim=size)

    def _num_units(self, num_gpu_blocks: int) -> tuple[int, ...]:
        """Units as the configuration has them, and at least what a request and a piece of its prompt need."""
        real = dataclasses.replace(
            self.config, block_size=self.block_size, num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=0, storage=None
        )
        share = num_gpu_blocks / self.config.pool_sizes()[0] if self.grows else 1.0
        counts = zip(self.layout.rows[1:], real.unit_counts(), strict=True)
        return tuple([max(math.ceil(count * share), row.num_least_units + self.piece_blocks) for row, count in counts])

    @property
    def piece_blocks(self) -> int:
        """Blocks of a prompt that are computed at a time."""
        return max(1, _PIECE_TOKENS // self.block_size)

    def compute(self, cache: PrefixCacheManager, request: Request, match: Match, num_blocks: int) -> None:
        """Compute the first blocks of a prompt in pieces, with a snapshot wherever one is asked for."""
        states = [number for number, row in enumerate(self.layout.rows[1:]) if row.kind == "state"]
        slots: Sequence[int] = ()
        done, stops = match.num_tokens, [*(stop for stop in match.checkpoint_tokens if stop <= num_blocks), num_blocks]
        while done < num_blocks:
            end = min(done + self.piece_blocks, next(stop for stop in stops if stop > done))
            new = cache.rows.allocate(request, end - done)
            slots = [new.tables[number].block_ids[0] for number in states if new.tables[number].block_ids] or slots
            if states and end in match.checkpoint_tokens:
                slots = cache.rows.snapshot(request, end, slots) or slots
            cache.commit(request, end)
            done = end

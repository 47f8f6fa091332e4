"""Blocks in a row as they are told, and the events that tell them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fastdeploy_cache.books.block_hash import HASH_BYTES, TOKEN_BYTES
from fastdeploy_cache.events.names import Extra, Extras, NameScheme
from fastdeploy_cache.events.wire import BlockStored, ExtraKeys
from fastdeploy_cache.transfer_manager.kv.groups import Row

_MOST_TOKENS = 16_384  # of one event
_KINDS = {
    "full": "full_attention",
    "window": "sliding_window",
    "chunk": "chunked_local_attention",
    "state": "mamba",
}


class Stretch(NamedTuple):
    """Blocks in a row: copies, which nobody changes.

    Attributes:
        before: the digest in front of the first; empty: it begins a prompt.
        digests: of them, joined.
        tokens: of them, int32, little-endian.
        extras: their extra keys, by place.
        salt: of their namespace, where the first begins a prompt.
    """

    before: bytes
    digests: bytes
    tokens: bytes
    extras: Extras | None
    salt: str

    @property
    def num_blocks(self) -> int:
        """How many they are."""
        return len(self.digests) // HASH_BYTES

    def part(self, start: int, end: int) -> Stretch:
        """The blocks [start, end) of it."""
        size = len(self.tokens) // self.num_blocks
        extras = {b - start: extra for b, extra in (self.extras or {}).items() if start <= b < end}
        return Stretch(
            self.digests[(start - 1) * HASH_BYTES : start * HASH_BYTES] if start else self.before,
            self.digests[start * HASH_BYTES : end * HASH_BYTES],
            self.tokens[start * size : end * size],
            extras or None,
            "" if start else self.salt,
        )

    def extra_keys(self) -> ExtraKeys | None:
        """One entry for each block; None where none has any."""
        if not self.extras and not self.salt:
            return None
        keys = [_keys_of(self.extras.get(block)) if self.extras else () for block in range(self.num_blocks)]
        if self.salt:
            keys[0] = (*keys[0], self.salt)
        return [each or None for each in keys]


def _keys_of(extra: Extra | None) -> tuple[Any, ...]:
    if extra is None:
        return ()
    return extra.images or (extra.key.hex(),)


def joined(blocks: Sequence[Stretch]) -> Stretch:
    """Single blocks, each behind the one before it, as one stretch."""
    if len(blocks) == 1:
        return blocks[0]
    extras = {place: each.extras[0] for place, each in enumerate(blocks) if each.extras}
    digests, tokens = b"".join([each.digests for each in blocks]), b"".join([each.tokens for each in blocks])
    return Stretch(blocks[0].before, digests, tokens, extras or None, blocks[0].salt)


def groups_of(rows: Sequence[Row]) -> dict[int, tuple[str, int]]:
    """Kind and window of each group behind the full one, as they are told."""
    return {number: (_KINDS[row.kind], row.reach_tokens) for number, row in enumerate(rows, start=1)}


class Teller:
    """Makes events. `group`: 0 is the full row of a hybrid model, others count from 1; None: there are no groups."""

    def __init__(self, scheme: NameScheme, rows: Sequence[Row]) -> None:
        self._scheme, self._rows = scheme, tuple(rows)
        self._most_blocks = max(1, _MOST_TOKENS // scheme.block_size)
        self._block_bytes = scheme.block_size * TOKEN_BYTES

    def stored(self, stretch: Stretch, medium: str, group: int | None) -> Iterator[BlockStored]:
        """The stretch as events of bounded size, the first blocks first."""
        for start in range(0, stretch.num_blocks, self._most_blocks):
            yield self._stored(stretch.part(start, start + self._most_blocks), medium, group)

    def _stored(self, part: Stretch, medium: str, group: int | None) -> BlockStored:
        kind, window = self._kind(group)
        return BlockStored(
            block_hashes=self.names(part.digests),
            parent_block_hash=self.names(part.before)[0] if part.before else None,
            token_ids=array("i", part.tokens).tolist(),
            block_size=self._scheme.block_size,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=part.extra_keys(),
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )

    def names(self, digests: bytes | bytearray) -> list[bytes | int]:
        """Joined digests as they are published."""
        return [*self._scheme.outside(digests)]

    def _kind(self, group: int | None) -> tuple[str | None, int | None]:
        if group is None:
            return None, None
        row = self._rows[group - 1] if group else None
        if row is None:
            return _KINDS["full"], None
        return _KINDS[row.kind], row.reach_tokens or None


def stretches(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rising numbers as intervals [first, end) without a gap."""
    start = 0
    for index, place in enumerate(places):
        if index + 1 == len(places) or places[index + 1] != place + 1:
            yield places[start], place + 1
            start = index + 1

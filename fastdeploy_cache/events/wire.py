"""KV events as vLLM 0.26 and later publishes them. Wire format: msgpack; source: `vllm/distributed/kv_events.py`.

A batch is an array: seconds since 1970, a list of events, the data-parallel rank or nil. An event is a map with its
name under "type".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fastdeploy_cache.ipc.codec import decode, encode

BlockName = bytes | int  # a digest, or the last 64 bits of one
MEDIA = GPU_MEDIUM, CPU_MEDIUM, DISK_MEDIUM = ("GPU", "CPU", "DISK")
ExtraKeys = list[tuple[Any, ...] | None]


class _BlockEvent(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    block_hashes: list[BlockName]
    medium: str | None


class BlockStored(_BlockEvent, tag=True):
    """Blocks in a row are in a medium now.

    Attributes:
        block_hashes: their names, in the order of the prompt.
        parent_block_hash: the name of the block before them; None where they begin a prompt.
        token_ids: of all of them, `block_size` for each.
        extra_keys: for each block what beside tokens tells it apart; None where no block has any.
        group_idx: of a model whose layers do not all keep everything, the number of the group; 0 is the full one.
        kv_cache_spec_kind: of such a model, what kind of memory the group has.
        kv_cache_spec_sliding_window: its window in tokens, where it has one.
    """

    parent_block_hash: BlockName | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    lora_name: str | None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None


class BlockRemoved(_BlockEvent, tag=True):
    """The last copy of each of these blocks in this medium is gone."""

    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing that was told so far is there any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def fields_of(event: Event) -> dict[str, Any]:
    """What an event says, by field; with its type."""
    return {"type": type(event).__name__, **msgspec.structs.asdict(event)}


class EventBatch(msgspec.Struct, array_like=True):
    """What one message brings. `unix_seconds`: when it was made."""

    unix_seconds: float
    events: list[Event]
    data_parallel_rank: int | None = None


def encode_batch(unix_seconds: float, events: Sequence[Event], data_parallel_rank: int | None) -> bytes:
    """The payload of a message."""
    return encode(EventBatch(unix_seconds, list(events), data_parallel_rank))


def decode_batch(payload: bytes) -> EventBatch:
    """The batch in a payload. Raises `CodecError` where there is none."""
    return decode(payload, EventBatch)

"""Our events beside vLLM's own code: its structs read what we publish, and its hashes are our names. In its lane."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from fastdeploy_cache.events.names import NameScheme, name_blocks
from fastdeploy_cache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, encode_batch

pytest.importorskip("vllm", reason="needs vLLM; CI runs this in vLLM's environment")


def test_its_structs_read_our_events() -> None:
    """Each field, and the batch around it; written again by vLLM it is the same bytes, but for what it leaves out."""
    from vllm.distributed.kv_events import KVEventBatch

    stored = BlockStored(
        block_hashes=[b"a" * 32, b"b" * 32], medium="GPU", parent_block_hash=None, token_ids=[1, 2, 3, 4],
        block_size=2, lora_id=None, lora_name=None, extra_keys=[("tenant",), None], group_idx=1,
        kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=8,
    )  # fmt: skip
    removed = BlockRemoved(block_hashes=[5, 2**64 - 1], medium="CPU")
    batch = msgspec.msgpack.decode(encode_batch(1.5, [stored, removed, AllBlocksCleared()], 3), type=KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank, len(batch.events)) == (1.5, 3, 3)
    for ours, theirs in zip((stored, removed), batch.events, strict=False):
        for field in ours.__struct_fields__:
            assert getattr(theirs, field) == getattr(ours, field), field
        assert type(theirs).__name__ == type(ours).__name__
    assert type(batch.events[2]).__name__ == "AllBlocksCleared"


@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("form", ["bytes", "int64"])
def test_its_hashes_are_our_names(salt: str, form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of five blocks, through its own hasher."""
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1" if form == "int64" else "0")
    kv_cache_utils.init_none_hash(sha256_cbor)
    tokens, parent, expected = np.random.default_rng(1).integers(0, 150_000, 80).astype(np.int32), None, []
    for block in range(5):
        extra = (("cache_salt", salt),) if salt and not block else None
        of_block = tokens[block * 16 : (block + 1) * 16].tolist()
        parent = kv_cache_utils.hash_block_tokens(sha256_cbor, parent, of_block, extra)
        expected.append(kv_cache_utils.maybe_convert_block_hash(parent))
    scheme = NameScheme(kind="sha256_cbor", form=form, block_size=16)
    assert [*name_blocks(scheme, scheme.names(), tokens, salt)] == expected

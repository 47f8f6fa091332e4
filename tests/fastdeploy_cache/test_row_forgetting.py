"""A namespace of a hybrid model is forgotten: its blocks, its units and the images of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request, StorageConfig, TransferConfig
from fastdeploy_cache.requests.tables import RowBlocks
from tests.rigs.hybrid_requests import BOTH, TEXT

SECONDS, NUM_TOKENS = 30.0, 16
SECRET, OTHER = np.float32(1234.5), np.float32(7.5)


def _config(**fields: Any) -> CacheConfig:
    base = {"block_size": 4, "num_gpu_blocks": 24, "num_cpu_blocks": 40, "num_gpu_units": (8, 16), "max_running": 3}
    return CacheConfig(**{**base, "layout": BOTH, "cpu_write_policy": "write_through", **fields})


def _parts(cache: PrefixCacheManager) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Each array of each rank's layers, with its row: the layers are a full one, a state and a window."""
    for rank in range(cache.config.transfer.tp_size):
        for row, layer in enumerate(cache.ranks.kv_views(rank)):
            for part in layer.values():
                yield row, part


def _write(cache: PrefixCacheManager, new: RowBlocks, value: np.float32) -> None:
    for row, part in _parts(cache):
        part[list(new.block_ids if not row else new.tables[row - 1].block_ids)] = value


def _begun(cache: PrefixCacheManager, namespace: str, value: np.float32) -> Request:
    """A request that has computed its prompt, all of whose numbers are this value, and made a checkpoint."""
    request = Request(request_id=f"of {namespace!r}", prompt_token_ids=TEXT, namespace=namespace)
    cache.match(request)
    new = cache.rows.allocate(request, 5)
    _write(cache, new, value)
    fresh = cache.rows.snapshot(request, NUM_TOKENS, new.tables[0].block_ids)
    assert fresh is not None
    for row, part in _parts(cache):
        if row == 1:
            part[list(fresh)] = value
    cache.commit(request, NUM_TOKENS)
    cache.commit(request, request.num_tokens)
    return request


def _serve(cache: PrefixCacheManager, namespace: str, value: np.float32) -> None:
    cache.release(_begun(cache, namespace, value))
    assert cache.wait_for_transfers(SECONDS)


def _found(cache: PrefixCacheManager, namespace: str) -> int:
    request = Request(request_id=f"again {namespace}", prompt_token_ids=TEXT, namespace=namespace)
    cache.prefetch(request)
    match = cache.match(request).wait(SECONDS)
    cache.release(request)
    return match.num_tokens


def _bytes_of(cache: PrefixCacheManager) -> bytes:
    """All that both tiers hold."""
    kept = [part.tobytes() for _, part in _parts(cache)]
    kept += [bytes(segment.view(np.uint8, (segment.num_bytes,))) for segment in cache._movement.client.cpu_segments()]
    return b"".join(kept)


@pytest.mark.processes
@pytest.mark.parametrize("transfer_client", ["inline", "processes"])
def test_no_byte_is_left_in_both_tiers(transfer_client: str) -> None:
    """With two ranks, here and in processes: blocks, units and images are zeros then, and others find theirs."""
    config = _config(transfer_client=transfer_client, transfer=TransferConfig(tp_size=2))
    with PrefixCacheManager(config) as cache:
        for namespace, value in (("", OTHER), ("secret", SECRET)):
            _serve(cache, namespace, value)
        assert _bytes_of(cache).count(SECRET.tobytes()) > 0
        before = cache.stats()
        report = cache.life.forget_namespace("secret", SECONDS)
        assert (report.num_gpu_blocks, report.num_cpu_blocks) == (4, 4)
        assert (report.num_waiting_blocks, report.num_held_blocks, report.left) == (0, 0, ())
        assert _bytes_of(cache).count(SECRET.tobytes()) == 0
        assert (_found(cache, "secret"), _found(cache, "")) == (0, NUM_TOKENS)
        cache.check_invariants()
        stats = cache.stats()
        for now, then in zip(stats.rows, before.rows, strict=True):
            assert (now.num_held, now.num_free) == (then.num_held // 2, then.num_free + then.num_held // 2)


def test_a_running_request_goes_on_and_is_wiped_when_it_ends() -> None:
    """It keeps its units and its checkpoint; when it is released all of that is zeros, and free."""
    with PrefixCacheManager(_config(transfer_client="inline")) as cache:
        request = _begun(cache, "secret", SECRET)
        report = cache.life.forget_namespace("secret", SECONDS)
        assert report.num_requests == 1 and report.num_held_blocks > 0
        cache.check_invariants()
        request.append_output([7, 7])
        cache.commit(request, request.num_tokens)
        cache.release(request)
        cache.check_invariants()
        assert _bytes_of(cache).count(SECRET.tobytes()) == 0
        assert _found(cache, "secret") == 0
        stats = cache.stats()
        assert stats.gpu.num_free == 24 and all(row.num_free == row.num_units for row in stats.rows)


def test_a_checkpoint_that_leaves_the_gpu_takes_nothing_of_before_along() -> None:
    """Where its image ends inside a page the rest of that is zeros: the page has had somebody else's bytes."""
    with PrefixCacheManager(_config(transfer_client="inline", num_cpu_blocks=8)) as cache:
        pages = cache.config.rank_layout()
        assert pages is not None and pages.checkpoint_bytes % pages.block_bytes, "an image that fills its pages"
        for segment in cache._movement.client.cpu_segments():
            segment.view(np.uint8, (segment.num_bytes,))[:] = 0xEE
        _serve(cache, "", OTHER)
        assert cache.stats().cpu.num_free < 3  # type: ignore[union-attr]
        kept = _bytes_of(cache)
        num_bytes = cache.stats().cpu.num_free * pages.block_bytes  # type: ignore[union-attr]
        assert kept.count(b"\xee") == num_bytes


@pytest.mark.processes
def test_nothing_is_left_on_the_disk(tmp_path: Path) -> None:
    """A store has two kinds of objects of the namespace, blocks and images, and both go; others find theirs."""
    storage = StorageConfig(weights_id="w", folder=str(tmp_path), capacity_bytes=2**20, admission="all")
    config = _config(storage=storage, min_prefetch_tokens=1, prefetch_policy="wait_complete")
    with PrefixCacheManager(config) as cache:
        for namespace, value in (("", OTHER), ("secret", SECRET)):
            _serve(cache, namespace, value)
        assert cache.storage.flush(SECONDS)
        assert SECRET.tobytes() * 4 in _disk(tmp_path)
        report = cache.life.forget_namespace("secret", SECONDS)
        assert report.num_stored_objects == 7 and report.num_waiting_blocks == 0
        assert SECRET.tobytes() not in _disk(tmp_path)
        cache.reset()
        assert (_found(cache, "secret"), _found(cache, "")) == (0, NUM_TOKENS)


def _disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())

"""A namespace of a hybrid model is forgotten: its blocks, its units and the images of its checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request, StorageConfig, TransferConfig
from fastdeploy_cache.books import forgetting
from fastdeploy_cache.books.block_pool import BlockPool
from fastdeploy_cache.requests.tables import RowBlocks
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.held_tasks import Held
from tests.rigs.hybrid_requests import BOTH, TEXT, computed, manager, started

SECONDS, NUM_TOKENS = 30.0, 16
SECRET, OTHER = 1234.0, 7.5
DTYPES = (np.float16, np.float32)  # of blocks and windows, and of states


def _config(**fields: Any) -> CacheConfig:
    base = {"block_size": 4, "num_gpu_blocks": 24, "num_cpu_blocks": 40, "num_gpu_units": (8, 16), "max_running": 3}
    return CacheConfig(**{**base, "layout": BOTH, "cpu_write_policy": "write_through", **fields})


def _parts(cache: PrefixCacheManager) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Each array of each rank's layers, with its row: the layers are a full one, a state and a window."""
    for rank in range(cache.config.transfer.tp_size):
        for row, layer in enumerate(cache.ranks.kv_views(rank)):
            for part in layer.values():
                yield row, part


def _write(cache: PrefixCacheManager, new: RowBlocks, value: float) -> None:
    for row, part in _parts(cache):
        assert part.dtype in DTYPES
        part[list(new.block_ids if not row else new.tables[row - 1].block_ids)] = value


def _begun(cache: PrefixCacheManager, namespace: str, value: float) -> Request:
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


def _serve(cache: PrefixCacheManager, namespace: str, value: float) -> None:
    cache.release(_begun(cache, namespace, value))
    assert cache.wait_for_transfers(SECONDS)


def _found(cache: PrefixCacheManager, namespace: str) -> int:
    request = Request(request_id=f"again {namespace}", prompt_token_ids=TEXT, namespace=namespace)
    cache.prefetch(request)
    match = cache.match(request).wait(SECONDS)
    cache.release(request)
    return match.num_tokens


def _numbers_of(cache: PrefixCacheManager, value: float) -> list[int]:
    """How many numbers of each row's arrays, and of the CPU tier, read as one dtype and as the other, are the value."""
    found = [0, 0, 0, 0, 0]
    for row, part in _parts(cache):
        found[row] += int((part == value).sum())
    for segment in cache._movement.client.cpu_segments():
        kept = segment.view(np.uint8, (segment.num_bytes,))
        for place, dtype in enumerate(DTYPES, 3):
            found[place] += int((kept.view(dtype) == value).sum())
    return found


@pytest.mark.processes
@pytest.mark.parametrize("transfer_client", ["inline", "processes"])
def test_no_byte_is_left_in_both_tiers(transfer_client: str) -> None:
    """With two ranks, here and in processes: blocks, units and images are zeros then, and others find theirs."""
    config = _config(transfer_client=transfer_client, transfer=TransferConfig(tp_size=2))
    with PrefixCacheManager(config) as cache:
        for namespace, value in (("", OTHER), ("secret", SECRET)):
            _serve(cache, namespace, value)
        assert all(_numbers_of(cache, SECRET))
        before, theirs = cache.stats(), _numbers_of(cache, OTHER)
        report = cache.life.forget_namespace("secret", SECONDS)
        assert (report.num_gpu_blocks, report.num_cpu_blocks) == (4, 4)
        assert (report.num_waiting_blocks, report.num_held_blocks, report.left) == (0, 0, ())
        assert not any(_numbers_of(cache, SECRET)) and _numbers_of(cache, OTHER)[3:] == theirs[3:]
        assert (_found(cache, "secret"), _found(cache, "")) == (0, NUM_TOKENS)
        cache.check_invariants()
        stats = cache.stats()
        for now, then in zip(stats.rows, before.rows, strict=True):
            assert (now.num_held, now.num_free) == (then.num_held // 2, then.num_free + then.num_held // 2)


def test_a_running_request_goes_on_and_is_wiped_when_it_ends() -> None:
    """It keeps its units and its checkpoint, and is given more; all of that is zeros, and free, when it has ended: also
    units that its window has left behind."""
    with PrefixCacheManager(_config(transfer_client="inline")) as cache:
        request = _begun(cache, "secret", SECRET)
        report = cache.life.forget_namespace("secret", SECONDS)
        assert report.num_requests == 1 and report.num_held_blocks > 0
        cache.check_invariants()
        for _ in range(5):
            request.append_output([7] * 4)
            _write(cache, cache.rows.allocate(request, 1), SECRET)
            cache.commit(request, request.num_tokens)
            cache.check_invariants()
        cache.release(request)
        cache.check_invariants()
        assert not any(_numbers_of(cache, SECRET))
        assert _found(cache, "secret") == 0
        stats = cache.stats()
        assert stats.gpu.num_free == 24 and all(row.num_free == row.num_units for row in stats.rows)


def test_a_checkpoint_that_leaves_the_gpu_takes_nothing_of_before_along() -> None:
    """Where its image ends inside a page the rest of that is zeros: the page has had somebody else's bytes."""
    with PrefixCacheManager(_config(transfer_client="inline", num_cpu_blocks=8)) as cache:
        layout = cache.config.rank_layout()
        assert layout is not None and layout.checkpoint_bytes % layout.block_bytes, "an image that fills its pages"
        for segment in cache._movement.client.cpu_segments():
            segment.view(np.uint8, (segment.num_bytes,))[:] = 0xEE
        _serve(cache, "", OTHER)
        num_free = cache.stats().cpu.num_free
        assert num_free < 3
        kept = [segment.view(np.uint8, (segment.num_bytes,)) for segment in cache._movement.client.cpu_segments()]
        assert sum(int((each == 0xEE).sum()) for each in kept) == num_free * layout.block_bytes


@pytest.mark.processes
def test_nothing_is_left_on_the_disk(tmp_path: Path) -> None:
    """A store has two kinds of objects of the namespace, blocks and images, and both go; others find theirs."""
    storage = StorageConfig(weights_id="w", folder=str(tmp_path), capacity_bytes=2**20, admission="all")
    config = _config(storage=storage, min_prefetch_tokens=1, prefetch_policy="wait_complete")
    secrets = [np.array([SECRET] * 4, dtype).tobytes() for dtype in DTYPES]
    with PrefixCacheManager(config) as cache:
        for namespace, value in (("", OTHER), ("secret", SECRET)):
            _serve(cache, namespace, value)
        assert cache.storage.flush(SECONDS)
        assert all(each in _disk(tmp_path) for each in secrets)
        report = cache.life.forget_namespace("secret", SECONDS)
        assert report.num_stored_objects == 7 and report.num_waiting_blocks == 0
        assert not any(each in _disk(tmp_path) for each in secrets)
        cache.reset()
        assert (_found(cache, "secret"), _found(cache, "")) == (0, NUM_TOKENS)


def _disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.mark.parametrize("is_encrypted", [False, True])
@pytest.mark.processes
def test_what_a_namespace_has_stored_is_found_by_the_next_engine(tmp_path: Path, *, is_encrypted: bool) -> None:
    """Blocks and the image behind them are under its own names, and under its own key where they are encrypted."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys]\nacme = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"\n')
    keys.chmod(0o600)
    storage = StorageConfig(
        weights_id="w",
        folder=str(tmp_path / "store"),
        capacity_bytes=2**20,
        admission="all",
        keys_file=str(keys) if is_encrypted else None,
    )
    config = _config(storage=storage, min_prefetch_tokens=1, prefetch_policy="wait_complete")
    with PrefixCacheManager(config) as cache:
        _serve(cache, "acme", OTHER)
        assert cache.storage.flush(SECONDS)
    with PrefixCacheManager(config) as cache:
        request = Request(request_id="again", prompt_token_ids=TEXT, namespace="acme")
        cache.prefetch(request)
        match = cache.match(request).wait(SECONDS)
        assert (match.num_tokens, _found(cache, "")) == (NUM_TOKENS, 0)
        tables = [match.block_ids, *[table.block_ids for table in match.tables]]
        assert all((part[list(tables[row])] == OTHER).all() for row, part in _parts(cache))
        cache.release(request)


# -- units that wait to be wiped are room for nobody


def _served(cache: PrefixCacheManager, namespace: str, num_prompts: int) -> None:
    for number in range(num_prompts):
        request = Request(request_id=f"{number}", prompt_token_ids=[number, *TEXT[1:]], namespace=namespace)
        cache.match(request)
        new = cache.rows.allocate(request, 5)
        cache.rows.snapshot(request, NUM_TOKENS, new.tables[0].block_ids)
        cache.commit(request, NUM_TOKENS)
        cache.commit(request, request.num_tokens)
        cache.release(request)


def test_checkpoints_of_a_forgotten_namespace_are_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go in the turn that forgets, however many runs there are: a row promises no more units than it can give."""
    monkeypatch.setattr(forgetting, "AT_ONCE", 0)  # runs that this turn removes
    with manager(num_gpu_units=(6, 12)) as cache:
        _served(cache, "secret", 2)
        rows = cache._books.rows
        assert rows is not None
        with cache._books:
            forgetting.forget_namespace(cache._books, "secret")
            assert not cache._books.tree.graves.are_empty, "all runs have gone"
            assert all(pool.num_available == pool.pool.num_free for pool in rows.checkpoints.pools)
        cache.check_invariants()


@pytest.mark.parametrize("num_marks", range(7))
def test_a_forget_without_memory_forgets_nothing_of_what_is_cached(
    monkeypatch: pytest.MonkeyPatch, num_marks: int
) -> None:
    """Memory runs out after some pools were marked: what is cached is found, and can make room, as before."""
    with manager(num_gpu_units=(6, 12), num_cpu_blocks=20) as cache:
        cache.release(computed(cache, "text"))
        marks, mark = itertools.count(), BlockPool._mark

        def fail(pool: BlockPool, ids: Any) -> None:
            if next(marks) == num_marks:
                raise MemoryError
            mark(pool, ids)

        monkeypatch.setattr(BlockPool, "_mark", fail)
        with pytest.raises(MemoryError):
            cache.life.forget_namespace("", 0.0)
        monkeypatch.undo()
        cache.check_invariants()
        request = Request(request_id="again", prompt_token_ids=TEXT)
        assert cache.match(request).num_tokens == NUM_TOKENS
        cache.release(request)
        for number in range(8):  # all that is cached gives room to others
            cache.release(computed(cache, f"other {number}", [100 + number] * 18))
            cache.check_invariants()


def test_units_that_are_being_wiped_are_coming() -> None:
    """Who lacks units waits for those that are wiped, as they come back by themselves."""
    with manager(num_gpu_units=(6, 12)) as cache:
        held = Held(cache, (TaskKind.WIPE,))
        _served(cache, "secret", 2)
        cache.life.forget_namespace("secret", 0.0)
        images, rows = cache._movement.images, cache._books.rows
        assert images is not None and rows is not None
        lacking = [pool.pool.num_blocks - pool.num_available for pool in rows.checkpoints.pools]
        assert min(lacking) > 0 and images.num_coming() == lacking
        while held.tasks:
            held.go()
        assert images.num_coming() == [0, 0]


def test_a_snapshot_is_refused_where_its_slots_have_to_be_wiped() -> None:
    """A request of another namespace gives up an older snapshot for a new one. It had the slots of that when the
    namespace was forgotten, so they are wiped first: the new one is refused, and the request goes on."""
    with manager(num_gpu_units=(2, 12), cache_outputs=True) as cache:
        request, new = started(cache, "runs")
        held = Held(cache, (TaskKind.WIPE,))
        cache.life.forget_namespace("nobody", 0.0)  # all that is free, or a request's, may have old bytes
        fresh = cache.rows.snapshot(request, 8, new.tables[0].block_ids)
        assert fresh is not None and cache.rows.snapshot(request, 12, fresh) is None
        cache.commit(request, request.num_tokens)
        cache.release(request)
        held.go()
        cache.check_invariants()


def test_a_forget_beside_a_checkpoint_of_others() -> None:
    """Others keep theirs, and go on at it."""
    with manager(num_gpu_units=(6, 12)) as cache:
        cache.release(computed(cache, "text"))
        _served(cache, "secret", 1)
        cache.life.forget_namespace("secret", SECONDS)
        request = Request(request_id="again", prompt_token_ids=TEXT)
        assert cache.match(request).num_tokens == NUM_TOKENS
        cache.release(request)
        cache.check_invariants()

"""`allocate` with `wait_seconds`, and what an error about missing blocks advises."""

from __future__ import annotations

import threading

import pytest

from fastdeploy_cache.errors import OutOfBlocksError
from tests.rigs.cache_model import CacheModel
from tests.rigs.process_ends import SECONDS

A, B = list(range(1000, 1020)), list(range(2000, 2020))
FOR_EVER = 1e6  # seconds: who waits by mistake does not come back


def model_with_copies_in_flight() -> CacheModel:
    """All 20 blocks of the pool are on their way down."""
    model = CacheModel(1, 20, 40)
    model.serve(A, stays=False, patient=False)
    assert model.client.tasks
    return model


def test_it_waits_for_copies_in_flight() -> None:
    """Blocks that only a copy holds are had when it has ended, on whatever thread that is."""
    model = model_with_copies_in_flight()
    request = model.must_match(B).request
    with pytest.raises(OutOfBlocksError, match="wait for the copies in flight, which hold 20"):
        model.cache.allocate(request, 20)
    landing = threading.Thread(target=model.client.land_all)
    landing.start()
    assert len(model.cache.allocate(request, 20, wait_seconds=SECONDS)) == 20
    landing.join(SECONDS)
    model.finish()


def test_it_waits_no_longer_than_it_may() -> None:
    """The copies do not end in time: the error is that of a call that does not wait, and nothing has changed."""
    model = model_with_copies_in_flight()
    request = model.must_match(B).request
    with pytest.raises(OutOfBlocksError) as refused:
        model.cache.allocate(request, 20, wait_seconds=0.01)
    assert (refused.value.missing, refused.value.coming) == (20, 20)
    model.client.land_all()
    assert len(model.cache.allocate(request, 20)) == 20
    model.finish()


def test_it_waits_for_nothing_where_nothing_is_on_its_way() -> None:
    """A running request holds the blocks; a paused cache moves nothing."""
    model = CacheModel(1, 20, 40)
    holder = model.must_match(A)
    assert model.allocate(holder, 20)
    request = model.must_match(B).request
    model.client.auto = True  # the ranks acknowledge a pause
    for _ in range(2):
        with pytest.raises(OutOfBlocksError, match="release a request"):
            model.cache.allocate(request, 20, wait_seconds=FOR_EVER)
        model.cache.life.pause(SECONDS)
    model.finish()


def test_the_error_advises_nothing_that_cannot_help() -> None:
    """More than the pool has: no wait helps. More than the copies hold: waiting alone does not."""
    model = model_with_copies_in_flight()
    request = model.must_match(B).request
    with pytest.raises(OutOfBlocksError, match="the whole pool has 20, so no wait can help") as refused:
        model.cache.allocate(request, 21)
    assert "copies" not in str(refused.value)
    with pytest.raises(OutOfBlocksError, match="the whole pool has 20"):
        model.cache.blocks.allocate(21)
    assert str(OutOfBlocksError(9, 5)) == (
        "9 blocks are missing; copies in flight hold 5 of them; release a request, then try again"
    )
    model.finish()


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (100, 7)])
def test_blocks_for(num_tokens: int, num_blocks: int) -> None:
    """Whole blocks, the last one perhaps in part."""
    model = CacheModel(16, 20, 0)
    assert model.cache.blocks_for(num_tokens) == num_blocks
    model.finish()

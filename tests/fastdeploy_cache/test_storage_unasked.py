"""A store that no request is fetched from: the log says so, once."""

from __future__ import annotations

import logging

import pytest

from tests.rigs.storage_rig import STORE, A, Rig

LONG, SHORT = A[:18], A[:16]  # with `min_prefetch_tokens` 16: four full blocks and a token to compute; one token less
NUM_REQUESTS = 100  # after so many long ones it is said


def serve(rig: Rig, tokens: list[int], num_requests: int) -> None:
    for _ in range(num_requests):
        rig.model.serve(tokens, stays=False, patient=True)
        rig.land_all()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "event=storage_not_asked" in record.getMessage()]


def test_a_store_that_is_never_asked_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """After a hundred long prompts without a prefetch, with the remedy; short ones do not count; another store anew."""
    rig = Rig(min_prefetch_tokens=16)
    with caplog.at_level(logging.WARNING):
        serve(rig, SHORT, NUM_REQUESTS)
        serve(rig, LONG, NUM_REQUESTS - 1)
        assert not said(caplog)
        serve(rig, LONG, 1)
        (line,) = said(caplog)
        assert f"num_requests={NUM_REQUESTS} min_tokens=16" in line and "call cache.prefetch(request)" in line
        serve(rig, LONG, NUM_REQUESTS)
        assert len(said(caplog)) == 1
    rig.model.cache.storage.detach()
    rig.model.cache.storage.attach(STORE, client=rig.store)
    rig.store.land_all()
    with caplog.at_level(logging.WARNING):
        serve(rig, LONG, NUM_REQUESTS)
    assert len(said(caplog)) == 2
    rig.finish()


def test_one_prefetch_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    """Also one that found everything here, and asked storage for nothing: the engine knows the verb."""
    rig = Rig(min_prefetch_tokens=16)
    with caplog.at_level(logging.WARNING):
        serve(rig, LONG, 1)
        rig.prefetch(LONG)
        serve(rig, LONG, 2 * NUM_REQUESTS)
    assert not said(caplog)
    rig.finish()


def test_without_a_store_nobody_is_to_be_asked(caplog: pytest.LogCaptureFixture) -> None:
    """A detached store is none."""
    rig = Rig(min_prefetch_tokens=16)
    rig.model.cache.storage.detach()
    with caplog.at_level(logging.WARNING):
        serve(rig, LONG, 2 * NUM_REQUESTS)
    assert not said(caplog)
    rig.finish()

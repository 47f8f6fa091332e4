"""Every public verb that waits: what it takes for a time, and what it refuses."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.callers.transfers import CallerLoad, CallerTransfer
from fastdeploy_cache.errors import OutOfBlocksError, RequestError
from fastdeploy_cache.ipc.clock import LONGEST_SECONDS, SYSTEM_CLOCK, seconds_to_wait
from fastdeploy_cache.peers.transfers import PeerTransfer
from fastdeploy_cache.requests.match import Match, Prefetch
from tests.rigs.cache_model import CacheModel
from tests.rigs.process_ends import SECONDS

A, B = list(range(1000, 1020)), list(range(2000, 2020))
NO_NUMBERS = ["1", "", None, math.nan, True, [1], 1j]
VERY_LONG = [math.inf, 1e12, 10**40, LONGEST_SECONDS, np.float32(1e30), np.int64(2**62)]

Verb = Callable[[CacheModel, Request, Any], object]
VERBS: dict[str, Verb] = {
    "PrefixCacheManager.allocate": lambda m, r, t: m.cache.allocate(r, 20, wait_seconds=t),
    "PrefixCacheManager.confirm": lambda m, r, t: m.cache.confirm(r, t, arrived=True),
    "PrefixCacheManager.wait_for_transfers": lambda m, _, t: m.cache.wait_for_transfers(t),
    "RankAccess.wait_ready": lambda m, _, t: m.cache.ranks.wait_ready(t),
    "BlockCopies.copy": lambda m, _, t: m.cache.blocks.copies.copy([], [], timeout_seconds=t),
    "BlockCopies.end_load": lambda m, _, t: m.cache.blocks.copies.end_load(
        CallerLoad((), (), None, 0, SYSTEM_CLOCK), t
    ),
    "Peers.wait_ready": lambda m, _, t: m.cache.peers.wait_ready(t),
    "StorageAccess.flush": lambda m, _, t: m.cache.storage.flush(t),
    "Match.wait": lambda m, r, t: m.cache.match(r).wait(t),
    "Match.arrived": lambda m, r, t: asyncio.run(m.cache.match(r).arrived(t)),
    "Prefetch.wait": lambda m, r, t: m.cache.prefetch(r).wait(t),
    "CallerTransfer.wait": lambda _m, _r, t: CallerTransfer((), 0, SYSTEM_CLOCK).wait(t),
    "CallerLoad.wait": lambda _m, _r, t: CallerLoad((), (), None, 0, SYSTEM_CLOCK).wait(t),
    "PeerTransfer.wait": lambda _m, _r, t: ended_transfer().wait(t),
}
ELSEWHERE = {"StorageAccess.wait_settled"}  # for the other rooms


def ended_transfer() -> PeerTransfer:
    transfer = PeerTransfer("a", 0, 1, SYSTEM_CLOCK.event())
    transfer.end(None)
    return transfer


def waiting_verbs(model: CacheModel) -> set[str]:
    """Public methods of what a user holds that take a time to wait. Those of `life` have limits of their own."""
    cache = model.cache
    kinds = [type(each) for each in (cache, cache.ranks, cache.blocks, cache.blocks.copies, cache.peers, cache.storage)]
    kinds += [Match, Prefetch, CallerTransfer, CallerLoad, PeerTransfer]
    return {
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name, verb in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and {"timeout_seconds", "wait_seconds"} & set(inspect.signature(verb).parameters)
    }


def test_no_verb_is_forgotten() -> None:
    """The table above has all public verbs that take a time to wait."""
    model = CacheModel(1, 20, 40)
    assert waiting_verbs(model) == VERBS.keys() | ELSEWHERE
    model.finish()


@pytest.mark.parametrize("name", VERBS)
def test_what_is_no_time_is_refused(name: str) -> None:
    """At the door, whether or not there is anything to wait for; None stands for the default where there is one."""
    model = CacheModel(1, 20, 40)
    request = model.must_match(A).request
    new = Request(request_id="new", prompt_token_ids=B) if name.startswith(("Match", "Prefetch")) else request
    has_default = name in ("PrefixCacheManager.confirm", "BlockCopies.copy") or name.startswith(("Match", "Prefetch"))
    for given in NO_NUMBERS:
        if given is None and has_default:
            continue
        with pytest.raises(RequestError, match=r"the time to wait is .*; give a number of seconds"):
            VERBS[name](model, new, given)
        if name.startswith("Match"):
            model.cache.release(new)
    model.finish()


@pytest.mark.parametrize("seconds", VERY_LONG, ids=str)
@pytest.mark.parametrize("name", VERBS)
def test_very_long_waits_are_no_error(name: str, seconds: float) -> None:
    """With copies in flight, which end in another thread: no clock overflows."""
    model = CacheModel(1, 20, 40)
    model.serve(A, stays=False, patient=False)
    request = model.must_match(B).request
    assert model.client.tasks
    landing = threading.Thread(target=model.client.land_all)
    new = Request(request_id="new", prompt_token_ids=A) if name.startswith(("Match", "Prefetch")) else request
    landing.start()
    VERBS[name](model, new, seconds)
    landing.join(SECONDS)
    model.client.land_all()
    if name.startswith("Match"):
        model.cache.release(new)
    if name != "PrefixCacheManager.allocate":
        model.finish()


def test_how_long_a_verb_waits() -> None:
    """Nothing when the time is over before it began, and a day at the most."""
    assert [seconds_to_wait("wait", given) for given in (-1, -math.inf, 0, 2, 0.5)] == [0, 0, 0, 2, 0.5]
    assert {seconds_to_wait("wait", given) for given in VERY_LONG} == {LONGEST_SECONDS}


def test_no_time_to_wait_costs_no_question() -> None:
    """A negative one is as none: the error is that of a call that does not wait."""
    model = CacheModel(1, 20, 40)
    model.serve(A, stays=False, patient=False)
    with pytest.raises(OutOfBlocksError):
        model.cache.allocate(model.must_match(B).request, 20, wait_seconds=-1.0)
    model.client.land_all()
    model.finish()

"""Instances that borrow by themselves what others have cached: real processes, events and bytes, and a model that
checks them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.config.events import EventsConfig
from fastdeploy_cache.errors import PeerRefusedError
from fastdeploy_cache.launch.server.chat import ChatApi
from fastdeploy_cache.launch.server.instance_app import InstanceApp
from fastdeploy_cache.launch.server.lenders import ServingLenders
from fastdeploy_cache.launch.server.prefix_lookup import EventSource
from fastdeploy_cache.peers import borrowing
from fastdeploy_cache.peers.borrowing import Loan
from fastdeploy_cache.peers.transfers import Receive
from tests.rigs.http_rig import served
from tests.rigs.integer_instance import PROMPT, SECONDS, Instance, Numbers, instances

# aiohttp keeps the handlers of an application in a cache of its own, and these their instance
pytestmark = [pytest.mark.processes, pytest.mark.leaks_allowed]
NUM_FULL = len(PROMPT) // 4 * 4


class Three(NamedTuple):
    """A lender with its events and its server, an instance that follows it, and one that has lenders of a test's."""

    lender: Instance
    borrower: Instance
    third: Instance
    lenders: ServingLenders


@contextmanager
def started(tmp_path: Path) -> Iterator[Three]:
    events = EventsConfig(endpoint=f"ipc://{tmp_path}/kv", heartbeat_seconds=0.2)
    with ExitStack() as stack:
        makes = [partial(Instance, "mixed", 1, events=events), *[partial(Instance, "mixed", 1) for _ in range(2)]]
        made = stack.enter_context(instances(*makes))
        port = stack.enter_context(served(InstanceApp(ChatApi(made[0].engine, Numbers()), made[0].cache).build()))
        lenders = ServingLenders([EventSource(f"http://127.0.0.1:{port},{events.endpoint}")])
        stack.callback(lenders.close)
        made[1].cache.peers.borrow_from(lenders)
        yield Three(*made, lenders)


def answer(instance: Instance, namespace: str = "") -> tuple[list[int], int]:
    """What is answered to the prompt, and how many of its tokens were computed for that."""
    before = instance.model.num_computed_tokens
    generation = instance.engine.intake.submit(np.array(PROMPT), 5, namespace=namespace)
    tokens = list(iter(lambda: generation.next_token(SECONDS), None))
    return tokens, instance.model.num_computed_tokens - before - len(tokens) + 1


def wait_known(lenders: ServingLenders, namespace: str = "") -> None:
    """Until the lender's events have come."""
    request = Request(request_id="known", prompt_token_ids=PROMPT, namespace=namespace)
    (mirror,) = lenders._mirrors.values()
    with mirror._lock:
        assert mirror._lock.wait_for(lambda: lenders.num_tokens(request) >= NUM_FULL, SECONDS)


def test_a_prompt_is_borrowed_before_it_is_matched(tmp_path: Path) -> None:
    """Nobody but the instance itself has asked for it: the same answer, and nothing is computed that was lent; what
    came is cached, so the next one needs no lender, and another namespace's is not found."""
    with started(tmp_path) as three:
        expected, num_computed = answer(three.lender)
        assert num_computed == len(PROMPT)
        wait_known(three.lenders)
        assert answer(three.borrower) == (expected, len(PROMPT) - NUM_FULL)
        num_bytes = three.borrower.num_bytes("receive")
        assert num_bytes > 0
        assert answer(three.borrower) == (expected, len(PROMPT) - NUM_FULL)
        assert three.borrower.num_bytes("receive") == num_bytes
        assert answer(three.borrower, "another") == (expected, len(PROMPT))


def test_a_lender_that_has_gone(tmp_path: Path) -> None:
    """Its events said that it has it, and it lends nothing any more: the prompt is computed."""
    with started(tmp_path) as three:
        expected, _ = answer(three.lender, "gone")
        wait_known(three.lenders, "gone")
        three.lender.cache.life.clear()
        assert answer(three.borrower, "gone")[0] == expected


class Made:
    """Lenders of a test's making."""

    def __init__(self, lend: Callable[[Request, float], Loan | None], num_tokens: int = NUM_FULL) -> None:
        self._lend, self._num_tokens = lend, num_tokens
        self.num_asked = 0

    def num_tokens(self, request: Request) -> int:
        return self._num_tokens

    def lend(self, request: Request, timeout_seconds: float) -> Loan | None:
        self.num_asked += 1
        return self._lend(request, timeout_seconds)


def _raises(request: Request, timeout_seconds: float) -> Loan | None:
    raise RuntimeError("planted")


def _lies(given_up: list[bool], request: Request, timeout_seconds: float) -> Loan | None:
    return Loan(b"no offer", lambda: given_up.append(True))


def test_lenders_that_fail_or_lie(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One raises, one gives what is no offer, which it is told, and one knows of more than there can be: each prompt is
    computed, and the threads live on."""
    with started(tmp_path) as three:
        expected, _ = answer(three.lender)
        given_up: list[bool] = []
        lenders = Made(_raises)
        three.third.cache.peers.borrow_from(lenders)
        with pytest.raises(PeerRefusedError, match="borrows already"):
            three.third.cache.peers.borrow_from(lenders)
        for number, lend in enumerate((_raises, partial(_lies, given_up), partial(_lies, given_up))):
            lenders._lend = lend
            lenders._num_tokens = 10**9 if number == 2 else NUM_FULL
            assert answer(three.third, f"{number}")[0] == expected
        assert given_up == [True, True] and lenders.num_asked == 3 and "planted" in caplog.text


def test_what_nobody_waits_for_is_given_up(tmp_path: Path) -> None:
    """The request has gone, or was matched, while its lender was asked: the offer is given back, and nothing is
    received. A prefetch whose blocks are all here asks nobody."""
    with started(tmp_path) as three:
        cache, given_up = three.third.cache, threading.Event()
        is_asked, may_go = threading.Event(), threading.Event()

        def lend(request: Request, timeout_seconds: float) -> Loan | None:
            is_asked.set()
            assert may_go.wait(SECONDS)
            return Loan(b"", given_up.set)

        lenders = Made(lend)
        cache.peers.borrow_from(lenders)
        for way in ("ended", "matched"):
            request = Request(request_id=way, prompt_token_ids=PROMPT, namespace=way)
            prefetch = cache.prefetch(request)
            assert is_asked.wait(SECONDS) and prefetch.is_borrowing and not prefetch.wait(0.0)
            if way == "ended":
                cache.end_prefetch(request)
            else:
                cache.match(request)
            may_go.set()
            assert prefetch.wait(SECONDS) and given_up.wait(SECONDS) and prefetch.num_borrowed_blocks == 0
            for event in (is_asked, may_go, given_up):
                event.clear()
            if way == "matched":
                cache.allocate(request, cache.blocks_for(len(PROMPT)))
                cache.commit(request, len(PROMPT))
                cache.release(request)
        again = cache.prefetch(Request(request_id="again", prompt_token_ids=PROMPT[:21], namespace="matched"))
        assert again.wait(SECONDS) and lenders.num_asked == 2


def test_one_that_never_answers_stalls_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own prompts are computed after a while, and those that nobody lends at once."""
    monkeypatch.setattr(borrowing, "_LEND_SECONDS", 0.5)
    monkeypatch.setattr(borrowing, "_STORE_SECONDS", 0.1)
    with started(tmp_path) as three:
        expected, _ = answer(three.lender)
        may_go = threading.Event()

        def lend(request: Request, timeout_seconds: float) -> Loan | None:
            may_go.wait(SECONDS)
            return None

        lenders = Made(lend)
        three.third.cache.peers.borrow_from(lenders)
        intake = three.third.engine.intake
        stuck = [intake.submit(np.array(PROMPT), 5, namespace=f"{number}") for number in range(6)]
        lenders._num_tokens = 0
        assert answer(three.third, "free")[0] == expected
        for generation in stuck:
            assert list(iter(partial(generation.next_token, SECONDS), None)) == expected
        may_go.set()


def test_each_request_has_its_own_loan(tmp_path: Path) -> None:
    """Two of one prompt wait for one; who prefetches twice has the first; a reused id is another request; and who is
    matched already, or has nothing to wait for, is told so at once."""
    with started(tmp_path) as three:
        cache, may_go = three.third.cache, threading.Event()

        def lend(request: Request, timeout_seconds: float) -> Loan | None:
            may_go.wait(SECONDS)
            return None

        cache.peers.borrow_from(Made(lend))
        one, same = _named(1), Request(request_id="same", prompt_token_ids=PROMPT, namespace="1")
        first, again, second = cache.prefetch(one), cache.prefetch(one), cache.prefetch(same)
        assert first.is_borrowing and again.is_borrowing and second.is_borrowing
        matched = _named(2)
        cache.match(matched)
        calls: list[int] = []
        told = cache.prefetch(matched)
        told.on_borrowed(lambda: calls.append(1))
        assert not told.is_borrowing and calls == [1] and told.ready
        reused = Request(request_id="1", prompt_token_ids=PROMPT, namespace="3")
        assert not cache.prefetch(reused).is_borrowing
        cache.end_prefetch(one)
        assert first.wait(SECONDS)
        new = cache.prefetch(reused)
        assert new.is_borrowing
        may_go.set()
        assert new.wait(SECONDS) and not cache.peers._borrowing._open  # type: ignore[union-attr]
        cache.release(matched)


def test_what_is_given_up_as_it_comes_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request ends between the last look and the receive, which nobody would end: its blocks may be evicted."""
    with started(tmp_path) as three:
        answer(three.lender)
        wait_known(three.lenders)
        cache, request = three.borrower.cache, Request(request_id="a", prompt_token_ids=PROMPT)
        borrows = cache.peers._borrowing
        assert borrows is not None
        begin = borrows._peers.begin

        def late(request: Request, offer: bytes) -> Receive:
            cache.end_prefetch(request)
            return begin(request, offer)

        monkeypatch.setattr(borrows, "_peers", borrows._peers._replace(begin=late))
        assert cache.prefetch(request).wait(SECONDS)
        borrows.close()
        assert not cache.peers.road.receives.pins and not cache.peers.road.receives.held_ids


def test_a_full_pool_waits_for_what_is_borrowed(tmp_path: Path) -> None:
    """A prompt that needs nearly all of it runs when the other one's blocks have come, and ends well."""
    with started(tmp_path) as three:
        answer(three.lender)
        wait_known(three.lenders)
        engine = three.borrower.engine
        large = np.arange(1, 380) % 100 + 1
        for generation in [engine.intake.submit(tokens, 5) for tokens in (np.array(PROMPT), large)]:
            assert list(iter(partial(generation.next_token, SECONDS), None))
            assert generation.finish_reason != "error", generation.error


def test_a_close_waits_for_no_lender(tmp_path: Path) -> None:
    """Whoever waits for a prefetch is answered, and what is queued is not asked for any more."""
    with started(tmp_path) as three:
        cache, may_go, is_asked = three.third.cache, threading.Event(), threading.Event()

        def lend(request: Request, timeout_seconds: float) -> Loan | None:
            is_asked.set()
            may_go.wait(SECONDS)
            return None

        cache.peers.borrow_from(Made(lend))
        prefetches = [cache.prefetch(_named(number)) for number in range(100)]
        assert is_asked.wait(SECONDS)
        closing = threading.Thread(target=cache.peers._borrowing.close)  # type: ignore[union-attr]
        closing.start()
        may_go.set()
        closing.join(SECONDS)
        assert not closing.is_alive() and all(prefetch.wait(0.0) for prefetch in prefetches)
        assert cache.prefetch(_named(1000)).wait(0.0)


def _named(number: int, **settings: Any) -> Request:
    return Request(request_id=f"{number}", prompt_token_ids=PROMPT, namespace=f"{number}", **settings)


def test_who_cannot_borrow() -> None:
    """An instance without peers, and one that only computes."""
    refused = pytest.raises(PeerRefusedError, match="the role of this instance is 'prefill'")
    with instances(partial(Instance, "prefill", 1)) as (prefill,), refused:
        prefill.cache.peers.borrow_from(Made(_raises))

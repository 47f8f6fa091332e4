"""The router between instances that lend: whom it asks to lend, and what it does without that."""

from __future__ import annotations

import threading

import pytest

from fastdeploy_cache.events import PrefixFound
from fastdeploy_cache.launch.server.choice import Chooser, Costs
from fastdeploy_cache.launch.server.instances import Instances
from fastdeploy_cache.launch.server.prefix_lookup import PromptKnown
from tests.rigs.event_rig import publishing
from tests.rigs.prefix_router import FIRST, PLACES, URLS, Pair, chat, lookup_of, pair_of, said
from tests.rigs.router_rig import SECONDS, Instance, _Handler, answers, answers_later, hangs_up, offers, refuses, routed

COSTS = Costs(moved_token=0.05, open_request=16.0)


def lends(handler: _Handler) -> None:
    """A prompt that is to be lent is offered; all else is answered, once it may."""
    if handler.path == "/v1/lend":
        offers(handler)
    else:
        answers_later(handler)


def does_not_lend(handler: _Handler) -> None:
    if handler.path == "/v1/lend":
        refuses(handler)
    else:
        answers_later(handler)


def breaks_off(handler: _Handler) -> None:
    if handler.path == "/v1/lend":
        hangs_up(handler)
    else:
        answers_later(handler)


def keep_busy(pair: Pair, lender: Instance) -> list[threading.Thread]:
    """It answers two requests, which wait: a third costs it more than another instance that borrows from it."""
    waiting = [threading.Thread(target=said, args=(pair.router, chat(FIRST))) for _ in range(2)]
    for number, thread in enumerate(waiting):
        lender.is_held.clear()
        thread.start()
        assert lender.is_held.wait(SECONDS), f"request {number} has not come"
    return waiting


def let_go(lender: Instance, waiting: list[threading.Thread]) -> None:
    lender.may_go_on.set()
    for thread in waiting:
        thread.join(SECONDS)


@pytest.mark.processes
@pytest.mark.parametrize(("fault", "is_lent"), [(lends, True), (does_not_lend, False), (breaks_off, False)])
def test_a_busy_instance_lends_what_it_has(fault: object, is_lent: bool) -> None:
    """While it answers others, the prompt goes to one that is free, with what it lends; else that one computes it."""
    lender, borrower = Instance(fault), Instance(answers)  # type: ignore[arg-type]
    with pair_of(costs=COSTS, instances=[lender, borrower]) as pair:
        pair.hold(0, FIRST)
        waiting = keep_busy(pair, lender)
        answer, route_said = said(pair.router, chat(FIRST))
        let_go(lender, waiting)
    asked = borrower.asked[-1]
    assert answer == {"by": borrower.url}
    assert ("kv_offer" in asked, asked.get("kv_is_lent")) == (is_lent, True if is_lent else None)
    assert (f"lender=127.0.0.1:{lender.server_port}" in route_said) == is_lent
    assert "reason=load" in route_said


@pytest.mark.processes
def test_what_was_lent_for_nothing_is_given_up() -> None:
    """The borrower refuses the chat: the lender need not wait for somebody who reads."""
    lender, borrower = Instance(lends), Instance(refuses)
    with pair_of(costs=COSTS, instances=[lender, borrower]) as pair:
        pair.hold(0, FIRST)
        waiting = keep_busy(pair, lender)
        said(pair.router, chat(FIRST))
        assert lender.is_given_up.wait(SECONDS)
        let_go(lender, waiting)


@pytest.mark.processes
def test_with_a_prefill_instance_nobody_lends() -> None:
    """It computes the prompt, or has it: its offer is the one that goes."""
    prefill, lender = Instance(offers), Instance(answers)
    with publishing() as cache:
        lookup = lookup_of({lender.url: cache})
        with routed([prefill], [lender], chooser=Chooser(lookup, COSTS)) as router:
            Pair([lender], [cache], router, lookup).hold(0, FIRST)
            said(router, {**chat(FIRST), "kv_is_lent": True})
        lookup.close()
    assert "kv_is_lent" not in lender.asked[-1] and "kv_offer" in lender.asked[-1]


def test_lending_is_weighed() -> None:
    """It costs a twentieth for each token that is moved, and a request to the lender; a few tokens are computed."""
    found = {PLACES[0]: PrefixFound(num_tokens=1000, num_gpu_tokens=1000)}
    costs, chooser, instances = COSTS, Chooser(None, COSTS), Instances(URLS)
    prompt = PromptKnown(1100, found)
    assert costs.of(prompt, PLACES[0]) == 100
    assert costs.of(prompt, PLACES[1]) == pytest.approx(100 + 50 + 16)
    assert costs.lender_of(prompt, PLACES[1]) == PLACES[0] and costs.lender_of(prompt, PLACES[0]) is None
    assert Costs().of(prompt, PLACES[1]) == 1100 and Costs().lender_of(prompt, PLACES[1]) is None
    few = PromptKnown(1100, {PLACES[0]: PrefixFound(num_tokens=16, num_gpu_tokens=16)})
    assert costs.lender_of(few, PLACES[1]) is None and costs.of(few, PLACES[1]) == 1100
    assert chooser.choose(instances, prompt).lender is None, "who has it all is asked first"

"""The router between instances that lend: whom it asks to lend, and what it does without that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from fastdeploy_cache.events import PrefixFound
from fastdeploy_cache.launch.server.choice import Chooser, Costs
from fastdeploy_cache.launch.server.instances import Instances, Load
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
@pytest.mark.parametrize("prefills", [offers, refuses])
def test_with_a_prefill_instance_nobody_lends(prefills: Callable[[_Handler], None]) -> None:
    """It computes the prompt, or has it: its offer is the one that goes, and without one the prompt is computed."""
    prefill, lender = Instance(prefills), Instance(answers)
    with publishing() as cache:
        lookup = lookup_of({lender.url: cache})
        with routed([prefill], [lender], chooser=Chooser(lookup, COSTS)) as router:
            Pair([lender], [cache], router, lookup).hold(0, FIRST)
            said(router, {**chat(FIRST), "kv_is_lent": True})
        lookup.close()
    assert "kv_is_lent" not in lender.asked[-1] and ("kv_offer" in lender.asked[-1]) == (prefills is offers)


@pytest.mark.processes
def test_a_loan_is_for_one_instance_alone(nobody: str) -> None:
    """Who should have borrowed is not there: the lender answers by itself, without its own offer, which is given up."""
    with ExitStack() as stack:
        lender = Instance(lends)
        caches = {lender.url: stack.enter_context(publishing()), nobody: stack.enter_context(publishing())}
        lookup = lookup_of(caches)
        stack.callback(lookup.close)
        router = stack.enter_context(routed([], [lender, nobody], chooser=Chooser(lookup, COSTS)))
        pair = Pair([lender], [*caches.values()], router, lookup)
        pair.hold(0, FIRST)
        waiting = keep_busy(pair, lender)
        third = threading.Thread(target=said, args=(router, chat(FIRST)))
        lender.is_held.clear()
        third.start()
        assert lender.is_held.wait(SECONDS), "it is asked for the answer, too"
        let_go(lender, [*waiting, third])
        assert lender.is_given_up.wait(SECONDS)
    assert not any("kv_offer" in each or "kv_is_lent" in each for each in lender.asked)


def test_lending_is_weighed() -> None:
    """It costs a twentieth for each token that is moved, and a request to the lender; a few tokens are computed."""
    found = {PLACES[0]: PrefixFound(num_tokens=1000, num_gpu_tokens=1000)}
    costs, chooser, instances = COSTS, Chooser(None, COSTS), Instances(URLS)
    prompt = PromptKnown(1100, found)
    assert costs.of(prompt, PLACES[0], PLACES) == 100
    assert costs.of(prompt, PLACES[1], PLACES) == pytest.approx(100 + 50 + 16)
    assert costs.lender_of(prompt, PLACES[1], PLACES) == PLACES[0]
    assert costs.lender_of(prompt, PLACES[0], PLACES) is None
    assert Costs().of(prompt, PLACES[1], PLACES) == 1100 and Costs().lender_of(prompt, PLACES[1], PLACES) is None
    few = PromptKnown(1100, {PLACES[0]: PrefixFound(num_tokens=16, num_gpu_tokens=16)})
    assert costs.lender_of(few, PLACES[1], PLACES) is None and costs.of(few, PLACES[1], PLACES) == 1100
    several = PromptKnown(1100, found, 2)
    assert costs.lender_of(several, PLACES[1], PLACES) is None, "an offer is of one prompt"
    assert chooser.choose(instances, prompt, may_lend=True).lender is None, "who has it all is asked first"


def test_who_hangs_or_has_another_role_lends_nothing() -> None:
    """A hung instance is no lender, another one that has less is; and without leave nobody is."""
    instances, chooser = Instances(URLS), Chooser(None, COSTS)
    found = {
        place: PrefixFound(num_tokens=n, num_gpu_tokens=n) for place, n in zip(PLACES, (1000, 0, 900), strict=True)
    }
    prompt = PromptKnown(1000, found)
    instances._note_hung(PLACES[0])
    with instances.loaded((PLACES[2], Load(0.0, 300.0))):
        choice = chooser.choose(instances, prompt, may_lend=True)
        assert (choice.places[0], choice.lender) == (PLACES[1], PLACES[2])
        assert choice.load_of(PLACES[1]).tokens == 1016, "what it costs where the loan does not come"
        assert chooser.choose(instances, prompt).lender is None
        assert chooser.choose(instances, prompt).places[0] == PLACES[2]
    assert instances.load(PLACES[2]) == 0

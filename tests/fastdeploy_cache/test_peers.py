"""Offers and receives in the books: what may be told to others, what may be believed of them, and when. Simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fastdeploy_cache import Request, StorageConfig
from fastdeploy_cache.errors import ConfigError, PeerRefusedError, PromptTooLongError, RequestError
from fastdeploy_cache.peers import receives
from fastdeploy_cache.peers.receives import PeerReceives
from fastdeploy_cache.transfer_manager.peer.offer import Offer, prompt_digest
from fastdeploy_cache.transfer_manager.peer.signature import OfferSigner, make_secret
from fastdeploy_cache.transfer_manager.task import RankResult, TransferResult
from tests.rigs.cache_model import CacheModel
from tests.rigs.simulated_pair import TEXT, SimulatedPair
from tests.rigs.simulated_storage import SimulatedStorage


@pytest.fixture
def pair() -> SimulatedPair:
    return SimulatedPair()


def test_what_runs_ahead_of_loads_is_not_offered_as_computed(pair: SimulatedPair) -> None:
    """An offer made while its blocks still load has none of them; where the load fails, the send does, too."""
    a, b = pair.a, pair.b
    a.serve_and_copy(TEXT)
    a.cache.blocks.evict(30)
    live = a.must_match(TEXT)
    assert a.run_ahead(live, 1)
    a.cache.commit(live.request, len(TEXT))  # its step is over, and nobody has confirmed it
    send = a.cache.peers.offer(live.request)
    receive = b.cache.peers.receive(Request(request_id="b", prompt_token_ids=TEXT), send.offer)
    pair.go_on()
    assert not receive.done
    a.client.land("failed")
    assert not a.cache.confirm(live.request, 0, arrived=True)
    a.cache.release(live.request)
    for _ in range(3):
        pair.go_on()
    assert receive.reason is not None and send.reason == "failed"


def test_a_load_that_comes_makes_it_computed(pair: SimulatedPair) -> None:
    """The same where the load succeeds: after `confirm` the next commit tells."""
    a, b = pair.a, pair.b
    a.serve_and_copy(TEXT)
    a.cache.blocks.evict(30)
    live = a.must_match(TEXT)
    assert a.run_ahead(live, 1)
    send = a.cache.peers.offer(live.request)
    receive = b.cache.peers.receive(Request(request_id="b", prompt_token_ids=TEXT), send.offer)
    a.client.land_all()
    a.confirm(live)
    a.compute(live, len(TEXT))
    for _ in range(3):
        pair.go_on()
    assert receive.succeeded and send.succeeded


def test_a_receive_that_cannot_land_is_told_and_holds_nothing(
    pair: SimulatedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory, say: who waits for it hears of it, and its blocks are free."""
    a, b = pair.a, pair.b
    live = a.must_match(TEXT)
    assert a.allocate(live, 11)
    send = a.cache.peers.offer(live.request)
    receive = b.cache.peers.receive(Request(request_id="b", prompt_token_ids=TEXT), send.offer)
    a.compute(live, len(TEXT))

    def insert(*_: object) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(receives, "insert", insert)
        for _ in range(3):
            pair.go_on()
    assert receive.done and receive.reason == "failed"
    b.cache.check_invariants()
    stats = b.cache.stats()
    assert (stats.gpu.num_free, stats.num_failed_steps["landing"], stats.num_open_receives) == (30, 1, 0)


def test_a_metric_that_raises_loses_no_transfer(pair: SimulatedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends hear of theirs, and what has come is cached. An offer for another prompt is refused, as ever."""
    a, b = pair.a, pair.b

    def fail(*_: object) -> None:
        raise ZeroDivisionError("metric")

    for model in (a, b):
        monkeypatch.setattr(model.cache.metrics, "record_peer", fail)
    live = a.must_match(TEXT)
    assert a.allocate(live, 11)
    send = a.cache.peers.offer(live.request)
    with pytest.raises(PeerRefusedError):
        b.cache.peers.receive(Request(request_id="other", prompt_token_ids=TEXT[::-1]), send.offer)
    receive = b.cache.peers.receive(Request(request_id="b", prompt_token_ids=TEXT), send.offer)
    a.compute(live, len(TEXT))
    for _ in range(3):
        pair.go_on()
    assert receive.succeeded and send.succeeded
    assert b.cache.stats().num_failed_steps["metrics"] and b.cache.stats().num_open_receives == 0


def test_what_is_open_is_counted(pair: SimulatedPair) -> None:
    """From the verb to the end, on each side its own."""
    a, b = pair.a, pair.b
    live = a.must_match(TEXT)
    assert a.allocate(live, 11)
    send = a.cache.peers.offer(live.request)
    b.cache.peers.receive(Request(request_id="b", prompt_token_ids=TEXT), send.offer)
    counts = [(stats.num_open_sends, stats.num_open_receives) for stats in (a.cache.stats(), b.cache.stats())]
    assert counts == [(1, 0), (0, 1)]
    a.compute(live, len(TEXT))
    for _ in range(3):
        pair.go_on()
    counts = [(stats.num_open_sends, stats.num_open_receives) for stats in (a.cache.stats(), b.cache.stats())]
    assert send.succeeded and counts == [(0, 0), (0, 0)]


def test_a_store_of_other_weights_ends_transfers(pair: SimulatedPair) -> None:
    """Attaching it forgets all that others of the old weights may still ask for, and offers are of the new ones."""
    a, b = pair.a, pair.b
    live = a.must_match(TEXT)
    assert a.allocate(live, 11)
    send = a.cache.peers.offer(live.request)
    a.cache.storage.attach(StorageConfig(folder="/nowhere", weights_id="v"), client=SimulatedStorage(a.client))
    pair.go_on()
    assert send.reason == "cancelled"
    a.release(live)
    live = a.must_match(TEXT)
    assert a.allocate(live, 11)
    with pytest.raises(PeerRefusedError, match="'v', this one 'w'"):
        b.cache.peers.receive(Request(request_id="b", prompt_token_ids=TEXT), a.cache.peers.offer(live.request).offer)


def test_weights_that_change_while_a_receive_is_checked(pair: SimulatedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check hashes the prompt without the lock: new weights meanwhile make it another instance."""
    a, b = pair.a, pair.b
    live = a.must_match(TEXT)
    assert a.allocate(live, 11)
    offer = a.cache.peers.offer(live.request).offer
    peers = b.cache.peers.road
    assert peers is not None
    check = peers.offers.check

    def slow(*arguments: Any) -> None:
        check(*arguments)
        b.cache.reset(weights_id="v")

    monkeypatch.setattr(peers.offers, "check", slow)
    with pytest.raises(PeerRefusedError, match="weights_id"):
        b.cache.peers.receive(Request(request_id="b", prompt_token_ids=TEXT), offer)


def test_numbers_of_steps_rise_and_are_used_once(pair: SimulatedPair) -> None:
    """Layers that were marked under a number say nothing of another step: it is refused."""
    a = pair.a
    live = a.must_match(TEXT)
    assert a.allocate(live, 11)
    a.cache.peers.offer(live.request)
    a.cache.peers.begin_step(live.request, 20, 5)
    with pytest.raises(RequestError, match="numbers rise"):
        a.cache.peers.begin_step(live.request, 24, 4)
    a.compute(live, 20)
    with pytest.raises(RequestError, match="each is for one step"):
        a.cache.peers.begin_step(live.request, 24, 5)
    a.cache.peers.begin_step(live.request, 24, 6)


def test_a_step_that_does_less_than_announced_fails_the_send(pair: SimulatedPair) -> None:
    """Readers may have read layers of blocks that will be computed again."""
    a = pair.a
    live = a.must_match(TEXT)
    assert a.allocate(live, 11)
    send = a.cache.peers.offer(live.request)
    a.cache.peers.begin_step(live.request, 40, 1)
    a.compute(live, 20)
    pair.go_on()
    assert send.reason == "failed" and "5 of the 10 blocks" in str(send.error)


def test_updates_wait_for_each_other(pair: SimulatedPair) -> None:
    """While a rank has not answered one, what comes meanwhile goes together with the next."""
    a, b = pair.a, pair.b
    assert a.peers is not None
    live = a.must_match(TEXT)
    assert a.allocate(live, 11)
    send = a.cache.peers.offer(live.request)
    held: list[Any] = []
    answer, a.peers.answer = a.peers.answer, lambda *given, **named: held.append((given, named))  # type: ignore[method-assign]
    for upto in (8, 16, 24, 44):
        a.compute(live, upto)
    assert len(held) == 1
    a.peers.answer = answer  # type: ignore[method-assign]
    a.peers.answer(*held[0][0], **held[0][1])
    receive = b.cache.peers.receive(Request(request_id="b", prompt_token_ids=TEXT), send.offer)
    for _ in range(3):
        pair.go_on()
    assert receive.succeeded and send.succeeded


def test_an_update_that_is_lost_fails_the_send(pair: SimulatedPair) -> None:
    """A rank that has not heard of blocks could never name them."""
    a = pair.a
    assert a.peers is not None
    live = a.must_match(TEXT)
    assert a.allocate(live, 11)
    send = a.cache.peers.offer(live.request)
    answer = a.peers.answer
    a.peers.answer = lambda task, *_, **__: answer(task, "the rank has not read its earlier tasks")  # type: ignore[method-assign]
    a.compute(live, 8)
    a.peers.answer = answer  # type: ignore[method-assign]
    pair.go_on()
    assert send.reason == "failed"


def test_a_prompt_that_can_never_fit_is_no_shortage() -> None:
    """Asking again would not help."""
    pair = SimulatedPair()
    small = pair._model("small", num_gpu=5)
    live = pair.a.must_match(TEXT)
    assert pair.a.allocate(live, 11)
    with pytest.raises(PromptTooLongError):
        small.cache.peers.receive(
            Request(request_id="b", prompt_token_ids=TEXT), pair.a.cache.peers.offer(live.request).offer
        )


@pytest.fixture
def group(tmp_path: Path) -> SimulatedPair:
    """A pair that shares a secret."""
    make_secret(tmp_path / "secret")
    return SimulatedPair(secret_file=str(tmp_path / "secret"))


def refused(model: CacheModel) -> dict[str, float]:
    """Receives that were refused, by the name of who had made the offer."""
    name = "fastdeploy_cache_peer_failures"
    samples = [s for family in model.cache.metrics.collect() if family.name == name for s in family.samples]
    return {s.labels["peer"]: s.value for s in samples if s.labels["reason"] == "refused" and s.value}


def test_an_offer_of_the_group_is_taken(group: SimulatedPair) -> None:
    """Signed by one, opened by the other: the blocks come."""
    live = group.a.must_match(TEXT)
    assert group.a.allocate(live, 11)
    send = group.a.cache.peers.offer(live.request)
    request = Request(request_id="b", prompt_token_ids=TEXT)
    group.b.cache.peers.check_offer(request, send.offer)
    assert group.b.cache.peers.receive(request, send.offer).num_blocks == 11


@pytest.mark.parametrize("is_signed_again", [False, True])
def test_an_offer_of_one_prompt_made_into_one_of_another_is_refused(
    group: SimulatedPair, is_signed_again: bool
) -> None:
    """A stranger has a true offer, and would have its blocks cached under a prompt that others ask for: nothing is
    fetched, no block is taken, and whose name it used is not counted."""
    a, b = group.a, group.b
    live = a.must_match(TEXT)
    assert a.allocate(live, 11)
    send, wanted = a.cache.peers.offer(live.request), [6 - token for token in TEXT]
    theirs = Request(request_id="b", prompt_token_ids=wanted)
    true = Offer.from_bytes(send.offer[32:])
    forged = msgspec.structs.replace(true, prompt=prompt_digest("", bytes(theirs.tokens), None))
    data = OfferSigner().sign(forged) if is_signed_again else send.offer[:32] + forged.to_bytes()
    num_free = b.cache.stats().gpu.by_state()["free"]
    for take in (b.cache.peers.check_offer, b.cache.peers.receive):
        with pytest.raises(PeerRefusedError, match="no offer of this group"):
            take(theirs, data)
    assert not b.peers.receives and b.cache.stats().num_open_receives == 0
    assert b.cache.stats().gpu.by_state()["free"] == num_free
    assert refused(b) == {"others": 2}


def test_a_true_offer_for_another_prompt_is_refused(group: SimulatedPair) -> None:
    """Replayed with other tokens, or in another namespace."""
    live = group.a.must_match(TEXT)
    assert group.a.allocate(live, 11)
    offer = group.a.cache.peers.offer(live.request).offer
    others = [{"prompt_token_ids": [6 - t for t in TEXT]}, {"prompt_token_ids": TEXT, "namespace": "salt"}]
    for other in others:
        request = Request(request_id="b", **other)
        for take in (group.b.cache.peers.check_offer, group.b.cache.peers.receive):
            with pytest.raises(PeerRefusedError, match="another prompt"):
                take(request, offer)
    assert not group.b.peers.receives


@pytest.mark.parametrize("offer", [None, "abc", 12, [1]])
def test_no_offer_at_all(pair: SimulatedPair, offer: Any) -> None:
    """What is no bytes is refused as such."""
    with pytest.raises(PeerRefusedError, match="an offer is bytes"):
        pair.b.cache.peers.receive(Request(request_id="b", prompt_token_ids=TEXT), offer)


@pytest.mark.parametrize("weights_id", [5, "  "])
def test_names_of_weights_are_checked_before_anything_changes(pair: SimulatedPair, weights_id: Any) -> None:
    """Without a store, too."""
    pair.a.serve(TEXT, stays=False, patient=True)
    with pytest.raises(ConfigError):
        pair.a.cache.reset(weights_id=weights_id)
    assert pair.a.cache.blocks.lookup(Request(request_id="x", prompt_token_ids=TEXT)).num_blocks == 11


def test_new_weights_are_named_whatever_else_fails(pair: SimulatedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers under the old name would be taken for ours: a failing end of receives does not keep it."""

    def fail(self: PeerReceives) -> None:
        raise MemoryError

    monkeypatch.setattr(PeerReceives, "cancel_all", fail)
    pair.a.cache.reset(weights_id="v")
    monkeypatch.undo()
    assert pair.a.cache.peers.road.offers.info.weights_id == "v"  # type: ignore[union-attr]
    pair.a.steps_may_fail = True


def test_an_offer_of_which_two_instances_read_parts(pair: SimulatedPair) -> None:
    """Its send has not succeeded: each rank went with another reader, and none of these has all."""
    a = pair.a
    a.serve_and_copy(TEXT)
    live = a.must_match(TEXT)
    send = a.cache.peers.offer(live.request)
    (task,) = [each.task for each in pair._network[0].sends.values()]
    ranks = tuple(RankResult(rank=rank, peer=peer) for rank, peer in enumerate(("decode-0", "decode-1")))
    a.cache.peers.road.on_result(TransferResult(task=task, ranks=ranks))
    assert send.reason == "gone" and "decode-0 and decode-1 have read parts of it" in str(send.error)

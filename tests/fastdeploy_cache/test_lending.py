"""What one instance has cached and lends to another: what is offered, what is refused, what is learned. Simulated."""

from __future__ import annotations

import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.errors import PeerRefusedError, RequestError
from fastdeploy_cache.peers.transfers import Send
from tests.rigs.simulated_pair import TEXT, SimulatedPair

BEHIND = [6, 6, 6, 5]
NUM_BLOCKS = len(TEXT) // 4


@pytest.fixture
def pair() -> SimulatedPair:
    return SimulatedPair()


def lent(pair: SimulatedPair, tokens: list[int]) -> tuple[Request, Send]:
    """The first instance has loaded what it has of these tokens, and lends it."""
    asked = Request(request_id="lent", prompt_token_ids=tokens)
    match = pair.a.cache.match(asked)
    pair.a.client.land_all()
    match.wait(1)
    try:
        return asked, pair.a.cache.peers.lend(asked)
    finally:
        pair.a.cache.release(asked)


def taken(pair: SimulatedPair, tokens: list[int]) -> int:
    """How many tokens of a prompt the second one finds on its GPU."""
    request = Request(request_id="takes", prompt_token_ids=tokens)
    match = pair.b.cache.match(request)
    pair.b.cache.release(request)
    return match.num_gpu_tokens


def test_what_the_cpu_tier_has_is_lent(pair: SimulatedPair) -> None:
    """It is loaded, offered and read, and then the other one has it; nothing is left held on either side."""
    pair.a.serve_and_copy(TEXT)
    pair.a.cache.blocks.evict(30)
    asked, send = lent(pair, [*TEXT, *BEHIND])
    assert send.num_blocks == NUM_BLOCKS, "no more than was found"
    request = Request(request_id="b", prompt_token_ids=[*TEXT, *BEHIND])
    receive = pair.b.cache.peers.receive(request, send.offer, is_lent=True)
    for _ in range(3):
        pair.go_on()
    assert receive.succeeded and send.succeeded
    pair.b.cache.peers.cancel_receive(request)
    assert taken(pair, [*TEXT, *BEHIND]) == len(TEXT)
    assert asked.request_id not in pair.a.cache.peers.road.sends
    pair.a.finish()
    pair.b.finish()


def test_what_is_not_cached_is_not_lent(pair: SimulatedPair) -> None:
    """No block of it is here, or the last one is not whole: there is nothing to offer."""
    with pytest.raises(RequestError, match="no full block"):
        lent(pair, TEXT)
    pair.a.finish()
    pair.b.finish()


def test_an_offer_is_of_one_prompt(pair: SimulatedPair) -> None:
    """What is lent of one prompt is refused for another one that begins alike."""
    pair.a.serve_and_copy(TEXT)
    _, send = lent(pair, [*TEXT, 1])
    with pytest.raises(PeerRefusedError, match="another prompt"):
        pair.b.cache.peers.receive(Request(request_id="b", prompt_token_ids=[*TEXT, 2]), send.offer, is_lent=True)
    pair.a.cache.peers.cancel_send(send)
    for _ in range(3):
        pair.go_on()
    pair.a.finish()
    pair.b.finish()


def test_what_is_computed_sooner_is_not_borrowed() -> None:
    """Once both times are known, the slower way is refused, with both; a hand-over by `offer` never is."""
    pair = SimulatedPair(load_policy="auto")
    pair.a.serve_and_copy(TEXT)
    speeds = pair.b.cache._movement.speeds
    speeds.prefill.note(1000, 0.001)
    asked = Request(request_id="b", prompt_token_ids=[*TEXT, *BEHIND])
    _, send = lent(pair, [*TEXT, *BEHIND])
    receive = pair.b.cache.peers.receive(asked, send.offer, is_lent=True)  # nothing is known of links yet
    for _ in range(3):
        pair.go_on()
    assert receive.succeeded
    pair.b.cache.peers.cancel_receive(asked)
    pair.b.cache.reset()
    speeds.peer.note(1.0, 60.0)
    _, send = lent(pair, [*TEXT, *BEHIND])
    with pytest.raises(PeerRefusedError, match=r"s to receive them and .* s to compute them"):
        pair.b.cache.peers.receive(asked, send.offer, is_lent=True)
    receive = pair.b.cache.peers.receive(asked, send.offer)
    for _ in range(3):
        pair.go_on()
    assert receive.succeeded
    pair.b.cache.peers.cancel_receive(asked)
    pair.a.finish()
    pair.b.finish()


def test_what_is_never_loaded_is_not_borrowed() -> None:
    """`load_policy` "never" is said as the reason."""
    pair = SimulatedPair(load_policy="never")
    pair.a.serve_and_copy(TEXT)
    asked = Request(request_id="b", prompt_token_ids=[*TEXT, *BEHIND])
    _, send = lent(pair, [*TEXT, *BEHIND])
    with pytest.raises(PeerRefusedError, match="load_policy is 'never'"):
        pair.b.cache.peers.receive(asked, send.offer, is_lent=True)
    pair.a.cache.peers.cancel_send(send)
    for _ in range(3):
        pair.go_on()
    pair.a.finish()
    pair.b.finish()


def test_only_what_is_lent_tells_how_fast_a_link_is(pair: SimulatedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an offer that is computed meanwhile is that of computing it."""
    pair.a.serve_and_copy(TEXT)
    noted = list[float]()
    monkeypatch.setattr(pair.b.cache._movement.speeds.peer, "note", lambda _, seconds: noted.append(seconds))
    for is_lent in (False, True):
        asked = Request(request_id=f"b{is_lent}", prompt_token_ids=[*TEXT, *BEHIND])
        _, send = lent(pair, [*TEXT, *BEHIND])
        pair.b.cache.peers.receive(asked, send.offer, is_lent=is_lent)
        for _ in range(3):
            pair.go_on()
        assert len(noted) == is_lent
        pair.b.cache.peers.cancel_receive(asked)
        pair.b.cache.reset()
    pair.a.finish()
    pair.b.finish()

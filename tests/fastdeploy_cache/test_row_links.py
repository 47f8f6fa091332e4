"""A hybrid model's prompt handed over a link: full KV, and the checkpoint behind it. Exact steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.errors import OutOfBlocksError, PeerRefusedError
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.peer.offer import GROUPS_VERSION
from tests.rigs.hybrid_requests import BOTH, ONLY_WINDOW, TEXT, computed, picture, started
from tests.rigs.linked_caches import END, Linked


@pytest.mark.parametrize("layout", [BOTH, ONLY_WINDOW])
def test_a_prompt_is_handed_over(layout: KVLayout) -> None:
    """The other instance goes on at the last boundary; what is there is not sent again; nothing stays held."""
    pair = Linked(layout)
    if layout is BOTH:
        send = pair.handed()
    else:
        request, _, send = pair.offered()
        pair.prefill.commit(request, len(TEXT))
        pair.prefill.release(request)
    request, receive = pair.receive(send.offer)
    assert receive.num_blocks == 4
    pair.check()
    pair.go_on()
    assert send.succeeded and receive.succeeded
    pair.check()
    assert pair.decode.match(request).num_tokens == END
    pair.decode.release(request)
    pair.check_nothing_kept()
    other = Request(request_id="a2", prompt_token_ids=TEXT)
    assert pair.prefill.match(other).num_tokens == END
    send = pair.prefill.peers.offer(other)
    request, receive = pair.receive(send.offer)
    assert receive.num_blocks == 0 and pair.going[0].detail.wants_nothing, "it is here already"
    pair.go_on()
    assert receive.succeeded and pair.decode.match(request).num_tokens == END
    pair.close()


def test_the_checkpoint_comes_when_it_is_made(linked_pair: Linked) -> None:
    """Blocks are read as they are committed; the snapshot behind the last of them ends it, also behind the commit."""
    request, new, send = linked_pair.offered()
    theirs, receive = linked_pair.receive(send.offer)
    for num_tokens in (8, END):
        linked_pair.prefill.commit(request, num_tokens)
        linked_pair.go_on()
        assert len(linked_pair.going[0].read) == num_tokens // 4 and not receive.done
    linked_pair.prefill.rows.snapshot(request, END, new.tables[0].block_ids)
    linked_pair.go_on()
    assert receive.succeeded and send.succeeded
    linked_pair.prefill.release(request)
    assert linked_pair.decode.match(theirs).num_tokens == END
    linked_pair.check()


def test_what_is_released_without_a_checkpoint_fails(linked_pair: Linked) -> None:
    """An engine that takes no snapshot there, or a pool without a slot for it."""
    request, _, send = linked_pair.offered()
    linked_pair.prefill.commit(request, len(TEXT))
    linked_pair.prefill.release(request)
    linked_pair.go_on()
    assert send.reason == "failed" and "without a checkpoint behind its 4 blocks" in str(send.error)
    linked_pair.check_nothing_kept()


def test_what_is_being_read_stays_though_its_request_has_gone(linked_pair: Linked) -> None:
    """Nothing makes room with the units that a send has told of; behind its end they are room."""
    send = linked_pair.handed()
    linked_pair.receive(send.offer)
    others = [Request(request_id=f"other {n}", prompt_token_ids=[40 + n] * 18) for n in range(4)]
    taken = 0
    with pytest.raises(OutOfBlocksError):
        for other in others:
            linked_pair.prefill.match(other)
            linked_pair.prefill.rows.allocate(other, 4)
            taken += 1
    linked_pair.check()
    linked_pair.go_on()
    assert send.succeeded
    linked_pair.prefill.rows.allocate(others[taken], 4)
    linked_pair.check()


def test_a_receive_for_which_a_row_is_short_changes_nothing(linked_pair: Linked) -> None:
    """It names the row."""
    send = linked_pair.handed()
    fillers = [started(linked_pair.decode, f"filler {n}", [40 + n] * 22)[0] for n in range(2)]
    before = picture(linked_pair.decode)
    with pytest.raises(OutOfBlocksError, match="2 units of the row 'window 6'") as short:
        linked_pair.receive(send.offer)
    assert short.value.row == "window 6" and picture(linked_pair.decode) == before
    linked_pair.check()
    for filler in fillers:
        linked_pair.decode.release(filler)
    request, receive = linked_pair.receive(send.offer)
    linked_pair.go_on()
    assert receive.succeeded and linked_pair.decode.match(request).num_tokens == END


def test_only_the_checkpoint_is_missing(linked_pair: Linked) -> None:
    """All full blocks are here, of a longer prompt: its units alone are received."""
    long = [*TEXT, *range(50, 60)]
    linked_pair.decode.release(computed(linked_pair.decode, "long", long))
    send = linked_pair.handed()
    request, receive = linked_pair.receive(send.offer)
    detail = linked_pair.going[0].detail
    assert receive.num_blocks == 0 and detail.units and not detail.wants_nothing
    linked_pair.check()
    linked_pair.go_on()
    assert receive.succeeded and linked_pair.decode.match(request).num_tokens == END
    linked_pair.decode.release(request)
    linked_pair.check_nothing_kept()


def test_it_was_made_here_meanwhile(linked_pair: Linked) -> None:
    """The same prompt was computed while it came: what came goes home, and what is here is kept for its match."""
    send = linked_pair.handed()
    request, receive = linked_pair.receive(send.offer)
    linked_pair.decode.release(computed(linked_pair.decode, "same"))
    linked_pair.go_on()
    assert receive.succeeded
    linked_pair.check()
    assert linked_pair.decode.match(request).num_tokens == END
    linked_pair.decode.release(request)
    linked_pair.check_nothing_kept()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("is_read", [False, True])
def test_a_reset_ends_it(linked_pair: Linked, side: str, is_read: bool) -> None:
    """On either side, before anything is read or when all is; nothing stays held."""
    send = linked_pair.handed()
    _, receive = linked_pair.receive(send.offer)
    if is_read:
        linked_pair.network[1].read(linked_pair.going[0], 100)
    getattr(linked_pair, side).reset()
    linked_pair.check()
    linked_pair.network[1].fail(linked_pair.going[0], "cancelled: it is over")
    linked_pair.prefill.peers.cancel_send(send)
    linked_pair.go_on()
    assert receive.reason == "cancelled"
    linked_pair.check_nothing_kept()


def forged(pair: Linked, offer: bytes, **fields: Any) -> bytes:
    """The same offer with other fields, by somebody of the group."""
    offers = pair.decode.peers.road.offers
    return offers._signer.sign(msgspec.structs.replace(offers.open(offer), **fields))


def test_offers_that_are_none_are_refused(linked_pair: Linked) -> None:
    """Other rows, other rank numbers by name, and boundaries at which the prompt cannot go on; nothing is begun."""
    send = linked_pair.handed()
    opened = linked_pair.decode.peers.road.offers.open(send.offer)
    assert opened.version == GROUPS_VERSION
    other = dataclasses.replace(BOTH, groups=(*BOTH.groups[:2], dataclasses.replace(BOTH.groups[2], reach_tokens=7)))
    two = {"tp_size": 2, "addresses": ("simulated", "simulated")}
    for fields, words in (
        ({"source": msgspec.structs.replace(opened.source, layout=other)}, "they must agree"),
        ({"source": msgspec.structs.replace(opened.source, **two)}, "rows 'state', 'window 6' need equal numbers"),
        ({"num_blocks": 0}, "can go on behind blocks 1 to 4"),
        ({"num_blocks": 5}, "the offer has 5 blocks"),
    ):
        with pytest.raises(PeerRefusedError, match=words):
            linked_pair.receive(forged(linked_pair, send.offer, **fields))
    short = TEXT[:END]
    prompt = linked_pair.prefill.peers.road.offers.new_send(
        linked_pair.prefill._requests.active(started(linked_pair.prefill, "short", short)[0]),
        4,
        linked_pair.prefill._books.clock.event(),
    )
    with pytest.raises(PeerRefusedError, match="ends behind block 4; request 'b' can go on behind blocks 1 to 3"):
        linked_pair.receive(prompt.offer, short)
    assert not linked_pair.going
    linked_pair.check()

"""A hybrid model's prompt handed over through a store: full KV, and the checkpoint behind it. Exact steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from fastdeploy_cache import CacheConfig, PeerConfig, PrefixCacheManager, Request, StorageConfig, Tier
from fastdeploy_cache.errors import PeerRefusedError, RequestError
from fastdeploy_cache.peers.transfers import Receive, Send
from fastdeploy_cache.request import Image
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.peer.offer import GROUPS_VERSION, OFFER_VERSION, Offer
from fastdeploy_cache.transfer_manager.storage.keys import is_page
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.held_store import HeldStore, stored_in
from tests.rigs.hybrid_requests import BOTH, ONLY_WINDOW, TEXT, computed, started
from tests.rigs.stored_rows import FIELDS, names_of, pages_of

END = 16  # tokens of TEXT in front of which the last checkpoint lies
PEER = PeerConfig(link="storage", weights_id="w", name="it")


def instance(layout: KVLayout = BOTH, **fields: Any) -> PrefixCacheManager:
    """One whose store is attached later, by the test."""
    units = {"num_gpu_units": (12,)} if len(layout.groups) == 2 else {}
    given: dict[str, Any] = {"block_size": 4, "num_gpu_blocks": 16, "transfer_client": "inline", "max_running": 3}
    config = CacheConfig(
        **{**given, **FIELDS, **units, "layout": layout, "peer": PEER, **fields},
        storage=StorageConfig(kind="valkey", server_url="redis://nowhere:1", weights_id="w"),
    )
    object.__setattr__(config, "storage", None)  # the configuration asks for a real one
    return PrefixCacheManager(config)


class Pair:
    """Two instances over one store: `prefill` computes, and `decode` goes on."""

    def __init__(self, opened: ExitStack, layout: KVLayout = BOTH) -> None:
        self.objects: dict[str, bytes] = {}
        self.prefill, self.decode = instance(layout), instance(layout)
        self.writes: HeldStore = opened.enter_context(stored_in(self.prefill, self.objects))
        self.reads: HeldStore = opened.enter_context(stored_in(self.decode, self.objects))

    def offered(self, tokens: list[int]) -> tuple[Request, Any, Send]:
        """A prompt that has its blocks, and is offered."""
        request, new = started(self.prefill, "a", tokens)
        return request, new, self.prefill.peers.offer(request)

    def handed(self, tokens: list[int] = TEXT) -> Send:
        """One that is computed and released."""
        request = computed(self.prefill, "a", tokens)
        send = self.prefill.peers.offer(request)
        self.prefill.release(request)
        return send

    def received(self, offer: bytes, tokens: list[int] = TEXT) -> tuple[Request, Receive]:
        request = Request(request_id="b", prompt_token_ids=tokens)
        return request, self.decode.peers.receive(request, offer)

    def check(self) -> None:
        for cache in (self.prefill, self.decode):
            cache.check_invariants()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as opened:
        given = Pair(opened)
        yield given
    vars(given).clear()  # pytest keeps it, and with it the memory of both


@pytest.mark.parametrize("layout", [BOTH, ONLY_WINDOW])
def test_a_prompt_is_handed_over(layout: KVLayout) -> None:
    """The other instance goes on at the last whole block, though it never saw the prompt; with nothing left open."""
    with ExitStack() as opened:
        pair = Pair(opened, layout)
        if layout is BOTH:
            send = pair.handed()
        else:
            request, _, send = pair.offered(TEXT)
            pair.prefill.commit(request, len(TEXT))
            pair.prefill.release(request)
        assert send.succeeded and send.num_blocks == 4
        request, receive = pair.received(send.offer)
        assert receive.succeeded and receive.num_blocks == 4
        match = pair.decode.match(request).wait(5.0)
        assert match.num_tokens == END
        pair.check()
        pair.decode.release(request)
        again, receive = pair.received(send.offer)
        assert receive.succeeded and receive.num_blocks == 0, "it is here already"
        assert pair.decode.match(again).wait(5.0).num_tokens == END
        pair.decode.release(again)
        pair.check()


def test_a_send_lasts_until_its_checkpoint_is_stored(pair: Pair) -> None:
    """Full KV alone is worth nothing. Until then both are kept, also without their request; then nothing is."""
    pair.writes.holds = {TaskKind.WRITE}
    send = pair.handed()
    while pair.writes.tasks:
        assert not send.done
        pair.check()
        pair.writes.step()
    assert send.succeeded and pages_of(pair.objects)
    pair.check()
    assert not pair.prefill.peers.road.sends.pins and not list(pair.prefill.peers.road.sends.checkpoints)


@pytest.mark.parametrize("num_free", [0, 3, 4, 6])
def test_a_send_for_which_there_is_no_room_fails_at_once(num_free: int) -> None:
    """Not at its deadline: where nothing can be copied down, or not the image, nothing more will happen."""
    prefill = instance(num_cpu_blocks=8)
    with stored_in(prefill, {}):
        prefill.blocks.allocate(8 - num_free, Tier.CPU)
        request = computed(prefill, "a", TEXT)
        send = prefill.peers.offer(request)
        prefill.release(request)
        assert send.reason == "failed" and "has not taken all of it" in str(send.error)
        prefill.check_invariants()


def test_a_snapshot_behind_the_commit_sends_it(pair: Pair) -> None:
    """Both orders are allowed, and nobody commits again before the release."""
    request, new, send = pair.offered(TEXT)
    pair.prefill.commit(request, END)
    assert not send.done
    pair.prefill.rows.snapshot(request, END, new.tables[0].block_ids)
    assert send.succeeded
    pair.prefill.commit(request, len(TEXT))
    pair.prefill.release(request)
    pair.check()


def test_what_is_released_without_a_checkpoint_fails(pair: Pair) -> None:
    """An engine that takes no snapshot there, or a pool without a slot for it."""
    request, _, send = pair.offered(TEXT)
    pair.prefill.commit(request, len(TEXT))
    pair.prefill.release(request)
    assert send.reason == "failed" and "its 4 blocks, and the checkpoint behind them," in str(send.error)
    pair.check()


@pytest.mark.parametrize("num_steps", range(3))
def test_a_reset_ends_a_send(pair: Pair, num_steps: int) -> None:
    """After any of its writes; nothing stays kept."""
    pair.writes.holds = {TaskKind.WRITE}
    send = pair.handed()
    for _ in range(min(num_steps, len(pair.writes.tasks) - 1)):
        pair.writes.step()
    pair.prefill.reset()
    assert send.reason == "cancelled"
    pair.writes.go()
    pair.check()


def test_a_write_that_fails_fails_the_send(pair: Pair) -> None:
    """That of the image alone: the offer is worth nothing."""
    pair.writes.holds = {TaskKind.WRITE}
    send = pair.handed()
    while not is_page(names_of(pair.writes.tasks[0])[0]):
        pair.writes.step()
    pair.writes.go("no space")
    assert send.reason == "failed", send.error
    pair.check()


def test_a_checkpoint_that_is_gone_from_the_store_fails_the_receive(pair: Pair) -> None:
    """The blocks are there and the image is not: nothing stays of them, and the prompt is computed."""
    send = pair.handed()
    for key in pages_of(pair.objects):
        del pair.objects[key]
    request, receive = pair.received(send.offer)
    assert receive.reason == "failed"
    assert pair.decode.match(request).wait(5.0).num_tokens == 0
    pair.decode.release(request)
    pair.check()


def test_an_image_that_does_not_come_fails_the_receive(pair: Pair) -> None:
    """All blocks have come by then: they serve nobody, and none of them stays."""
    send = pair.handed()
    pair.reads.holds = {TaskKind.PREFETCH}
    request, receive = pair.received(send.offer)
    while not is_page(names_of(pair.reads.tasks[0])[0]):
        pair.reads.step()
    assert not receive.done
    for key in pages_of(pair.objects):
        del pair.objects[key]
    pair.reads.go("the connection was lost")
    assert receive.reason == "failed", receive.error
    assert pair.decode.match(request).wait(5.0).num_tokens == 0
    pair.decode.release(request)
    pair.check()


def test_an_earlier_checkpoint_is_not_that_of_the_offer(pair: Pair) -> None:
    """The prompt before left one on the same path, and this one leaves none."""
    pair.prefill.release(computed(pair.prefill, "before", TEXT[:10]))
    request, _, send = pair.offered(TEXT)
    pair.prefill.commit(request, len(TEXT))
    assert not send.done
    pair.prefill.release(request)
    assert send.reason == "failed"
    pair.check()


def test_an_offer_ends_in_front_of_an_image(pair: Pair) -> None:
    """As its checkpoint does; the receive succeeds, though more whole blocks are behind."""
    images = (Image(offset=14, length=3, hash=b"i" * 32),)
    request = Request(request_id="a", prompt_token_ids=TEXT, images=images)
    match = pair.prefill.match(request)
    assert match.checkpoint_tokens[-1] == 12
    new = pair.prefill.rows.allocate(request, 5)
    send = pair.prefill.peers.offer(request)
    pair.prefill.rows.snapshot(request, 12, new.tables[0].block_ids)
    for num_tokens in (12, len(TEXT)):
        pair.prefill.commit(request, num_tokens)
    pair.prefill.release(request)
    assert send.succeeded and send.num_blocks == 3
    other = Request(request_id="b", prompt_token_ids=TEXT, images=images)
    receive = pair.decode.peers.receive(other, send.offer)
    assert receive.succeeded and pair.decode.match(other).wait(5.0).num_tokens == 12
    pair.decode.release(other)
    pair.check()


def test_a_short_prompt_has_nothing_to_offer(pair: Pair) -> None:
    """One whole block and no token behind it: nobody could go on there."""
    request, _ = started(pair.prefill, "a", TEXT[:4])
    with pytest.raises(RequestError, match="no full block behind which the prompt can be gone on with"):
        pair.prefill.peers.offer(request)
    pair.prefill.release(request)


def forged(pair: Pair, offer: bytes, **fields: Any) -> bytes:
    """The same offer with other fields, by somebody of the group."""
    offers = pair.decode.peers.road.offers
    return offers._signer.sign(msgspec.structs.replace(offers.open(offer), **fields))


def test_offers_that_are_none_are_refused(pair: Pair) -> None:
    """Other rows, an older version, more blocks than the prompt has, a boundary within an image; nothing is begun."""
    send = pair.handed()
    other = dataclasses.replace(BOTH, groups=(*BOTH.groups[:2], dataclasses.replace(BOTH.groups[2], reach_tokens=7)))
    source = pair.decode.peers.road.offers.open(send.offer).source
    for fields, words in (
        ({"source": msgspec.structs.replace(source, layout=other)}, "they must agree"),
        ({"num_blocks": 5}, "the offer has 5 blocks"),
    ):
        with pytest.raises(PeerRefusedError, match=words):
            pair.received(forged(pair, send.offer, **fields))
    opened = pair.decode.peers.road.offers.open(send.offer)
    assert opened.version == GROUPS_VERSION
    old = msgspec.msgpack.decode(opened.to_bytes())
    old["version"] = OFFER_VERSION
    with pytest.raises(PeerRefusedError, match="version 1, this is 2"):
        Offer.from_bytes(msgspec.msgpack.encode(old))
    shown = Request(request_id="b", prompt_token_ids=TEXT, images=(Image(offset=14, length=3, hash=b"i" * 32),))
    with pytest.raises(PeerRefusedError, match="ends behind block 4, within an image"):
        pair.decode.peers.receive(shown, send.offer)
    assert not len(pair.decode.peers.road.receives)
    pair.check()

"""A hybrid model's prompt handed over a link: full KV, and the checkpoint behind it. Exact steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from fastdeploy_cache import PeerConfig, PrefixCacheManager, Request
from fastdeploy_cache.books.checkpoints import Checkpoints
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import OutOfBlocksError, PeerRefusedError
from fastdeploy_cache.peers import receives
from fastdeploy_cache.peers.transfers import Receive, Send
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.peer.offer import GROUPS_VERSION
from tests.rigs.held_tasks import Held
from tests.rigs.hybrid_requests import BOTH, ONLY_WINDOW, TEXT, computed, picture, started
from tests.rigs.row_links import RowArrays
from tests.rigs.simulated_peers import SimReceive, SimulatedPeers
from tests.rigs.stored_rows import no_memory

TIERS = {"num_cpu_blocks": 90, "cpu_write_policy": "write_through", "max_load_share": 1.0}
END = 16  # tokens of TEXT in front of which the last checkpoint lies


class Linked:
    """Two instances; nothing is read until the test says so."""

    def __init__(self, layout: KVLayout = BOTH, **fields: Any) -> None:
        self.network: list[SimulatedPeers] = []
        self.prefill, self.decode = (self._instance(name, layout, **fields) for name in ("prefill", "decode"))

    def _instance(self, name: str, layout: KVLayout, **fields: Any) -> PrefixCacheManager:
        units = (12,) if len(layout.groups) == 2 else (6, 12)
        given: dict[str, Any] = {"block_size": 4, "num_gpu_blocks": 16, "num_gpu_units": units, "max_running": 3}
        peer = PeerConfig(weights_id="w", name=name)
        config = CacheConfig(**{**given, "layout": layout, "transfer_client": "inline", "peer": peer, **fields})
        client = SimulatedPeers(name, self.network, [])
        cache = PrefixCacheManager(config, peer_client=client)
        rank_layout = config.rank_layout()
        assert rank_layout is not None
        memory = [RowArrays(cache, rank_layout, row) for row in range(len(rank_layout.rows))]
        client.memory, client.rows = memory[0], memory[1:]
        client.num_units = lambda boundary: [row.num_units_at(boundary) for row in rank_layout.rows[1:]]
        return cache

    @property
    def going(self) -> list[SimReceive]:
        """Receives that are on their way."""
        return self.network[1].receives

    def offered(self, tokens: list[int] = TEXT) -> tuple[Request, Any, Send]:
        """A prompt that has its blocks, and is offered."""
        request, new = started(self.prefill, "a", tokens)
        return request, new, self.prefill.peers.offer(request)

    def handed(self, tokens: list[int] = TEXT, name: str = "a") -> Send:
        """One that is computed and released."""
        request = computed(self.prefill, name, tokens)
        send = self.prefill.peers.offer(request)
        self.prefill.release(request)
        return send

    def receive(self, offer: bytes, tokens: list[int] = TEXT, name: str = "b") -> tuple[Request, Receive]:
        request = Request(request_id=name, prompt_token_ids=tokens)
        return request, self.decode.peers.receive(request, offer)

    def go_on(self) -> None:
        """All is read, confirmed and answered."""
        for end in self.network:
            for receive in list(end.receives):
                end.read(receive, 100)
                end.confirm(receive)
        for end in self.network:
            for send in list(end.sends.values()):
                if send.is_over or send.why:
                    end.end_send(send, send.why)

    def check(self) -> None:
        for cache in (self.prefill, self.decode):
            cache.check_invariants()

    def check_nothing_kept(self) -> None:
        self.check()
        for cache in (self.prefill, self.decode):
            road = cache.peers.road
            assert not [*road.sends.pins, *road.sends.checkpoints, *road.receives.pins, *road.receives.checkpoints]
            assert not [*road.sends.held_ids, *road.receives.held_ids, *road.receives.held_units]

    def close(self) -> None:
        for end in self.network:
            end.stop()  # or each would wait for what the test has left
        for cache in (self.prefill, self.decode):
            cache.close()
        for end in self.network:
            end.memory, end.rows = [], ()  # a traceback in the log may keep it


@pytest.fixture
def pair() -> Iterator[Linked]:
    given = Linked()
    yield given
    given.close()
    vars(given).clear()  # pytest keeps it, and with it the memory of both


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


def test_the_checkpoint_comes_when_it_is_made(pair: Linked) -> None:
    """Blocks are read as they are committed; the snapshot behind the last of them ends it, also behind the commit."""
    request, new, send = pair.offered()
    theirs, receive = pair.receive(send.offer)
    for num_tokens in (8, END):
        pair.prefill.commit(request, num_tokens)
        pair.go_on()
        assert len(pair.going[0].read) == num_tokens // 4 and not receive.done
    pair.prefill.rows.snapshot(request, END, new.tables[0].block_ids)
    pair.go_on()
    assert receive.succeeded and send.succeeded
    pair.prefill.release(request)
    assert pair.decode.match(theirs).num_tokens == END
    pair.check()


def test_what_is_released_without_a_checkpoint_fails(pair: Linked) -> None:
    """An engine that takes no snapshot there, or a pool without a slot for it."""
    request, _, send = pair.offered()
    pair.prefill.commit(request, len(TEXT))
    pair.prefill.release(request)
    pair.go_on()
    assert send.reason == "failed" and "without a checkpoint behind its 4 blocks" in str(send.error)
    pair.check_nothing_kept()


def test_what_is_being_read_stays_though_its_request_has_gone(pair: Linked) -> None:
    """Nothing makes room with the units that a send has told of; behind its end they are room."""
    send = pair.handed()
    pair.receive(send.offer)
    others = [Request(request_id=f"other {n}", prompt_token_ids=[40 + n] * 18) for n in range(4)]
    taken = 0
    with pytest.raises(OutOfBlocksError):
        for other in others:
            pair.prefill.match(other)
            pair.prefill.rows.allocate(other, 4)
            taken += 1
    pair.check()
    pair.go_on()
    assert send.succeeded
    pair.prefill.rows.allocate(others[taken], 4)
    pair.check()


def test_a_receive_for_which_a_row_is_short_changes_nothing(pair: Linked) -> None:
    """It names the row."""
    send = pair.handed()
    fillers = [started(pair.decode, f"filler {n}", [40 + n] * 22)[0] for n in range(2)]
    before = picture(pair.decode)
    with pytest.raises(OutOfBlocksError, match="2 units of the row 'window 6'") as short:
        pair.receive(send.offer)
    assert short.value.row == "window 6" and picture(pair.decode) == before
    pair.check()
    for filler in fillers:
        pair.decode.release(filler)
    request, receive = pair.receive(send.offer)
    pair.go_on()
    assert receive.succeeded and pair.decode.match(request).num_tokens == END


def test_only_the_checkpoint_is_missing(pair: Linked) -> None:
    """All full blocks are here, of a longer prompt: its units alone are received."""
    long = [*TEXT, *range(50, 60)]
    pair.decode.release(computed(pair.decode, "long", long))
    send = pair.handed()
    request, receive = pair.receive(send.offer)
    detail = pair.going[0].detail
    assert receive.num_blocks == 0 and detail.units and not detail.wants_nothing
    pair.check()
    pair.go_on()
    assert receive.succeeded and pair.decode.match(request).num_tokens == END
    pair.decode.release(request)
    pair.check_nothing_kept()


def test_it_was_made_here_meanwhile(pair: Linked) -> None:
    """The same prompt was computed while it came: what came goes home, and what is here is kept for its match."""
    send = pair.handed()
    request, receive = pair.receive(send.offer)
    pair.decode.release(computed(pair.decode, "same"))
    pair.go_on()
    assert receive.succeeded
    pair.check()
    assert pair.decode.match(request).num_tokens == END
    pair.decode.release(request)
    pair.check_nothing_kept()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("is_read", [False, True])
def test_a_reset_ends_it(pair: Linked, side: str, is_read: bool) -> None:
    """On either side, before anything is read or when all is; nothing stays held."""
    send = pair.handed()
    _, receive = pair.receive(send.offer)
    if is_read:
        pair.network[1].read(pair.going[0], 100)
    getattr(pair, side).reset()
    pair.check()
    pair.network[1].fail(pair.going[0], "cancelled: it is over")
    pair.prefill.peers.cancel_send(send)
    pair.go_on()
    assert receive.reason == "cancelled"
    pair.check_nothing_kept()


@pytest.mark.parametrize(
    ("where", "name"), [(Checkpoints, "publish"), (Checkpoints, "_take_units"), (receives, "insert")]
)
def test_books_without_memory_fail_the_receive(
    pair: Linked, where: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full blocks without their checkpoint serve nobody: none stays."""
    send = pair.handed()
    request, receive = pair.receive(send.offer)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, no_memory)
        pair.go_on()
    assert receive.reason == "failed" and "could not take what had come" in str(receive.error)
    pair.check_nothing_kept()
    assert pair.decode.stats().gpu.num_free == 16
    assert pair.decode.match(request).num_tokens == 0


def test_half_of_the_blocks_are_inserted(pair: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was no memory for the others: the checkpoint, which would lie behind them, does not come."""
    send = pair.handed()
    _, receive = pair.receive(send.offer)
    insert = receives.insert

    def half(tree: Any, at: Any, keys: Any, first: int, ids: Any, **fields: Any) -> Any:
        return insert(tree, at, keys, first, ids[:2], **fields)

    monkeypatch.setattr(receives, "insert", half)
    pair.go_on()
    assert receive.reason == "failed"
    pair.check_nothing_kept()
    assert pair.decode.stats().gpu.num_free == 16


@pytest.mark.parametrize("name", ["pin", "bytes of it"])
def test_a_checkpoint_of_which_nobody_could_be_told(pair: Linked, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of memory: the next commit tells."""
    request, new, send = pair.offered()
    theirs, receive = pair.receive(send.offer)
    pair.prefill.commit(request, 12)
    pair.prefill.rows.snapshot(request, END, new.tables[0].block_ids)
    sends = pair.prefill.peers.road.sends
    with monkeypatch.context() as patch:
        patch.setattr(sends, "_keep_checkpoint" if name == "pin" else "_update", no_memory)
        pair.prefill.commit(request, END)
    pair.check()
    assert not list(sends.checkpoints)
    pair.prefill.commit(request, len(TEXT))
    pair.go_on()
    assert receive.succeeded and send.succeeded
    pair.prefill.release(request)
    assert pair.decode.match(theirs).num_tokens == END
    pair.decode.release(theirs)
    pair.check_nothing_kept()


def forged(pair: Linked, offer: bytes, **fields: Any) -> bytes:
    """The same offer with other fields, by somebody of the group."""
    offers = pair.decode.peers.road.offers
    return offers._signer.sign(msgspec.structs.replace(offers.open(offer), **fields))


def test_offers_that_are_none_are_refused(pair: Linked) -> None:
    """Other rows, other rank numbers by name, and boundaries at which the prompt cannot go on; nothing is begun."""
    send = pair.handed()
    opened = pair.decode.peers.road.offers.open(send.offer)
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
            pair.receive(forged(pair, send.offer, **fields))
    short = TEXT[:END]
    prompt = pair.prefill.peers.road.offers.new_send(
        pair.prefill._requests.active(started(pair.prefill, "short", short)[0]), 4, pair.prefill._books.clock.event()
    )
    with pytest.raises(PeerRefusedError, match="ends behind block 4; request 'b' can go on behind blocks 1 to 3"):
        pair.receive(prompt.offer, short)
    assert not pair.going
    pair.check()


def in_cpu_alone(cache: PrefixCacheManager, tokens: list[int] = TEXT) -> None:
    """These are computed there, copied down, and leave the GPU."""
    cache.release(computed(cache, "first", tokens))
    for number in range(6):
        cache.release(computed(cache, f"other {number}", [100 + number] * 18))


def test_a_checkpoint_in_front_of_which_a_load_is_on_its_way_is_not_offered_yet() -> None:
    """It has come, full KV has not, and then does not: nobody hears of it, and what is held ends in the right order."""
    pair = Linked(**TIERS)
    in_cpu_alone(pair.prefill)
    held = Held(pair.prefill)
    request = Request(request_id="again", prompt_token_ids=TEXT)
    pair.prefill.match(request)
    pair.prefill.rows.allocate(request, 1, ahead_of_loads=True)
    full, (image,) = [t for t in held.tasks if not t.units], [t for t in held.tasks if t.units]
    held.tasks = [image]
    held.go()
    send = pair.prefill.peers.offer(request)
    pair.check()
    assert not list(pair.prefill.peers.road.sends.checkpoints)
    held.tasks = full
    held.go(lambda _: True)
    pair.prefill.release(request)
    pair.check()
    pair.go_on()
    assert send.reason == "failed"
    pair.check_nothing_kept()
    pair.close()


def test_a_row_that_is_short_starts_no_load() -> None:
    """The same with full KV in the CPU tier: nothing leaves the GPU for a load whose receive is refused."""
    pair = Linked(**TIERS)
    in_cpu_alone(pair.decode, TEXT[:12])
    send = pair.handed()
    fillers = [started(pair.decode, f"filler {n}", [40 + n] * 22)[0] for n in range(2)]
    held, before = Held(pair.decode), picture(pair.decode)
    with pytest.raises(OutOfBlocksError, match="units of the row"):
        pair.receive(send.offer)
    assert not held.tasks and picture(pair.decode) == before
    for filler in fillers:
        pair.decode.release(filler)
    request, receive = pair.receive(send.offer)
    assert held.num_loads == 1, "full KV alone: the checkpoint comes over the link"
    held.go()
    pair.go_on()
    assert receive.succeeded and pair.decode.match(request).num_tokens == END
    pair.decode.release(request)
    pair.check_nothing_kept()
    pair.close()

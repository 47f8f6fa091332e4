"""Two instances with real peer processes and real bytes: what arrives is exact, and what cannot arrive is a miss."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.errors import OutOfBlocksError, PeerError, PeerRefusedError, RequestError
from tests.rigs.instance import BLOCK_SIZE, LAYOUT, SECONDS
from tests.rigs.peer_instances import NONE_HELD, NUM_BLOCKS, TOKENS, Rig

pytestmark = pytest.mark.processes


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as opened:
        yield Rig(opened)


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (2, 2), (3, 1), (1, 2), (2, 6), (6, 3)])
def test_blocks_arrive_byte_for_byte(rig: Rig, num_prefill: int, num_decode: int) -> None:
    """Chunk by chunk, between all pairs of rank numbers that divide each other."""
    prefill, decode = rig.here("prefill", tp_size=num_prefill), rig.here("decode", tp_size=num_decode)
    offer = prefill.offer("a", TOKENS)
    assert decode.receive("a", TOKENS, offer) == NUM_BLOCKS
    for num_tokens in (6, 21, len(TOKENS)):
        prefill.compute("a", num_tokens)
    prefill.release("a")
    assert decode.wait_receive("a") == [True, None, None]
    assert decode.serve("a") == NUM_BLOCKS * BLOCK_SIZE
    assert prefill.wait_send("a") == [True, None, None]
    assert prefill.check() == decode.check() == NONE_HELD


def test_layers_come_before_the_step_is_over(rig: Rig, eventually: Callable[..., None]) -> None:
    """While the model computes the fourth layer, the first three are read; nothing can be found yet."""
    prefill, decode = rig.here("prefill"), rig.here("decode")
    decode.receive("a", TOKENS, prefill.offer("a", TOKENS))
    prefill.compute("a", len(TOKENS), num_layers=3)
    tier = decode.cache.peers.road
    assert tier is not None
    here, there = (
        [layer["value"].view(np.uint16) for layer in each.cache.ranks.kv_views(0)] for each in (decode, prefill)
    )
    ids, table = tier.receives.held_ids, prefill._requests["a"][1][:NUM_BLOCKS]
    eventually(lambda: np.array_equal(here[2][ids], there[2][table]))
    assert not here[3][ids].any(), "the fourth layer is not there"
    assert decode.cache.blocks.lookup(Request(request_id="x", prompt_token_ids=TOKENS)).num_blocks == 0
    prefill.compute("a", len(TOKENS))
    prefill.release("a")
    assert decode.wait_receive("a")[0] and decode.serve("a") == NUM_BLOCKS * BLOCK_SIZE


def test_what_is_cached_is_not_sent(rig: Rig) -> None:
    """Of a prompt whose first blocks decode has on the GPU or in its CPU tier only the others go."""
    prefill, decode = rig.here("prefill"), rig.here("decode", num_gpu=20, num_cpu=40)
    decode.receive("a", TOKENS, prefill.offer("a", TOKENS))
    prefill.compute("a", len(TOKENS))
    prefill.release("a")
    assert decode.wait_receive("a")[0]
    decode.serve("a")
    longer = [*TOKENS[: 6 * BLOCK_SIZE], *range(500, 500 + 4 * BLOCK_SIZE)]
    assert decode.receive("b", longer, prefill.offer("b", longer)) == 4
    prefill.compute("b", len(longer))
    prefill.release("b")
    assert decode.wait_receive("b")[0] and decode.serve("b") == len(longer) - BLOCK_SIZE
    assert decode.cache.wait_for_transfers(SECONDS)
    decode.cache.blocks.evict(20)
    assert decode.cache.blocks.lookup(Request(request_id="x", prompt_token_ids=TOKENS)).block_ids == []
    assert decode.receive("c", TOKENS, prefill.offer("c", TOKENS)) == 0, "it is loaded instead"
    assert decode.wait_receive("c")[0] and decode.serve("c") == NUM_BLOCKS * BLOCK_SIZE
    prefill.release("c")
    assert prefill.wait_send("c")[0], "not needed is no failure"
    assert prefill.check() == decode.check() == NONE_HELD


@pytest.mark.parametrize("num_layers", range(LAYOUT.num_layers + 1))
def test_prefill_killed_at_any_layer(rig: Rig, num_layers: int) -> None:
    """The receive ends as gone, its blocks go home, nothing is found; a receive from another instance never notices."""
    doomed, other, decode = rig.apart("prefill"), rig.here("prefill"), rig.here("decode")
    offer = base64.b64decode(doomed.do("offer", "a", TOKENS))
    decode.receive("a", TOKENS, offer)
    doomed.do("compute", "a", 12)
    doomed.do("compute", "a", 24, num_layers)
    theirs = [7, *TOKENS]
    decode.receive("b", theirs, other.offer("b", theirs))
    other.compute("b", 20)
    doomed.kill()
    other.compute("b", len(theirs))
    other.release("b")
    assert (
        decode.wait_receive("b") == [True, None, None] and decode.serve("b") == len(theirs) // BLOCK_SIZE * BLOCK_SIZE
    )
    succeeded, reason, _ = decode.wait_receive("a")
    assert (succeeded, reason) == (False, "gone")
    assert decode.serve("a") == 0
    assert decode.check() == NONE_HELD


@pytest.mark.parametrize("num_layers", [0, 2, LAYOUT.num_layers])
def test_decode_killed_at_any_layer(rig: Rig, num_layers: int) -> None:
    """The send ends as gone and its blocks go home; a restarted instance may take the same offer before that."""
    prefill, doomed, restarted = rig.here("prefill"), rig.apart("decode"), rig.here("decode")
    offer = prefill.offer("a", TOKENS)
    again = prefill.offer("b", [*TOKENS, 1])
    for name, tokens, data in (("a", TOKENS, offer), ("b", [*TOKENS, 1], again)):
        doomed.do("receive", name, tokens, base64.b64encode(data).decode())
    prefill.compute("a", 8)
    doomed.do("wait_for_blocks", "a", 2)
    prefill.compute("a", 24, num_layers)
    doomed.kill()
    restarted.receive("b", [*TOKENS, 1], again)
    prefill.compute("b", len(TOKENS) + 1)
    prefill.release("b")
    assert restarted.wait_receive("b") == [True, None, None] and restarted.serve("b") == NUM_BLOCKS * BLOCK_SIZE
    assert prefill.wait_send("a")[:2] == [False, "gone"]
    prefill.release("a")
    assert prefill.check() == restarted.check() == NONE_HELD


def test_decode_full(rig: Rig) -> None:
    """Without room a receive is refused and changes nothing; the offer is as good when there is room."""
    prefill, decode = rig.here("prefill"), rig.here("decode", num_gpu=NUM_BLOCKS + 3)
    held = decode.cache.blocks.allocate(6)
    offer = prefill.offer("a", TOKENS)
    prefill.compute("a", len(TOKENS))
    prefill.release("a")
    with pytest.raises(OutOfBlocksError) as refused:
        decode.receive("a", TOKENS, offer)
    assert refused.value.missing == 3
    decode.cache.blocks.free(held)
    assert decode.receive("a", TOKENS, offer) == NUM_BLOCKS
    assert decode.wait_receive("a")[0] and decode.serve("a") == NUM_BLOCKS * BLOCK_SIZE


def test_back_pressure(rig: Rig) -> None:
    """More sends than are allowed are refused until one has ended."""
    prefill = rig.here("prefill", max_transfers=1)
    decode = rig.here("decode")
    offer = prefill.offer("a", TOKENS)
    with pytest.raises(PeerError, match="max_transfers"):
        prefill.offer("b", [*TOKENS, 1])
    prefill.compute("a", len(TOKENS))
    decode.receive("a", TOKENS, offer)
    assert prefill.wait_send("a")[0]
    request, *_ = prefill._requests["b"]
    assert prefill.cache.peers.offer(request).offer
    prefill.release("b")
    prefill.release("a")


def test_a_failed_request_says_how_far_it_was(rig: Rig) -> None:
    """Released in the middle of a step, it fails on the decode side with the block and the layer it had come to."""
    prefill, decode = rig.here("prefill"), rig.here("decode")
    decode.receive("a", TOKENS, prefill.offer("a", TOKENS))
    prefill.compute("a", 8)
    prefill.compute("a", 24, num_layers=3)
    prefill.release("a")
    succeeded, reason, error = decode.wait_receive("a")
    assert (succeeded, reason) == (False, "failed")
    assert "2 of 9 blocks" in error and "layer 3" in error
    assert decode.serve("a") == 0 and prefill.wait_send("a")[1] == "failed"
    assert prefill.check() == decode.check() == NONE_HELD


@pytest.mark.parametrize("verb", ["reset", "pause", "sleep", "update_weights"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_changes_of_life_end_transfers(rig: Rig, side: str, verb: str) -> None:
    """Either side's reset, pause, sleep or new weights: both ends come to nothing, and afterwards it works again."""
    prefill, decode = rig.here("prefill"), rig.here("decode")
    decode.receive("a", TOKENS, prefill.offer("a", TOKENS))
    prefill.compute("a", 20)
    changed = prefill if side == "prefill" else decode
    getattr(changed.cache.life, verb)(*(["w2"] if verb == "update_weights" else []))
    assert not decode.wait_receive("a")[0] and not prefill.wait_send("a")[0]
    prefill.release("a")
    assert decode.receives.pop("a") and decode.check() == prefill.check() == NONE_HELD
    {"pause": changed.cache.life.resume, "sleep": changed.cache.life.wake}.get(verb, lambda: None)()
    offer = prefill.offer("b", TOKENS)
    if verb == "update_weights":
        with pytest.raises(PeerRefusedError, match="weights_id"):
            decode.receive("b", TOKENS, offer)
        (decode if changed is prefill else prefill).cache.life.update_weights("w2")
        prefill.release("b")
        offer = prefill.offer("b", TOKENS)
    decode.receive("b", TOKENS, offer)
    prefill.compute("b", len(TOKENS))
    prefill.release("b")
    assert decode.wait_receive("b") == [True, None, None] and decode.serve("b") == NUM_BLOCKS * BLOCK_SIZE


def test_who_does_not_fit_is_refused_with_both_values(rig: Rig) -> None:
    """Other weights, another number of ranks, another prompt, an own offer, no offer at all, a wrong role."""
    prefill, decode = rig.here("prefill", tp_size=2), rig.here("decode", tp_size=3)
    offer = prefill.offer("a", TOKENS)
    with pytest.raises(PeerRefusedError, match="2 ranks, this one 3"):
        decode.receive("a", TOKENS, offer)
    others = rig.here("decode", weights_id="other")
    with pytest.raises(PeerRefusedError, match="'w', this one 'other'"):
        others.receive("a", TOKENS, offer)
    fitting = rig.here("mixed")
    with pytest.raises(PeerRefusedError, match="another prompt"):
        fitting.receive("a", [*TOKENS[:-1], 1], offer)
    with pytest.raises(PeerRefusedError, match="no offer"):
        fitting.receive("a", TOKENS, offer[:-5])
    with pytest.raises(PeerRefusedError, match="own"):
        fitting.receive("b", TOKENS, fitting.offer("a", TOKENS))
    with pytest.raises(PeerRefusedError, match="'decode'"):
        decode.offer("x", TOKENS)
    decode.release("x")
    with pytest.raises(PeerRefusedError, match="'prefill'"):
        prefill.receive("x", TOKENS, offer)
    with pytest.raises(RequestError, match="already"):
        prefill.cache.peers.offer(prefill._requests["a"][0])
    with pytest.raises(RequestError, match="no full block"):
        prefill.offer("short", TOKENS[:3])
    assert decode.check() == others.check() == NONE_HELD


def test_cancelled_from_either_side(rig: Rig) -> None:
    """Blocks of both sides go home; the other requests go on."""
    prefill, decode = rig.here("prefill"), rig.here("decode")
    for name, tokens in (("a", TOKENS), ("b", [1, *TOKENS]), ("c", [2, *TOKENS])):
        decode.receive(name, tokens, prefill.offer(name, tokens))
        prefill.compute(name, 16)
    decode.cache.peers.cancel_receive(decode.receives["a"][1])
    assert decode.wait_receive("a")[1] == "cancelled" and prefill.wait_send("a")[1] == "cancelled"
    prefill.cache.peers.cancel_send(prefill.sends["b"])
    assert decode.wait_receive("b")[1] == "cancelled" and prefill.wait_send("b")[1] == "cancelled"
    prefill.compute("c", len(TOKENS))
    for name in "abc":
        prefill.release(name)
    assert decode.wait_receive("c")[0] and decode.serve("c") == NUM_BLOCKS * BLOCK_SIZE
    decode.cache.peers.cancel_receive(decode.receives.pop("b")[1])
    assert prefill.check() == decode.check() == NONE_HELD


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_rank_of_several_is_killed(rig: Rig, side: str) -> None:
    """The other ranks hear of it at once: both sides end while the prompt is still being computed, and the rank comes
    back for the next request."""
    prefill, decode = rig.here("prefill", tp_size=2), rig.here("decode", tp_size=2)
    decode.receive("a", TOKENS, prefill.offer("a", TOKENS))
    prefill.compute("a", 8)
    decode.wait_for_blocks("a", 2)
    cache = (prefill if side == "prefill" else decode).cache
    pid = cache.peers.statuses()[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert not decode.wait_receive("a")[0] and not prefill.wait_send("a")[0]
    prefill.release("a")
    assert decode.serve("a") == 0
    assert cache.peers.wait_ready(SECONDS)
    decode.receive("b", TOKENS, prefill.offer("b", TOKENS))
    prefill.compute("b", len(TOKENS))
    prefill.release("b")
    assert decode.wait_receive("b") == [True, None, None] and decode.serve("b") == NUM_BLOCKS * BLOCK_SIZE
    assert prefill.check() == decode.check() == NONE_HELD


def test_many_at_a_time(rig: Rig) -> None:
    """As many transfers as are allowed, in many steps, side by side: every one arrives whole."""
    num = 60
    prefill, decode = (rig.here(role, num_gpu=num * 6, max_transfers=num) for role in ("prefill", "decode"))
    prompts = {f"r{i}": [i, *range(1000, 1000 + 5 * BLOCK_SIZE)] for i in range(num)}
    for name, tokens in prompts.items():
        decode.receive(name, tokens, prefill.offer(name, tokens))
    for num_tokens in range(BLOCK_SIZE, 5 * BLOCK_SIZE + 1, BLOCK_SIZE):
        for name in prompts:
            prefill.compute(name, num_tokens)
    for name in prompts:
        prefill.release(name)
    assert [decode.wait_receive(name) for name in prompts] == [[True, None, None]] * num
    assert [decode.serve(name) for name in prompts] == [5 * BLOCK_SIZE] * num
    assert all(prefill.wait_send(name)[0] for name in prompts)
    assert prefill.check() == decode.check() == NONE_HELD


def test_a_match_ends_the_receive_it_does_not_wait_for(rig: Rig) -> None:
    """At once, on both sides."""
    prefill, decode = rig.here("prefill"), rig.here("decode")
    decode.receive("a", TOKENS, prefill.offer("a", TOKENS))
    receive, request = decode.receives.pop("a")
    assert decode.cache.match(request).num_tokens == 0
    assert not receive.wait(SECONDS) and receive.reason == "cancelled"
    assert prefill.wait_send("a")[1] == "cancelled"
    decode.cache.release(request)
    prefill.release("a")

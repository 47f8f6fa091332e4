"""A hybrid model computed by one instance and gone on with by another, over a link, while parts fail."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import pytest

from fastdeploy_cache import PeerConfig
from fastdeploy_cache.errors import OutOfBlocksError, PeerError
from fastdeploy_cache.transfer_manager.client import RankStatus
from fastdeploy_cache.transfer_manager.config import TransferConfig
from tests.rigs.float64_engine import WAIT_SECONDS, Float64Engine
from tests.rigs.float64_model import BLOCK, VOCABULARY
from tests.rigs.needs import need_mooncake, need_nixl
from tests.rigs.row_trouble import Trouble, compute, signal_one

pytestmark = pytest.mark.processes

NUM_RECEIVES = int(os.environ.get("FASTDEPLOY_CACHE_ROW_RECEIVES", "80"))  # 2,000 in .ci/night


@contextmanager
def instances(draw: random.Random, *, tp_size: int = 2, **peer: Any) -> Iterator[tuple[Float64Engine, Float64Engine]]:
    """Two, with real peer processes of each rank."""
    transfer = TransferConfig(
        tp_size=tp_size, max_restarts=10_000, restart_backoff_seconds=0.0, task_timeout_seconds=5.0,
        stop_timeout_seconds=2.0,
    )  # fmt: skip
    timeouts = {"offer_timeout_seconds": 4.0, "receive_timeout_seconds": 4.0, "silence_timeout_seconds": 1.5}
    with ExitStack() as opened:
        made = []
        for name in ("prefill", "decode"):
            engine = Float64Engine(
                seed=draw.randrange(2**30), num_gpu_blocks=40, num_gpu_units=(9, 24, 30), num_cpu_blocks=60,
                transfer_client="processes", transfer=transfer, load_policy="always",
                peer=PeerConfig(weights_id="rows", name=name, **{**timeouts, **peer}),
            )  # fmt: skip
            made.append(engine)
            opened.enter_context(engine.cache)
        yield made[0], made[1]
        for engine in made:
            engine.disturb = lambda: None
            assert engine.cache.wait_for_transfers(WAIT_SECONDS)
            engine.cache.check_invariants()
            road = engine.cache.peers.road
            assert not [*road.sends.pins, *road.sends.checkpoints, *road.receives.pins, *road.receives.checkpoints]
            assert not [*road.sends.held_ids, *road.receives.held_ids, *road.receives.held_units]


def test_an_offer_of_an_earlier_boundary() -> None:
    """Altered by one of the group, with its secret: the units behind the other boundary are not taken for its own."""
    draw = random.Random(4)
    with instances(draw, tp_size=1) as (prefill, decode):
        prompt = [draw.randrange(VOCABULARY) for _ in range(5 * BLOCK + 1)]
        served = prefill.begin(prompt, 0)
        send = prefill.cache.peers.offer(served.request)
        offers = prefill.cache.peers.road.offers
        opened = offers.open(send.offer)
        forged = offers._signer.sign(msgspec.structs.replace(opened, num_blocks=3))
        request = decode.request_of(prompt)
        receive = decode.cache.peers.receive(request, forged)
        compute(prefill, served)
        assert not receive.wait(WAIT_SECONDS) and receive.reason == "failed"
        assert f"a checkpoint behind {opened.num_blocks} blocks, and not 3" in str(receive.error)
        gone_on = decode.begin(prompt, 2, request)
        assert not gone_on.num_hit
        compute(decode, gone_on)


def hand_over(prefill: Float64Engine, decode: Float64Engine, prompt: list[int]) -> tuple[bool, bool, int]:
    """Computed by one while the other receives, which then goes on; whether it was offered, whether all came, and the
    tokens that were hit."""
    served, request = prefill.begin(prompt, 0), decode.request_of(prompt)
    try:
        send = prefill.cache.peers.offer(served.request)
    except PeerError:  # a rank is down, or a reset was faster
        send = None
    receive = None
    if send is not None:
        try:
            receive = decode.cache.peers.receive(request, send.offer)
        except (PeerError, OutOfBlocksError):
            receive = None
    compute(prefill, served)
    came = receive is not None and receive.wait(WAIT_SECONDS)
    assert receive is None or receive.done, "a receive without an end"
    gone_on = decode.begin(prompt, 3, request)
    num_hit = gone_on.num_hit
    compute(decode, gone_on)
    if receive is None and send is not None:
        prefill.cache.peers.cancel_send(send)
    if send is not None:
        send.wait(WAIT_SECONDS)
        assert send.done, "a send without an end"
    return receive is not None, came, num_hit


def prompts(draw: random.Random) -> Iterator[list[int]]:
    """Some share their beginnings; each has a whole block, and a token behind it."""
    systems = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (13, 22)]
    while True:
        yield [*draw.choice(systems), *(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 20)))]


def trouble_of(engines: tuple[Float64Engine, ...], draw: random.Random) -> Trouble:
    """To both instances, and to what moves bytes between them."""
    trouble = Trouble(draw, {})

    def kill(of: Callable[[Float64Engine], list[RankStatus]]) -> None:
        signal_one(of(draw.choice(engines)), signal.SIGKILL, draw)

    def peers_of(engine: Float64Engine) -> list[RankStatus]:
        return engine.cache.peers.statuses()

    def stop() -> None:
        pid = signal_one(peers_of(draw.choice(engines)), signal.SIGSTOP, draw)
        if pid is not None:
            trouble.hang(lambda: None, lambda: _go_on(pid))

    trouble.kinds = {
        "a peer process is killed": lambda: kill(peers_of),
        "a peer process hangs": stop,
        "a rank is killed": lambda: kill(lambda engine: engine.cache._movement.client.statuses()),
        "a reset": lambda: draw.choice(engines).cache.reset(),  # noqa: PLW0108 (of one that is drawn then)
    }
    return trouble


def _go_on(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:  # it was taken for dead, and replaced
        return


@pytest.mark.timeout(180 + NUM_RECEIVES)
def test_prompts_are_handed_over_in_trouble() -> None:
    """Each logit is that from scratch, on both sides, whatever fails; and in the end nothing is held."""
    draw = random.Random(NUM_RECEIVES)
    num_receives = num_came = num_hit = 0
    with instances(draw) as engines:
        trouble = trouble_of(engines, draw)
        for engine in engines:
            engine.disturb = trouble
        for prompt in prompts(draw):
            is_begun, came, num_tokens = hand_over(*engines, prompt)
            num_receives, num_came = num_receives + is_begun, num_came + came
            num_hit += came and num_tokens == (len(prompt) - 1) // BLOCK * BLOCK
            if not is_begun:
                trouble.end()
                engines[0].cache.peers.wait_ready(WAIT_SECONDS)
                engines[1].cache.peers.wait_ready(WAIT_SECONDS)
            if num_receives == NUM_RECEIVES:
                break
        trouble.end()
    assert num_came > 0.5 * num_receives and num_hit > 0.9 * num_came, (num_receives, num_came, num_hit, trouble.seen)
    print(num_receives, "received,", num_came, "came,", num_hit, "hit whole;", dict(trouble.seen))


@pytest.mark.parametrize("link", ["nixl", "mooncake"])
def test_other_libraries_move_the_bytes(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and windows of two ranks, bit by bit."""
    need_nixl() if link == "nixl" else need_mooncake()
    monkeypatch.setenv("UCX_MODULES", "^ib")  # they bring a libnl of their own, which ends the process at its end
    draw = random.Random(1)
    settings = {"offer_timeout_seconds": 20.0, "receive_timeout_seconds": 20.0, "silence_timeout_seconds": 10.0}
    with instances(draw, link=link, **settings) as (prefill, decode):
        for _, prompt in zip(range(5), prompts(draw), strict=False):
            assert hand_over(prefill, decode, prompt) == (True, True, (len(prompt) - 1) // BLOCK * BLOCK)

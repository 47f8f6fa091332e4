"""A hybrid model computed by one instance and gone on with by another, through a real Valkey, while parts fail."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fastdeploy_cache import PeerConfig, StorageConfig
from fastdeploy_cache.errors import PeerError
from fastdeploy_cache.transfer_manager.client import RankStatus
from fastdeploy_cache.transfer_manager.config import TransferConfig
from tests.rigs.float64_engine import WAIT_SECONDS, Float64Engine
from tests.rigs.float64_model import BLOCK, VOCABULARY
from tests.rigs.row_trouble import Trouble, compute, signal_one
from tests.rigs.storage_servers import ValkeyServer
from tests.rigs.stored_float64 import storing_in

pytestmark = pytest.mark.processes

NUM_RECEIVES = int(os.environ.get("FASTDEPLOY_CACHE_ROW_RECEIVES", "40"))  # 2,000 in .ci/night
TP_SIZE = 2


def instance(url: str, seed: int) -> Float64Engine:
    """One with two ranks, which shares a store with others."""
    store = StorageConfig(
        kind="valkey", server_url=url, weights_id="rows", admission="all", task_timeout_seconds=1.0,
    )  # fmt: skip
    transfer = TransferConfig(
        tp_size=TP_SIZE, max_restarts=10_000, restart_backoff_seconds=0.0, task_timeout_seconds=5.0,
        stop_timeout_seconds=2.0,
    )  # fmt: skip
    peer = PeerConfig(link="storage", weights_id="rows", name="it", offer_timeout_seconds=2.0)
    return storing_in(store, seed, transfer_client="processes", transfer=transfer, peer=peer)


def trouble_of(server: ValkeyServer, engines: tuple[Float64Engine, ...], draw: random.Random) -> Trouble:
    """To instances over a store, and to the store."""

    def kill(of: Callable[[Float64Engine], list[RankStatus]]) -> None:
        signal_one(of(draw.choice(engines)), signal.SIGKILL, draw)

    def restart() -> None:
        server.kill()
        server.start()

    trouble = Trouble(draw, {})
    trouble.kinds = {
        "a rank is killed": lambda: kill(lambda engine: engine.cache._movement.client.statuses()),
        "a process of the store is killed": lambda: kill(lambda engine: engine.cache.storage.statuses()),
        "the server hangs": lambda: trouble.hang(server.pause, server.resume),
        "the server starts empty": restart,
        "a reset": lambda: draw.choice(engines).cache.reset(),  # noqa: PLW0108 (of one that is drawn then)
    }
    return trouble


def handed_over(prefill: Float64Engine, prompt: list[int]) -> bytes | None:
    """Compute and offer it; its offer, if all of it is in the store."""
    served = prefill.begin(prompt, 0)
    try:
        send = prefill.cache.peers.offer(served.request)
    except PeerError:  # the store is away, or a reset was faster
        send = None
    compute(prefill, served)
    return send.offer if send is not None and send.wait(WAIT_SECONDS) else None


def gone_on_with(decode: Float64Engine, prompt: list[int], offer: bytes) -> tuple[bool, int]:
    """Receive it, and go on behind it; whether all came, and how many tokens were hit."""
    request = decode.request_of(prompt)
    try:
        came = decode.cache.peers.receive(request, offer).wait(WAIT_SECONDS)
    except PeerError:
        came = False
    served = decode.begin(prompt, 3, request)
    num_hit = served.num_hit
    compute(decode, served)
    return came, num_hit


@pytest.mark.timeout(120 + NUM_RECEIVES)
def test_prompts_are_handed_over_in_trouble(tmp_path: Path) -> None:
    """Each logit is that from scratch, on both sides, whatever fails; and in the end nothing is held."""
    draw, server = random.Random(NUM_RECEIVES), ValkeyServer(tmp_path)
    server.start()
    prefill, decode = (instance(server.unix_url, seed) for seed in (1, 2))
    trouble = trouble_of(server, (prefill, decode), draw)
    num_offers = num_came = num_hit = 0
    decode.is_patient = True
    with prefill.cache, decode.cache:
        prefill.disturb = decode.disturb = trouble
        systems = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in (13, 22)]
        while num_offers < NUM_RECEIVES:
            prompt = [*draw.choice(systems), *(draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 20)))]
            offer = handed_over(prefill, prompt)
            if offer is None:
                trouble.end()
                continue
            num_offers += 1
            came, num_tokens = gone_on_with(decode, prompt, offer)
            num_came += came
            num_hit += came and num_tokens == (len(prompt) - 1) // BLOCK * BLOCK
        trouble.end()
        for engine in (prefill, decode):
            engine.disturb = lambda: None
            assert engine.cache.wait_for_transfers(WAIT_SECONDS)
            engine.cache.check_invariants()
            road = engine.cache.peers.road
            assert not [*road.sends.pins, *road.sends.checkpoints, *road.receives.pins]
    server.kill()
    # of a server that starts empty the sender hears nothing: what it has written once is not there for a while
    assert num_came > 0.2 * num_offers and num_hit > 0.6 * num_came, (num_offers, num_came, num_hit, trouble.seen)
    print(num_offers, "received,", num_came, "came,", num_hit, "hit whole;", dict(trouble.seen))

"""Two hybrid caches and the link between them: nothing is read until the test says so."""

from __future__ import annotations

from typing import Any

from fastdeploy_cache import PeerConfig, PrefixCacheManager, Request
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.peers.transfers import Receive, Send
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from tests.rigs.hybrid_requests import BOTH, TEXT, computed, started
from tests.rigs.row_links import RowArrays
from tests.rigs.simulated_peers import SimReceive, SimulatedPeers

END = 16  # tokens of TEXT in front of which the last checkpoint lies


class Linked:
    """Both instances."""

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

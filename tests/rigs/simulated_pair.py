"""Two instances that hand blocks to each other, over simulated memory."""

from __future__ import annotations

from typing import Any

from fastdeploy_cache import KVLayout, PeerConfig, TransferConfig
from tests.rigs.cache_model import CacheModel
from tests.rigs.simulated_peers import SimulatedPeers

TEXT = [(5 * i * i) % 7 for i in range(44)]
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2)


class SimulatedPair:
    """Two instances; the first computes."""

    def __init__(self, secret_file: str | None = None, **settings: Any) -> None:
        self._network: list[SimulatedPeers] = []
        self._secret_file = secret_file
        self.a, self.b = (self._model(name, **settings) for name in ("a", "b"))

    def _model(self, name: str, num_gpu: int = 30, num_cpu: int = 20, **settings: Any) -> CacheModel:
        return CacheModel(
            4,
            num_gpu,
            num_cpu,
            peers=lambda memory: SimulatedPeers(name, self._network, memory),
            layout=LAYOUT,
            peer=PeerConfig(weights_id="w", name=name, secret_file=self._secret_file),
            transfer=TransferConfig(),
            **settings,
        )

    def go_on(self) -> None:
        """Let everything between the instances happen."""
        for end in self._network:
            for receive in list(end.receives):
                end.read(receive, 100)
                if not end.confirm(receive) and receive.send is None:
                    end.fail(receive, "gone: it is over")
            for send in list(end.sends.values()):
                if send.is_over or send.why:
                    end.end_send(send, send.why)

"""Sends to other instances and receives from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastdeploy_cache.metrics.families import Families

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PEER_KINDS = ("send", "receive")
PEER_REASONS = ("gone", "late", "refused", "failed", "cancelled", "full")


@dataclass(slots=True)
class _PeerSums:
    num_tasks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class PeerCounts:
    """Sums for each kind and peer. One thread at a time, but for `layers_family`."""

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[str, str], _PeerSums] = defaultdict(_PeerSums)  # kind, peer
        self._failures: defaultdict[tuple[str, str, str], int] = defaultdict(int)  # kind, peer, reason
        self._layers_in_flight: Callable[[], Mapping[str, int]] = dict

    def observe(self, layers_in_flight: Callable[[], Mapping[str, int]]) -> None:
        """Read this at every scrape: by peer, layers that it has computed and that have not come yet."""
        self._layers_in_flight = layers_in_flight

    def record(self, kind: str, peer: str, num_bytes: int, seconds: float, reason: str | None) -> None:
        """A send or a receive has ended; with a reason it came to nothing."""
        sums = self._sums[kind, peer]
        sums.num_tasks += 1
        sums.num_bytes += num_bytes
        sums.seconds += seconds
        if reason is not None:
            self._failures[kind, peer, reason] += 1

    def families(self, families: Families) -> list[Metric]:
        """What Prometheus is shown of what has ended."""
        nobody = dict.fromkeys(((kind, "") for kind in PEER_KINDS), _PeerSums())

        def by_peer(name: str) -> dict[tuple[str, ...], float]:
            return {key: getattr(sums, name) for key, sums in (nobody | self._sums).items()}

        labels = ("kind", "peer")
        failures: dict[tuple[str, ...], float] = {(d, "", r): 0 for d in PEER_KINDS for r in PEER_REASONS}
        failures |= {(*key,): n for key, n in self._failures.items()}
        transfers, moved = by_peer("num_tasks"), by_peer("num_bytes")
        text = "Sends and receives that came to nothing, by reason"
        return [
            families.counter("peer_transfers", "Sends to and receives from other instances", labels, transfers),
            families.counter("peer_bytes", "Bytes that went from one instance to another", labels, moved),
            families.counter("peer_seconds", "Time receives took, computing included", labels, by_peer("seconds")),
            families.counter("peer_failures", text, (*labels, "reason"), failures),
        ]

    def layers_family(self, families: Families) -> Metric:
        """What is on its way now. It asks the cache, so no lock of the metrics is held."""
        text = "Layers that another instance has computed and that have not come yet"
        in_flight: dict[tuple[str, ...], float] = {("",): 0}
        in_flight |= {(peer,): n for peer, n in self._layers_in_flight().items()}
        return families.gauge("peer_layers_in_flight", text, ("peer",), in_flight)

"""Links, peers and local memory of one kind, for the tests of links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.peer import open_link
from fastdeploy_cache.transfer_manager.peer.link import Bytes, Link, LinkError, Pieces, open_endpoint, seal_endpoint
from tests.rigs.link_peer import LinkPeer

MIB = 2**20
SECONDS = 20.0  # of reads that are to succeed
Row = tuple[int, int, int, int, int]


def pieces(*rows: Row) -> Pieces:
    """Rows of local segment, local offset, remote segment, remote offset, bytes."""
    return Pieces(*np.array(rows, np.int64).reshape(-1, 5).T)


def error_of(call: Callable[..., object], *arguments: object) -> LinkError:
    """What the call raises."""
    with pytest.raises(LinkError) as caught:
        call(*arguments)
    return caught.value


def changed(endpoint: bytes, kind: str, fields: dict[str, Any]) -> bytes:
    """Another endpoint, as whole as the first."""
    return seal_endpoint(msgspec.structs.replace(open_endpoint(endpoint, kind), **fields))


class Rig:
    """Opens and starts, and closes all of it at the end."""

    def __init__(self, kind: str, *, is_network: bool = False) -> None:
        self.kind, self.is_network = kind, is_network
        self._links: list[Link] = []
        self._peers: list[LinkPeer] = []
        self._segments: list[SharedArray] = []

    def link(self, *sizes: int) -> tuple[Link, list[Bytes]]:
        """A link over new local segments, and these as bytes."""
        link = open_link(self.kind, {})
        self._links.append(link)
        segments = [SharedArray.create("local", size) for size in sizes]
        self._segments += segments
        link.register(segments)
        return link, [segment.view(np.uint8, (segment.num_bytes,)) for segment in segments]

    def peer(self, *sizes: int, seed: int = 1) -> LinkPeer:
        """A process with such segments."""
        self._peers.append(LinkPeer(self.kind, list(sizes), seed))
        return self._peers[-1]

    def close(self) -> None:
        """Links first: they have to end without the peers' help."""
        for link in self._links:
            link.close()
            link.close()
        for peer in self._peers:
            peer.kill()
        for segment in self._segments:
            segment.close()

"""What a rank's peer process is told."""

from __future__ import annotations

from typing import Any

from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.process.setup import ProcessSetup


class PeerSetup(ProcessSetup, frozen=True, kw_only=True):
    """The rank's KV arrays, the instance that it belongs to, and the link to others."""

    tp_size: int
    layout: RankLayout
    num_gpu_blocks: int
    kv: KVHandle
    instance_id: bytes
    name: str
    link: str
    link_options: dict[str, Any]
    address: str  # of its control socket
    keys_folder: str | None
    silence_seconds: float
    peer_signal_fd: int

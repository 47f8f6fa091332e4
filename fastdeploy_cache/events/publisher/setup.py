"""What the process that publishes is told."""

from __future__ import annotations

from fastdeploy_cache.events.names import NameScheme
from fastdeploy_cache.transfer_manager.kv.groups import Row
from fastdeploy_cache.transfer_manager.process.setup import ProcessSetup


class PublisherSetup(ProcessSetup, frozen=True, kw_only=True):
    """Where it publishes, under which names, and what it keeps. `rows`: of a hybrid model, those behind the full one.

    `token`: whoever asks what is cached of a prompt must say it; None: nobody is answered.
    """

    endpoint: str
    replay_endpoint: str
    topic: str
    keys_folder: str | None
    data_parallel_rank: int | None
    scheme: NameScheme
    rows: tuple[Row, ...]
    num_kept: int
    kept_bytes: int
    interval_seconds: float  # of heartbeats
    token: str | None

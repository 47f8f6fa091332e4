"""The road to other instances that the configuration asks for."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import LayoutError
from fastdeploy_cache.ipc.clock import Clock
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.peers.link_road import LinkRoad
from fastdeploy_cache.peers.offers import PeerOffers
from fastdeploy_cache.peers.store_road import StoreRoad
from fastdeploy_cache.requests.requests import Requests
from fastdeploy_cache.storage.access import StorageAccess
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.peer.client import PeerClient, PeerProcesses
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig
from fastdeploy_cache.transfer_manager.peer.offer import ID_BYTES, InstanceInfo
from fastdeploy_cache.transfer_manager.peer.signature import OfferSigner, load_secret
from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient

Road = LinkRoad | StoreRoad


def open_road(
    config: CacheConfig,
    books: Books,
    movement: Movement,
    requests: Requests,
    storage: StorageAccess,
    *,
    metrics: CacheMetrics,
    client: PeerClient | None,
) -> Road:
    """`client` replaces the configured peer processes (tests, simulation). Nothing is started yet.

    Raises:
        PeerRefusedError: the link's settings, or the group's secret, are wrong.
    """
    given = config.peer
    assert given is not None
    name = given.name or f"{socket.gethostname()}-{config.transfer.data_parallel_id}"[:64]
    peer, instance_id = dataclasses.replace(given, name=name), books.clock.random_bytes(ID_BYTES)
    signer = OfferSigner(load_secret(Path(peer.secret_file)) if peer.secret_file is not None else b"")
    with books:
        books.follow_weights(peer.weights_id)
    if peer.link == "storage":
        offers = PeerOffers(_instance_info(config, peer, instance_id), signer)
        return StoreRoad(
            config, books, offers=offers, movement=movement, storage=storage, prefetches=requests.prefetches
        )
    client = client or _new_client(config, peer, instance_id, movement.client, books.clock)
    offers = PeerOffers(_instance_info(config, peer, instance_id, client), signer)
    return LinkRoad(config, books, offers=offers, client=client, movement=movement, metrics=metrics)


def _instance_info(
    config: CacheConfig, peer: PeerConfig, instance_id: bytes, client: PeerClient | None = None
) -> InstanceInfo:
    assert config.layout is not None
    return InstanceInfo(
        instance_id=instance_id,
        name=peer.name,
        link=peer.link,
        weights_id=peer.weights_id,
        block_size=config.block_size,
        tp_size=config.transfer.tp_size,
        layout=config.layout,
        addresses=client.addresses if client is not None else (),
        public_key=client.public_key if client is not None else b"",
    )


def _new_client(
    config: CacheConfig, peer: PeerConfig, instance_id: bytes, ranks: TransferClient, clock: Clock
) -> PeerProcesses:
    """A process for each rank, over its KV arrays."""
    layout, handles = config.rank_layout(), list[KVHandle | None]()
    assert layout is not None
    for rank in range(config.transfer.tp_size):
        try:
            handles.append(ranks.kv_handle(rank))
        except LayoutError:  # its worker has not attached them yet
            handles.append(None)
    return PeerProcesses(
        peer,
        config.transfer,
        instance_id=instance_id,
        layout=layout,
        num_gpu_blocks=config.pool_sizes()[0],
        kv=handles,
        clock=clock,
    )

"""FastDeploy's settings of prefill and decode instances become this project's, or are refused with the value."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from fastdeploy_cache.adapters.fastdeploy.peer_config import peer_config
from fastdeploy_cache.errors import ConfigError
from tests.rigs.fastdeploy_engine import launch, new_config

WEIGHTS = {"weights_id": "tiny-1"}
_KEYS = {"keys_folder": "/somewhere"}
_NIXL = {"peer": {**WEIGHTS, "link": "nixl", **_KEYS}}


def _ports(*ports: object) -> dict[str, Any]:
    return _ports_as(list(ports))


def _ports_as(given: object) -> dict[str, Any]:
    return {"cache_transfer_protocol": "rdma", "local_rdma_comm_ports": given}


@pytest.mark.parametrize(
    ("protocol", "ports", "settings", "link", "listen"),
    [
        (None, None, {}, "shm", ""),
        ("ipc", [8330], {}, "shm", ""),
        ("ipc,rdma", None, {}, "shm", ""),
        ("rdma,ipc", None, {}, "shm", ""),
        (["ipc", "rdma"], None, {"link": "nixl"}, "nixl", ""),
        ("rdma", [8330, 8331], {"link": "nixl", **_KEYS}, "nixl", "tcp://10.0.0.1:8330"),
        ("ipc,rdma", ["8330", "8331", "8332"], {"link": "mooncake", **_KEYS}, "mooncake", "tcp://10.0.0.1:8330"),
        ("rdma", "8330,8331", {"link": "nixl", **_KEYS}, "nixl", "tcp://10.0.0.1:8330"),
        ("rdma", " 8330 , 8331 ", {"link": "nixl", **_KEYS}, "nixl", "tcp://10.0.0.1:8330"),
        ("rdma", np.array([8330, 8331]), {"link": "nixl", **_KEYS}, "nixl", "tcp://10.0.0.1:8330"),
        ("rdma", [], {"link": "nixl"}, "nixl", ""),
        ("rdma", "", {"link": "nixl"}, "nixl", ""),
        ("rdma", [1, 2], {"link": "nixl", "listen": "tcp://10.0.0.2:9", **_KEYS}, "nixl", "tcp://10.0.0.2:9"),
        ("ipc", None, {"link": "storage"}, "storage", ""),
    ],
)
def test_links_by_protocol(protocol: Any, ports: Any, settings: dict[str, Any], link: str, listen: str) -> None:
    """The protocol means a link, the table names it; ports are for links between hosts."""
    theirs = new_config().cache_config
    theirs.cache_transfer_protocol, theirs.local_rdma_comm_ports = protocol, ports
    peer = peer_config(theirs, "decode", settings, weights_id="w", tp_size=2, pod_ip="10.0.0.1")
    assert peer is not None and (peer.link, peer.listen, peer.weights_id) == (link, listen, "w")
    if link == "mooncake":
        assert peer.mooncake_hostname == "10.0.0.1"


@pytest.mark.parametrize("port", [8330, "8330", ["8330"], (8330,)])
@pytest.mark.parametrize(
    ("pod_ip", "listen"),
    [
        ("10.0.0.1", "tcp://10.0.0.1:8330"),
        ("::1", "tcp://[::1]:8330"),
        ("[fd00::7]", "tcp://[fd00::7]:8330"),
        ("prefill-0", "tcp://prefill-0:8330"),
    ],
)
def test_one_port_beside_any_address(port: object, pod_ip: str, listen: str) -> None:
    """The port of a single rank, however it is written; an IPv6 address stands in brackets before it."""
    theirs = new_config().cache_config
    theirs.cache_transfer_protocol, theirs.local_rdma_comm_ports = "rdma", port
    settings = {"link": "nixl", **_KEYS}
    peer = peer_config(theirs, "decode", settings, weights_id="w", tp_size=1, pod_ip=pod_ip)
    assert peer is not None and peer.listen == listen


@pytest.mark.parametrize(
    "given",
    [
        *("8330,", "8330,8332", "8_330,8_331", "8330,x", 8330, 0, True, 8330.0, b"89", {"8330": 1}),
        *([None], [8330, None], [8330.7, 8331.7], [True, 2], [0, 1], [-1, 0], [65535, 65536], [[8330, 8331]]),
    ],
)
def test_ports_that_are_none_are_shown(given: object) -> None:
    """Whatever else stands there for two ranks: a ConfigError with the value."""
    theirs = new_config().cache_config
    theirs.cache_transfer_protocol, theirs.local_rdma_comm_ports = "rdma", given
    settings = {"link": "nixl", **_KEYS}
    with pytest.raises(ConfigError, match=re.escape(f"local_rdma_comm_ports is {given!r} for 2 ranks")):
        peer_config(theirs, "decode", settings, weights_id="w", tp_size=2, pod_ip="10.0.0.1")


@pytest.mark.parametrize(
    ("theirs", "extra", "message"),
    [
        ({"cache_transfer_protocol": "rdma"}, {}, "say which: .*'link': 'nixl'"),
        ({"cache_transfer_protocol": "tcp"}, {}, "'tcp' is none of ipc, rdma"),
        ({"cache_transfer_protocol": 5}, {}, "cache_transfer_protocol is 5; give a text"),
        ({"cache_transfer_protocol": 0}, {}, "cache_transfer_protocol is 0; give a text"),
        ({"cache_transfer_protocol": b"ipc"}, {}, "cache_transfer_protocol is b'ipc'; give a text"),
        ({"cache_transfer_protocol": ["ipc", None]}, {}, r"cache_transfer_protocol is \['ipc', None\]; give a text"),
        ({"cache_transfer_protocol": "ipc"}, {"peer": {**WEIGHTS, "link": "nixl"}}, "'ipc'; that means shm, and"),
        (_ports(8330, 8331), {"peer": {**WEIGHTS, "link": "nixl"}}, "without keys, and nobody unknown may connect"),
        (_ports_as("8330"), _NIXL, "local_rdma_comm_ports is '8330' for 2 ranks; give each one, without gaps"),
        (_ports(8330), _NIXL, r"local_rdma_comm_ports is \[8330\] for 2 ranks; give each one, without gaps"),
        (_ports(8330, 8332), _NIXL, "for 2 ranks; give each one, without gaps"),
        (_ports("x", "y"), _NIXL, "for 2 ranks; give each one, without gaps"),
        ({}, {"peer": None}, "does not name its weights"),
        ({}, {"peer": {"weights": "w"}}, "unknown key 'peer.weights'; did you mean 'peer.weights_id'"),
        ({}, {"peer": {**WEIGHTS, "max_transfers": 0}}, "peer.max_transfers is 0"),
        ({}, {"peer": WEIGHTS, "role": "decode"}, "the role is splitwise_role"),
        ({}, {"enable_prefix_caching": False}, "peer needs a layout, and enable_prefix_caching"),
    ],
)
def test_settings_that_cannot_be_say_why(theirs: dict[str, Any], extra: dict[str, Any], message: str) -> None:
    """Each wrong or missing setting is named at the launch, with what to do."""
    config = new_config(16, 0, **{"peer": WEIGHTS, **extra})
    for name, value in theirs.items():
        setattr(config.cache_config, name, value)
    with pytest.raises(ConfigError, match=message), contextlib.ExitStack() as opened:
        manager = PrefixCacheManager(config, 2, "prefill")
        opened.callback(manager.close)
        launch(manager, f"settings{os.getpid()}", 2)

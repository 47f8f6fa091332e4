"""Settings of peers: what cannot be is refused with the value and what to do."""

from __future__ import annotations

import pytest

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig


def test_defaults_are_a_private_socket_on_one_host() -> None:
    """Only the weights have to be named."""
    config = PeerConfig(weights_id="w1")
    assert (config.link, config.listen, config.keys_folder, config.link_options()) == ("shm", "", None, {})


@pytest.mark.parametrize("listen", ["tcp://10.0.0.1:5000", "tcp://[fe80::1]:5000", "tcp://host.example:1"])
def test_addresses_that_others_can_reach(listen: str) -> None:
    """With keys."""
    assert PeerConfig(weights_id="w", listen=listen, keys_folder="/keys").listen == listen


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights_id": ""}, "name the weights"),
        ({"weights_id": "  "}, "name the weights"),
        ({"weights_id": None}, "name the weights"),
        ({"link": "pigeon"}, r"'pigeon'; use one of shm, nixl"),
        ({"name": "x" * 65}, "at most 64"),
        ({"name": 5}, "at most 64"),
        ({"listen": "5000"}, "use tcp://ADDRESS:PORT"),
        ({"listen": "10.0.0.1:5000"}, "use tcp://ADDRESS:PORT"),
        ({"listen": "ipc:///run/x"}, "use tcp://ADDRESS:PORT"),
        ({"listen": "tcp://10.0.0.1"}, "use tcp://ADDRESS:PORT"),
        ({"listen": "tcp://:5000"}, "use tcp://ADDRESS:PORT"),
        ({"listen": "tcp://10.0.0.1:"}, "use tcp://ADDRESS:PORT"),
        ({"listen": "tcp://10.0.0.1:0"}, "use tcp://ADDRESS:PORT"),
        ({"listen": "tcp://10.0.0.1:65536"}, "use tcp://ADDRESS:PORT"),
        ({"listen": "tcp://fe80::1:5000"}, r"in brackets: tcp://\[fe80::1\]:5000"),
        ({"listen": "tcp://*:5000"}, "name the address"),
        ({"listen": "tcp://0.0.0.0:5000"}, "name the address"),
        ({"listen": "tcp://[::]:5000"}, "name the address"),
        ({"listen": "tcp://10.0.0.1:5000", "keys_folder": None}, "without peer.keys_folder"),
        ({"listen": "tcp://10.0.0.1:5000", "link": "storage"}, "nothing listens"),
        ({"offer_timeout_seconds": 0.5}, "1 second or more"),
        ({"receive_timeout_seconds": 86400}, "less than a day"),
        ({"silence_timeout_seconds": float("nan")}, "1 second or more"),
        ({"silence_timeout_seconds": "5"}, "1 second or more"),
        ({"silence_timeout_seconds": True}, "1 second or more"),
        ({"max_transfers": 0}, "use 1 to 120"),
        ({"max_transfers": 121}, "use 1 to 120"),
        ({"max_transfers": 1.5}, "give a whole number"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    """By its name."""
    with pytest.raises(ConfigError, match=message) as caught:
        PeerConfig(**({"weights_id": "w", "keys_folder": "/keys"} | fields))  # type: ignore[arg-type]
    assert f"peer.{next(iter(fields))}" in str(caught.value)


def test_each_link_gets_its_own_options() -> None:
    """And none of the others'."""
    settings = {
        "nixl_backend": "GDS",
        "mooncake_hostname": "h",
        "mooncake_protocol": "rdma",
        "mooncake_device_name": "m",
    }
    options = {
        "nixl": {"backend": "GDS"},
        "mooncake": {"hostname": "h", "protocol": "rdma", "device_name": "m"},
        "shm": {},
    }
    for link, expected in options.items():
        assert PeerConfig(weights_id="w", link=link, **settings).link_options() == expected  # type: ignore[arg-type]

"""How other instances are reached: settings of the engine's side, handed to the peer processes as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.settings import check_integers, names_checked

LINKS = ("shm", "nixl", "mooncake", "storage")
_MAX_TRANSFERS = 120  # with an update of each at a time, below the tasks that a rank may have in flight
_MAX_NAME = 64


@names_checked
@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Other instances that blocks are sent to and received from.

    Args:
        weights_id: names the model's weights, as for storage. What other weights have computed is never received.
        link: what moves the bytes: `shm` on one host, `nixl` or `mooncake` between hosts, `storage` through a shared
            store.
        name: the name of this instance in metrics and logs of the others. Where it is empty, host name and
            data-parallel id are taken.
        listen: where control messages arrive. Empty means a private socket on this host; the other form is
            `tcp://ADDRESS:PORT` (IPv6: `tcp://[ADDRESS]:PORT`), where rank r takes PORT + r. TCP needs `keys_folder`.
        keys_folder: the folder with the keys of this host and of those that it talks to, made by `fastdeploy-cache
            peer-keys`.
        secret_file: a file with the group's secret, made by `fastdeploy-cache peer-secret`. An offer that was made or
            changed without it is refused. Without a file every offer is believed: then take offers over a channel of
            your own alone.
        offer_timeout_seconds: the time from an offer to the end of its send. After that its blocks go home.
        receive_timeout_seconds: the time from the call of `receive` to its end.
        silence_timeout_seconds: a peer that says nothing for so long counts as gone. This is also the longest that one
            read may take.
        max_transfers: how many sends, and how many receives, there may be at a time; at most 120. More are refused.
        nixl_backend: (nixl) the name of its plug-in.
        mooncake_hostname: (mooncake) the address at which other instances reach the Transfer Engine of this one.
            Whoever reaches its port can read and write the KV arrays: use it in a network that is trusted.
        mooncake_protocol: (mooncake) what moves the bytes between hosts: `tcp` or `rdma`.
        mooncake_device_name: (mooncake) the network device for `rdma`. It stays empty for `tcp`.
    """

    weights_id: str
    link: Literal["shm", "nixl", "mooncake", "storage"] = "shm"
    name: str = ""
    listen: str = ""
    keys_folder: str | None = None
    secret_file: str | None = None
    offer_timeout_seconds: float = 60.0
    receive_timeout_seconds: float = 60.0
    silence_timeout_seconds: float = 5.0
    max_transfers: int = 64
    nixl_backend: str = "UCX"
    mooncake_hostname: str = "127.0.0.1"
    mooncake_protocol: str = "tcp"
    mooncake_device_name: str = ""

    def __post_init__(self) -> None:
        check_integers(self, ConfigError, prefix="peer.")
        if not isinstance(self.weights_id, str) or not self.weights_id.strip():
            raise ConfigError(
                f"peer.weights_id is {self.weights_id!r}; name the weights (a revision, or weights_id_of(files)): "
                "what other weights have computed must never be received"
            )
        if self.link not in LINKS:
            raise ConfigError(f"peer.link is {self.link!r}; use one of {', '.join(LINKS)}")
        if not isinstance(self.name, str) or len(self.name) > _MAX_NAME:
            raise ConfigError(f"peer.name is {self.name!r}; give a text of at most {_MAX_NAME} characters")
        self._check_listen()
        if self.secret_file is not None and (not isinstance(self.secret_file, str) or not self.secret_file.strip()):
            raise ConfigError(f"peer.secret_file is {self.secret_file!r}; name a file, or leave it out")
        for name in ("offer_timeout_seconds", "receive_timeout_seconds", "silence_timeout_seconds"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 1 <= value < 86400:
                raise ConfigError(f"peer.{name} is {value!r}; use 1 second or more, and less than a day")
        if not 1 <= self.max_transfers <= _MAX_TRANSFERS:
            raise ConfigError(f"peer.max_transfers is {self.max_transfers}; use 1 to {_MAX_TRANSFERS}")

    def _check_listen(self) -> None:
        if not self.listen:
            return
        if self.link == "storage":
            raise ConfigError(f"peer.listen is {self.listen!r}; with peer.link 'storage' nothing listens")
        address = self.listen.removeprefix("tcp://")
        host, colon, port = address.rpartition(":")
        if address == self.listen or not host or not colon or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"peer.listen is {self.listen!r}; use tcp://ADDRESS:PORT")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ConfigError(f"peer.listen is {self.listen!r}; put an IPv6 address in brackets: tcp://[{host}]:{port}")
        if host == "*" or _is_any(host):
            raise ConfigError(f"peer.listen is {self.listen!r}; name the address by which others reach this host")
        if self.keys_folder is None:
            raise ConfigError(f"peer.listen is {self.listen!r} without peer.keys_folder; nobody unknown may connect")

    @property
    def port(self) -> int | None:
        """The port of rank 0; None for private sockets."""
        return int(self.listen.rpartition(":")[2]) if self.listen else None

    def link_options(self) -> dict[str, Any]:
        """What the link is opened with."""
        if self.link == "nixl":
            return {"backend": self.nixl_backend}
        if self.link == "mooncake":
            return {
                "hostname": self.mooncake_hostname,
                "protocol": self.mooncake_protocol,
                "device_name": self.mooncake_device_name,
            }
        return {}


def _is_any(host: str) -> bool:
    """Whether this stands for all of a host's addresses, however it is written ("0", "[::]", ...)."""
    import ipaddress  # late: of TCP alone
    import socket

    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        pass
    try:
        return not any(socket.inet_aton(host))
    except OSError:  # a name
        return False

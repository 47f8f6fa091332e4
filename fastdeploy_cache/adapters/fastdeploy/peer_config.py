"""FastDeploy's settings of prefill and decode apart, as a `PeerConfig`."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from fastdeploy_cache.config.cache import check_keys
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig

_LINKS = {"ipc": ("shm",), "rdma": ("nixl", "mooncake")}  # what moves the bytes, by `cache_transfer_protocol`


def has_peers(role: str, settings: Mapping[str, Any] | None) -> bool:
    """Whether blocks go between instances: those of a `mixed` one only where a table `peer` says so."""
    return role != "mixed" or settings is not None


def peer_config(
    theirs: Any, role: str, settings: Mapping[str, Any] | None, *, weights_id: str | None, tp_size: int, pod_ip: str
) -> PeerConfig | None:
    """None where no blocks go between instances.

    `theirs`: `cache_transfer_protocol` and `local_rdma_comm_ports` are read. `settings`: the table `peer`; it wins.
    `weights_id`: of storage, where the table has none.

    Raises:
        ConfigError: a setting that is wrong, or missing.
    """
    if not has_peers(role, settings):
        return None
    if settings is not None:
        check_keys({"peer": settings})
    ours: dict[str, Any] = {"weights_id": weights_id, **(settings or {})}
    if not ours["weights_id"]:
        raise ConfigError(
            f"splitwise_role is {role!r}, and an instance that does not name its weights sends no blocks and receives "
            "none; give cache_config.fastdeploy_cache = {'peer': {'weights_id': ...}}"
        )
    ours["link"] = _link_of(theirs, ours.get("link"))
    ports = getattr(theirs, "local_rdma_comm_ports", None)
    is_given = ports is not None and (not hasattr(ports, "__len__") or len(ports) > 0)
    if is_given and ours["link"] in _LINKS["rdma"] and not ours.get("listen"):
        ours["listen"] = f"tcp://{_bracketed(pod_ip)}:{_first_port(ports, tp_size)}"
        if ours.get("keys_folder") is None:
            raise ConfigError(
                f"local_rdma_comm_ports is {ports!r} without keys, and nobody unknown may connect; make them with "
                "`fastdeploy-cache peer-keys` and give cache_config.fastdeploy_cache = {'peer': {'keys_folder': ...}}"
            )
        if ours["link"] == "mooncake":
            ours.setdefault("mooncake_hostname", pod_ip)
    return PeerConfig(**ours)


def _link_of(theirs: Any, given: str | None) -> str:
    """The one that is given, if the protocols mean it, or the first that they mean without doubt."""
    protocols = _protocols(getattr(theirs, "cache_transfer_protocol", None))
    meant = [link for protocol in protocols for link in _LINKS[protocol]]
    if given is not None:
        if given != "storage" and given not in meant:
            raise ConfigError(
                f"peer.link is {given!r}, cache_transfer_protocol {','.join(protocols)!r}; that means "
                f"{' or '.join(meant)}, and 'storage' goes with any"
            )
        return given
    link = next((_LINKS[protocol][0] for protocol in protocols if len(_LINKS[protocol]) == 1), None)
    if link is None:
        raise ConfigError(
            f"cache_transfer_protocol is {','.join(protocols)!r}, by {' or '.join(meant)}; say which: "
            f"cache_config.fastdeploy_cache = {{'peer': {{'link': {meant[0]!r}}}}}"
        )
    return link


def _protocols(given: Any) -> list[str]:
    named = _listed(given)
    if not all(isinstance(name, str) for name in named):
        raise ConfigError(f"cache_transfer_protocol is {given!r}; give a text, of {', '.join(_LINKS)}")
    protocols = [name.strip() for name in named if name.strip()] or list(_LINKS)
    unknown = [name for name in protocols if name not in _LINKS]
    if unknown:
        raise ConfigError(f"cache_transfer_protocol is {given!r}; {unknown[0]!r} is none of {', '.join(_LINKS)}")
    return protocols


def _first_port(ports: Any, tp_size: int) -> int:
    numbers = [_port(each) for each in _listed(ports)[:tp_size]]
    first = numbers[0] if numbers else None
    if first is None or numbers != list(range(first, first + tp_size)):
        raise ConfigError(
            f"local_rdma_comm_ports is {ports!r} for {tp_size} ranks; give each one, without gaps, as numbers or as a "
            "text with commas: rank r takes the first and r"
        )
    return first


def _port(given: Any) -> int | None:
    """A port that is given as a number or a text; None where it is no port."""
    if isinstance(given, str):
        text = given.strip()
        number = int(text) if text.isascii() and text.isdecimal() else 0
    else:
        try:
            number = operator.index(given)
        except TypeError:
            return None
    return number if 0 < number < 65536 and not isinstance(given, bool) else None


def _listed(given: Any) -> list[Any]:
    """A setting that FastDeploy takes as a list or as a text with commas; anything else is its one element."""
    if isinstance(given, str):
        return given.split(",")
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) and not isinstance(given, bytes) else [given]


def _bracketed(address: str) -> str:
    """An IPv6 address as it stands before a port."""
    return f"[{address}]" if ":" in address and not address.startswith("[") else address

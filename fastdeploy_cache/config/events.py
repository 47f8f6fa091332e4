"""The table `events` of the configuration: who may hear which blocks are cached."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.settings import check_integers, names_checked

BLOCK_NAMES, NAME_FORMS = ("own", "sha256_cbor"), ("bytes", "int64")
_REPLAY_OFFSET = 100  # of its port, where none is given


@names_checked
@dataclass(frozen=True, kw_only=True)
class EventsConfig:
    """Events for routers and others who want to know which blocks are cached, in vLLM's wire format.

    Args:
        endpoint: where the stream is published, such as `tcp://127.0.0.1:5557` or `ipc:///run/mine/events`. A
            data-parallel id is added to a port, and to a path behind `_dp`. An address that other hosts reach needs
            `keys_folder`: events carry prompts.
        replay_endpoint: where messages are asked for again, and snapshots. Where it is not given, it is the port of
            `endpoint` plus 100, or its path with `.replay` behind it.
        topic: the first frame of each message, which listeners may choose by.
        block_names: what blocks are called. `own`: the hashes that storage uses, too. `sha256_cbor`: vLLM's, so that
            whoever hashes prompts as vLLM does finds them; that needs the extra `vllm-names`.
        name_form: `int64` publishes the last 64 bits of a digest as a number, as vLLM does by default. `bytes`
            publishes whole digests, as vLLM does where VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0; not every router
            reads those.
        hash_seed: of `sha256_cbor`: the PYTHONHASHSEED of the vLLM that names are to agree with, where it has one.
        num_kept_messages: how many of the last messages can be asked for again.
        kept_bytes: how many bytes these may have together.
        max_waiting_changes: how many changes of the tree's shape may wait in the engine's process for a publisher that
            is slow or gone. When there are more, they are dropped, and all that is cached is told anew.
        heartbeat_seconds: how often an empty message is sent while nothing happens.
        keys_folder: the folder with the keys of this host and of those that may listen, made by `fastdeploy-cache
            peer-keys`.
        query_token_file: a file with a token. Who says it may ask how much of a prompt is cached. Without a file nobody
            is answered.

    Raises:
        ConfigError: an impossible value.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    block_names: Literal["own", "sha256_cbor"] = "own"
    name_form: Literal["bytes", "int64"] = "int64"
    hash_seed: str = "vllm-none-hash"
    num_kept_messages: int = 10_000
    kept_bytes: int = 64 * 2**20
    max_waiting_changes: int = 20_000
    heartbeat_seconds: float = 1.0
    keys_folder: str | None = None
    query_token_file: str | None = None

    def __post_init__(self) -> None:
        check_integers(self, ConfigError, "events.")
        for name, known in (("block_names", BLOCK_NAMES), ("name_form", NAME_FORMS)):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"events.{name} is {value!r}; use one of {', '.join(known)}")
        for name in ("endpoint", "replay_endpoint"):
            if (value := getattr(self, name)) is not None:
                self._check_endpoint(name, value)
        self._check_texts()
        for name, least, most in (
            ("num_kept_messages", 1, 1_000_000),
            ("kept_bytes", 2**20, 2**40),
            ("max_waiting_changes", 100, 10_000_000),
            ("heartbeat_seconds", 0.1, 3600.0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise ConfigError(f"events.{name} is {value!r}; use {least} to {most}")
        if self.endpoint == self.replay_endpoint:
            raise ConfigError(f"events.replay_endpoint is {self.endpoint!r}, as events.endpoint; give it another one")

    def _check_texts(self) -> None:
        for name in ("topic", "hash_seed"):
            if not isinstance(value := getattr(self, name), str) or len(value) > 256 or not _is_plain(value):
                raise ConfigError(f"events.{name} is {value!r:.80}; give a text of at most 256 characters")
        for name in ("keys_folder", "query_token_file"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise ConfigError(f"events.{name} is {value!r}; give its path, or leave it out")

    def _check_endpoint(self, name: str, value: str) -> None:
        kind, _, place = value.partition("://") if isinstance(value, str) and _is_plain(value) else ("", "", "")
        host, _, port = place.rpartition(":")
        if kind == "ipc" and place.startswith("/"):
            return
        if kind != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"events.{name} is {value!r}; use tcp://ADDRESS:PORT, or ipc:// and the path of a socket")
        if not _is_loopback(host) and self.keys_folder is None:
            raise ConfigError(
                f"events.{name} is {value!r}, which others may reach, and events carry prompts; use 127.0.0.1, or give "
                "events.keys_folder (see `fastdeploy-cache peer-keys`)"
            )

    def endpoints(self, data_parallel_id: int) -> tuple[str, str]:
        """Where this cache publishes, and where it is asked."""
        first = self.endpoint
        if self.replay_endpoint is not None:
            second = self.replay_endpoint
        elif first.startswith("ipc://"):
            second = f"{first}.replay"
        else:
            second = _with_port(first, _REPLAY_OFFSET)
        return _moved(first, data_parallel_id), _moved(second, data_parallel_id)


def _is_plain(text: str) -> bool:
    """Whether it can be said in a message, and be a path."""
    return "\0" not in text and not any("\ud800" <= each <= "\udfff" for each in text)


def _is_loopback(host: str) -> bool:
    """Whether only this host reaches it. A name is not looked up: it may stand for anything, but for `localhost`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _with_port(endpoint: str, offset: int) -> str:
    place, _, port = endpoint.rpartition(":")
    if (moved := int(port) + offset) > 65535:
        raise ConfigError(f"events.endpoint is {endpoint!r}, and port {moved} beside it is none; use a lower one")
    return f"{place}:{moved}"


def _moved(endpoint: str, data_parallel_id: int) -> str:
    """Each cache of a data-parallel group has an address of its own, as in vLLM."""
    if not data_parallel_id:
        return endpoint
    return (
        f"{endpoint}_dp{data_parallel_id}" if endpoint.startswith("ipc://") else _with_port(endpoint, data_parallel_id)
    )

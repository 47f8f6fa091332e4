"""Prints what a publisher of events tells, as it comes."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, Protocol

from fastdeploy_cache.errors import LaunchError, counted
from fastdeploy_cache.events.mirror import Mirror
from fastdeploy_cache.events.wire import AllBlocksCleared, BlockName, BlockStored, Event, decode_batch, fields_of
from fastdeploy_cache.ipc.peer_channel import load_keys

_WAIT_SECONDS = 10.0
_SHOWN_CHARACTERS = 12  # of a name


class _Options(Protocol):
    """How to listen: see the command's options."""

    @property
    def replay_endpoint(self) -> str | None: ...
    @property
    def topic(self) -> str: ...
    @property
    def keys_folder(self) -> Path | None: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def as_json(self) -> bool: ...


def listen(endpoint: str, options: _Options) -> None:
    """Print how much is cached, then each event, until the time is over or until Ctrl-C.

    Raises:
        ConfigError, IPCError: the address is none, or the keys cannot be read.
        LaunchError: nobody publishes there.
    """
    lock, out, folder, told = threading.Lock(), sys.stdout, options.keys_folder, _json if options.as_json else _text

    def print_message(sequence: int, payload: bytes) -> None:
        batch = decode_batch(payload)
        with lock:
            out.writelines([told(sequence, batch.unix_seconds, event) for event in batch.events])
            out.flush()

    with Mirror(
        endpoint,
        options.replay_endpoint,
        topic=options.topic,
        keys_folder=str(folder) if folder is not None else None,
        publisher_key=_publisher_key(folder) if folder is not None else b"",
        on_message=print_message,
    ) as mirror:
        if not mirror.wait_current(min(_WAIT_SECONDS, options.seconds or _WAIT_SECONDS)):
            if mirror.failure is not None:
                raise mirror.failure
            keys = ", or the keys are not trusted there" if folder is not None else ""
            raise LaunchError(f"nobody publishes at {endpoint}, or answers{keys}; see `events.endpoint` of the cache")
        there = {medium: mirror.num_blocks(medium) for medium in ("GPU", "CPU")}
        with lock:
            if options.as_json:
                out.write(json.dumps({"type": "cached", "block_size": mirror.block_size, **there}) + "\n")
            else:
                of = ", ".join(f"{medium} {count}" for medium, count in there.items())
                out.write(f"== cached now, in blocks of {counted(mirror.block_size or 0, 'token')}: {of}\n")
            out.flush()
        mirror.wait_closed(options.seconds)
        if isinstance(mirror.failure, BrokenPipeError):  # nobody reads what is printed any more
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        elif mirror.failure is not None:
            raise mirror.failure


def _publisher_key(folder: Path) -> bytes:
    """The one key that is trusted besides one's own; of several nobody can tell which is the publisher's."""
    keys = load_keys(folder)
    others = keys.trusted - {keys.public}
    if len(others) != 1:
        raise LaunchError(f"{folder}/trusted has {len(others)} keys besides your own; put the publisher's there, alone")
    return next(iter(others))


def _json(sequence: int, unix_seconds: float, event: Event) -> str:
    found = fields_of(event)
    for field in ("block_hashes", "parent_block_hash"):
        if field in found:
            found[field] = _readable(found[field])
    return json.dumps({"sequence": sequence, "unix_seconds": unix_seconds, **found}) + "\n"


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(each) for each in value]
    return value.hex() if isinstance(value, bytes) else value


def _text(sequence: int, unix_seconds: float, event: Event) -> str:  # noqa: ARG001 (as `_json`)
    if isinstance(event, AllBlocksCleared):
        return f"{sequence:8} cleared all\n"
    num_blocks = counted(len(event.block_hashes), "block")
    first, last = (_short(name) for name in (event.block_hashes[0], event.block_hashes[-1]))
    group = f" group {event.group_idx}" if event.group_idx else ""
    if isinstance(event, BlockStored):
        parent = f" behind {_short(event.parent_block_hash)}" if event.parent_block_hash is not None else ""
        return f"{sequence:8} stored  {event.medium}{group} {num_blocks}: {first} to {last}{parent}\n"
    return f"{sequence:8} removed {event.medium}{group} {num_blocks}: {first} to {last}\n"


def _short(name: BlockName) -> str:
    return name.hex()[:_SHOWN_CHARACTERS] if isinstance(name, bytes) else f"{name:x}"[:_SHOWN_CHARACTERS]

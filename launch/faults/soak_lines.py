"""What the command `soak` and its engines' processes say to each other: one line of JSON each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from fastdeploy_cache.ipc.codec import taken_apart
from fastdeploy_cache.launch.faults.story import Settings


class EngineTask(msgspec.Struct, frozen=True, kw_only=True):
    """The first line to an engine: what it is."""

    number: int
    num_engines: int
    seed: int
    num_lives: int  # of this engine, before
    settings: Settings
    store_folder: str
    valkey_url: str = ""  # a store for all engines, in place of the folder


class ToEngine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A further one: an offer of another engine, or that it is time to end."""

    offer: bytes = b""
    tokens: list[int] = []
    namespace: str = ""
    is_over: bool = False


class Offered(msgspec.Struct, frozen=True, kw_only=True, tag="offered"):
    """Another engine may have this."""

    to: int
    offer: bytes
    tokens: list[int]
    namespace: str


@dataclass
class VerbSeen:
    """How often a verb was called, and its longest call, without what its process was held up for."""

    num_calls: int = 0
    longest_seconds: float = 0.0


class EngineReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """What a process of an engine has seen since it began."""

    counts: dict[str, int]
    verbs: dict[str, VerbSeen]
    findings: list[tuple[str, str]]  # the kind, the words
    num_descriptors: int
    resident_bytes: int
    is_done: bool


FromEngine = Offered | EngineReport


def line_of(said: EngineTask | ToEngine | FromEngine) -> bytes:
    """One line, with its end."""
    return msgspec.json.encode(said) + b"\n"


def read_line(line: bytes, kind: Any) -> Any:
    """What such a line says; None where it is cut short, as the last one of a process that was killed."""
    try:
        return msgspec.json.decode(line, type=taken_apart(kind))
    except msgspec.MsgspecError:
        return None

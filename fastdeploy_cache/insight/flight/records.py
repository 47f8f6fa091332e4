"""What a flight recording is made of: one packed record for each thing that the cache was asked, decided or suffered.

Numbers are little-endian. Marks of blocks are kept apart from the records, in the order in which records name them, so
that all of them can be mixed with a secret at once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, Final

from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.errors import RecordingError
from fastdeploy_cache.policies import EVICTION_POLICIES
from fastdeploy_cache.requests import listener
from fastdeploy_cache.transfer_manager.task import TaskKind

NO_CAUSE: Final = 255
CAUSES: Final = {cause.place: cause for cause in Cause}
TASK_KINDS: Final = tuple(TaskKind)
STATUSES: Final = ("running", "pausing", "paused", "falling_asleep", "asleep", "waking", "clearing", "updating")


class RecordKind(IntEnum):
    """What has happened; the first byte of a record."""

    MATCHED = 1
    LOOKED = 2  # `prefetch` has looked for a queued request
    ALLOCATED = listener.ALLOCATED
    REFUSED = listener.REFUSED
    COMMITTED = listener.COMMITTED
    CONFIRMED = listener.CONFIRMED
    RELEASED = 7
    TASK_ENDED = 8
    RESET = 9
    GPU_FORGOTTEN = 10
    STATUS = 11
    RANK = 12
    BREAKER = 13
    ALERT = 14  # what a file was written for
    SETTLED_LATE = listener.SETTLED_LATE
    STEPPED = 16  # the records in front of it, so many, are of one step
    POLICY = 18  # another eviction policy
    MARKED = 17  # at the end: what a request that is still there has published behind its prompt
    SNAPSHOT = listener.SNAPSHOT
    DRAFTED = listener.DRAFTED
    ANCHORED = 21  # behind MATCHED, of a hybrid model: where the deepest checkpoint of its prompt lies
    STATE_COPIED = listener.STATE_COPIED


class Flag:
    """Bits of the field `flags`."""

    HAS_HINTS = 1  # of MATCHED and LOOKED: priority and keep_seconds follow
    HAS_IMAGES = 2  # how many, and each one's place and digest, follow
    INSIDE_IMAGES = 4  # a match may end inside an image
    WAS_COUNTED = 8  # it returns from a preemption: admitted before
    WAS_USED = 16  # and released before
    VOID = 1  # of RELEASED: what it computed on what was coming is worth nothing
    FAILED_LOAD = 2
    SESSION_ENDED = 4
    TOOL_CALL_PENDING = 8
    HAS_SESSION = 16  # a `SessionHint` follows


# Behind the kind. `at` is in seconds, by the cache's clock; what has none happened at that of the record before.
# `num_known` blocks are those of the request `author`; behind these come `num_marks` marks. The evicted blocks are all
# since the start.
_PROMPT: Final = ("at", "number", "num_tokens", "num_prompt_tokens", "namespace", "author", "num_known", "num_marks")
_FIELDS: Final[dict[RecordKind, tuple[str, tuple[str, ...]]]] = {
    RecordKind.MATCHED: ("dIIIQIIIIIIBB", (*_PROMPT, "num_found", "num_gpu", "num_unloaded", "cause", "flags")),
    RecordKind.LOOKED: ("dIIIQIIIIB", (*_PROMPT, "num_found", "flags")),
    RecordKind.ALLOCATED: ("IIB", ("number", "num_blocks", "ahead")),
    RecordKind.REFUSED: ("III", ("number", "num_blocks", "num_missing")),
    RecordKind.COMMITTED: ("III", ("number", "num_computed", "num_held")),
    RecordKind.CONFIRMED: ("IB", ("number", "arrived")),
    RecordKind.RELEASED: (
        "dIIIIIQQIIfIIB",
        (
            *("at", "number", "num_tokens", "num_computed", "num_matched", "num_gpu", "num_gpu_evicted"),
            *("num_cpu_evicted", "num_storage", "num_copied", "load_seconds", "first", "num_marks", "flags"),
        ),
    ),
    RecordKind.TASK_ENDED: (
        "dIBIfQB",
        ("at", "task_id", "task_kind", "num_blocks", "task_seconds", "num_bytes", "failed"),
    ),
    RecordKind.RESET: ("dI", ("at", "epoch")),
    RecordKind.GPU_FORGOTTEN: ("dI", ("at", "rank")),
    RecordKind.STATUS: ("dBB", ("at", "status", "asleep")),
    RecordKind.RANK: ("dIBI", ("at", "rank", "up", "num_restarts")),
    RecordKind.BREAKER: ("dBB", ("at", "is_write", "state")),
    RecordKind.ALERT: ("dB", ("at", "reason")),
    RecordKind.SETTLED_LATE: ("I", ("number",)),
    RecordKind.STEPPED: ("I", ("num_records",)),
    RecordKind.POLICY: ("dB", ("at", "policy")),
    RecordKind.MARKED: ("III", ("number", "first", "num_marks")),
    RecordKind.SNAPSHOT: ("IIB", ("number", "num_tokens", "given")),
    RecordKind.DRAFTED: ("I", ("number",)),
    RecordKind.ANCHORED: ("II", ("number", "boundary")),
    RecordKind.STATE_COPIED: ("I", ("number",)),
}
LAYOUTS: Final = {kind: struct.Struct(f"<B{form}") for kind, (form, _) in _FIELDS.items()}
NAMES: Final = {kind: ("kind", *names) for kind, (_, names) in _FIELDS.items()}
HINTS: Final = struct.Struct("<dd")  # priority and keep_seconds; not a number: none
SESSION: Final = struct.Struct("<QBII")  # the fields of a `SessionHint`
NUM_IMAGES: Final = struct.Struct("<H")
IMAGE: Final = struct.Struct("<IIQ")  # offset, length, digest
# of fields that name one of several
_MOST: Final = {"task_kind": len(TASK_KINDS) - 1, "status": len(STATUSES) - 1, "up": 1, "asleep": 3} | {
    "policy": len(EVICTION_POLICIES) - 1
}
Record = dict[str, Any]
Digest = Callable[[bytes], int]  # 64 bits for a name


def pack(note: tuple[Any, ...], digest: Digest) -> tuple[bytes, bytes]:
    """What the recorder has noted, as a record, and the marks that go with it. Raises `RecordingError` where it has
    a number that no record can hold."""
    try:
        return _pack(note, digest)
    except struct.error as error:
        raise RecordingError(f"a note of kind {note[0]} cannot be recorded: {error}") from error


def _pack(note: tuple[Any, ...], digest: Digest) -> tuple[bytes, bytes]:
    kind = RecordKind(note[0])
    if kind is RecordKind.MATCHED:
        _, at, number, num_tokens, num_prompt, namespace, author, known, marks, *found, refused, rest = note
        flags, more = _pack_rest(rest, digest)
        cause = refused[0].place if refused is not None else NO_CAUSE
        prompt = (at, number, num_tokens, num_prompt, digest(namespace.encode()), author, known, len(marks) // 4)
        return LAYOUTS[kind].pack(kind, *prompt, *found, cause, flags) + more, marks
    if kind is RecordKind.LOOKED:
        _, at, number, num_tokens, num_prompt, namespace, author, known, marks, num_found, rest = note
        flags, more = _pack_rest(rest, digest)
        prompt = (at, number, num_tokens, num_prompt, digest(namespace.encode()), author, known, len(marks) // 4)
        return LAYOUTS[kind].pack(kind, *prompt, num_found, flags) + more, marks
    if kind is RecordKind.RELEASED:
        *counts, first, marks, rest = note
        num_storage, num_copied, seconds, *bits, hint = rest or (0, 0, 0.0, None)
        flags, more = sum([1 << place for place, is_set in enumerate(bits) if is_set]), b""
        if hint is not None:
            flags |= Flag.HAS_SESSION
            session, tool = (digest(n.to_bytes(8, "little")) if n else 0 for n in (hint.session, hint.tool))
            more = SESSION.pack(session, hint.going, tool & 0xFFFFFFFF, hint.num_answer_tokens)
        sizes = num_storage, num_copied, seconds, first, len(marks) // 4
        return LAYOUTS[kind].pack(*counts, *sizes, flags) + more, marks
    if kind is RecordKind.MARKED:
        *counts, marks = note
        return LAYOUTS[kind].pack(*counts, len(marks) // 4), marks
    return LAYOUTS[kind].pack(*note), b""


def _pack_rest(rest: tuple[Any, ...] | None, digest: Digest) -> tuple[int, bytes]:
    """The flags of what few requests have, and that itself."""
    if rest is None:
        return 0, b""
    counted, used, inside, priority, keep_seconds, images = rest
    flags, more = Flag.WAS_COUNTED * counted | Flag.WAS_USED * used | Flag.INSIDE_IMAGES * inside, b""
    if priority is not None or keep_seconds is not None:
        flags |= Flag.HAS_HINTS
        more += HINTS.pack(*[math.nan if number is None else number for number in (priority, keep_seconds)])
    if images:
        flags |= Flag.HAS_IMAGES
        images = images[: 2**16 - 1]
        more += NUM_IMAGES.pack(len(images))
        more += b"".join([IMAGE.pack(image.offset, image.length, digest(image.hash)) for image in images])
    return flags, more


def unpack(data: bytes) -> Iterator[Record]:
    """The records of `data`, one by one: their fields by name; hints and images where there are any.

    Raises:
        ValueError: a kind that is not known, or a record that is cut, or says what cannot be.
    """
    at, seconds = 0, 0.0
    while at < len(data):
        record, at = unpack_one(data, at)
        seconds = record.setdefault("at", seconds)
        _check(record)
        yield record


def unpack_one(data: bytes, at: int) -> tuple[Record, int]:
    """The record at the byte `at`, and where it ends. Raises `ValueError` as `unpack`."""
    try:
        kind = RecordKind(data[at])
        record: Record = dict(zip(NAMES[kind], LAYOUTS[kind].unpack_from(data, at), strict=True))
        record["kind"], at = kind, at + LAYOUTS[kind].size
        if kind in (RecordKind.MATCHED, RecordKind.LOOKED):
            at = _unpack_rest(record, data, at)
        if kind is RecordKind.RELEASED and record["flags"] & Flag.HAS_SESSION:
            record["session_hint"] = SESSION.unpack_from(data, at)
            at += SESSION.size
    except struct.error as error:
        raise ValueError(f"a record is cut: {error}") from None
    return record, at


def _check(record: Record) -> None:
    """Whether it is one that a recorder makes."""
    for name, most in _MOST.items():
        if record.get(name, 0) > most:
            raise ValueError(f"a record has {name} {record[name]}, more than {most}")
    if any(not math.isfinite(record.get(name, 0.0)) for name in ("at", "load_seconds", "task_seconds")):
        raise ValueError("a record has a time that is no number")
    if (cause := record.get("cause", NO_CAUSE)) != NO_CAUSE and cause not in CAUSES:
        raise ValueError(f"a record has the cause {cause}, which is none")
    if record.get("num_prompt_tokens", 0) > record.get("num_tokens", 0):
        raise ValueError(f"a prompt has {record['num_prompt_tokens']} of {record['num_tokens']} tokens")


def _unpack_rest(record: Record, data: bytes, at: int) -> int:
    if record["flags"] & Flag.HAS_HINTS:
        record["priority"], record["keep_seconds"] = HINTS.unpack_from(data, at)
        at += HINTS.size
    if record["flags"] & Flag.HAS_IMAGES:
        (num_images,) = NUM_IMAGES.unpack_from(data, at)
        at += NUM_IMAGES.size
        record["images"] = [IMAGE.unpack_from(data, at + number * IMAGE.size) for number in range(num_images)]
        at += num_images * IMAGE.size
    return at

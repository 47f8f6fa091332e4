"""A flight recording as a trace for the simulator: its prompts, at their times."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fastdeploy_cache.insight.flight.file import FlightRecording, read_recording
from fastdeploy_cache.insight.flight.header import has_rows
from fastdeploy_cache.insight.flight.records import Flag, RecordKind
from fastdeploy_cache.launch.simulator.recorded_prompts import RecordedPrompts
from fastdeploy_cache.launch.simulator.recorded_settings import recorded_config
from fastdeploy_cache.launch.simulator.trace import Trace, TraceError, TraceRequest

_MAX_BLOCKS = 2**26  # of all prompts together: a trace keeps each prompt whole, where a recording refers to others


def recorded_block_size(recording: FlightRecording) -> int:
    """The tokens of a block. Raises `TraceError` where its header does not say."""
    settings = recording.header.get("settings")
    block_size = settings.get("block_size") if isinstance(settings, dict) else None
    if type(block_size) is not int or not 1 <= block_size <= 1024:
        raise TraceError(f"the recording's header has block_size {block_size!r}; it is no trace")
    return block_size


def read_recorded_trace(path: Path, block_size: int | None) -> Trace:
    """The prompts that were matched, each once: not again after a preemption. `block_size`: what was asked for.

    Raises:
        RecordingError: it cannot be read.
        TraceError: another block size than the recording's, or no request.
    """
    recording = read_recording(path)
    size = recorded_block_size(recording)
    if block_size not in (None, size):
        raise TraceError(f"--block-size {block_size} with a recording of blocks of {size} tokens; leave it out")
    prompts = RecordedPrompts(recording, size)
    numbers: dict[tuple[int, int], int] = {}  # of a block behind all before it, as in any trace
    namespaces: dict[int, int] = {}
    requests, began, latest = list[TraceRequest](), None, 0.0
    num_left = _MAX_BLOCKS
    for record in recording.of_kind(RecordKind.MATCHED):
        if record["flags"] & Flag.WAS_COUNTED:
            continue
        num_left -= record["num_tokens"] // size
        if num_left < 0:
            raise TraceError(f"{path} tells of more than {_MAX_BLOCKS} blocks of prompts; record for a shorter time")
        began = record["at"] if began is None else began
        latest = max(latest, record["at"] - began)
        parent = -1 - namespaces.setdefault(record["namespace"], len(namespaces))
        blocks = list[int]()
        for block in prompts.blocks(record["number"], record["num_tokens"] // size).tolist():
            parent = numbers.setdefault((parent, block), len(numbers))
            blocks.append(parent)
        requests.append(TraceRequest(latest, record["num_tokens"], np.array(blocks, dtype=np.int32)))
    if not requests:
        raise TraceError(f"{path} has no requests")
    hybrid = recorded_config(recording.header, {}) if has_rows(recording.header) else None
    return Trace(requests, size, len(numbers), len(numbers), 0, 0, hybrid)

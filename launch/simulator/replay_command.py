"""A flight recording replayed, as a program: what was the same, and what was not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.insight.flight.file import read_recording
from fastdeploy_cache.launch.findings import console_beside, write_json
from fastdeploy_cache.launch.simulator.flight_replay import FlightReplay
from fastdeploy_cache.launch.simulator.replay_outcome import ReplayOutcome

DIFFERENT = 4  # the exit status


def replay_recording(path: Path, json_file: Path | None) -> int:
    """Replay a recording, print what came of it, and return the exit status: 0 the same, 4 not.

    Raises:
        LaunchError: nothing to replay, or findings that cannot be written.
        RecordingError: the recording cannot be read or replayed.
    """
    console = console_beside(json_file, 110)
    recording = read_recording(path)
    outcome = FlightReplay(recording).run()
    if not outcome.num_steps:
        raise LaunchError(recording.note or f"{path} has no step to replay")
    if recording.note:
        console.print(f"note: {recording.note}")
    header = recording.header
    found = {"recording": path.name, "note": recording.note, **dataclasses.asdict(outcome)}
    found |= {name: header.get(name) for name in ("reason", "settings", "has_storage", "has_peers", "num_dropped")}
    console.print(
        f"{path.name}: {outcome.num_steps} steps of {outcome.num_requests} requests; "
        f"{outcome.num_steps - outcome.num_different} the same, {outcome.num_different} different"
    )
    for difference in outcome.differences:
        console.print(f"  {difference}")
    if outcome.num_different > len(outcome.differences):
        console.print(f"  and {outcome.num_different - len(outcome.differences)} more")
    if not recording.has_policies:
        console.print(
            "The recording is of a version that does not tell whether the eviction policy was changed meanwhile."
        )
    has_storage, has_tenants = bool(header.get("has_storage")), bool(header.get("num_tenants"))
    for line in _remarks(outcome, not header.get("num_dropped"), has_storage=has_storage, has_tenants=has_tenants):
        console.print(line)
    write_json(json_file, found)
    return DIFFERENT if outcome.num_different else 0


def _remarks(outcome: ReplayOutcome, is_whole: bool, *, has_storage: bool, has_tenants: bool) -> list[str]:
    """Why a replay may differ without anything being wrong."""
    remarks = []
    if not is_whole:
        remarks.append(
            f"The recording begins in the midst: {outcome.num_taught_blocks} blocks were taught when a match had found "
            f"them, {outcome.num_without_begin} steps are of requests from before; what was cached beside is unknown."
        )
    if has_storage:
        remarks.append("There was a store: what it had, and when it answered, is not recorded.")
    if has_tenants:
        remarks.append("There were tenants: their shares and times to live are not recorded, and a replay has none.")
    return remarks

"""What the commands `fastdeploy-cache storage ...` do: ask the store, print, write what was asked for.

All may raise LaunchError, ConfigError and TransferError.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.findings import check_target, console_beside, write_json
from fastdeploy_cache.launch.storage import report
from fastdeploy_cache.launch.storage.place import Place, open_place
from fastdeploy_cache.launch.storage.report import Facts
from fastdeploy_cache.transfer_manager.storage.admin import Cleared, StorageAdmin

_WIDTH = 100
_NUM_NAMED = 5  # of the weights that are there, in a message
Names = Mapping[str, str]


def list_weights(place: Place, weights_id: str | None, json_file: Path | None) -> None:
    """What is in a store, by weights."""
    console = _console(json_file)
    admin, names = open_place(place, weights_id)
    rows = report.by_weights(_summaries(admin, names, weights_id))
    if rows:
        console.print(report.weights_table(rows))
    else:
        _say(console, f"nothing is in {admin.where}")
    write_json(json_file, {"store": admin.where, "weights": rows, "damaged": _damaged(console, admin)})


def describe_spaces(place: Place, weights_id: str | None, json_file: Path | None) -> None:
    """All that is known of each space."""
    console = _console(json_file)
    admin, names = open_place(place, weights_id)
    rows = _summaries(admin, names, weights_id)
    for row in rows:
        _say(console, "\n".join(report.details(row)))
    if not rows:
        _say(console, f"nothing is in {admin.where}")
    write_json(json_file, {"store": admin.where, "spaces": rows, "damaged": _damaged(console, admin)})


def verify(place: Place, weights_id: str | None, json_file: Path | None) -> bool:
    """Read every object; returns whether nothing is damaged."""
    console = _console(json_file)
    admin, names = open_place(place, weights_id)
    rows = report.in_order(report.checked_facts(checked, names) for checked in admin.verify(weights_id))
    if weights_id is not None and not rows:
        raise LaunchError(_absence(admin, names, weights_id))
    if rows:
        console.print(report.checked_table(rows))
        for row in rows:
            if not row["listed"]:
                _say(console, f"its journal is damaged, objects are lost: {report.title(row)}")
    else:
        _say(console, f"nothing is in {admin.where}")
    damaged = _damaged(console, admin)
    write_json(json_file, {"store": admin.where, "spaces": rows, "damaged": damaged})
    return not damaged and not any(row["damaged"] or not row["listed"] for row in rows)


def clear(place: Place, weights_id: str, json_file: Path | None) -> bool:
    """Remove the weights' objects; returns whether none were kept."""
    console = _console(json_file)
    admin, names = open_place(place, weights_id)
    cleared = admin.clear(weights_id)
    if cleared.num_objects or cleared.removed or cleared.kept:
        _say(console, f"{cleared.num_objects:,} objects of weights {weights_id!r} are gone from {admin.where}")
    else:
        _say(console, _absence(admin, names, weights_id))
    return _kept_none(console, admin, names, cleared, json_file)


def collect(place: Place, capacity_bytes: int, json_file: Path | None) -> bool:
    """Make a folder fit; returns whether it does."""
    console = _console(json_file)
    admin, names = open_place(place, None)
    cleared = admin.gc(capacity_bytes)
    for row in (report.space_facts(space, names) for space in cleared.removed):
        _say(console, f"removed: {report.title(row)}")
    _say(console, f"{report.size(cleared.freed_bytes)} are free again in {admin.where}")
    return _kept_none(console, admin, names, cleared, json_file)


def _kept_none(console: Console, admin: StorageAdmin, names: Names, cleared: Cleared, json_file: Path | None) -> bool:
    kept = [report.space_facts(space, names) for space in cleared.kept]
    for row in kept:
        _say(console, f"kept, as an engine has it open: {report.title(row)}")
    found = {
        "store": admin.where,
        "objects": cleared.num_objects,
        "freed_bytes": cleared.freed_bytes,
        "removed": [report.space_facts(space, names) for space in cleared.removed],
        "kept": kept,
    }
    write_json(json_file, found)
    return not kept


def _damaged(console: Console, admin: StorageAdmin) -> list[str]:
    """Spaces of which nobody can tell what they are for, each named in a line."""
    found = admin.damaged()
    for where in found:
        _say(console, f"its space.json is damaged; the engine of that space mends it, gc removes it: {where}")
    return found


def _console(json_file: Path | None) -> Console:
    check_target(json_file)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a store may hold names that a terminal cannot show
    return console_beside(json_file, _WIDTH)


def _say(console: Console, text: str) -> None:
    """Print a line as it is, however long."""
    console.print(Text(text), soft_wrap=True)


def _summaries(admin: StorageAdmin, names: Names, weights_id: str | None) -> list[Facts]:
    rows = report.in_order(report.summary_facts(summary, names) for summary in admin.spaces())
    if weights_id is None:
        return rows
    chosen = [row for row in rows if row["weights_id"] == weights_id]
    if not chosen:
        raise LaunchError(_absence(admin, names, weights_id))
    return chosen


def _absence(admin: StorageAdmin, names: Names, weights_id: str) -> str:
    """What to say of weights that are not there: which are."""
    rows = report.by_weights(report.summary_facts(summary, names) for summary in admin.spaces())
    there = [report.weights(row) for row in rows]
    more = f" and {len(there) - _NUM_NAMED} more" if len(there) > _NUM_NAMED else ""
    return (
        f"nothing of weights {weights_id!r} is in {admin.where}; "
        f"there is: {', '.join(there[:_NUM_NAMED]) or 'nothing'}{more}"
    )

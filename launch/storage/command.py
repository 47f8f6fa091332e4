"""What the commands `fastdeploy-cache storage ...` do: ask the store, print, write what was asked for.

All may raise LaunchError, ConfigError and TransferError.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path

from rich.console import Console
from rich.text import Text

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.findings import console_beside, print_table, progress_on, write_json
from fastdeploy_cache.launch.storage import report
from fastdeploy_cache.launch.storage.opening import open_place
from fastdeploy_cache.launch.storage.place import Place
from fastdeploy_cache.launch.storage.report import Facts
from fastdeploy_cache.transfer_manager.storage.admin import Checked, Cleared, StorageAdmin

_NUM_NAMED = 5  # of the weights that are there, in a message
_NUM_SHOWN = 20  # of a space's damaged objects
Names = Mapping[str, str]


def list_weights(place: Place, weights_id: str | None, json_file: Path | None) -> None:
    """What is in a store, by weights."""
    console = _console(json_file)
    admin, names = open_place(place, weights_id)
    weights_id = _whole_id(console, admin, weights_id)
    rows = report.by_weights(_summaries(admin, names, weights_id))
    if rows:
        print_table(console, report.weights_table(rows))
    else:
        _say(console, f"nothing is in {admin.where}")
    write_json(json_file, _facts(console, admin) | {"weights": rows, "damaged": _damaged(console, admin)})


def describe_spaces(place: Place, weights_id: str | None, json_file: Path | None) -> None:
    """All that is known of each space."""
    console = _console(json_file)
    admin, names = open_place(place, weights_id)
    weights_id = _whole_id(console, admin, weights_id)
    rows = _summaries(admin, names, weights_id)
    for row in rows:
        _say(console, "\n".join(report.details(row)))
    if not rows:
        _say(console, f"nothing is in {admin.where}")
    write_json(json_file, _facts(console, admin) | {"spaces": rows, "damaged": _damaged(console, admin)})


def verify(place: Place, weights_id: str | None, remove: bool, json_file: Path | None) -> bool:
    """Read every object; returns whether nothing damaged is there any more."""
    console = _console(json_file)
    admin, names = open_place(place, weights_id)
    weights_id = _whole_id(console, admin, weights_id)
    found = _checked(console, admin, weights_id, remove)
    if weights_id is not None and not found and not admin.unreadable():
        raise LaunchError(_absence(admin, names, weights_id))
    rows = report.in_order(report.checked_facts(checked, names) for checked in found)
    if rows:
        print_table(console, report.checked_table(rows))
        for row in rows:
            for line in report.damage(row, _NUM_SHOWN, was_to_go=remove):
                _say(console, line)
    else:
        _say(console, f"nothing is in {admin.where}")
    damaged = _damaged(console, admin)
    write_json(json_file, {"store": admin.where, "spaces": rows, "damaged": damaged})
    return not damaged and all(checked.is_well for checked in found)


def _checked(console: Console, admin: StorageAdmin, weights_id: str | None, remove: bool) -> list[Checked]:
    """What came of it; a terminal shows how far it is."""
    if not console.is_terminal:
        return admin.verify(weights_id, remove=remove)
    chosen = [each for each in admin.spaces() if weights_id in (None, each.space.weights_id)]
    with progress_on(console, is_transient=True) as progress:
        bar = progress.add_task("objects", total=sum(each.num_objects for each in chosen) or None)
        return admin.verify(weights_id, remove=remove, on_object=lambda: progress.advance(bar))


def clear(place: Place, weights_id: str, dry_run: bool, json_file: Path | None) -> bool:
    """Remove the weights' objects; returns whether none were kept, and no other space may be of these weights."""
    if not weights_id:
        raise LaunchError("--weights-id is empty, so nothing is cleared; name the weights, as `storage ls` shows them")
    console = _console(json_file)
    admin, names = open_place(place, weights_id)
    if dry_run:
        weights_id = _whole_id(console, admin, weights_id) or ""
    else:
        _check_whole(admin, weights_id)
    cleared = admin.clear(weights_id, dry_run=dry_run)
    if cleared.num_objects or cleared.removed or cleared.kept:
        fate = f"would be removed from {admin.where}" if dry_run else f"are gone from {admin.where}"
        _say(console, f"{cleared.num_objects:,} objects of weights {weights_id!r} {fate}")
    damaged = _damaged(console, admin)  # nobody can tell whether they are of these weights
    if not (cleared.num_objects or cleared.removed or cleared.kept):  # mistyped, and what was meant is still there
        raise LaunchError(_absence(admin, names, weights_id))
    return _kept_none(console, admin, names, cleared, dry_run, json_file) and not damaged


def collect(place: Place, capacity_bytes: int, dry_run: bool, json_file: Path | None) -> bool:
    """Make a folder fit; returns whether it does."""
    console = _console(json_file)
    admin, names = open_place(place, None)
    cleared = admin.gc(capacity_bytes, dry_run=dry_run)
    for row in (report.space_facts(space, names) for space in cleared.removed):
        _say(console, f"{'would be removed' if dry_run else 'removed'}: {report.title(row)}")
    fate = "would be free" if dry_run else "are free again"
    _say(console, f"{report.size(cleared.freed_bytes)} {fate} in {admin.where}")
    unreadable = admin.unreadable()
    for what in unreadable:
        _say(console, f"not the store's, so its space is left as it is: {what}")
    return _kept_none(console, admin, names, cleared, dry_run, json_file) and not unreadable


def _kept_none(
    console: Console, admin: StorageAdmin, names: Names, cleared: Cleared, dry_run: bool, json_file: Path | None
) -> bool:
    kept = [report.space_facts(space, names) for space in cleared.kept]
    for row in kept:
        _say(console, f"kept, as an engine has it open: {report.title(row)}")
    for where in cleared.kept_nameless:
        _say(console, f"kept, as an engine has it open, though its space.json is damaged: {where}")
    found = {
        "store": admin.where,
        "dry_run": dry_run,
        "objects": cleared.num_objects,
        "freed_bytes": cleared.freed_bytes,
        "removed": [report.space_facts(space, names) for space in cleared.removed],
        "kept": kept,
        "kept_damaged": list(cleared.kept_nameless),
    }
    write_json(json_file, found)
    return not kept and not cleared.kept_nameless


def _whole_id(console: Console, admin: StorageAdmin, given: str | None) -> str | None:
    """The id that is meant: the one given, or the only one that begins so.

    Raises:
        LaunchError: several begin so.
    """
    known, found = _begun_by(admin, given or "")
    if given in known or not found:
        return given
    if len(found) > 1:
        raise LaunchError(f"several weights' ids begin with {given!r}: {_listing(found)}; give more of the id")
    _say(console, f"{given!r} stands for {found[0]!r}")
    return found[0]


def _begun_by(admin: StorageAdmin, given: str) -> tuple[set[str], list[str]]:
    """All ids that are there, and those that begin so."""
    known = admin.weights_ids() if given else set()
    return known, sorted(each for each in known if each.startswith(given))


def _check_whole(admin: StorageAdmin, given: str) -> None:
    """Refuse the beginning of an id: tomorrow it may be that of other weights, and what is cleared is gone.

    Raises:
        LaunchError: it is no id that is there, and one or several begin so.
    """
    known, found = _begun_by(admin, given)
    if found and given not in known:
        raise LaunchError(f"{given!r} is only the beginning of {_listing(found)}; clear takes the whole id")


def _facts(console: Console, admin: StorageAdmin) -> Facts:
    """The store, and what its file system has free, which is said, too."""
    free_bytes = admin.free_bytes()
    if free_bytes is not None:
        _say(console, f"{report.size(free_bytes)} are free on the file system of {admin.where}")
    return {"store": admin.where, "free_bytes": free_bytes}


def _damaged(console: Console, admin: StorageAdmin) -> list[str]:
    """Spaces of which nobody can tell what they are for, or that hold what is not the store's; each named in a line."""
    found, unreadable = admin.damaged(), admin.unreadable()
    for where in found:
        _say(console, f"its space.json is damaged; the engine of that space mends it, gc removes it: {where}")
    for what in unreadable:
        _say(console, f"not the store's, so its space is left as it is: {what}")
    return [*found, *unreadable]


def _console(json_file: Path | None) -> Console:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a store may hold names that a terminal cannot show
    return console_beside(json_file, 0)


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
    return f"nothing of weights {weights_id!r} is in {admin.where}; there is: {_listing(there) or 'nothing'}"


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return f"{', '.join(map(report.shown, names[:_NUM_NAMED]))}{more}"

"""The command `simulate-faults`."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console

from fastdeploy_cache.errors import LaunchError, counted
from fastdeploy_cache.launch.faults.options import (
    SimulateFaultsOptions,
    check_json,
    fault_names,
    run_of,
    write_found,
)
from fastdeploy_cache.launch.faults.search import ALL_FAULTS, FoundStory, Search, as_test, run_story, search, shortest
from fastdeploy_cache.launch.faults.story import Story, from_json
from fastdeploy_cache.launch.findings import console_beside, print_table, progress_on, table_of
from fastdeploy_cache.launch.interrupts import STATUS, noted

_WIDTH = 120
_MOST_FOUND = 5  # a search ends with so many
_PER_STEPS = 1000
_MOST_NAMED = 4  # phases that a fault did not meet; --json has all that it met
_RATES = ("verbs", "answers", "file calls", "messages", "blocks compared")


def simulate_faults(wanted: SimulateFaultsOptions) -> int:
    """Look, show and write what was seen; the exit status: 0 nothing was found, 1 something was, 130 after Ctrl-C.

    Raises:
        typer.BadParameter: an unknown fault, a story that cannot be read or run, options that exclude each other, or a
            file that cannot be written.
    """
    check_json(wanted.json_file)
    names, console = fault_names(wanted.faults, ALL_FAULTS), console_beside(wanted.json_file, _WIDTH)
    if wanted.story is not None:
        if wanted != SimulateFaultsOptions(story=wanted.story):
            raise typer.BadParameter("--story runs one story as it is, to its end; it takes no other option")
        return _again(console, _read(wanted.story))
    so_far, status = Search(), 0
    shorter: list[FoundStory] = []
    with noted() as look:
        try:
            for so_far in _shown(console, wanted, names):
                look()
                if len(so_far.found) >= _MOST_FOUND:
                    break
        except KeyboardInterrupt:
            status = STATUS
        _show(console, so_far)
        try:
            shorter.extend(_shorter(console, found, look) for found in so_far.found)
        except KeyboardInterrupt:
            status = STATUS
    rest = so_far.found[len(shorter) :]
    document = run_of(wanted.seed, names) | as_document(so_far, shorter + rest, interrupted=bool(status))
    write_found(wanted.json_file, document)
    return status or int(bool(so_far.found))


def _shown(console: Console, wanted: SimulateFaultsOptions, names: tuple[str, ...]) -> Iterator[Search]:
    """The search, with a bar, up to its end."""
    gc.freeze()  # what is loaded stays: the look for a story's garbage need not go over it
    seconds = wanted.minutes * 60
    with progress_on(console, is_transient=True) as bar:
        task = bar.add_task("seconds", total=int(seconds))
        for so_far in search(fault_names=names, first_seed=wanted.seed, has_agents=wanted.agents):
            what = f"{so_far.num_steps:,} steps, {counted(len(so_far.found), 'finding')}; seconds"
            bar.update(task, completed=min(int(so_far.seconds), int(seconds)), description=what)
            yield so_far
            if so_far.seconds >= seconds or (wanted.steps is not None and so_far.num_steps >= wanted.steps):
                return


def _read(file: Path) -> Story:
    try:
        story = from_json(file.read_bytes(), str(file))
        if unknown := {fault.name for fault in story.faults}.difference(ALL_FAULTS):
            raise typer.BadParameter(f"{min(unknown)!r} is no fault; known: {', '.join(ALL_FAULTS)}")
        return story
    except OSError as error:
        raise typer.BadParameter(f"--story {file}: {error.strerror}") from error
    except LaunchError as error:
        raise typer.BadParameter(str(error)) from error


def _again(console: Console, story: Story) -> int:
    outcome = run_story(story)
    console.print(f"{outcome.num_steps:,} steps, digest {outcome.trace:016x}")
    for finding in outcome.findings:
        console.print(f"{finding.kind}: {finding.text}\n{finding.trace}", markup=False)
    if not outcome.findings:
        console.print("nothing was found")
    return int(bool(outcome.findings))


def _shorter(console: Console, found: FoundStory, look: Callable[[], None]) -> FoundStory:
    """The same in a story that is as short as can be, printed as a test."""
    console.print(f"\nmaking the story of seed {found.story.seed} short ...", markup=False)
    story = shortest(found.story, found.finding.kind, before_each=look)
    again = [each for each in run_story(story).findings if each.kind == found.finding.kind]
    short = FoundStory(story, again[0] if again else found.finding, found.num_steps, found.lines)
    console.print(as_test(short), markup=False)
    return short


def _show(console: Console, so_far: Search) -> None:
    rate = so_far.num_steps / so_far.seconds if so_far.seconds else 0.0
    console.print(
        f"{counted(so_far.num_stories, 'story')}, {so_far.num_steps:,} steps, {rate:,.0f} a second, "
        f"{counted(len(so_far.found), 'finding')}"
    )
    per_step = _PER_STEPS / max(1, so_far.num_steps)
    rates = [f"{so_far.counts[name] * per_step:.1f} {name}" for name in _RATES]
    console.print(f"in {_PER_STEPS:,} steps: {', '.join(rates)}, {so_far.num_faults * per_step:.2f} faults")
    print_table(
        console, table_of(("fault", "times", "phases that it met"), _rows(so_far), words=("phases that it met",))
    )
    for found in so_far.found:  # now: making them short may take long, and be interrupted
        console.print(f"{found.finding.kind}, seed {found.story.seed}: {found.finding.text}", markup=False)


def _rows(so_far: Search) -> Iterator[tuple[str, int, str]]:
    phases = sorted({phase for _, phase in so_far.met})
    for name in ALL_FAULTS:
        missed = [phase for phase in phases if (name, phase) not in so_far.met]
        text = f"{len(phases) - len(missed)} of {len(phases)}"
        if 0 < len(missed) <= _MOST_NAMED:
            text += f"; not {', '.join(missed)}"
        yield name, so_far.counts[f"fault: {name}"], text


def as_document(so_far: Search, found: list[FoundStory], *, interrupted: bool) -> dict[str, Any]:
    """What `--json` writes."""
    met: dict[str, dict[str, int]] = defaultdict(dict)
    for (name, phase), number in sorted(so_far.met.items()):
        met[name][phase] = number
    return {
        "interrupted": interrupted,
        "num_stories": so_far.num_stories,
        "num_steps": so_far.num_steps,
        "seconds": round(so_far.seconds, 1),
        "counts": dict(sorted(so_far.counts.items())),
        "met": met,
        "found": [
            {
                "kind": each.finding.kind,
                "text": each.finding.text,
                "num_steps": each.num_steps,
                "story": msgspec.to_builtins(each.story),
            }
            for each in found
        ],
    }

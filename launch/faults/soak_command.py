"""The command `soak`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console

from fastdeploy_cache.errors import counted
from fastdeploy_cache.launch.faults.options import (
    SoakOptions,
    check_json,
    check_server,
    fault_names,
    run_of,
    write_found,
)
from fastdeploy_cache.launch.faults.soak import NUM_ENGINES, Soak, SoakRun, soaking
from fastdeploy_cache.launch.faults.soak_faults import SOAK_FAULTS
from fastdeploy_cache.launch.findings import console_beside, print_table, progress_on, table_of
from fastdeploy_cache.launch.interrupts import STATUS, noted

_WIDTH = 120
_LEAST_SECONDS = 60.0
_MIB = 2**20
_SHOWN = (
    "requests", "blocks compared", "GPU tokens", "CPU tokens", "storage tokens", "received", "ran ahead", "void",
    "checks", "closed by users",
)  # fmt: skip


def soak(wanted: SoakOptions) -> int:
    """Run it, show and write what was seen; the exit status: 0 nothing was wrong, 1 something was, 130 after Ctrl-C.

    Raises:
        typer.BadParameter: an unknown fault, a server that does not answer, or a file that cannot be written.
    """
    check_json(wanted.json_file)
    faults, console = fault_names(wanted.faults, tuple(SOAK_FAULTS)), console_beside(wanted.json_file, _WIDTH)
    check_server(wanted.valkey_url)
    with noted() as look, soaking(wanted.seed, wanted.ranks, faults, wanted.valkey_url) as run:
        try:
            for _ in _shown(console, run, wanted.minutes * 60):
                look()
            status = 0
        except KeyboardInterrupt:
            status = STATUS
            run.end_now()
        seen = run.seen
        if not status and not seen.findings and not seen.counts["blocks compared"]:
            seen.findings.append(("no block was compared", "this says nothing: give it more minutes"))
        _show(console, seen)
        for log in run.logs() if seen.findings else ():
            console.print(log, markup=False)
    document = run_of(wanted.seed, faults) | as_document(seen, wanted, interrupted=bool(status))
    write_found(wanted.json_file, document)
    return status or int(bool(seen.findings))


def _shown(console: Console, run: SoakRun, seconds: float) -> Iterator[Soak]:
    with progress_on(console, is_transient=True) as bar:
        task = bar.add_task("seconds", total=int(seconds))
        for seen in run.run(seconds):
            what = f"{counted(sum(seen.faults.values()), 'fault')}, {counted(len(seen.findings), 'finding')}; seconds"
            bar.update(task, completed=min(int(seen.seconds), int(seconds)), description=what)
            yield seen


def _show(console: Console, seen: Soak) -> None:
    console.print(
        f"{NUM_ENGINES} engines, {seen.num_lives} processes of them, {seen.seconds:,.0f} s, "
        f"{counted(sum(seen.faults.values()), 'fault')}, {counted(len(seen.findings), 'finding')}"
    )
    console.print(", ".join(f"{seen.counts[name]:,} {name}" for name in _SHOWN))
    if seen.longest_seconds > _LEAST_SECONDS:  # in less there is no growth to see
        console.print(
            f"the process that lived longest grew in {seen.longest_seconds:,.0f} s after its first minute by "
            f"{seen.growth_bytes / _MIB:+.1f} MiB and {seen.growth_descriptors:+d} descriptors"
        )
    print_table(console, table_of(("fault", "times"), sorted(seen.faults.items())))
    verbs = sorted(seen.verbs.items(), key=lambda item: -item[1].longest_seconds)
    rows = [(name, verb.num_calls, f"{verb.longest_seconds:.3f}") for name, verb in verbs]
    print_table(console, table_of(("verb", "calls", "longest seconds"), rows))
    for kind, text in seen.findings:
        console.print(f"{kind}: {text}", markup=False)


def as_document(seen: Soak, wanted: SoakOptions, *, interrupted: bool) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "interrupted": interrupted,
        "seconds": round(seen.seconds, 1),
        "num_ranks": wanted.ranks,
        "num_engines": NUM_ENGINES,
        "num_lives": seen.num_lives,
        "counts": dict(sorted(seen.counts.items())),
        "faults": dict(sorted(seen.faults.items())),
        "verbs": {name: asdict(verb) for name, verb in sorted(seen.verbs.items())},
        "longest_life_seconds": round(seen.longest_seconds, 1),
        "growth_bytes": seen.growth_bytes,
        "growth_descriptors": seen.growth_descriptors,
        "findings": [{"kind": kind, "text": text} for kind, text in seen.findings],
    }

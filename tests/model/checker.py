"""Runs `spin` over a model: searches all of its states, or has it repeat traces."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.model.traces import MAX_TASKS, MODEL, Trace

_BUILD_SECONDS = 120
BLOCK, HANDOVER = MODEL, MODEL.with_name("handover.pml")
# how much may happen in a search
BUDGETS = ("MAX_TAKES=2", "MAX_PUTS=3", "MAX_DEATHS=1", "MAX_FORGETS=1")
ONE, TWO = ("MAX_DEATHS=0", "NUM_RECEIVES=1"), ("MAX_DEATHS=0", "NUM_RECEIVES=2")
RESTART = ("MAX_DEATHS=1", "NUM_RECEIVES=1")


class Checked(NamedTuple):
    """What a search came to: the invariant that does not hold, if any, and the states that were seen."""

    violated: str
    num_states: int


def _build(folder: Path, model: Path, macros: Sequence[str], options: Sequence[str]) -> Path:
    """The program that searches a model. Raises `CalledProcessError`."""
    for command in (
        ["spin", "-a", *(f"-D{macro}" for macro in macros), str(model)],
        ["gcc", "-w", *options, "-DNOREDUCE", "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_BUILD_SECONDS)
    return folder / "pan"


def _search(model: Path, macros: Sequence[str], options: Sequence[str], arguments: Sequence[str]) -> Checked:
    with tempfile.TemporaryDirectory() as folder:
        program = _build(Path(folder), model, macros, options)
        command = [str(program), "-m1000000", *arguments]
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=600)
    assert "max search depth too small" not in done.stdout, "it was cut short"
    violated = re.search(r"pan:1: (?:assertion violated +!\((\w+)\)|(.*) \(at depth)", done.stdout)
    states = re.search(r"(\d+) states, stored", done.stdout)
    assert states is not None, done.stdout
    return Checked((violated[1] or violated[2]) if violated else "", int(states[1]))


def check(model: Path, macros: Sequence[str] = (), *, is_large: bool = False) -> Checked:
    """Search all states, or up to the first at which an invariant does not hold. `is_large`: the search takes longer
    than a compiler that makes it fast."""
    return _search(model, macros, ("-O2" if is_large else "-O0", "-DSAFETY"), ("-w25" if is_large else "-w23",))


def check_ends(model: Path, macros: Sequence[str] = ()) -> Checked:
    """Search for a run without an end: there is none where no state can be reached from itself."""
    return _search(model, macros, ("-O0", "-DNP"), ("-w24", "-l"))


class Replay:
    """The model of one block, to repeat traces of so many ranks."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        """Build it in a folder, which it uses from then on."""
        self._folder = folder
        macros = ("REPLAY", f"RANKS={num_ranks}", f"TASKS={MAX_TASKS}")
        self._program = _build(folder, MODEL, macros, ("-O0", "-DSAFETY"))

    def refused(self, traces: Iterable[Trace], seconds: float = 600.0) -> dict[Trace, int]:
        """Those that the model cannot repeat, each with the number of its first steps that it can."""
        all_traces = list(traces)
        steps = [step for trace in all_traces for step in (*trace, 0)]
        (self._folder / "traces.bin").write_bytes(struct.pack(f"{len(steps)}i", *steps))
        depth = 40 * max(map(len, all_traces), default=0) + 4 * len(steps) + 1000
        done = subprocess.run(
            [str(self._program), "-E", f"-m{depth}", "-w24"],
            cwd=self._folder, check=True, capture_output=True, text=True, timeout=seconds,
        )  # fmt: skip
        assert "errors: 0" in done.stdout and "max search depth too small" not in done.stdout, done.stdout
        taken = (self._folder / "taken.bin").read_bytes()
        found, start = {}, 0
        for trace in all_traces:
            marks = taken[start : start + len(trace) + 1]
            start += len(trace) + 1
            if 0 in marks:
                found[trace] = marks.index(0)
        return found


class Replays:
    """One `Replay` for each number of ranks, built when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._built: dict[int, Replay] = {}

    def of(self, num_ranks: int) -> Replay:
        """The one for so many ranks."""
        if num_ranks not in self._built:
            folder = self._folder / str(num_ranks)
            folder.mkdir()
            self._built[num_ranks] = Replay(folder, num_ranks)
        return self._built[num_ranks]

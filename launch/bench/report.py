"""The frame of every benchmark: figures beside their baselines, and which promises they met.

A benchmark adds lines of figures and notes as it goes. What it prints, what it writes as JSON, what of it was promised
and the machine that it ran on are the same for all of them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fastdeploy_cache.launch.bench.machine import describe_machine
from fastdeploy_cache.launch.findings import console_beside, table_of, write_json

_WIDTH = 120
_HEADING_WIDTHS = (20, 14, 8)  # of a column; the first with which a table is no wider than the console


@dataclass(frozen=True)
class Promise:
    """What a figure must not exceed, or must reach at least. Made by `at_most` and `at_least`."""

    name: str
    limit: float
    is_least: bool


def at_most(name: str, limit: float) -> Promise:
    """A figure has to be `limit` or less."""
    return Promise(name, limit, is_least=False)


def at_least(name: str, limit: float) -> Promise:
    """A figure has to be `limit` or more."""
    return Promise(f"{name}, at least", limit, is_least=True)


@dataclass(frozen=True)
class Figure:
    """One measured value, a median as a rule. What is promised of it is its ratio to the baseline, if it has one."""

    name: str
    value: float
    unit: str = ""
    baseline: Figure | None = None
    promise: Promise | None = None

    @property
    def ratio(self) -> float | None:
        """The value over that of the baseline, which was measured in the same run."""
        return None if self.baseline is None else self.value / self.baseline.value


class Report:
    """What one run of a benchmark found. `facts` are written beside the figures, for programs that read them."""

    def __init__(self, json_file: Path | None, *, page: str = "docs/benchmark.md") -> None:
        """Raises `LaunchError` where the file cannot be written."""
        self._console = console_beside(json_file, _WIDTH)
        self.facts: dict[str, Any] = {"machine": describe_machine()}
        self._json_file, self._page = json_file, page
        self._figures = list[dict[str, Any]]()
        self._reach = list[dict[str, Any]]()
        self.note(self.facts["machine"]["text"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write what was found until Ctrl-C; the tables of it stand there already."""
        if kind is KeyboardInterrupt:
            self._write(interrupted=True)

    def note(self, text: str) -> None:
        """Print a line that holds no figure of its own."""
        self._console.print(text)

    def table(self, name: str, lines: Mapping[str, Sequence[Figure]], *, about: str = "", label: str = "") -> None:
        """Print a line of figures for each label. A run of another version finds them under the same names."""
        cells = {line: _cells(figures) for line, figures in lines.items()}
        columns = list(dict.fromkeys(column for found in cells.values() for column in found))
        rows = [[line, *(found.get(column, "") for column in columns)] for line, found in cells.items()]
        self.note(f"{name}: {about}" if about else name)
        self._print_table([(label, ""), *(heading for _, *heading in columns)], rows)
        for line, figures in lines.items():
            self._add(name, line, figures)

    def _print_table(self, headings: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> None:
        """Units stand below the names, which take several lines where there is no room."""
        any_width = self._console.options.update(width=10 * self._console.width)
        for width in _HEADING_WIDTHS:
            columns = ["\n".join([*textwrap.wrap(text, width), *unit.splitlines()]) for text, unit in headings]
            table = table_of(columns, rows, words=columns[:1])
            needed = self._console.measure(table, options=any_width).maximum
            if needed <= self._console.width:
                break
        self._console.width = max(self._console.width, needed)  # rather too wide than cut
        self._console.print(table)

    def line(self, name: str, *figures: Figure) -> None:
        """Print figures side by side, as text."""
        self.note(f"{name}: " + ", ".join(f"{each.name} {_shown(each.value)} {each.unit}".rstrip() for each in figures))
        self._add(name, "", figures)

    def _add(self, table: str, line: str, figures: Sequence[Figure]) -> None:
        for figure in figures:
            entry: dict[str, Any] = {"table": table, "line": line, "name": figure.name}
            entry |= {"value": figure.value, "unit": figure.unit}
            if figure.baseline is not None:
                entry |= {"baseline": figure.baseline.name, "ratio": figure.ratio}
            self._figures.append(entry)
            if (promise := figure.promise) is not None:
                value = round(figure.value if figure.ratio is None else figure.ratio, 3)
                is_kept = value >= promise.limit if promise.is_least else value <= promise.limit
                self._reach.append({"name": promise.name, "value": value, "limit": promise.limit, "ok": is_kept})

    def end(self) -> bool:
        """Print what was promised, write everything that was found; whether every promise was kept.

        Raises:
            LaunchError: the file cannot be written.
        """
        words = {True: "[green]ok[/green]", False: "[red]missed[/red]"}
        rows = [(entry["name"], entry["value"], entry["limit"], words[entry["ok"]]) for entry in self._reach]
        self.note("Promised figures")
        self._console.print(table_of(("figure", "value", "limit", ""), rows, words=("figure",)))
        self.note(f"{self._page} of the source says what each figure is.")
        self._write()
        return all(entry["ok"] for entry in self._reach)

    def _write(self, **facts: bool) -> None:
        write_json(self._json_file, {**self.facts, **facts, "figures": self._figures, "reach": self._reach})


def size(num_bytes: int) -> str:
    """Whole KiB or MiB."""
    return f"{num_bytes // 2**20} MiB" if num_bytes >= 2**20 else f"{num_bytes // 2**10} KiB"


def _cells(figures: Sequence[Figure]) -> dict[tuple[str, str, str], str]:
    """What a line of a table shows, by figure, heading and unit."""
    cells = {}
    for each in figures:
        cells[each.name, each.name, each.unit] = _shown(each.value)
        if each.baseline is not None and each.ratio is not None:
            cells[each.name, f"of {each.baseline.name}", ""] = _shown(each.ratio)
    return cells


def _shown(value: float) -> str:
    """Three digits that count, and one behind the point below a thousand; a number of things is whole."""
    size = abs(value)
    num_digits = 0 if size >= 1000 or isinstance(value, int) else 1 if size >= 10 else 2 if size >= 0.1 else 3
    return f"{value:.{num_digits}f}"

"""Where a program's findings go: a console, tables and progress for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from fastdeploy_cache.errors import LaunchError, reason_of

STANDARD_OUTPUT = Path("-")
_MAX_WIDTH = 10_000  # of a table: more than any name has


def check_target(file: Path | None) -> None:
    """Refuse a file that cannot be written, before the work.

    Raises:
        LaunchError: its folder does not exist, or it is a folder itself.
    """
    if file is None or file == STANDARD_OUTPUT:
        return
    if not file.absolute().parent.is_dir():
        raise LaunchError(f"cannot write {file}: its folder does not exist")
    if file.is_dir():
        raise LaunchError(f"cannot write {file}: it is a folder")


def console_beside(file: Path | None, width: int) -> Console:
    """Standard output, or standard error where the JSON goes to standard output; of this width at least.

    Raises:
        LaunchError: see `check_target`; it comes before the work.
    """
    check_target(file)
    console = Console(highlight=False, stderr=file == STANDARD_OUTPUT)
    console.width = max(console.width, width)
    return console


def print_table(console: Console, table: Table | Tree) -> None:
    """Print a table as it fits, or a tree as wide as it is: a name that is cut by lines can neither be read nor
    copied."""
    if isinstance(table, Table):
        console.print(fitted(console, table), soft_wrap=True)
        return
    console.width = max(console.width, _width(console, table))
    console.print(table)


def fitted(console: Console, table: Table) -> Table | Text:
    """The table, if the console has room for it; without lines between its columns, if that is enough; else a block of
    lines for each row. Nothing is cut in any of them."""
    if _width(console, table) <= console.width:
        return table
    headings = [str(column.header).replace("\n", " ") for column in table.columns]
    rows = list(zip(*(list(column.cells) for column in table.columns), strict=True))
    _make_narrow(table)
    if _width(console, table) <= console.width:
        return table
    size = max(map(len, headings))
    texts = ["\n".join(f"{name:<{size}}  {cell}" for name, cell in zip(headings, row, strict=True)) for row in rows]
    return Text("\n\n".join(texts if table.caption is None else [*texts, str(table.caption)]))


def _width(console: Console, shown: Table | Tree) -> int:
    return Measurement.get(console, console.options.update(max_width=_MAX_WIDTH), shown).maximum


def _make_narrow(table: Table) -> None:
    table.box, table.pad_edge, table.padding = box.SIMPLE, False, (0, 0)


def table_of(
    columns: Sequence[str], rows: Iterable[Iterable[Any]] = (), *, words: Collection[str] = (), is_narrow: bool = False
) -> Table:
    """A table whose columns hold numbers, which are never broken, but for those named in `words`.

    A narrow one has no lines between its columns.
    """
    table = Table()
    if is_narrow:
        _make_narrow(table)
    for column in columns:
        if column in words:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    return table


def progress_on(console: Console, *, is_transient: bool = False) -> Progress:
    """Bars that say what is done, how much of how much, and for how long. Transient ones are gone at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=is_transient)


def write_json(file: Path | None, found: dict[str, Any]) -> None:
    """Write what was found, if it is wanted.

    Raises:
        LaunchError: the file cannot be written.
    """
    text = json.dumps(found, indent=2) + "\n"
    if file == STANDARD_OUTPUT:
        sys.stdout.write(text)
    elif file is not None:
        try:
            file.write_text(text)
        except OSError as error:
            raise LaunchError(f"cannot write {file}: {reason_of(error)}") from error

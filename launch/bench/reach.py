"""Promised figures: each with its limit and a verdict."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

Reach = list[dict[str, Any]]


def add_at_most(reach: Reach, name: str, value: float, limit: float) -> None:
    """A figure that has to be `limit` or less."""
    value = round(value, 3)
    reach.append({"name": name, "value": value, "limit": limit, "ok": value <= limit})


def add_at_least(reach: Reach, name: str, value: float, limit: float) -> None:
    """A figure that has to be `limit` or more."""
    value = round(value, 3)
    reach.append({"name": f"{name}, at least", "value": value, "limit": limit, "ok": value >= limit})


def table_of(title: str, columns: tuple[str, ...]) -> Table:
    """A table of numbers."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def show_reach(console: Console, reach: Reach) -> None:
    """Print all figures and whether they were reached."""
    table = table_of("Promised figures", ("figure", "value", "limit", ""))
    for entry in reach:
        word = "[green]ok[/green]" if entry["ok"] else "[red]missed[/red]"
        table.add_row(entry["name"], str(entry["value"]), str(entry["limit"]), word)
    console.print(table)

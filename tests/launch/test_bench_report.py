"""The frame of the benchmarks: what is printed, what is written, and what counts as a promise kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.report import Figure, Report, at_least, at_most

FLOOR = Figure("plain copy", 8.0, "GB/s")


def test_what_is_promised_of_a_figure_with_a_baseline_is_their_ratio(tmp_path: Path) -> None:
    """Twice the floor is not at most one and a half of it, though the value itself is below the limit of another."""
    report = Report(tmp_path / "found.json")
    shares = [
        Figure("link", 16.0, "GB/s", FLOOR, at_most("share", 1.5)),
        Figure("raw", 16.0, promise=at_most("raw", 20)),
    ]
    report.table("links", {"shm": [FLOOR, *shares]})
    assert not report.end()
    reach = json.loads((tmp_path / "found.json").read_text())["reach"]
    assert reach == [
        {"name": "share", "value": 2.0, "limit": 1.5, "ok": False},
        {"name": "raw", "value": 16.0, "limit": 20, "ok": True},
    ]


def test_figures_are_written_as_they_were_measured(tmp_path: Path) -> None:
    """Names, unit, the value with all its digits, the baseline and the ratio to it; facts and the machine beside."""
    report = Report(tmp_path / "found.json")
    report.facts["rounds"] = 3
    report.table("links", {"shm": [Figure("link", 1 / 3, "GB/s", FLOOR)]}, about="not part of the name")
    report.line("start", Figure("took", 0.125, "s", promise=at_least("took", 0.1)))
    assert report.end()
    found = json.loads((tmp_path / "found.json").read_text())
    link = {"table": "links", "line": "shm", "name": "link", "value": 1 / 3, "unit": "GB/s"}
    assert found["figures"] == [
        link | {"baseline": "plain copy", "ratio": 1 / 24},
        {"table": "start", "line": "", "name": "took", "value": 0.125, "unit": "s"},
    ]
    assert found["rounds"] == 3 and found["machine"]["num_cores"] >= 1


def test_a_table_shows_values_units_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    """A column for each figure, one behind it for the ratio to its baseline; a line may lack what another one has."""
    report = Report(None)
    lines = {"shm": [FLOOR, Figure("link", 6.0, "GB/s", FLOOR), Figure("pieces", 1024)], "nixl": [FLOOR]}
    report.table("links", lines, label="kind", about="one round")
    text = capsys.readouterr().out
    assert "links: one round" in text
    rows = [[cell.strip() for cell in row.strip("│┃").split("│")] for row in text.splitlines() if row.startswith("│")]
    assert rows == [["shm", "8.00", "6.00", "0.75", "1024"], ["nixl", "8.00", "", "", ""]]
    for heading in ("kind", "plain copy", "GB/s", "link", "of plain copy", "pieces"):
        assert heading in text


def test_a_wide_table_breaks_headings_and_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """Twelve columns with names of two words: all labels and values are whole."""
    report = Report(None)
    figures = [Figure(f"measured quantity{number}", 1000.0 + number, "us") for number in range(11)]
    report.table("many", {"a label of words": figures})
    text = capsys.readouterr().out
    assert "a label of words" in text and "\u2026" not in text
    assert all(f" {1000 + number} " in text for number in range(11))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(12345.6, "12346"), (171.44, "171.4"), (7.126, "7.13"), (0.0042, "0.004"), (-2.5, "-2.50"), (19, "19")],
)
def test_values_keep_three_digits(value: float, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As many behind the point as say something; a number of things has none."""
    report = Report(None)
    report.line("so", Figure("much", value, "ms"))
    assert f"so: much {shown} ms\n" in capsys.readouterr().out


def test_a_target_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    """Before anything is measured."""
    with pytest.raises(LaunchError, match="its folder does not exist"):
        Report(tmp_path / "nowhere" / "found.json")

"""`docs/trust.md` says what is: the tests that it names are there, and so are the faults that it lists."""

from __future__ import annotations

import re
from pathlib import Path

from fastdeploy_cache.launch.faults.search import ALL_FAULTS
from tests.simulation import planted
from tests.simulation.find_planted import known

_TESTS = Path(__file__).parents[1]
_PAGE = _TESTS.parent.joinpath("docs", "trust.md").read_text()
_REPORT = re.compile(r"^- \[[\w.-]+#\d+\]\(https://github\.com/", re.MULTILINE)


def section(title: str) -> str:
    """The part of the page below a title."""
    _, found, rest = _PAGE.partition(f"\n{title}\n")
    assert found, title
    return re.split(r"\n##+ ", rest)[0]


def first_cells(text: str) -> list[str]:
    """The first cell of each row of a table, without its head."""
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    return rows[2:]


def test_named_tests_are_there() -> None:
    """Each `file.py::test` is a function of that file."""
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", _PAGE)
    assert len(named) >= 25
    for file, name in named:
        path = _TESTS / file
        assert path.is_file(), file
        assert f"def {name}(" in path.read_text(), f"{file} has no {name}"


def test_all_faults_are_listed() -> None:
    """The table has each fault once, by its name."""
    listed = [name.strip() for cell in first_cells(section("### Faults")) for name in cell.split(",")]
    assert sorted(listed) == sorted(ALL_FAULTS)


def test_planted_faults_are_listed() -> None:
    """The table has what the last whole search found."""
    rows = [line for line in section("## It is seen to find").splitlines() if line.startswith("|")][2:]
    wanted = [f"| {name} | {found['num_steps']:,} | {found['kind']} |" for name, found in known().items()]
    assert rows == wanted
    assert set(first_cells(section("### By the order of things"))) == {each.name for each in planted.BY_ORDER}


def test_reports_are_held_by_something() -> None:
    """Each public report of the table names a test; those without one are in a paragraph that says so."""
    reports = section("## Defects of the field, held here")
    listed, _, without = reports.partition("Among the reports whose class **no test here excludes**")
    assert without
    each = _REPORT.split(listed)[1:]
    assert len(each) >= 25
    assert all("::test_" in report for report in each)
    for names in re.findall(r"planted: ([^.]+)\.", " ".join(listed.split())):
        assert set(names.split(", ")) <= set(known()), names


def test_the_readme_says_what_the_page_shows() -> None:
    """How many kinds of fault there are, and the figures of the last long run."""
    readme = " ".join(_TESTS.parent.joinpath("README.md").read_text().split())
    names = r"kinds of fault|steps|blocks compared|\*\*findings\*\*"
    run = dict(re.findall(rf"^\| ({names}) \| ([\d,]+) \|$", _PAGE, re.MULTILINE))
    number = {name: int(value.replace(",", "")) for name, value in run.items()}
    assert f"{number['kinds of fault']} kinds of fault {number['blocks compared'] / 1e6:.2f} million blocks" in readme
    assert f"compared in {number['steps'] // 10**6} million steps" in readme
    assert number["**findings**"] == 0
    soak = " ".join(section("## A soak").split())
    faults, blocks = re.findall(r"(\d[\d,]*) faults, .*?([\d,]+) blocks compared", soak)[0]
    words = f"{int(blocks.replace(',', '')) / 1e6:.2f} million blocks were right, under {faults} faults"
    assert words in readme

"""What was skipped: counted by reason at the end of a run, and written to a file for a run that has more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "write the tests that were skipped here, a line each, for a run with `pytest @FILE` where more is installed"
    parser.addoption("--skipped-to", type=Path, metavar="FILE", help=words)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section("skipped, by reason")
    for reason, num_tests in Counter(map(_reason, skipped)).most_common():
        terminalreporter.write_line(f"{num_tests:5d}  {reason}")
    file = config.getoption("--skipped-to")
    if file is not None:
        file.write_text("".join(f"{name}\n" for name in sorted({report.nodeid for report in skipped})))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The words of the skip alone: where it stands in the code would make many reasons of one."""
    longrepr = report.longrepr
    words = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return words.removeprefix("Skipped: ")

"""The report as Markdown: one table of sections, one of what each has looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdeploy_cache.launch.gpu.notes import SKIPPED
from fastdeploy_cache.launch.gpu.sections import Section

_SIMULATED = (
    "**The driver is SIMULATED: nothing here ran on a GPU.** The bytes show that the right copies are asked for; the "
    "speeds say nothing."
)


@dataclass(frozen=True, kw_only=True)
class SectionReport:
    """What became of a section: `ok`, `failed` or `skipped`. `is_fault`: the run as a whole is not right by it.
    `is_late`: the time of the whole was over before it had its own."""

    name: str
    title: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    lines: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    log_tail: list[str] = field(default_factory=list)
    is_fault: bool = False
    is_late: bool = False

    @classmethod
    def skipped(cls, section: Section, reason: str, *, is_fault: bool = False, is_late: bool = False) -> SectionReport:
        """A section that was not begun."""
        name, title = section.name, section.title
        return cls(name=name, title=title, outcome=SKIPPED, reason=reason, is_fault=is_fault, is_late=is_late)

    @property
    def counts(self) -> str:
        """How its lines came out."""
        outcomes = [line["outcome"] for line in self.lines]
        return ", ".join(f"{outcomes.count(each)} {each}" for each in ("ok", "wrong", SKIPPED) if each in outcomes)


def as_markdown(reports: Sequence[SectionReport]) -> str:
    """The whole report."""
    is_simulated = any(report.facts.get("is_simulated") for report in reports)
    parts = ["# CUDA on this machine", *([_SIMULATED] if is_simulated else [])]
    rows = [[each.title, each.outcome, each.counts, f"{each.seconds:.0f} s", each.reason or "-"] for each in reports]
    parts.append(_table(["section", "outcome", "lines", "time", "why"], rows))
    for each in reports:
        if each.lines:
            lines = [[line["what"], line["outcome"], line["detail"]] for line in each.lines]
            parts += [f"## {each.title}", _table(["what", "outcome", "detail"], lines)]
        if each.log_tail:
            parts.append("End of its output:\n\n```\n" + "\n".join(each.log_tail) + "\n```")
    return "\n\n".join(parts)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(_cell(each) for each in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

"""What a section finds, written as it goes, so that a section that is killed leaves what it had found."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import CacheError

# Ours, those of frameworks for a GPU's errors, and what other bindings than those we know would answer with.
_FAILURES = (CacheError, RuntimeError, OSError, TypeError, ValueError, AttributeError, LookupError)
OK, WRONG, SKIPPED = "ok", "wrong", "skipped"


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """How much the sections do. `is_quick`: little, for a test of the sections themselves; its figures say nothing."""

    is_quick: bool = False


class Notes:
    """One section's lines in a file: what was looked at, how it came out, and figures."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def note(self, what: str, detail: str = "", *, outcome: str = OK, **figures: float) -> None:
        """Write a line. Figures are named with their units."""
        line: dict[str, Any] = {"what": what, "outcome": outcome, "detail": detail, "figures": figures}
        self._write(line)

    def skip(self, what: str, reason: str) -> None:
        """What was not tried, and why."""
        self.note(what, reason, outcome=SKIPPED)

    def fact(self, name: str, value: Any) -> None:
        """Something that programs read."""
        self._write({"fact": name, "value": value})

    def check(self, what: str, look: Callable[[], str]) -> bool:
        """Note what `look` says, or the error that it raises; whether it raised none."""
        try:
            detail = look()
        except _FAILURES as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f" ({Path(last.filename).name}:{last.lineno})"
            self.note(what, f"{type(error).__name__}: {error}{where}", outcome=WRONG)
            return False
        self.note(what, detail)
        return True

    def _write(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as out:
            out.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Found:
    """What a section's file holds."""

    lines: list[dict[str, Any]]
    facts: dict[str, Any]

    @classmethod
    def read(cls, file: Path) -> Found:
        """Read the file, whose last line may be cut."""
        lines: list[dict[str, Any]] = []
        facts: dict[str, Any] = {}
        for text in file.read_text().splitlines() if file.exists() else []:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            if "fact" in line:
                facts[line["fact"]] = line["value"]
            else:
                lines.append(line)
        return cls(lines, facts)

"""What the doctor says, and from when on something is worth a word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIN_SHARE: Final = 0.1  # of all prompt tokens that one cause costs, before it is worth a word
MIN_REQUESTS: Final = 20  # fewer say nothing


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong.

    Attributes:
        name: a word for it, which stays the same.
        evidence: a sentence with what was seen.
        advice: a sentence with what to change.
        share: of all prompt tokens that it costs, 0 to 1; None where that cannot be said.
    """

    name: str
    evidence: str
    advice: str
    share: float | None = None

    def __str__(self) -> str:
        gain = "" if self.share is None else f" At most {self.share:.0%} of all prompt tokens can be won by it."
        return f"{self.name}: {self.evidence} {self.advice}{gain}"

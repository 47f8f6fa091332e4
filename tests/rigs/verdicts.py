"""Whether the verdicts of a benchmark follow from its figures."""

from __future__ import annotations

from typing import Any

_ROUNDING = 0.0005  # `value` has three decimals, the verdict is that of the exact one


def is_consistent(entry: dict[str, Any]) -> bool:
    """Whether an entry's verdict follows from value and limit, its name saying which way."""
    value, limit = entry["value"], entry["limit"]
    if abs(value - limit) <= _ROUNDING:
        return True
    return bool(entry["ok"] == (value > limit if entry["name"].endswith("at least") else value < limit))

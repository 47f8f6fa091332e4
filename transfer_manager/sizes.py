"""Sizes in bytes as people write them: `10GB`, `64MiB`, `4096`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from fastdeploy_cache.errors import ConfigError

_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?) *([A-Za-z]*)", re.ASCII)
_SHOWN = 80  # characters of a text that is no size
_PREFIXES = "kmgt"
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}{end}": 1000**power for power, letter in enumerate(_PREFIXES, 1) for end in ("", "b")},
    **{f"{letter}i{end}": 1024**power for power, letter in enumerate(_PREFIXES, 1) for end in ("", "b")},
}


def parse_size(text: str, name: str) -> int:
    """The bytes that a text means: a number, with or without a unit.

    `K`, `M`, `G` and `T` are powers of 1000, with or without a `B` behind them; `KiB`, `MiB`, `GiB` and `TiB` are
    powers of 1024. Case does not matter. What is less than a byte is left out.

    Args:
        text: such as `4096`, `10GB`, `1.5 GiB`.
        name: of the setting or option, for the message.

    Raises:
        ConfigError: the text is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(found[2].lower()) if found else None
    if found is None or factor is None or (factor == 1 and "." in found[1]):
        raise ConfigError(
            f"{name} is {text[:_SHOWN]!r}; give a number of bytes, such as 4096, or a number with a unit: 10GB "
            "(10 times 1000 to the third) or 64MiB (64 times 1024 to the second)"
        )
    return int(Fraction(found[1]) * factor)


def with_sizes(settings: Mapping[str, Any], table: str = "") -> dict[str, Any]:
    """The settings, with each text of a key that ends in `_bytes` as the bytes that it means; in their tables, too.

    Args:
        settings: of everything, with tables as mappings; or of one table.
        table: the table's name with a dot, for messages. What lies inside a table is left alone.

    Raises:
        ConfigError: one of these texts is no size; the key is named.
    """
    return {key: _with_size(table, key, value) for key, value in settings.items()}


def _with_size(table: str, key: str, value: Any) -> Any:
    if isinstance(value, str) and key.endswith("_bytes"):
        return parse_size(value, f"{table}{key}")
    return with_sizes(value, f"{key}.") if isinstance(value, Mapping) and not table else value

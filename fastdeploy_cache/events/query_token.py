"""The token by which others may ask what is cached of a prompt."""

from __future__ import annotations

import stat
from pathlib import Path

from fastdeploy_cache.errors import ConfigError

_LEAST_CHARACTERS = 16


def read_token(path: str | None) -> str | None:
    """The token in a file; None without one. Raises `ConfigError`: it cannot be read, is short, or open to others."""
    if path is None:
        return None
    try:
        mode, token = Path(path).stat().st_mode, Path(path).read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"events.query_token_file is {path!r}, and cannot be read: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"events.query_token_file is {path!r}, which others may read; chmod 600 it")
    if len(token) < _LEAST_CHARACTERS:
        raise ConfigError(
            f"events.query_token_file is {path!r}, and has {len(token)} characters; use {_LEAST_CHARACTERS} or more"
        )
    return token

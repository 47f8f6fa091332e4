"""Sizes as options of a command give them."""

from __future__ import annotations

import typer


def size_given(option: str, text: str, least_bytes: int = 0) -> int:
    """The bytes that an option means, such as `512MiB`; `transfer_manager.sizes` says how sizes are written.

    Raises:
        typer.BadParameter: it is no size, or less than `least_bytes`.
    """
    from fastdeploy_cache.errors import ConfigError  # late: for help the command line does without
    from fastdeploy_cache.transfer_manager.sizes import parse_size

    try:
        num_bytes = parse_size(text, option)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    if num_bytes < least_bytes:
        raise typer.BadParameter(f"{option} is {text!r}; use at least {least_bytes // 2**20}MiB")
    return num_bytes

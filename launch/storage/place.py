"""The options that say which store it is that an operator looks after."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class Place:
    """One of `folder`, `server_url`, `master_address` and `config` says which store it is."""

    folder: Annotated[str | None, typer.Option(help="The store: a folder of kind file.")] = None
    server_url: Annotated[str | None, typer.Option(help="The store: a Valkey server, as storage.server_url.")] = None
    password_file: Annotated[Path | None, typer.Option(help="Holds the server's password, or user:password.")] = None
    tls_ca_file: Annotated[Path | None, typer.Option(help="A certificate authority to trust beside the system's.")] = (
        None
    )
    master_address: Annotated[
        str | None, typer.Option(help="The store: a Mooncake cluster, its master's HOST:PORT.")
    ] = None
    metrics_url: Annotated[str | None, typer.Option(help="The master's metrics server, if not http://HOST:9003.")] = (
        None
    )
    config: Annotated[Path | None, typer.Option(help="The store: an engine's configuration, a TOML file.")] = None

"""The commands `fastdeploy-cache storage ...`: what an operator does with a store, also beside living engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

storage_app = typer.Typer(no_args_is_help=True, help="Look after a store: what is in it, is it whole, clear it.")

Folder = Annotated[str | None, typer.Option(help="The store: a folder of kind file.")]
ServerUrl = Annotated[str | None, typer.Option(help="The store: a Valkey server, as storage.server_url.")]
PasswordFile = Annotated[Path | None, typer.Option(help="Holds the server's password, or user:password.")]
TlsCaFile = Annotated[Path | None, typer.Option(help="A certificate authority to trust beside the system's.")]
MasterAddress = Annotated[str | None, typer.Option(help="The store: a Mooncake cluster, its master's HOST:PORT.")]
MetricsUrl = Annotated[str | None, typer.Option(help="The master's metrics server, if not http://HOST:9003.")]
Config = Annotated[Path | None, typer.Option(help="The store: an engine's configuration, a TOML file.")]
WeightsId = Annotated[str | None, typer.Option(help="These weights only. A Mooncake cluster knows no ids: name them.")]
Json = Annotated[Path | None, typer.Option(help="Also write the findings to this file; - is standard output.")]


@storage_app.command()
def ls(
    *,
    folder: Folder = None,
    server_url: ServerUrl = None,
    password_file: PasswordFile = None,
    tls_ca_file: TlsCaFile = None,
    master_address: MasterAddress = None,
    metrics_url: MetricsUrl = None,
    config: Config = None,
    weights_id: WeightsId = None,
    json: Json = None,
) -> None:
    """What is in it, by weights."""
    from fastdeploy_cache.launch.storage.command import list_weights as run
    from fastdeploy_cache.launch.storage.place import Place

    run(Place(folder, server_url, password_file, tls_ca_file, master_address, metrics_url, config), weights_id, json)


@storage_app.command()
def stat(
    *,
    folder: Folder = None,
    server_url: ServerUrl = None,
    password_file: PasswordFile = None,
    tls_ca_file: TlsCaFile = None,
    master_address: MasterAddress = None,
    metrics_url: MetricsUrl = None,
    config: Config = None,
    weights_id: WeightsId = None,
    json: Json = None,
) -> None:
    """All that is known of each rank's space in it."""
    from fastdeploy_cache.launch.storage.command import describe_spaces as run
    from fastdeploy_cache.launch.storage.place import Place

    run(Place(folder, server_url, password_file, tls_ca_file, master_address, metrics_url, config), weights_id, json)


@storage_app.command()
def verify(
    *,
    folder: Folder = None,
    server_url: ServerUrl = None,
    password_file: PasswordFile = None,
    tls_ca_file: TlsCaFile = None,
    master_address: MasterAddress = None,
    metrics_url: MetricsUrl = None,
    config: Config = None,
    weights_id: WeightsId = None,
    json: Json = None,
) -> None:
    """Read every object and check it; changes nothing. Status 1: one is damaged."""
    from fastdeploy_cache.launch.storage.command import verify as run
    from fastdeploy_cache.launch.storage.place import Place

    place = Place(folder, server_url, password_file, tls_ca_file, master_address, metrics_url, config)
    raise typer.Exit(0 if run(place, weights_id, json) else 1)


@storage_app.command()
def clear(
    *,
    weights_id: Annotated[str, typer.Option(help="The weights whose objects go.")],
    folder: Folder = None,
    server_url: ServerUrl = None,
    password_file: PasswordFile = None,
    tls_ca_file: TlsCaFile = None,
    master_address: MasterAddress = None,
    metrics_url: MetricsUrl = None,
    config: Config = None,
    json: Json = None,
) -> None:
    """Remove all objects of some weights. Status 1: some stay, as an engine has them open."""
    from fastdeploy_cache.launch.storage.command import clear as run
    from fastdeploy_cache.launch.storage.place import Place

    place = Place(folder, server_url, password_file, tls_ca_file, master_address, metrics_url, config)
    raise typer.Exit(0 if run(place, weights_id, json) else 1)


@storage_app.command()
def gc(
    *,
    capacity_bytes: Annotated[int, typer.Option(min=0, help="What may stay.")],
    folder: Folder = None,
    server_url: ServerUrl = None,
    password_file: PasswordFile = None,
    tls_ca_file: TlsCaFile = None,
    master_address: MasterAddress = None,
    metrics_url: MetricsUrl = None,
    config: Config = None,
    json: Json = None,
) -> None:
    """Remove what crashes left in a folder, and its oldest spaces until it fits. Status 1: engines hold too much."""
    from fastdeploy_cache.launch.storage.command import collect as run
    from fastdeploy_cache.launch.storage.place import Place

    place = Place(folder, server_url, password_file, tls_ca_file, master_address, metrics_url, config)
    raise typer.Exit(0 if run(place, capacity_bytes, json) else 1)

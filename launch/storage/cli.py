"""The commands `fastdeploy-cache storage ...`: what an operator does with a store, also beside living engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastdeploy_cache.launch.options import size_given, spread
from fastdeploy_cache.launch.storage.place import Place

storage_app = typer.Typer(
    no_args_is_help=True,
    help="Look after a store: what is in it, is it whole, clear it.",
    epilog="Example: fastdeploy-cache storage ls --folder /ssd/kv",
)

WeightsId = Annotated[
    str | None, typer.Option(help="These weights only; the id's beginning is enough, but not with Mooncake.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")]
Json = Annotated[Path | None, typer.Option(help="Also write the findings to this file; - is standard output.")]


@storage_app.command(epilog="Example: fastdeploy-cache storage ls --folder /ssd/kv")
@spread
def ls(place: Place, weights_id: WeightsId = None, json: Json = None) -> None:
    """What is in it, by weights."""
    from fastdeploy_cache.launch.storage.command import list_weights

    list_weights(place, weights_id, json)


@storage_app.command(epilog="Example: fastdeploy-cache storage stat --folder /ssd/kv --json -")
@spread
def stat(place: Place, weights_id: WeightsId = None, json: Json = None) -> None:
    """All that is known of each rank's space in it."""
    from fastdeploy_cache.launch.storage.command import describe_spaces

    describe_spaces(place, weights_id, json)


@storage_app.command(epilog="Example: fastdeploy-cache storage verify --folder /ssd/kv --remove")
@spread
def verify(
    place: Place,
    weights_id: WeightsId = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is damaged.")] = False,
    json: Json = None,
) -> bool:
    """Read every object, and name those that are not what was written. Status 1: one is damaged, and still there."""
    from fastdeploy_cache.launch.storage.command import verify as run

    return run(place, weights_id, remove, json)


@storage_app.command(
    epilog="Example: fastdeploy-cache storage clear --folder /ssd/kv --weights-id my-model@1 --dry-run"
)
@spread
def clear(
    place: Place,
    weights_id: Annotated[
        str,
        typer.Option(help="The weights whose objects go; the whole id, but for --dry-run, where its beginning does."),
    ],
    dry_run: DryRun = False,
    json: Json = None,
) -> bool:
    """Remove all objects of some weights. Status 1: some stay, which an engine has open, or may, in a damaged space."""
    from fastdeploy_cache.launch.storage.command import clear as run

    return run(place, weights_id, dry_run, json)


def _size(text: str) -> int:
    return size_given("--capacity-bytes", text)


@storage_app.command(epilog="Example: fastdeploy-cache storage gc --folder /ssd/kv --capacity-bytes 10GB")
@spread
def gc(
    place: Place,
    capacity_bytes: Annotated[int, typer.Option(parser=_size, metavar="SIZE", help="What may stay, such as 10GB.")],
    dry_run: DryRun = False,
    json: Json = None,
) -> bool:
    """Remove what crashes left in a folder, and its oldest spaces until it fits. Status 1: engines hold too much."""
    from fastdeploy_cache.launch.storage.command import collect

    return collect(place, capacity_bytes, dry_run, json)

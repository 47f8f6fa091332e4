"""The commands `fastdeploy-cache storage ...`: what an operator does with a store, also beside living engines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastdeploy_cache.launch.size_option import size_given

if TYPE_CHECKING:
    from fastdeploy_cache.launch.storage.place import Place

storage_app = typer.Typer(
    no_args_is_help=True,
    help="Look after a store: what is in it, is it whole, clear it.",
    epilog="Example: fastdeploy-cache storage ls --folder /ssd/kv",
)

# Of every command, by the fields of `Place`.
WHERE: dict[str, Any] = {
    "folder": Annotated[str | None, typer.Option(help="The store: a folder of kind file.")],
    "server_url": Annotated[str | None, typer.Option(help="The store: a Valkey server, as storage.server_url.")],
    "password_file": Annotated[Path | None, typer.Option(help="Holds the server's password, or user:password.")],
    "tls_ca_file": Annotated[Path | None, typer.Option(help="A certificate authority to trust beside the system's.")],
    "master_address": Annotated[
        str | None, typer.Option(help="The store: a Mooncake cluster, its master's HOST:PORT.")
    ],
    "metrics_url": Annotated[str | None, typer.Option(help="The master's metrics server, if not http://HOST:9003.")],
    "config": Annotated[Path | None, typer.Option(help="The store: an engine's configuration, a TOML file.")],
}
WeightsId = Annotated[
    str | None, typer.Option(help="These weights only; the id's beginning is enough, but not with Mooncake.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")]
Json = Annotated[Path | None, typer.Option(help="Also write the findings to this file; - is standard output.")]


def with_place(command: Callable[..., bool]) -> Callable[..., None]:
    """A command with the options that say which store it is, behind those that it needs.

    It is given them as one `Place`. Where it returns False, its status is 1.
    """

    @functools.wraps(command)
    def run(**given: Any) -> None:
        from fastdeploy_cache.launch.storage.place import Place

        place = Place(**{name: given.pop(name) for name in WHERE})
        raise typer.Exit(0 if command(place, **given) else 1)

    hints = signature(command, locals={"Place": None}, eval_str=True)
    own = [each for each in hints.parameters.values() if each.name != "place"]
    where = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in WHERE.items()]
    options = sorted([*where, *own], key=lambda each: each.default is not Parameter.empty)
    # from these two the options are read
    run.__dict__["__signature__"] = Signature(options)
    run.__annotations__ = {each.name: each.annotation for each in options}
    return run


@storage_app.command(epilog="Example: fastdeploy-cache storage ls --folder /ssd/kv")
@with_place
def ls(place: Place, *, weights_id: WeightsId = None, json: Json = None) -> bool:
    """What is in it, by weights."""
    from fastdeploy_cache.launch.storage.command import list_weights

    list_weights(place, weights_id, json)
    return True


@storage_app.command(epilog="Example: fastdeploy-cache storage stat --folder /ssd/kv --json -")
@with_place
def stat(place: Place, *, weights_id: WeightsId = None, json: Json = None) -> bool:
    """All that is known of each rank's space in it."""
    from fastdeploy_cache.launch.storage.command import describe_spaces

    describe_spaces(place, weights_id, json)
    return True


@storage_app.command(epilog="Example: fastdeploy-cache storage verify --folder /ssd/kv --remove")
@with_place
def verify(
    place: Place,
    *,
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
@with_place
def clear(
    place: Place,
    *,
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
@with_place
def gc(
    place: Place,
    *,
    capacity_bytes: Annotated[int, typer.Option(parser=_size, metavar="SIZE", help="What may stay, such as 10GB.")],
    dry_run: DryRun = False,
    json: Json = None,
) -> bool:
    """Remove what crashes left in a folder, and its oldest spaces until it fits. Status 1: engines hold too much."""
    from fastdeploy_cache.launch.storage.command import collect

    return collect(place, capacity_bytes, dry_run, json)

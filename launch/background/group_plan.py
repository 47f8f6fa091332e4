"""What a group is made of: its members, and the command that each of them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.background.run_folder import RunFolder

ROUTER = "router"
_MOST_CHARACTERS = 98  # of a unix socket's path, less `.replay`
_NOT_SHARED = {
    "--role": "use --prefill N and --decode N",
    "--control-socket": "all would take one socket; start them one by one",
    "--metrics-port": "each member takes a free port, which --status shows",
    "--log-dir": "each member has its own folder",
}
_NOT_SHARED_SETTINGS = {
    "role": "use --prefill N and --decode N",
    "peer.listen": "all members would take one port; start them one by one",
    "peer.name": "each member has its own, which metrics show",
    "events.endpoint": "each member has its own: use --events",
}


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """How many of each, and what they are given. `serve` are options of `serve` for every instance."""

    num_prefill: Annotated[int, typer.Option("--prefill", min=1, help="Instances that compute prompts.")] = 1
    num_decode: Annotated[int, typer.Option("--decode", min=1, help="Instances that answer.")] = 1
    prefill_ranks: Annotated[int, typer.Option(min=1, help="Ranks of each prefill instance.")] = 1
    decode_ranks: Annotated[int, typer.Option(min=1, help="Ranks of each decode instance.")] = 1
    host: Annotated[str, typer.Option(help="Address of the router.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the router; 0 takes a free one.")] = 8000
    allow_hosts: Annotated[
        list[str] | None, typer.Option("--allow-host", metavar="NAME", help="As of `serve`; of all members.")
    ] = None
    events: Annotated[
        bool, typer.Option("--events", help="Instances tell what they have, and the router sends prompts there.")
    ] = False
    serve: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises `LaunchError` for an option that a whole group cannot share."""
        settings = [word.removeprefix("--set=") for word in self.serve]
        for word, setting in zip(self.serve, settings, strict=True):
            name = word.partition("=")[0]
            why = _NOT_SHARED.get(name) or _NOT_SHARED_SETTINGS.get(setting.partition("=")[0] if "=" in setting else "")
            if why is not None:
                raise LaunchError(f"{word} is not for a whole group: {why}")

    def instances(self, folder: RunFolder) -> dict[str, list[str]]:
        """The command of each instance, by its name."""
        roles = [("prefill", number, self.prefill_ranks) for number in range(self.num_prefill)]
        roles += [("decode", number, self.decode_ranks) for number in range(self.num_decode)]
        return {
            f"{role}-{number}": [
                *("serve", "--role", role, "--ranks", str(num_ranks), "--port", "0", "--metrics-port", "0"),
                *("--log-dir", str(folder.log_folder / f"{role}-{number}")),
                *("--set", f"peer.name={role}-{number}", "--set", f"peer.secret_file={secret_file(folder)}"),
                *(("--set", f"events.endpoint={events_endpoint(folder, f'{role}-{number}')}") if self.events else ()),
                *self._allowed(),
                *self.serve,
            ]
            for role, number, num_ranks in roles
        }

    def router(self, urls: Mapping[str, str], folder: RunFolder) -> list[str]:
        """The command of the router, before instances that listen there."""
        instances = [word for name, url in urls.items() for word in (f"--{name.partition('-')[0]}", url)]
        heard = [("--events", f"{url},{events_endpoint(folder, name)}") for name, url in urls.items() if self.events]
        events = [word for pair in heard for word in pair]
        return ["route", "--host", self.host, "--port", str(self.port), *self._allowed(), *instances, *events]

    def words(self) -> list[str]:
        """The options of `up` that make this plan."""
        counts = {"prefill": self.num_prefill, "decode": self.num_decode}
        counts |= {"prefill-ranks": self.prefill_ranks, "decode-ranks": self.decode_ranks, "port": self.port}
        return [
            *(w for n, c in counts.items() for w in (f"--{n}", str(c))),
            "--host",
            self.host,
            *(("--events",) if self.events else ()),
            *self._allowed(),
            *self.serve,
        ]

    def _allowed(self) -> list[str]:
        return [word for name in self.allow_hosts or () for word in ("--allow-host", name)]


def at_known_ports(command: Sequence[str], facts: Mapping[str, str]) -> list[str]:
    """The command of a member that is started again where the others know it; the last of an option counts."""
    ports = {"--port": facts.get("url"), "--metrics-port": facts.get("metrics", "").removesuffix("/metrics")}
    if command[0] == "route":
        del ports["--metrics-port"]
    return [*command, *(w for name, url in ports.items() if url for w in (name, url.rpartition(":")[2]))]


def secret_file(folder: RunFolder) -> Path:
    """The secret of this group alone: its instances sign their offers with it."""
    return folder.group_folder / "peer.secret"


def events_endpoint(folder: RunFolder, name: str) -> str:
    """Where an instance publishes. Raises `LaunchError`: the folder's path is too long for a socket in it."""
    path = folder.group_folder / f"{name}.events"
    if len(str(path)) > _MOST_CHARACTERS:
        raise LaunchError(f"--events: {path} is too long for a socket; use a --run-dir with a shorter path")
    return f"ipc://{path}"


def discovery_file(folder: RunFolder) -> Path:
    """Where Prometheus finds the group's ports (`file_sd_configs`)."""
    return folder.group_folder / "prometheus.json"

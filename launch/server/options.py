"""The options of `serve` and of `route`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

Names = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="A name that its ports may be asked under; can be repeated.")
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the API; 0 takes a free one.")]


@dataclass(frozen=True)
class ServeOptions:
    """What an instance is made of."""

    config: Annotated[Path | None, typer.Option(help="TOML file; `config sample` prints one.")] = None
    model: Annotated[
        str,
        typer.Option(help="smollm2; or hybrid: its weights, with windows and states in some layers."),
    ] = "smollm2"
    ranks: Annotated[int | None, typer.Option(help="Short for --set transfer.tp_size=N: 1 or 3.")] = None
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as num_gpu_blocks=256.")
    ] = None
    device: Annotated[str, typer.Option(help="cpu, or gpu:N with paddlepaddle-gpu (all ranks on that GPU).")] = "cpu"
    host: Host = "127.0.0.1"
    port: Port = 8000
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of /metrics.")] = 9400
    storage: Annotated[Path | None, typer.Option(help="Folder of a store on disk, which outlives restarts.")] = None
    control_socket: Annotated[
        Path | None, typer.Option(help="Take the verbs of `control` at this unix socket, in a folder of mode 700.")
    ] = None
    role: Annotated[
        str, typer.Option(help="prefill computes prompts for decode instances (see `route`); mixed does both alone.")
    ] = "mixed"
    peers: Annotated[
        bool, typer.Option("--peers", help="With --role mixed: lend what is cached to others, and take what they lend.")
    ] = False
    borrow_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL,ENDPOINT[,KEY]",
            help="With --peers: another instance and its events.endpoint, to borrow prompts from. Can be repeated.",
        ),
    ] = None
    on_receive_failure: Annotated[
        str, typer.Option(help="Where offered blocks do not come: recompute the prompt, or fail the request.")
    ] = "recompute"
    allow_host: Names = None
    log_dir: Annotated[Path | None, typer.Option(help="Folder for one log per rank.")] = None

    def __post_init__(self) -> None:
        """Raises `typer.BadParameter` for a word that is none of those known."""
        if self.model not in ("smollm2", "hybrid"):
            raise typer.BadParameter(f"--model {self.model}; use smollm2 or hybrid")
        if self.role not in ("mixed", "prefill", "decode"):
            raise typer.BadParameter(f"--role {self.role}; use mixed, prefill or decode")
        if self.on_receive_failure not in ("recompute", "fail"):
            raise typer.BadParameter(f"--on-receive-failure {self.on_receive_failure}; use recompute or fail")


@dataclass(frozen=True)
class RouteOptions:
    """What a router asks, and how."""

    decode: Annotated[list[str], typer.Option(help="URL of a decode instance; can be repeated.")]
    prefill: Annotated[list[str] | None, typer.Option(help="URL of a prefill instance; can be repeated.")] = None
    host: Host = "127.0.0.1"
    port: Port = 8000
    prefill_timeout: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds for a prefill instance's offer; then decode computes.")
    ] = 10.0
    max_open_prefills: Annotated[
        int, typer.Option(min=0, help="Chats of one client that prefill instances compute at a time; decode the rest.")
    ] = 32
    events: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL,ENDPOINT[,KEY]",
            help="An instance's events.endpoint; it gets the prompts of which it has most. Can be repeated.",
        ),
    ] = None
    keys_folder: Annotated[
        Path | None, typer.Option(help="Of this router's keys, for events with keys (see `peer-keys`).")
    ] = None
    loaded_token_cost: Annotated[
        float, typer.Option(min=0, max=1, help="Of a token cached below the GPU, where computing one costs 1.")
    ] = 0.1
    moved_token_cost: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Of a token that one instance lends to another (`serve --peers`); else none."),
    ] = None
    open_request_cost: Annotated[
        float, typer.Option(min=0, help="Of each request that an instance is answering, in tokens that are computed.")
    ] = 16.0
    allow_host: Names = None

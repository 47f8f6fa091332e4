"""The options of `bench control` and of `bench storage`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fastdeploy_cache.launch.options import size_given

LEAST_BYTES = 16 * 2**20  # of what is moved


@dataclass(frozen=True)
class ControlOptions:
    """What to run."""

    trace: Annotated[Path | None, typer.Option(help="Also serve the first 400 requests of this trace.")] = None
    trace_block_size: Annotated[int, typer.Option(min=1, help="Tokens that one hash id of it stands for.")] = 512
    repeats: Annotated[int, typer.Option(min=1, help="How often each workload is served; medians count.")] = 5
    scale_blocks: Annotated[
        str, typer.Option(help="Pool sizes of at least 640, of full pools and worst calls; of two, also the ratio.")
    ] = "10000,100000,1000000"
    max_runs: Annotated[
        int, typer.Option(min=1, help="Pools of more cached prompts are left out of the worst calls: they take long.")
    ] = 250_000
    peer: Annotated[
        str | None, typer.Option(help="vllm=FOLDER: beside vLLM's own manager; the folder holds its package.")
    ] = None


@dataclass(frozen=True)
class StorageOptions:
    """What to measure."""

    folder: Annotated[
        Path | None, typer.Option(help="Where the file store is measured: a folder of the disk in question.")
    ] = None
    server_url: Annotated[str | None, typer.Option(help="Also measure this Valkey server (it is filled).")] = None
    master_address: Annotated[str | None, typer.Option(help="Also measure the Mooncake cluster of this master.")] = None
    memory: Annotated[str, typer.Option(metavar="SIZE", help="What is written and read in a round.")] = "256MiB"
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians count.")] = 5
    reopen: Annotated[str, typer.Option(metavar="SIZE", help="Size of the folder that is opened again; 0: none.")] = (
        "10GB"
    )
    model: Annotated[bool, typer.Option(help="Also load a prompt of the demo's model, and compute it.")] = True

    @property
    def memory_bytes(self) -> int:
        """What `memory` means. Raises `typer.BadParameter`."""
        return size_given("--memory", self.memory, LEAST_BYTES)

    @property
    def reopen_bytes(self) -> int:
        """What `reopen` means. Raises `typer.BadParameter`."""
        return size_given("--reopen", self.reopen)

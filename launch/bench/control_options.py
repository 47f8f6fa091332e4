"""The options of `bench control`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


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

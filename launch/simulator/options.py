"""The options of `simulate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class SimulateOptions:
    """What to replay, and where the findings go."""

    gpu_blocks: Annotated[
        list[str], typer.Option(help="Blocks of the GPU tier: 4096, or 5% of the distinct blocks.")
    ] = field(default_factory=list)
    trace_block_size: Annotated[int, typer.Option(min=1, help="Tokens that one hash id stands for.")] = 512
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens per cached block; the trace's block size, or a divisor.")
    ] = None
    cpu_blocks: Annotated[list[str], typer.Option(help="Blocks of the CPU tier, likewise.")] = field(
        default_factory=lambda: ["0"]
    )
    storage_blocks: Annotated[list[str], typer.Option(help="Blocks of a store below it, likewise.")] = field(
        default_factory=lambda: ["0"]
    )
    policy: Annotated[list[str], typer.Option(help="Eviction policies.")] = field(default_factory=lambda: ["lru"])
    hints: Annotated[
        list[str], typer.Option(help="What requests say: session; will_go_on; will_go_on:0.2, a fifth of it wrong.")
    ] = field(default_factory=list)
    hint_seed: Annotated[int, typer.Option(min=0, help="Of the draw of what is wrong.")] = 0
    write_policy: Annotated[str, typer.Option(help="What the CPU tier is given: see cpu_write_policy.")] = "write_back"
    storage_write_policy: Annotated[str, typer.Option(help="What the store is offered.")] = "write_through"
    storage_admission: Annotated[str, typer.Option(help="What it takes of that: second_use, or all.")] = "second_use"
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the findings to this file; - is standard output.")
    ] = None
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Also draw hit rate over capacity (PNG or SVG).")] = (
        None
    )
    bound: Annotated[bool, typer.Option(help="Find the clairvoyant bound as well.")] = True
    skip_bad: Annotated[bool, typer.Option(help="Leave bad lines out and count them.")] = False
    config_file: Annotated[
        Path | None, typer.Option("--config", help="TOML file; with its layout sizes may be a rank's 80GiB.")
    ] = None
    prefill_tokens_per_second: Annotated[
        float | None, typer.Option(min=1, help="How fast prompts are computed: also say the seconds saved.")
    ] = None

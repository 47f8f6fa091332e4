"""The simulator's table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(console: Console, found: dict[str, Any]) -> None:
    """Print one line for each capacity and policy, and the bounds."""
    console.print(
        f"{found['trace']}: {found['requests']} requests, {found['tokens'] / 1e6:.1f} M tokens, "
        f"{found['distinct_blocks']} distinct blocks of {found['block_size']} tokens"
    )
    if found["skipped_lines"]:
        console.print(f"{found['skipped_lines']} bad lines were left out")
    table = Table(title="Token hit rates, evictions and traffic in blocks", title_justify="left")
    for column in ("GPU blocks", "CPU blocks", "policy", "hit rate", "GPU", "CPU", "evicted", "to CPU", "to GPU"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in found["results"]:
        rates = (row[f"{tier}token_hit_rate"] for tier in ("", "gpu_", "cpu_"))
        table.add_row(
            str(row["gpu_blocks"]),
            str(row["cpu_blocks"]),
            row["policy"],
            *(f"{rate:.2%}" for rate in rates),
            *(str(row[name]) for name in ("gpu_evicted_blocks", "swapped_out_blocks", "swapped_in_blocks")),
        )
    console.print(table)
    for bound in found["bounds"]:
        rate = bound["clairvoyant_token_hit_rate"]
        console.print(f"No policy hits more than {rate:.2%} with {bound['blocks']} blocks (clairvoyant)")
    console.print(f"A cache that never evicts hits {found['infinite_token_hit_rate']:.2%}")
    num_too_long = max(row["too_long_requests"] for row in found["results"])
    if num_too_long:
        console.print(f"Up to {num_too_long} prompts did not fit into the GPU blocks: they count as misses")

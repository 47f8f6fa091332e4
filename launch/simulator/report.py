"""The simulator's table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from fastdeploy_cache.launch.findings import table_of


def show(console: Console, found: dict[str, Any]) -> None:
    """Print one line for each capacity and policy, and the bounds."""
    console.print(
        f"{found['trace']}: {found['requests']} requests, {tokens_text(found['tokens'])}, "
        f"{found['distinct_blocks']} distinct blocks of {found['block_size']} tokens"
    )
    if found["rows"]:
        console.print(f"A model with rows {', '.join(found['rows'])}; sizes are blocks of the full row")
    if found["skipped_lines"]:
        console.print(f"{found['skipped_lines']} bad line(s) were left out")
    if found["unnamed_tokens"] > 0.1 * found["tokens"]:
        console.print(
            f"Hash ids stand for all but {found['unnamed_tokens'] / found['tokens']:.0%} of the tokens, which count as "
            "misses: is --trace-block-size right?"
        )
    has_storage = any(row["storage_blocks"] for row in found["results"])
    has_speed = "saved_seconds" in found["results"][0]
    _print_table(console, found["results"], has_storage, has_speed)
    console.print("hit: share of prompt tokens; evicted: blocks that left the GPU; to CPU, to GPU: blocks copied")
    if has_storage:
        console.print("stored, fetched: blocks written to storage, and read from it")
    if has_speed:
        console.print("saved: seconds of computing prompts, without those that loading takes")
    small = any(0 < row["cpu_blocks"] <= row["gpu_blocks"] for row in found["results"])
    if small and found["write_policy"] != "write_back":
        console.print("The CPU tier holds copies of what is on the GPU: it adds what it is larger than the GPU")
    for bound in found["bounds"]:
        rate = bound["clairvoyant_token_hit_rate"]
        console.print(f"No policy hits more than {rate:.2%} with {bound['blocks']} blocks in one tier (clairvoyant)")
    whose = "A cache of a uniform model" if found["rows"] else "A cache"
    console.print(f"{whose} that never evicts hits {found['infinite_token_hit_rate']:.2%}")
    num_too_long = max(row["too_long_requests"] for row in found["results"])
    if num_too_long:
        console.print(f"{num_too_long} prompts did not fit into the smallest GPU tier: they count as misses there")


def _print_table(console: Console, rows: Sequence[dict[str, Any]], has_storage: bool, has_speed: bool) -> None:
    tiers = {"gpu": "GPU", "cpu": "CPU"} | ({"storage": "storage"} if has_storage else {})
    counts = {"gpu_evicted_blocks": "evicted", "swapped_out_blocks": "to CPU", "swapped_in_blocks": "to GPU"}
    counts |= {"stored_blocks": "stored", "fetched_blocks": "fetched"} if has_storage else {}
    columns = [f"{name} blocks" for name in tiers.values()]
    columns += ["policy", "hit", *(f"{name} hit" for name in tiers.values()), *counts.values()]
    columns += ["saved"] if has_speed else []
    if has_storage:
        columns = [column.replace(" ", "\n") for column in columns]  # else it is wider than most terminals
    cells = [
        (
            *(row[f"{tier}_blocks"] for tier in tiers),
            row["policy"],
            *(f"{row[f'{tier}token_hit_rate']:.2%}" for tier in ("", *(f"{tier}_" for tier in tiers))),
            *(_count(row[name]) for name in counts),
            *([f"{row['saved_seconds']:.0f} s"] if has_speed else []),
        )
        for row in rows
    ]
    console.print(table_of(columns, cells, words=("policy",), is_narrow=True))


def tokens_text(number: int) -> str:
    """So many tokens, exactly or in thousands or millions."""
    if number < 10_000:
        return f"{number} tokens"
    return f"{number / 1e3:.0f} k tokens" if number < 999_500 else f"{number / 1e6:.1f} M tokens"


def _count(number: int) -> str:
    return str(number) if number < 100_000 else f"{number / 1000:.0f}k"

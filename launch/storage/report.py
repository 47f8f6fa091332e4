"""What is in a store: facts for programs, and tables and lines made of them for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from fastdeploy_cache.launch.findings import table_of
from fastdeploy_cache.transfer_manager.storage.admin import Checked, Space, SpaceSummary

Facts = dict[str, Any]  # None: not known. Sizes are in bytes, times in seconds since the epoch
_UNKNOWN = "?"


def space_facts(space: Space, names: Mapping[str, str]) -> Facts:
    """What a space is for; `names` are the weights' ids that are known by their digests."""
    key_space = space.key_space
    return {
        "weights_id": names.get(space.weights_digest) if space.weights_id is None else space.weights_id,
        "weights_digest": space.weights_digest,
        "where": space.where,
        "rank": key_space and key_space.rank,
        "tp_size": key_space and key_space.tp_size,
        "layout": key_space and key_space.layout,
        "block_size": key_space and key_space.block_size,
        "object_bytes": key_space and key_space.object_bytes,
    }


def summary_facts(summary: SpaceSummary, names: Mapping[str, str]) -> Facts:
    """What is in a space."""
    return {
        **space_facts(summary.space, names),
        "objects": summary.num_objects,
        "pages": summary.num_pages,
        "bytes": summary.num_bytes,
        "allocated_bytes": summary.allocated_bytes,
        "last_written": summary.last_written_seconds,
        "open": summary.is_open,
    }


def checked_facts(checked: Checked, names: Mapping[str, str]) -> Facts:
    """What was found of a space's objects."""
    return {
        **space_facts(checked.space, names),
        "objects": checked.num_objects,
        "damaged": checked.num_damaged,
        "gone": checked.num_gone,
        "listed": checked.is_listed,
        "mended": checked.is_mended,
        "damaged_objects": [
            {"where": each.where, "hash": each.block_hash, "reason": each.reason, "page": each.is_page}
            for each in checked.damage
        ],
    }


def in_order(spaces: Iterable[Facts]) -> list[Facts]:
    """The spaces, ordered by weights and rank."""
    return sorted(spaces, key=lambda row: (weights(row), row["tp_size"] or 0, row["rank"] or 0, row["where"]))


def by_weights(spaces: Iterable[Facts]) -> list[Facts]:
    """Facts of summaries, added up."""
    return [_sum(list(group)) for _, group in groupby(in_order(spaces), key=lambda row: row["weights_digest"])]


def _sum(spaces: Sequence[Facts]) -> Facts:
    ranks = sorted({(row["tp_size"], row["rank"]) for row in spaces if row["rank"] is not None})
    return {
        "weights_id": spaces[0]["weights_id"],
        "weights_digest": spaces[0]["weights_digest"],
        "ranks": [
            {"tp_size": tp_size, "ranks": [rank for _, rank in group]}
            for tp_size, group in groupby(ranks, key=lambda rank: rank[0])
        ],
        "spaces": len(spaces),
        "objects": sum(row["objects"] for row in spaces),
        "pages": sum(row["pages"] for row in spaces),
        "bytes": _total(row["bytes"] for row in spaces),
        "allocated_bytes": _total(row["allocated_bytes"] for row in spaces),
        "open_spaces": _total(row["open"] for row in spaces),
    }


def _total(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def weights(row: Facts) -> str:
    """The weights' id, or its digest where that is all that is known."""
    return f"digest {row['weights_digest']}" if row["weights_id"] is None else shown(row["weights_id"])


def rank(row: Facts) -> str:
    """Which rank of how many; where that is not known, the beginning of the space's digest tells it from others."""
    if row["rank"] is None:
        return f"? ({row['where'].rstrip(':').rpartition(':')[2][:8]})"
    return f"{row['rank']} of {row['tp_size']}"


def title(row: Facts) -> str:
    """A space in one line."""
    return f"{weights(row)}, rank {rank(row)}: {shown(row['where'])}"


def shown(text: str) -> str:
    """The text as it is, or quoted where it would not be seen as it is: a store may hold any names."""
    return text if text.isprintable() and text and text == text.strip() else repr(text)


def size(num_bytes: float | None) -> str:
    """Bytes as people read them."""
    if num_bytes is None:
        return _UNKNOWN
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.{0 if unit == 'bytes' else 1}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def weights_table(rows: Sequence[Facts]) -> Table:
    """A line for each weights."""
    has_pages = any(row["pages"] for row in rows)  # of a hybrid model
    columns = ("weights", "ranks", "spaces", "objects", *(("pages",) * has_pages), "bytes", "on the disk", "open")
    cells = [
        (
            Text(weights(row)),
            ", ".join(f"{len(group['ranks'])} of {group['tp_size']}" for group in row["ranks"]) or _UNKNOWN,
            *(row["spaces"], f"{row['objects']:,}", *((f"{row['pages']:,}",) * has_pages)),
            *(size(row["bytes"]), size(row["allocated_bytes"]), _open(row)),
        )
        for row in rows
    ]
    return table_of(columns, cells, words=("weights", "ranks"))


def _open(row: Facts) -> str:
    num_open: int | None = row["open_spaces"]
    if num_open is None:
        return _UNKNOWN
    return {0: "no", row["spaces"]: "yes"}.get(num_open, f"{num_open} of {row['spaces']}")


def checked_table(rows: Sequence[Facts]) -> Table:
    """A line for each space."""
    counts = ("objects", "damaged", "gone")
    cells = [(Text(weights(row)), rank(row), *(f"{row[name]:,}" for name in counts)) for row in rows]
    return table_of(("weights", "rank", *counts), cells, words=("weights", "rank"))


def damage(row: Facts, num_shown: int, *, was_to_go: bool) -> list[str]:
    """What is wrong with a space, and what has become of that, a line each; of its objects the first ones."""
    objects = row["damaged_objects"]
    lines = [
        f"damaged: {each['where']}: {each['reason']} ({'page' if each['page'] else 'block'} {each['hash']})"
        for each in objects[:num_shown]
    ]
    if len(objects) > num_shown:
        lines.append(f"damaged: {len(objects) - num_shown:,} more; --json FILE has all")
    if not row["listed"]:
        lines.append(f"its journal is damaged or missing, objects are lost: {title(row)}")
    if lines and row["mended"]:
        lines.append(f"removed what is damaged: {title(row)}")
    elif lines and was_to_go:
        lines.append(f"kept, as an engine has it open, which drops what is damaged when it reads it: {title(row)}")
    return lines


def details(row: Facts) -> list[str]:
    """All that is known of a space, a line each."""
    written = row["last_written"]
    facts = {
        "weights": weights(row),
        "rank": None if row["rank"] is None else rank(row),
        "layout": row["layout"] and _readable(shown(row["layout"])),
        "block size": row["block_size"] and f"{row['block_size']} tokens, {size(row['object_bytes'])}",
        "objects": f"{row['objects']:,}",
        "pages": row["pages"] and f"{row['pages']:,} of the objects, which are of checkpoints",
        "bytes": size(row["bytes"]),
        "on the disk": row["allocated_bytes"] and size(row["allocated_bytes"]),
        "last written": written and f"{datetime.fromtimestamp(written, UTC):%Y-%m-%d %H:%M:%S} UTC",
        "open": {True: "an engine has it", False: "no engine has it", None: None}[row["open"]],
    }
    return [shown(row["where"]), *(f"  {name:<14}{fact}" for name, fact in facts.items() if fact not in (None, 0))]


def _readable(layout: str) -> str:
    """A layout's image, which names a place in the shape of each part, for people."""
    return re.sub(r" tokens at (\d+)", r" (axis \1 counts the block's tokens)", layout)

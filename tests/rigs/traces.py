"""Traces of requests, as files."""

from __future__ import annotations

import json
from pathlib import Path


def line(seconds: float, ids: list[int], num_tokens: int | None = None, **more: object) -> str:
    length = len(ids) * 4 if num_tokens is None else num_tokens
    return json.dumps({"timestamp": seconds * 1000, "input_length": length, "hash_ids": ids, **more})


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path

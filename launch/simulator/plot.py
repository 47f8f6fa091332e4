"""Hit rate over capacity as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.errors import LaunchError


def draw(file: Path, found: dict[str, Any]) -> None:
    """One line for each policy (and size of the CPU tier), the clairvoyant bound and the cache that never evicts.

    Raises:
        LaunchError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LaunchError(f"--plot needs matplotlib ({error}); pip install 'fastdeploy-cache[plot]'") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in found["results"]:
        label = row["policy"] + (f", {row['cpu_blocks']} of them CPU" if row["cpu_blocks"] else "")
        lines.setdefault(label, []).append((row["gpu_blocks"] + row["cpu_blocks"], row["token_hit_rate"]))
    bounds = [(bound["blocks"], bound["clairvoyant_token_hit_rate"]) for bound in found["bounds"]]
    for label, points in lines.items():
        _add_line(axes, label, points, marker="o")
    if bounds:
        _add_line(axes, "clairvoyant", bounds, marker="x", color="black", linestyle="--")
    axes.axhline(found["infinite_token_hit_rate"] * 100, color="grey", linestyle=":", label="never evicts")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"blocks of {found['block_size']} tokens")
    axes.set_ylabel("token hit rate, %")
    axes.set_title(found["trace"])
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise LaunchError(f"cannot write {file}: {error}") from error


def _add_line(axes: Any, label: str, points: list[tuple[int, float]], **style: Any) -> None:
    ordered = sorted(points)
    axes.plot([size for size, _ in ordered], [rate * 100 for _, rate in ordered], label=label, **style)

"""Hit rate over capacity as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import LaunchError

PLOT_SUFFIXES = (".png", ".svg")


def check_plot(file: Path) -> None:
    """Raise `LaunchError`, before the work, where no picture could be drawn."""
    if file.suffix not in PLOT_SUFFIXES:
        raise LaunchError(f"cannot draw {file}; end its name in {' or '.join(PLOT_SUFFIXES)}")
    try:
        import matplotlib.figure  # noqa: F401 (whether it is there)
    except ImportError as error:
        raise LaunchError(f"--plot needs matplotlib ({error}); run: pip install 'matplotlib>=3.8'") from error


def draw(file: Path, found: dict[str, Any]) -> None:
    """One line for each policy, over the sizes of the tier that varies; the clairvoyant bound, the infinite cache.

    Raises:
        LaunchError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    by_cpu = len({r["gpu_blocks"] for r in found["results"]}) == 1 < len({r["cpu_blocks"] for r in found["results"]})
    along, fixed = ("cpu_blocks", "gpu_blocks") if by_cpu else ("gpu_blocks", "cpu_blocks")
    several = len({row[fixed] for row in found["results"]}) > 1
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in found["results"]:
        label = f"{row['policy']}, {row[fixed]} CPU blocks" if several else row["policy"]
        lines.setdefault(label, []).append((row[along], row["token_hit_rate"]))
    for label, points in lines.items():
        _add_line(axes, label, points, marker="o")
    rates = {bound["blocks"]: bound["clairvoyant_token_hit_rate"] for bound in found["bounds"]}
    if rates and not several:
        sizes = {(row[along], row["gpu_blocks"] + row["cpu_blocks"]) for row in found["results"]}
        points = [(x, rates[size]) for x, size in sizes]
        _add_line(axes, "clairvoyant", points, marker="x", color="black", linestyle="--")
    axes.axhline(found["infinite_token_hit_rate"] * 100, color="grey", linestyle=":", label="never evicts")
    axes.set_xscale("linear" if by_cpu else "log")
    asked = sorted({row[along] for row in found["results"]})
    axes.set_xticks(asked, [str(size) for size in asked])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    beside = f" beside {found['results'][0]['gpu_blocks']} GPU blocks" if by_cpu else ""
    axes.set_xlabel(f"{'CPU' if by_cpu else 'GPU'} blocks of {found['block_size']} tokens{beside}")
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

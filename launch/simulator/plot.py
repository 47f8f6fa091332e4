"""Hit rate over capacity as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import LaunchError, reason_of

_TIERS = {"gpu_blocks": "GPU", "cpu_blocks": "CPU", "storage_blocks": "storage"}
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
    """One line for each policy, over the sizes of the first tier that varies; where another varies, too, for each of
    its sizes. Beside them the clairvoyant bound and the infinite cache.

    Raises:
        LaunchError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    rows = found["results"]
    varying = [tier for tier in _TIERS if len({row[tier] for row in rows}) > 1] or ["gpu_blocks"]
    along, *others = varying
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        label = ", ".join([row["policy"], *(f"{row[tier]} {_TIERS[tier]} blocks" for tier in others)])
        lines.setdefault(label, []).append((row[along], row["token_hit_rate"]))
    for label, points in lines.items():
        _add_line(axes, label, points, marker="o")
    rates = {bound["blocks"]: bound["clairvoyant_token_hit_rate"] for bound in found["bounds"]}
    if rates and not others:
        sizes = {(row[along], sum(row[tier] for tier in _TIERS)) for row in rows}
        points = [(x, rates[size]) for x, size in sizes if size in rates]
        _add_line(axes, "clairvoyant", points, marker="x", color="black", linestyle="--")
    axes.axhline(found["infinite_token_hit_rate"] * 100, color="grey", linestyle=":", label="never evicts")
    axes.set_xscale("log" if along == "gpu_blocks" else "linear")  # other tiers may have no blocks
    asked = sorted({row[along] for row in rows})
    axes.set_xticks(asked, [str(size) for size in asked])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    fixed = [f"{rows[0][tier]} {name}" for tier, name in _TIERS.items() if tier not in varying and rows[0][tier]]
    beside = f" beside {' and '.join(fixed)} blocks" if fixed else ""
    axes.set_xlabel(f"{_TIERS[along]} blocks of {found['block_size']} tokens{beside}")
    axes.set_ylabel("token hit rate, %")
    axes.set_title(found["trace"])
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise LaunchError(f"cannot write {file}: {reason_of(error)}") from error


def _add_line(axes: Any, label: str, points: list[tuple[int, float]], **style: Any) -> None:
    ordered = sorted(points)
    axes.plot([size for size, _ in ordered], [rate * 100 for _, rate in ordered], label=label, **style)

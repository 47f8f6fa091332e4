"""Section: what ranks reach beside a pinned copy in the same run, and beside the PCIe link."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from fastdeploy_cache.launch.bench.cuda_transfer import cuda_bandwidth, way_speeds
from fastdeploy_cache.launch.bench.gpu_machine import describe_gpus
from fastdeploy_cache.launch.bench.transfer import CASES, Case
from fastdeploy_cache.launch.gpu.notes import GpuOptions, Notes

_GB = 1e9
_TWO_RANKS = ("256 KiB blocks, block first, 32 layers", "8 MiB blocks, layer first, 32 layers: an 8B model")
_WAYS = ("64 KiB blocks, block first, 16 layers", "256 KiB blocks, layer first, 32 layers (4 KiB pieces)")
_QUICK_LAYOUT = "256 KiB blocks, layer first, 2 layers"


class _Size(NamedTuple):
    memory_bytes: int  # of each pool
    repeats: int


def run(notes: Notes, options: GpuOptions) -> None:
    """Ways first, which needs no rank; then each layout with one rank, and two of them with two."""
    size = _Size(8 << 20, 1) if options.is_quick else _Size(256 << 20, 5)
    by_name = {case.name: case for case in CASES}
    gpus = describe_gpus()
    link = min((gpu.pcie_gb_per_second or 0.0 for gpu in gpus), default=0.0)
    ways = [by_name[_QUICK_LAYOUT]] if options.is_quick else [*(by_name[name] for name in _WAYS), CASES[-1]]
    for case in ways:
        notes.check(f"ways of the device, {case.name}", partial(_note_ways, notes, case, size))
    if options.is_quick:
        runs = [(by_name[_QUICK_LAYOUT], 1), (by_name[_QUICK_LAYOUT], 2)]
    else:
        runs = [(case, 1) for case in CASES] + [(by_name[name], 2) for name in _TWO_RANKS]
    for case, num_ranks in runs:
        limit = link * min(num_ranks, len(gpus))
        notes.check(_title(case, num_ranks), partial(_note_ranks, notes, case, num_ranks, size, limit))


def _title(case: Case, num_ranks: int) -> str:
    return f"{case.name}; {num_ranks} rank{'s' * (num_ranks > 1)}"


def _note_ways(notes: Notes, case: Case, size: _Size) -> str:
    texts = []
    for name, (out, into) in way_speeds(case, size.memory_bytes, size.repeats).items():
        figures = {"out_gb_per_second": out / _GB, "in_gb_per_second": into / _GB}
        texts.append(f"{name} {out / _GB:.1f} out, {into / _GB:.1f} in")
        notes.fact(f"way: {case.name}: {name}", figures)
    return "GB/s: " + "; ".join(texts)


def _note_ranks(notes: Notes, case: Case, num_ranks: int, size: _Size, limit: float) -> str:
    found = cuda_bandwidth(case, num_ranks, size.memory_bytes, size.repeats)
    notes.fact(f"ranks: {_title(case, num_ranks)}", found._asdict())
    ways = (
        ("out", found.swap_out, found.joined_out, found.pinned_out),
        ("in", found.swap_in, found.joined_in, found.pinned_in),
    )
    texts = [
        f"{way} {scattered / _GB:.1f} (neighbours {joined / _GB:.1f}), pinned copy {pinned / _GB:.1f}: "
        f"{scattered / pinned:.0%} of it" + (f", {scattered / _GB / limit:.0%} of the link" if limit else "")
        for way, scattered, joined, pinned in ways
    ]
    return f"GB/s: {'; '.join(texts)}; {found.num_blocks} blocks; ranks up after {found.start_seconds:.1f} s"

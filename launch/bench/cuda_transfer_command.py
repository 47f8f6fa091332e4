"""The data-plane benchmark on GPUs as a program: nothing is promised yet, so figures are shown only."""

from __future__ import annotations

from pathlib import Path

from fastdeploy_cache.launch.bench.cuda_transfer import CudaBandwidth, cuda_bandwidth, way_speeds
from fastdeploy_cache.launch.bench.gpu_machine import describe_gpus
from fastdeploy_cache.launch.bench.report import Figure, Report
from fastdeploy_cache.launch.bench.transfer import CASES
from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda

_GB = 1e9
_MAX_RANKS = 2


def bench_cuda_transfer(json_file: Path | None, repeats: int, memory_bytes: int) -> bool:
    """Run everything, print it, write it; True, as no figure has a limit.

    Raises:
        LaunchError: a folder that does not exist.
        DeviceError: there is no GPU, or the bindings are missing.
        RankStartError, NotEnoughMemoryError: the ranks cannot start.
    """
    with Report(json_file, page="docs/gpu.md") as report:
        if getattr(Cuda(0).driver, "IS_SIMULATED", False):
            report.note("The driver is simulated: these speeds say nothing.")
        for gpu in describe_gpus():
            link = gpu.pcie_gb_per_second
            report.note(f"GPU {gpu.index}: {gpu.name}, driver {gpu.driver}, link {link or 'unknown'} GB/s each way")
        ways = {case.name: way_speeds(case, memory_bytes, repeats) for case in CASES}
        lines = {name: _way_figures(speeds) for name, speeds in ways.items()}
        report.table("Ways of the device", lines, about="scattered blocks, in one process", label="layout")
        report.facts["ways"], report.facts["bandwidth"] = ways, []
        for num_ranks in (1, _MAX_RANKS):
            found = {case.name: cuda_bandwidth(case, num_ranks, memory_bytes, repeats) for case in CASES}
            lines = {name: _rank_figures(row) for name, row in found.items()}
            title = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
            report.table(title, lines, about="of all ranks, from submission to answer", label="layout")
            report.facts["bandwidth"] += [
                {"case": name, "ranks": num_ranks, **row._asdict()} for name, row in found.items()
            ]
        return report.end()


def _way_figures(speeds: dict[str, list[float]]) -> list[Figure]:
    batch = _pair("batch", speeds["batch"])
    others = [
        Figure(figure.name, figure.value, figure.unit, base)
        for name in ("kernel", "single copies")
        for figure, base in zip(_pair(name, speeds[name]), batch, strict=True)
    ]
    return [*batch, *others]


def _pair(name: str, speeds: list[float]) -> list[Figure]:
    return [Figure(f"{name} {way}", speed / _GB, "GB/s") for way, speed in zip(("out", "in"), speeds, strict=True)]


def _rank_figures(row: CudaBandwidth) -> list[Figure]:
    pinned_out, pinned_in = _pair("pinned", [row.pinned_out, row.pinned_in])
    return [
        pinned_out,
        Figure("swap out", row.swap_out / _GB, "GB/s", pinned_out),
        Figure("out, neighbours", row.joined_out / _GB, "GB/s", pinned_out),
        pinned_in,
        Figure("swap in", row.swap_in / _GB, "GB/s", pinned_in),
        Figure("in, neighbours", row.joined_in / _GB, "GB/s", pinned_in),
    ]

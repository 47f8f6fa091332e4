"""The benchmark of sending between instances as a program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import LaunchError, NotEnoughMemoryError
from fastdeploy_cache.ipc.memory_limit import available_memory_bytes
from fastdeploy_cache.launch.bench.peer import Overlap, link_rows, overlap, smallest_receive_seconds, state_seconds
from fastdeploy_cache.launch.bench.peer_memory import LinkMissingError
from fastdeploy_cache.launch.bench.report import Figure, Report, at_least, at_most, size
from fastdeploy_cache.transfer_manager.peer import KINDS

_GB, _MIB = 1e9, 2**20
_FLOORS = {"shm": "plain copy", "nixl": "NIXL alone", "mooncake": "Mooncake alone"}
_PROMISED = {"shm": (256 * 2**10, 0.8), "nixl": (_MIB, 0.85), "mooncake": (_MIB, 0.85)}
_MEMORY_TIMES = 8  # segments of both processes of a link, a copy, and the pools of both instances
_MOST_STATE_MS = 10.0  # shm: from a prompt's last commit until its state is at the other instance
_NO_GPU = "GPU memory is not measured: the KV arrays of this benchmark are in host memory"


def bench_peer(json_file: Path | None, repeats: int, memory_bytes: int, kinds: Sequence[str]) -> bool:
    """Run everything over these links, print it, write it; whether every promise was kept.

    Raises:
        LaunchError: no such link, a folder that does not exist, or a process that fails.
        NotEnoughMemoryError: about eight times `memory_bytes` are not there.
    """
    if unknown := set(kinds) - set(KINDS):
        raise LaunchError(f"--link {unknown.pop()}; use {', '.join(KINDS)}")
    _check_memory(memory_bytes)
    with Report(json_file) as report:
        report.note(_NO_GPU)
        links: dict[str, Any] = {}
        missing = {"gpu": _NO_GPU}
        report.facts |= {"links": links, "not_measured": missing}
        for kind in kinds:
            try:
                links[kind] = {"rows": _run_link(report, kind, memory_bytes, repeats)}
            except LinkMissingError as error:
                missing[kind] = str(error)
                report.note(f"{kind} is not measured: {error}")
        overlaps = {kind: overlap(kind, memory_bytes, repeats) for kind in links}
        for kind, row in overlaps.items():
            described = row._asdict() | {"num_layers_behind": row.num_layers_behind}
            links[kind] |= {"overlap": described, "smallest_receive_seconds": smallest_receive_seconds(kind, repeats)}
        if links:
            _show_overlaps(report, overlaps, {kind: link["smallest_receive_seconds"] for kind, link in links.items()})
            _run_states(report, links, repeats)
        return report.end()


def _check_memory(memory_bytes: int) -> None:
    """Check this before anything is started: a process that the system ends for want of memory says nothing."""
    needed, available = _MEMORY_TIMES * memory_bytes, available_memory_bytes()
    if needed > available:
        raise NotEnoughMemoryError(
            f"--memory {size(memory_bytes)} needs {_MEMORY_TIMES} times as much, {needed} bytes, but {available} bytes "
            f"are available; use {available // (_MEMORY_TIMES * _MIB)}MiB or less"
        )


def _run_link(report: Report, kind: str, memory_bytes: int, repeats: int) -> list[dict[str, float]]:
    rows, lines = link_rows(kind, memory_bytes, repeats), {}
    promised_bytes, limit = _PROMISED[kind]
    for row in rows:
        floor = Figure(_FLOORS[kind], row.floor / _GB, "GB/s")
        of_floor = of_each = None
        if row.piece_bytes == promised_bytes:
            name = f"{kind}, pieces of {size(row.piece_bytes)}: of"
            of_floor, of_each = at_least(f"{name} {floor.name}", limit), at_least(f"{name} each plainly", limit)
        lines[size(row.piece_bytes)] = [
            Figure("pieces", row.num_pieces),
            floor,
            Figure("link", row.link / _GB, "GB/s", floor, of_floor),
            Figure("receive", row.receive / _GB, "GB/s", floor),
        ]
        if row.each is not None:
            lines[size(row.piece_bytes)] += [
                Figure("each plainly", row.each / _GB, "GB/s"),
                Figure("link of each plainly", row.link / row.each, promise=of_each),
            ]
    report.table(f"{kind}, a link and a whole receive", lines, label="pieces of")
    names = ("floor", "link", "receive", "each")
    fields = {name: f"{name}_bytes_per_second" for name in names}
    return [{fields.get(n, n): value for n, value in row._asdict().items() if value is not None} for row in rows]


def _show_overlaps(report: Report, overlaps: dict[str, Overlap], smallest: dict[str, float]) -> None:
    lines = {}
    for kind, row in overlaps.items():
        whole = Figure("whole", row.whole * 1e3, "ms")
        # without it, a sender that begins with the last layer would be as late in both, and in time
        promise = at_most(f"{kind}: last layer alone / whole", 0.5)
        alone = Figure("last layer alone", row.alone * 1e3, "ms", whole, promise)
        promise = at_most(f"{kind}: visible after the last layer / last layer alone", 1.2)
        lines[kind] = [
            Figure("a layer is computed in", row.layer_seconds * 1e3, "ms"),
            Figure("last layer to visible", row.visible * 1e3, "ms", alone, promise),
            alone,
            Figure("layers behind", row.num_layers_behind),
            whole,
            Figure("32 KiB", smallest[kind] * 1e3, "ms"),
        ]
    sizes = next(iter(overlaps.values()))
    about = f"{sizes.num_layers} layers of {sizes.layer_bytes / _MIB:.1f} MiB"
    report.table("A prompt that is sent while it is computed", lines, about=about, label="link")


def _run_states(report: Report, links: dict[str, Any], repeats: int) -> None:
    lines = {}
    for kind, link in links.items():
        num_bytes, seconds = state_seconds(kind, repeats)
        link["state"] = {"num_bytes": num_bytes, "after_commit_seconds": seconds}
        promise = at_most("shm: the state is there, ms after the last commit", _MOST_STATE_MS)
        lines[kind] = [
            Figure("state", num_bytes / _MIB, "MiB"),
            Figure("there after the last commit", seconds * 1e3, "ms", None, promise if kind == "shm" else None),
        ]
    report.table("The state of a hybrid model (Qwen3-Next-80B in shape)", lines, label="link")

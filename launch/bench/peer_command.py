"""The benchmark of sending between instances as a program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fastdeploy_cache.errors import LaunchError, NotEnoughMemoryError
from fastdeploy_cache.ipc.memory_limit import available_memory_bytes
from fastdeploy_cache.launch.bench.machine import describe_machine
from fastdeploy_cache.launch.bench.peer import Overlap, Row, link_rows, overlap, smallest_receive_seconds
from fastdeploy_cache.launch.bench.peer_memory import LinkMissingError
from fastdeploy_cache.launch.bench.reach import Reach, add_at_least, add_at_most, show_reach, table_of
from fastdeploy_cache.launch.findings import check_target, console_beside, write_json
from fastdeploy_cache.transfer_manager.peer import KINDS

_GB, _MIB = 1e9, 2**20
_FLOORS = {"shm": "plain copy", "nixl": "NIXL alone", "mooncake": "Mooncake alone"}
_PROMISED = {"shm": (256 * 2**10, 0.8), "nixl": (_MIB, 0.85), "mooncake": (_MIB, 0.85)}
_MEMORY_TIMES = 8  # segments of both processes of a link, a copy, and the pools of both instances
_NO_GPU = "GPU memory is not measured: the KV arrays of this benchmark are in host memory"


def bench_peer(json_file: Path | None, repeats: int, memory_mib: int, kinds: Sequence[str]) -> bool:
    """Run everything over these links, print it, write it; whether every figure was reached.

    Raises:
        LaunchError: no such link, a folder that does not exist, or a process that fails.
        NotEnoughMemoryError: about eight times `memory_mib` are not there.
    """
    check_target(json_file)
    if unknown := set(kinds) - set(KINDS):
        raise LaunchError(f"--link {unknown.pop()}; use {', '.join(KINDS)}")
    _check_memory(memory_mib)
    console = console_beside(json_file, 110)
    reach: Reach = []
    links: dict[str, Any] = {}
    missing = {"gpu": _NO_GPU}
    found: dict[str, Any] = {"machine": describe_machine(), "links": links, "not_measured": missing, "reach": reach}
    console.print(found["machine"]["text"])
    console.print(_NO_GPU)
    for kind in kinds:
        try:
            links[kind] = {"rows": _run_link(console, kind, memory_mib * _MIB, repeats, reach)}
        except LinkMissingError as error:
            missing[kind] = str(error)
            console.print(f"{kind} is not measured: {error}")
    overlaps = {kind: overlap(kind, memory_mib * _MIB, repeats) for kind in links}
    smallest = {kind: smallest_receive_seconds(kind, repeats) for kind in links}
    _show_overlaps(console, overlaps, smallest, reach)
    for kind, link in links.items():
        row = overlaps[kind]
        described = row._asdict() | {"num_layers_behind": row.num_layers_behind}
        link |= {"overlap": described, "smallest_receive_seconds": smallest[kind]}
    show_reach(console, reach)
    console.print("docs/benchmark.md says what each figure is.")
    write_json(json_file, found)
    return all(entry["ok"] for entry in reach)


def _check_memory(memory_mib: int) -> None:
    """Before anything is started: a process that the system ends for want of memory says nothing."""
    needed, available = _MEMORY_TIMES * memory_mib * _MIB, available_memory_bytes()
    if needed > available:
        raise NotEnoughMemoryError(
            f"--memory-mib {memory_mib} needs {_MEMORY_TIMES} times as much, {needed} bytes, but {available} bytes are "
            f"available; use {available // (_MEMORY_TIMES * _MIB)} or less"
        )


def _run_link(console: Console, kind: str, memory_bytes: int, repeats: int, reach: Reach) -> list[dict[str, float]]:
    floor = _FLOORS[kind]
    also = ("each plainly",) if kind == "shm" else ()
    columns = ("pieces of", "pieces", floor, "link", "of it", "receive", "of it", *also)
    table = table_of(f"{kind}: GB/s of a link, and of a whole receive", columns)
    rows = link_rows(kind, memory_bytes, repeats)
    promised_bytes, limit = _PROMISED[kind]
    for row in rows:
        table.add_row(*_cells(row))
        if row.piece_bytes == promised_bytes:
            name = f"{kind}, pieces of {_size(row.piece_bytes)}: of"
            add_at_least(reach, f"{name} {floor}", row.link / row.floor, limit)
            if row.each is not None:
                add_at_least(reach, f"{name} each plainly", row.link / row.each, limit)
    console.print(table)
    names = ("floor", "link", "receive", "each")
    fields = {name: f"{name}_bytes_per_second" for name in names}
    return [{fields.get(n, n): value for n, value in row._asdict().items() if value is not None} for row in rows]


def _cells(row: Row) -> list[str]:
    shares = [cell for speed in (row.link, row.receive) for cell in (f"{speed / _GB:.2f}", f"{speed / row.floor:.2f}")]
    each = [f"{row.each / _GB:.2f}"] if row.each is not None else []
    return [_size(row.piece_bytes), str(row.num_pieces), f"{row.floor / _GB:.2f}", *shares, *each]


def _size(num_bytes: int) -> str:
    return f"{num_bytes // _MIB} MiB" if num_bytes >= _MIB else f"{num_bytes // 2**10} KiB"


def _show_overlaps(console: Console, overlaps: dict[str, Overlap], smallest: dict[str, float], reach: Reach) -> None:
    sizes = next(iter(overlaps.values()))
    title = (
        f"A prompt of {sizes.num_layers} layers of {sizes.layer_bytes / _MIB:.1f} MiB, sent while it is computed; ms"
    )
    table = table_of(
        title,
        (
            "link",
            "a layer is computed in",
            "last layer to visible",
            "last layer alone",
            "of it",
            "layers behind",
            "whole",
            "32 KiB",
        ),
    )
    for kind, row in overlaps.items():
        ratio = row.visible / row.alone
        times = (row.layer_seconds, row.visible, row.alone, row.whole, smallest[kind])
        layer, visible, alone, whole, least = (f"{seconds * 1e3:.1f}" for seconds in times)
        shares = f"{ratio:.2f}", f"{row.num_layers_behind:.1f}"
        table.add_row(kind, layer, visible, alone, *shares, whole, least)
        add_at_most(reach, f"{kind}: visible after the last layer / last layer alone", ratio, 1.2)
        # without it, a sender that begins with the last layer would be as late in both, and in time
        add_at_most(reach, f"{kind}: last layer alone / whole", row.alone / row.whole, 0.5)
    console.print(table)

"""How much memory this process may still take: the machine's MemAvailable and every enclosing cgroup's limit."""

from __future__ import annotations

from pathlib import Path

from fastdeploy_cache.errors import NotEnoughMemoryError

_V2 = ("sys/fs/cgroup", "", ("memory.max", "memory.current", "inactive_file"))
_V1_NAMES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V1 = ("sys/fs/cgroup/memory", "memory", _V1_NAMES)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be taken before the machine or a cgroup (v2 or v1) runs out.

    Page cache that a cgroup can drop counts as available. `root` is where /proc and /sys are found.

    Source: kernel documentation, admin-guide/cgroup-v2 and filesystems/proc (MemAvailable).
    """
    return min([_mem_available(root), *_cgroup_limits(root, *_V2), *_cgroup_limits(root, *_V1)])


def check_available(num_bytes: int, what: str, available_bytes: int | None = None) -> None:
    """Raise `NotEnoughMemoryError` naming both numbers when `num_bytes` is more than is available."""
    available = available_memory_bytes() if available_bytes is None else available_bytes
    if num_bytes > available:
        needed, there = (f"{number} bytes ({number / 2**30:.2f} GiB)" for number in (num_bytes, available))
        raise NotEnoughMemoryError(f"{what} needs {needed} but {there} are available; use fewer or smaller blocks")


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise NotEnoughMemoryError("/proc/meminfo has no MemAvailable line; Linux 3.14 or newer is needed")


def _cgroup_limits(root: Path, mount: str, controller: str, names: tuple[str, str, str]) -> list[int]:
    """What each enclosing cgroup still allows. `names`: of limit, usage, and page cache that it can drop."""
    limits = []
    for directory in _cgroup_directories(root, root / mount, controller):
        limit, usage = (_read_int(directory / name) for name in names[:2])
        if limit is not None and usage is not None:
            limits.append(max(0, limit - usage + _stat(directory / "memory.stat", names[2])))
    return limits


def _cgroup_directories(root: Path, mount: Path, controller: str) -> list[Path]:
    """The directories from this process's cgroup up to the mount point (in a container that is all one sees)."""
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            inner = mount / path.lstrip("/")
            return [d for d in (inner, *inner.parents) if d.is_relative_to(mount) and d.is_dir()]
    return []


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or the word "max"
        return None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)

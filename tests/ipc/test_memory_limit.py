"""What may still be taken: the machine's MemAvailable and every cgroup between this process and the mount."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy_cache.errors import NotEnoughMemoryError
from fastdeploy_cache.ipc.memory_limit import available_memory_bytes, check_available

GIB = 2**30
V2 = "0::/system.slice/engine.service\n"
V1 = "12:cpu,cpuacct:/elsewhere\n5:memory:/jobs/42\n1:name=systemd:/jobs/42\n"


def write(root: Path, path: str, text: object) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 64 GiB available and no cgroups."""
    write(tmp_path, "proc/meminfo", f"MemTotal: 999 kB\nMemFree: 1 kB\nMemAvailable:   {64 * 2**20} kB")
    return tmp_path


def v2(root: Path, directory: str, limit: object, current: int, inactive_file: int = 0) -> None:
    base = f"sys/fs/cgroup/{directory}"
    write(root, f"{base}/memory.max", limit)
    write(root, f"{base}/memory.current", current)
    write(root, f"{base}/memory.stat", f"anon 5\nfile 7\ninactive_file {inactive_file}\nactive_file 3")


def v1(root: Path, directory: str, limit: int, usage: int, inactive_file: int = 0) -> None:
    base = f"sys/fs/cgroup/memory/{directory}"
    write(root, f"{base}/memory.limit_in_bytes", limit)
    write(root, f"{base}/memory.usage_in_bytes", usage)
    write(root, f"{base}/memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive_file}")


def test_without_cgroups_the_machine_decides(root: Path) -> None:
    """MemAvailable counts, not MemTotal and not MemFree."""
    assert available_memory_bytes(root) == 64 * GIB


def test_a_machine_without_memavailable_is_an_error(root: Path) -> None:
    """An unreadable limit is no licence to take everything."""
    write(root, "proc/meminfo", "MemTotal: 999 kB")
    with pytest.raises(NotEnoughMemoryError, match="MemAvailable"):
        available_memory_bytes(root)


def test_v2_own_limit_less_usage(root: Path) -> None:
    """The process's own cgroup leaves its limit less what is used, page cache that can go not counted as used."""
    write(root, "proc/self/cgroup", V2.strip())
    v2(root, "system.slice/engine.service", 8 * GIB, 3 * GIB, inactive_file=1 * GIB)
    assert available_memory_bytes(root) == 6 * GIB


def test_v2_the_tightest_enclosing_cgroup_decides(root: Path) -> None:
    """A parent's limit binds its children, whose own may be wider or `max`."""
    write(root, "proc/self/cgroup", V2.strip())
    v2(root, "system.slice/engine.service", "max", 1 * GIB)
    v2(root, "system.slice", 4 * GIB, 2 * GIB)
    assert available_memory_bytes(root) == 2 * GIB
    v2(root, "system.slice/engine.service", 3 * GIB, 2 * GIB)
    assert available_memory_bytes(root) == 1 * GIB


def test_v2_sibling_cgroups_do_not_count(root: Path) -> None:
    """Only the way from the process up to the mount is looked at."""
    write(root, "proc/self/cgroup", V2.strip())
    v2(root, "system.slice/other.service", 1, 0)
    v2(root, "user.slice", 1, 0)
    assert available_memory_bytes(root) == 64 * GIB


def test_v2_inside_a_container_the_mount_itself_is_the_cgroup(root: Path) -> None:
    """Where the path of /proc/self/cgroup is not visible below the mount, the mount's own limit is found."""
    write(root, "proc/self/cgroup", "0::/docker/0123abcd")
    v2(root, "", 2 * GIB, 1 * GIB)
    assert available_memory_bytes(root) == 1 * GIB


def test_v2_over_its_limit_is_zero_not_negative(root: Path) -> None:
    """A cgroup above its limit (it may be lowered at any time) has nothing left, never less."""
    write(root, "proc/self/cgroup", V2.strip())
    v2(root, "system.slice/engine.service", 1 * GIB, 2 * GIB)
    assert available_memory_bytes(root) == 0


def test_v2_all_unlimited(root: Path) -> None:
    """`max` everywhere leaves the machine's number."""
    write(root, "proc/self/cgroup", V2.strip())
    v2(root, "system.slice/engine.service", "max", 1 * GIB)
    v2(root, "system.slice", "max", 1 * GIB)
    assert available_memory_bytes(root) == 64 * GIB


def test_v1_hierarchical_cache_counts_as_available(root: Path) -> None:
    """The memory controller's own path is used, and its total_inactive_file is what can go."""
    write(root, "proc/self/cgroup", V1.strip())
    v1(root, "jobs/42", 8 * GIB, 6 * GIB, inactive_file=2 * GIB)
    v1(root, "elsewhere", 1, 0)
    assert available_memory_bytes(root) == 4 * GIB


def test_v1_enclosing_limit_binds(root: Path) -> None:
    """A parent of the v1 cgroup binds as in v2."""
    write(root, "proc/self/cgroup", V1.strip())
    v1(root, "jobs/42", 9223372036854771712, 1 * GIB)
    v1(root, "jobs", 5 * GIB, 2 * GIB)
    assert available_memory_bytes(root) == 3 * GIB


def test_check_names_both_numbers() -> None:
    """The refusal says what is wanted and what there is, in bytes and GiB."""
    with pytest.raises(NotEnoughMemoryError) as refusal:
        check_available(3 * GIB, "the pool", available_bytes=2 * GIB)
    for part in ("the pool", str(3 * GIB), str(2 * GIB), "3.00 GiB", "2.00 GiB"):
        assert part in str(refusal.value)
    check_available(2 * GIB, "the pool", available_bytes=2 * GIB)

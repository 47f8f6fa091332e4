"""Disks in trouble below a running engine: full, read-only, gone, lying. It goes on without, and with them again."""

from __future__ import annotations

import dataclasses
import errno
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastdeploy_cache import PrefixCacheManager, Request
from tests.rigs.storage_engine import drained, file_storage, storage_config
from tests.rigs.storage_trouble import Eventually, InTrouble, breaker, metric, prompt, spoiled, stored

pytestmark = pytest.mark.processes

WRITING = ("open", "write", "allocate", "sync", "rename")


def mount(*arguments: str | Path) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine lets us mount nothing: {done.stderr.strip()}")


@pytest.fixture
def new_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes disks of 256 KiB, in memory."""
    made: list[Path] = []

    def new(name: str, options: str = "rw") -> Path:
        path = tmp_path / name
        path.mkdir()
        mount("-t", "tmpfs", "-o", f"size=256k,{options}", "tmpfs", path)
        made.append(path)
        return path

    yield new
    for path in reversed(made):
        while path.is_mount():
            subprocess.run(["umount", "-l", path], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the room that there is."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    return filler


def test_a_full_disk(new_disk: Callable[[str], Path], eventually: Eventually) -> None:
    """Writes cease, and breaker and gauge tell; what is stored is found; with room again, the store takes new
    blocks."""
    disk = new_disk("disk")
    storage = dataclasses.replace(file_storage(disk / "store"), slab_bytes=2**14, breaker_seconds=0.05)
    config = storage_config(1, storage)
    stored(config, *range(13))  # whose journal is a page, almost
    with PrefixCacheManager(config) as cache:
        drained(cache)
        trouble, filler = InTrouble(cache, eventually), fill(disk)
        trouble.serve_until(lambda: breaker(cache, "write"))
        assert metric(cache, "task_failures_total", kind="write", rank="0") >= 3
        assert trouble.finds(prompt(12))
        trouble.goes_on()
        assert metric(cache, "storage_blocks_total", fate="skipped") > 0
        trouble.serve_until(lambda: metric(cache, "storage_disk_full") == 1)
        filler.unlink()
        trouble.comes_back()
        trouble.serve_until(lambda: metric(cache, "storage_disk_full") == 0)


@pytest.mark.parametrize(("error", "tp_size"), [(errno.EROFS, 1), (errno.EIO, 1), (errno.EROFS, 2)])
def test_a_disk_that_cannot_be_written_any_more(
    tmp_path: Path, error: int, tp_size: int, eventually: Eventually
) -> None:
    """Remounted read-only under the running store, or broken: what it had is found, until it takes more again."""
    storage, orders = spoiled(tmp_path)
    config = storage_config(tp_size, storage)
    stored(config, 1)
    with PrefixCacheManager(config) as cache:
        drained(cache)
        trouble = InTrouble(cache, eventually)
        orders.give(errors=dict.fromkeys(WRITING, error))
        trouble.serve_until(lambda: breaker(cache, "write"))
        assert trouble.finds(prompt(1))
        trouble.goes_on()
        orders.give()
        trouble.comes_back()


def test_a_folder_that_is_removed(tmp_path: Path, eventually: Eventually) -> None:
    """Its process says so, ends, and begins a new folder; nobody else is stopped."""
    folder = tmp_path / "store"
    config = storage_config(1, dataclasses.replace(file_storage(folder), breaker_seconds=0.05))
    with PrefixCacheManager(config) as cache:
        trouble = InTrouble(cache, eventually)
        tokens = trouble.serve()
        drained(cache)
        shutil.rmtree(folder)
        tier = cache.storage._tier
        assert tier is not None
        trouble.serve_until(lambda: tier.link.client.statuses()[0].num_restarts)
        assert metric(cache, "task_failures_total", kind="write", rank="0")
        assert all(status.num_restarts == 0 for status in cache.stats().ranks)
        eventually(lambda: tier.link.client.available)
        trouble.comes_back()
        assert not trouble.finds(tokens)


def test_a_disk_that_is_gone_for_a_while(new_disk: Callable[..., Path], eventually: Eventually) -> None:
    """Below its mount point nothing can be written: the engine goes on, and finds all there was once it is mounted."""
    disk, point = new_disk("disk"), new_disk("point", "ro")
    mount("--bind", disk, point)
    config = storage_config(1, dataclasses.replace(file_storage(point / "store"), slab_bytes=2**14))
    stored(config, 1)
    with PrefixCacheManager(config) as cache:
        drained(cache)
        tier, trouble = cache.storage._tier, InTrouble(cache, eventually)
        assert tier is not None
        subprocess.run(["umount", "-l", point], check=True)
        trouble.serve_until(lambda: tier.link.client.statuses()[0].num_restarts >= 2)  # one was for nothing
        trouble.goes_on()
        assert not tier.link.client.available
        request = Request(request_id="queued", prompt_token_ids=prompt(1))
        assert cache.prefetch(request).ready and cache.match(request).ready
        cache.release(request)
        mount("--bind", disk, point)
        eventually(lambda: tier.link.client.available)
        eventually(lambda: trouble.finds(prompt(1)))
        trouble.comes_back()

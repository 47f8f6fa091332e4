"""A cache in a process of its own that runs out of descriptors; says what it saw as JSON on standard output."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastdeploy_cache import (
    CacheConfig,
    KVLayout,
    PeerConfig,
    PrefixCacheManager,
    Request,
    StorageConfig,
    TransferConfig,
)
from fastdeploy_cache.errors import RankStartError
from fastdeploy_cache.insight.doctor.process_troubles import troubles_of
from fastdeploy_cache.metrics.page_samples import samples_of
from fastdeploy_cache.transfer_manager.process.child import ChildProcess
from fastdeploy_cache.transfer_manager.rank.owner import RankOwner
from tests.rigs.leaks import child_pids

LIMIT = 150
SECONDS = 30.0


class Greedy:
    """Takes each descriptor that becomes free, as whoever holds connections to this process does."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._take, daemon=True)
        self.fill()
        self._thread.start()

    def fill(self) -> None:
        try:
            while True:
                self._held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass

    def _take(self) -> None:
        while not self._over.wait(0.0005):
            self.fill()

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        for fd in self._held:
            os.close(fd)


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


def new_config(folder: str, **transfer: Any) -> CacheConfig:
    return CacheConfig(
        block_size=4,
        num_gpu_blocks=16,
        num_cpu_blocks=16,
        role="prefill",
        layout=KVLayout(num_layers=1, num_kv_heads=2, head_dim=4),
        storage=StorageConfig(folder=f"{folder}/store", weights_id="w", capacity_bytes=2**22),
        peer=PeerConfig(weights_id="w"),
        transfer=TransferConfig(**transfer),
    )


def later(folder: str) -> dict[str, Any]:
    """Every child is killed while there are no descriptors; then there are some again."""
    with PrefixCacheManager(new_config(folder, max_restarts=1)) as cache:
        assert cache.peers.wait_ready(SECONDS)
        url = cache.serve_metrics()
        before, statuses = cache._seen.processes(), cache._seen.processes
        assert cache.examine() == []  # and what it imports is there
        greedy = Greedy()
        for (status,) in before.values():
            assert status.pid is not None
            os.kill(status.pid, signal.SIGKILL)
        eventually(lambda: {each.state for (each,) in statuses().values()} == {"short"})
        time.sleep(2.0)  # several tries, more than deaths are allowed
        page = cache._seen.picture("running").processes
        found = {
            "states": {kind: str(each.state) for kind, (each,) in statuses().items()},
            "troubles": [str(trouble) for trouble in troubles_of(statuses())],
            "findings": [str(finding) for finding in cache.examine()],
            "numbers": page,
        }
        request = Request(request_id="a", prompt_token_ids=list(range(20)))
        cache.match(request)
        found["blocks"] = len(cache.allocate(request, 5))
        cache.release(request)
        greedy.end()
        eventually(lambda: all(each.up for (each,) in statuses().values()))
        text = _page(url)
        found |= {
            "restarts": {kind: each.num_restarts for kind, (each,) in statuses().items()},
            "findings_after": [str(finding) for finding in cache.examine()],
            "metrics_after": [s.value for s in samples_of(text) if s.name == "fastdeploy_cache_process_state"],
        }
        cache.check_invariants()
        return found


def _page(url: str) -> str:
    from urllib.request import urlopen

    with urlopen(url, timeout=SECONDS) as answer:
        text: str = answer.read().decode()
    return text


def first(folder: str, *, ends: bool) -> dict[str, Any]:
    """The first spawn meets a shortage, that ends after a while, or never."""
    spawn, held = RankOwner.spawn, list[Greedy]()

    def spawn_short(owner: RankOwner, rank: int, incarnation: int, queue_fds: tuple[int, ...]) -> ChildProcess:
        if not held:
            held.append(Greedy())
            if ends:
                threading.Timer(1.0, held[0].end).start()
        return spawn(owner, rank, incarnation, queue_fds)

    RankOwner.spawn = spawn_short  # type: ignore[method-assign]
    started = time.monotonic()
    try:
        with PrefixCacheManager(new_config(folder, start_timeout_seconds=SECONDS if ends else 1.0)) as cache:
            (status,) = cache.ranks.statuses()
            return {"restarts": status.num_restarts, "up": status.up}
    except RankStartError as error:
        held[0].end()
        return {"error": str(error), "seconds": time.monotonic() - started}


def starting(folder: str, num_files: int) -> dict[str, Any]:
    """Every child is killed, and those in their place have no descriptors to start with, until they have some again."""
    wrapper, is_short = Path(folder, "python"), Path(folder, "short")
    wrapper.write_text(f'#!/bin/sh\n[ -e {is_short} ] && ulimit -n {num_files}\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o700)
    sys.executable = str(wrapper)
    with PrefixCacheManager(new_config(folder, max_restarts=1)) as cache:
        assert cache.peers.wait_ready(SECONDS)
        before, statuses = cache._seen.processes(), cache._seen.processes
        is_short.touch()
        for (status,) in before.values():
            assert status.pid is not None
            os.kill(status.pid, signal.SIGKILL)
        num_seen = dict.fromkeys(before, 0)
        while min(num_seen.values()) < 3:  # more than deaths are allowed
            for kind in num_seen:
                eventually(lambda kind=kind: statuses()[kind][0].state == "short")  # type: ignore[misc]
                eventually(lambda kind=kind: statuses()[kind][0].state != "short")  # type: ignore[misc]
                num_seen[kind] += 1
        eventually(lambda: {each.state for (each,) in statuses().values()} == {"short"})
        found: dict[str, Any] = {"reasons": {kind: each.shortage for kind, (each,) in statuses().items()}}
        is_short.unlink()
        eventually(lambda: all(each.up for (each,) in statuses().values()))
        found["restarts"] = {kind: each.num_restarts for kind, (each,) in statuses().items()}
        cache.check_invariants()
        return found


def off() -> dict[str, Any]:
    """A rank dies of what is mended later: it is off, and comes back when asked."""
    config = CacheConfig(
        block_size=4,
        num_gpu_blocks=16,
        num_cpu_blocks=16,
        layout=KVLayout(num_layers=1, num_kv_heads=2, head_dim=4),
        transfer=TransferConfig(max_restarts=1, restart_backoff_seconds=0.01, off_retry_seconds=3600.0),
    )
    with PrefixCacheManager(config) as cache:
        executable, sys.executable = sys.executable, "/bin/false"
        (status,) = cache.ranks.statuses()
        assert status.pid is not None
        os.kill(status.pid, signal.SIGKILL)
        eventually(lambda: cache.ranks.statuses()[0].state == "off")
        found: dict[str, Any] = {
            "findings": [str(finding) for finding in cache.examine()],
            "troubles": cache.control.status()["troubles"],
        }
        sys.executable = executable
        found["restarted"] = [cache.ranks.restart(0)]
        found["up"] = cache.ranks.wait_ready(SECONDS)
        found["restarted"].append(cache.ranks.restart())
        found["findings_after"] = [str(finding) for finding in cache.examine()]
    return found


def limits() -> dict[str, Any]:
    """How many files this process may open, and its children; the soft one of this is below the hard one."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, 2 * LIMIT))
    with tempfile.TemporaryDirectory() as folder, PrefixCacheManager(new_config(folder)) as cache:
        assert cache.peers.wait_ready(SECONDS)
        cache._seen.start_what_if()
        children = child_pids()

        def of_children() -> list[tuple[int, int]]:
            return [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in children]

        eventually(lambda: set(of_children()) == {(2 * LIMIT, 2 * LIMIT)})
        return {"num_children": len(children), "own": resource.getrlimit(resource.RLIMIT_NOFILE)}


def main() -> None:
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
    mode = sys.argv[1]
    if mode != "limits":
        resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    if mode == "limits":
        found = limits()
    elif mode == "off":
        found = off()
    else:
        with tempfile.TemporaryDirectory() as folder:
            if mode == "starting":
                found = starting(folder, int(sys.argv[2]))
            elif mode == "later":
                found = later(folder)
            else:
                found = first(folder, ends=mode == "first-late")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

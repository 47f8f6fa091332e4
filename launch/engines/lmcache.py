"""LMCache beside this cache: its server in a process of its own, which on a CPU its connector needs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.engines.stages import tail

_READY = b"cache server is running"
_START_SECONDS, _STOP_SECONDS = 120.0, 20.0


@dataclass(frozen=True)
class LMCacheServer:
    """A server that runs: what vLLM's connector is told, and what the engine's process finds LMCache by."""

    pid: int
    port: int
    environment: dict[str, str]

    @property
    def connector_options(self) -> dict[str, object]:
        """`kv_connector_extra_config` of `LMCacheMPConnector`."""
        return {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": self.port}


@contextmanager
def lmcache_server(folder: Path, log: Path, *, chunk_tokens: int) -> Iterator[LMCacheServer]:
    """Start LMCache, installed in `folder` (`pip install --target`), with 2 GB; stop it at the end.

    Raises:
        LaunchError: it is not there, or has not come up in time.
    """
    if not (folder / "lmcache").is_dir():
        raise LaunchError(f"LMCache is not installed in {folder}; give the folder of `pip install --target`")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, "LMCACHE_TRACK_USAGE": "false"}
    port = _free_port()
    options = {"--port": port, "--chunk-size": chunk_tokens, "--l1-size-gb": 2, "--eviction-policy": "LRU"}
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", *words]
    command += ["--supported-transfer-mode", "auto", "--disable-observability"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **environment}
    )
    is_up = threading.Event()
    drain = threading.Thread(target=_drain, args=(process, log, is_up), name="lmcache-log")
    drain.start()
    try:
        if not is_up.wait(_START_SECONDS) or process.poll() is not None:
            raise LaunchError(f"LMCache has not come up in {_START_SECONDS:.0f} s:\n{tail(log)}")
        yield LMCacheServer(process.pid, port, environment)
    finally:
        _stop(process)
        drain.join()


def _drain(process: subprocess.Popen[bytes], log: Path, is_up: threading.Event) -> None:
    """Keep its pipe empty, and say when it runs, or has ended."""
    assert process.stdout is not None
    with log.open("wb") as out:
        for line in process.stdout:
            out.write(line)
            out.flush()
            if _READY in line:
                is_up.set()
    is_up.set()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

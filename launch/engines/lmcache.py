"""LMCache beside this cache: its server in a process of its own, which on a CPU its connector needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.engines.servers import free_port, running, words_of
from fastdeploy_cache.launch.engines.stages import python_path

_READY = b"cache server is running"


@contextmanager
def lmcache_server(folder: Path, log: Path, *, chunk_tokens: int) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Start LMCache, installed in `folder` (`pip install --target`), with 2 GB; stop it at the end.

    Gives what the plan of a run beside it has (see `StagePlan`), and the environment in which vLLM finds LMCache.

    Raises:
        LaunchError: it is not there, or has not come up.
    """
    if not (folder / "lmcache").is_dir():
        raise LaunchError(f"LMCache is not installed in {folder}; give the folder of `pip install --target`")
    environment = {"PYTHONPATH": python_path(folder), "LMCACHE_TRACK_USAGE": "false"}
    port = free_port()
    options = {"--port": port, "--chunk-size": chunk_tokens, "--l1-size-gb": 2, "--eviction-policy": "LRU"}
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", *words_of(options)]
    command += ["--supported-transfer-mode", "auto", "--disable-observability"]
    with running(command, ready=_READY, log=log, environment=environment, is_idle=True) as server:
        connector_options = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
        yield {"cache": connector_options, "beside_pid": server.pid}, environment

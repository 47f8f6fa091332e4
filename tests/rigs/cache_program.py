"""A program with a cache of its own and a control socket, which serves a few requests and waits to be told to end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = """
import sys
from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, Request
from fastdeploy_cache.config.insight import InsightConfig

config = CacheConfig(
    block_size=4,
    num_gpu_blocks=40,
    num_cpu_blocks=40,
    layout=KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32"),
    insight=InsightConfig(control_socket=sys.argv[1]),
)
with PrefixCacheManager(config) as cache:
    for number in range(4):
        tokens = [*range(8), *[100 + number] * 6]
        session = "last" if number == 2 else ""
        request = Request(request_id=f"chat-{number}", prompt_token_ids=tokens, session_id=session)
        match = cache.match(request)
        cache.allocate(request, cache.blocks_for(14) - len(match.block_ids))
        cache.commit(request, 14)
        if number < 3:
            cache.release(request)
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def cache_program(path: Path) -> Iterator[subprocess.Popen[str]]:
    """It runs, and can be asked at `path`; ended with its input."""
    command = [sys.executable, "-c", PROGRAM, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
            process.communicate(timeout=60)
        finally:
            process.kill()

"""Servers in a process of its own with few open files: an API's, and that of metrics. Says their ports, then does what
it is told on standard input: `fill` takes every descriptor that is left, `free` gives them back."""

from __future__ import annotations

import logging
import os
import resource
import sys
import threading

from aiohttp import web

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache.launch.server.answers import success
from fastdeploy_cache.launch.server.http_server import HttpServer, answering

LIMIT = 100


async def _health(_: web.Request) -> web.StreamResponse:
    return success({"status": "ok"})


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    app = web.Application(middlewares=[answering])
    app.router.add_get("/health", _health)
    server = HttpServer("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=(app,))
    thread.start()
    held: list[int] = []
    with PrefixCacheManager(CacheConfig(block_size=4, num_gpu_blocks=4, transfer_client="inline")) as cache:
        metrics = cache.serve_metrics()
        print(server.port, metrics.rpartition(":")[2].partition("/")[0], flush=True)
        for line in sys.stdin:
            try:
                while line == "fill\n":
                    held.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                pass
            while line == "free\n" and held:
                os.close(held.pop())
            print("done", flush=True)
    server.stop()
    thread.join()
    server.close()


if __name__ == "__main__":
    main()

"""The command `route`: a router that stays up."""

from __future__ import annotations

import logging
import queue
import signal
import threading
from collections.abc import Sequence

from fastdeploy_cache.ipc.shortage import share_of_files
from fastdeploy_cache.launch.server.http_server import HttpServer
from fastdeploy_cache.launch.server.instances import Instances
from fastdeploy_cache.launch.server.limits import Limits
from fastdeploy_cache.launch.server.readiness import tell_ready
from fastdeploy_cache.launch.server.router import MAX_BODY_BYTES, Router

logger = logging.getLogger(__name__)


def route(
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    host: str,
    port: int,
    prefill_seconds: float,
    max_open_prefills: int,
    allow_hosts: Sequence[str] = (),
) -> None:
    """Run until SIGTERM or SIGINT.

    Without an offer of a prefill instance within `prefill_seconds` the decode instance computes the prompt itself. An
    instance that cannot be reached, or ends without an answer, is passed over. One that hangs, so that its health does
    not answer either, may do so because of what it was asked: the chat is answered with status 504, no other instance
    gets it, and other chats go elsewhere. An offer that no decode instance takes is given up.
    `allow_hosts`: names that it may be asked under, beside those of loopback and `host`.

    Raises:
        LaunchError: the port is taken, or a URL is none.
        ConfigError: one of `allow_hosts` is no name.
    """
    endings: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: endings.put(number))
    router = Router(Instances(prefill), Instances(decode), prefill_seconds, max_open_prefills=max_open_prefills)
    # Each may have one to an instance beside it.
    limits = Limits(max_body_bytes=MAX_BODY_BYTES, max_connections=share_of_files(0.25, 10_000))
    server = HttpServer(host, port, limits, allow_hosts=allow_hosts)
    thread = threading.Thread(target=server.run, args=(router.build(),), name="http")
    thread.start()
    try:
        url = f"http://{host}:{server.port}"
        logger.info("event=serving url=%s prefill=%s decode=%s", url, ",".join(prefill), ",".join(decode))
        tell_ready(url=url, metrics=f"{url}/metrics")
        endings.get()
    finally:
        logger.info("event=stopping")
        server.stop()
        thread.join()
        server.close()

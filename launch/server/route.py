"""The command `route`: a router that stays up."""

from __future__ import annotations

import logging
import queue
import signal
import threading

from fastdeploy_cache.ipc.shortage import share_of_files
from fastdeploy_cache.launch.server.http_server import HttpServer
from fastdeploy_cache.launch.server.instances import Instances
from fastdeploy_cache.launch.server.limits import Limits
from fastdeploy_cache.launch.server.options import RouteOptions
from fastdeploy_cache.launch.server.readiness import tell_ready
from fastdeploy_cache.launch.server.router import MAX_BODY_BYTES, Router

logger = logging.getLogger(__name__)


def route(options: RouteOptions) -> None:
    """Run until SIGTERM or SIGINT.

    Without an offer of a prefill instance within `prefill_timeout` the decode instance computes the prompt itself. An
    instance that cannot be reached, or ends without an answer, is passed over. One that hangs, so that its health does
    not answer either, may do so because of what it was asked: the chat is answered with status 504, no other instance
    gets it, and other chats go elsewhere. An offer that no decode instance takes is given up.

    Raises:
        LaunchError: the port is taken, or a URL is none.
        ConfigError: one of `allow_host` is no name.
    """
    endings: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: endings.put(number))
    host, prefill, decode = options.host, options.prefill or [], options.decode
    most = options.max_open_prefills
    router = Router(Instances(prefill), Instances(decode), options.prefill_timeout, max_open_prefills=most)
    # Each may have one to an instance beside it.
    limits = Limits(max_body_bytes=MAX_BODY_BYTES, max_connections=share_of_files(0.25, 10_000))
    server = HttpServer(host, options.port, limits, allow_hosts=options.allow_host or [])
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

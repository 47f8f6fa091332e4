"""The command `route`: a router that stays up."""

from __future__ import annotations

import logging
import queue
import signal
import threading
from contextlib import ExitStack

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.ipc.shortage import share_of_files
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.reference_engine.weights import load_model_files
from fastdeploy_cache.launch.server.api_prompts import PromptReader
from fastdeploy_cache.launch.server.choice import Chooser, Costs
from fastdeploy_cache.launch.server.http_server import HttpServer
from fastdeploy_cache.launch.server.instances import Instances
from fastdeploy_cache.launch.server.limits import Limits
from fastdeploy_cache.launch.server.options import RouteOptions
from fastdeploy_cache.launch.server.prefix_lookup import EventSource, PrefixLookup, check_length
from fastdeploy_cache.launch.server.readiness import tell_ready
from fastdeploy_cache.launch.server.router import MAX_BODY_BYTES, Router

logger = logging.getLogger(__name__)


def route(options: RouteOptions) -> None:
    """Run until SIGTERM or SIGINT.

    Without an offer of a prefill instance within `prefill_timeout` the decode instance computes the prompt itself. An
    instance that cannot be reached, or ends without an answer, is passed over. One that hangs, so that its health does
    not answer either, may do so because of what it was asked: the chat is answered with status 504, no other instance
    gets it, and other chats go elsewhere. An offer that no decode instance takes is given up.

    With `events` an instance gets the prompts of which it has most, weighed against what it has to do: see `Chooser`.

    Raises:
        LaunchError: the port is taken, or a URL is none.
        ConfigError, IPCError: one of `allow_host` is no name, or an address of `events` is none.
        ModelLoadError: the tokeniser of the instances' model is needed for `events`, and is not here.
    """
    endings: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: endings.put(number))
    host, prefill, decode = options.host, options.prefill or [], options.decode
    with ExitStack() as stack:
        costs = Costs(options.loaded_token_cost, options.open_request_cost, options.moved_token_cost)
        chooser = Chooser(_lookup(options, stack), costs)
        router = Router(
            Instances(prefill),
            Instances(decode),
            options.prefill_timeout,
            chooser=chooser,
            max_open_prefills=options.max_open_prefills,
        )
        # Each may have one to an instance beside it.
        limits = Limits(max_body_bytes=MAX_BODY_BYTES, max_connections=share_of_files(0.25, 10_000))
        server = HttpServer(host, options.port, limits, allow_hosts=options.allow_host or [])
        stack.callback(server.close)
        thread = threading.Thread(target=server.run, args=(router.build(),), name="http")
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.stop)
        url = f"http://{host}:{server.port}"
        logger.info("event=serving url=%s prefill=%s decode=%s", url, ",".join(prefill), ",".join(decode))
        tell_ready(url=url, metrics=f"{url}/metrics")
        endings.get()
        logger.info("event=stopping")


def _lookup(options: RouteOptions, stack: ExitStack) -> PrefixLookup | None:
    """Who follows the events of instances, where there are any; it is closed with `stack`."""
    sources = [EventSource(text) for text in options.events or []]
    known = [*Instances(options.prefill or []).in_order(), *Instances(options.decode).in_order()]
    for source in sources:
        if source.place not in known:
            raise LaunchError(
                f"--events names {source.place[0]}:{source.place[1]}, which is no instance of this router; give the "
                "URL that --decode or --prefill has"
            )
    if not sources:
        return None
    reader = PromptReader(ChatTokenizer(load_model_files()), check_length)
    lookup = PrefixLookup(sources, reader, options.keys_folder)
    stack.callback(lookup.close)
    return lookup

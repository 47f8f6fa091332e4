"""An engine process that stays up: HTTP in front, metrics beside it, a clean end on SIGTERM."""

from __future__ import annotations

import dataclasses
import logging
import queue
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache.errors import CacheError, LaunchError, LifeCycleError, counted
from fastdeploy_cache.insight.control.server import ControlServer
from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.launch.reference_engine.paddle_runtime import import_paddle
from fastdeploy_cache.launch.reference_engine.serving import running_engine
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles, load_model_files
from fastdeploy_cache.launch.server.chat import ChatApi
from fastdeploy_cache.launch.server.engine_control import EngineControl
from fastdeploy_cache.launch.server.http_server import HttpServer
from fastdeploy_cache.launch.server.instance_app import InstanceApp
from fastdeploy_cache.launch.server.options import ServeOptions
from fastdeploy_cache.launch.server.readiness import tell_ready, tell_status
from fastdeploy_cache.launch.server.settings import check_pool, device_settings, load_config, named
from fastdeploy_cache.life_cycle import LifeCycleStatus
from fastdeploy_cache.metrics.exporter import cannot_listen

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 10.0
_FLIGHT = "flight"  # no end: a flight recording is asked for
_ASKS = {signal.SIGTERM: "asked", signal.SIGINT: "asked", signal.SIGUSR1: _FLIGHT}


def serve(options: ServeOptions) -> None:
    """Run until SIGTERM or SIGINT.

    At its control socket (else at the configured one) it takes the verbs of `insight.control.messages`. Where it is not
    to recompute what was not received, a chat whose offered blocks do not come is an error.

    Raises:
        LaunchError, PortInUseError, IPCError: a port or the socket is taken.
        ConfigError, ModelLoadError, RankStartError, NotEnoughMemoryError: it cannot start as configured.
    """
    device_settings(options.device, ())  # first: a mistake should cost nothing
    files = _import_and_read()  # before the signal handlers below, which Paddle's own would replace
    config, control_socket = _own_socket(load_config(files, options), options.control_socket)
    tokenizer = _tokenizer(files, config)
    endings = _hear_signals()
    server, control = _listen(options, control_socket)
    try:
        config = named(config, server.port)
        tell_status(f"starting {counted(config.transfer.tp_size, 'rank')}")
        can_recompute = options.on_receive_failure == "recompute"
        with running_engine(files, config, recompute_not_received=can_recompute) as engine, ExitStack() as stack:
            _borrow(engine, options, stack)
            hosts = options.allow_host or []
            metrics_url = engine.cache.serve_metrics(options.host, options.metrics_port, allow_hosts=hosts)
            app = InstanceApp(ChatApi(engine, tokenizer), engine.cache, metrics_url).build()
            url = f"http://{options.host}:{server.port}"
            ranks, role = config.transfer.tp_size, config.role
            logger.info("event=serving url=%s metrics=%s ranks=%d role=%s", url, metrics_url, ranks, role)
            tell_ready(url=url, metrics=metrics_url)
            if control is not None:
                control.start(engine.cache.control.subject(EngineControl(engine)))
            ending = _run_until(endings, engine, partial(server.run, app), server.stop)
    finally:
        server.close()
        if control is not None:  # now that the cache is closed, what a verb waits for has ended
            control.stop()
    logger.info("event=stopped")
    if ending != "asked":
        raise LaunchError(f"the {ending} ended by itself; its log says why")


def _borrow(engine: Engine, options: ServeOptions, stack: ExitStack) -> None:
    """Have the instances that were named lend what they have. Whom nobody named is not imported for."""
    if options.borrow_from:
        from fastdeploy_cache.launch.server.lenders import ServingLenders
        from fastdeploy_cache.launch.server.prefix_lookup import EventSource

        events = engine.cache.config.events
        folder = Path(events.keys_folder) if events is not None and events.keys_folder is not None else None
        lenders = ServingLenders([EventSource(text, "--borrow-from") for text in options.borrow_from], folder)
        stack.callback(lenders.close)
        engine.cache.peers.borrow_from(lenders)


def _import_and_read() -> ModelFiles:
    tell_status("importing PaddlePaddle")
    import_paddle()
    tell_status("reading the model; the first time its weights are converted, which takes a while and 0.5 GB")
    return load_model_files()


def _tokenizer(files: ModelFiles, config: CacheConfig) -> ChatTokenizer:
    """The model's. Raises `ConfigError` where the pool has no room for what it makes of the shortest chat."""
    tokenizer = ChatTokenizer(files)
    check_pool(config, len(tokenizer.encode_chat([{"role": "user", "content": "a"}])))
    return tokenizer


def _hear_signals() -> queue.SimpleQueue[str]:
    """What it is asked by signals from now on, one by one."""
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()  # its put is safe in a signal handler, Event.set is not
    for number, what in _ASKS.items():
        signal.signal(number, lambda *_, what=what: asked.put(what))
    return asked


def _own_socket(config: CacheConfig, control_socket: Path | None) -> tuple[CacheConfig, Path | None]:
    """The configured socket is ours, and not the cache's: who pauses the cache has to pause the engine first."""
    insight = config.insight
    if insight.control_socket is None:
        return config, control_socket
    config = dataclasses.replace(config, insight=dataclasses.replace(insight, control_socket=None))
    return config, control_socket or Path(insight.control_socket)


def _run_until(
    endings: queue.SimpleQueue[str], engine: Engine, run_http: Callable[[], None], stop_http: Callable[[], None]
) -> str:
    def run(what: Callable[[], None], name: str) -> None:
        try:
            what()
        finally:  # whatever ended it: a server that cannot answer should not stay
            endings.put(name)

    threads = [
        threading.Thread(target=run, args=(engine.run, "engine"), name="engine"),
        threading.Thread(target=run, args=(run_http, "HTTP server"), name="http"),
    ]
    for thread in threads:
        thread.start()
    try:
        while (ending := endings.get()) == _FLIGHT:
            _write_flight(engine.cache)
        return ending
    finally:
        logger.info("event=stopping")
        engine.stop()
        threads[0].join()  # every answer has ended by now, which is still to be said
        stop_http()
        threads[1].join()
        if engine.cache.config.storage is not None:
            _flush(engine.cache)


def _write_flight(cache: PrefixCacheManager) -> None:
    """In the main thread and not in the signal's handler, which may have interrupted somebody who has the lock."""
    try:
        logger.info("event=flight_written reason=asked path=%s", cache.insight.write_flight())
    except CacheError as error:
        logger.warning("event=flight_not_written reason=asked error=%r", str(error))


def _flush(cache: PrefixCacheManager) -> None:
    """A paused cache goes on for it; one that sleeps is left alone."""
    try:
        if cache.life.status is not LifeCycleStatus.RUNNING:
            cache.life.resume(_FLUSH_SECONDS)
        logger.info("event=storage_flushed all=%s", cache.storage.flush(_FLUSH_SECONDS))
    except LifeCycleError as error:
        logger.warning("event=storage_not_flushed reason=%r", f"{error}; wake the server before it is ended")


def check_metrics_port(host: str, port: int) -> None:
    """Raises `LaunchError` where nothing can listen there."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        text = cannot_listen(host, port, error, dashes="--", port_name="metrics-port")
        raise LaunchError(f"metrics {text}") from error


def _listen(options: ServeOptions, control_socket: Path | None) -> tuple[HttpServer, ControlServer | None]:
    """Take all ports before the ranks start: one that is taken should cost nothing."""
    check_metrics_port(options.host, options.metrics_port)
    server = HttpServer(options.host, options.port, allow_hosts=options.allow_host or [])
    try:
        return server, ControlServer(control_socket) if control_socket is not None else None
    except CacheError:
        server.close()
        raise

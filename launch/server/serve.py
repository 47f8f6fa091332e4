"""An engine process that stays up: HTTP in front, metrics beside it, a clean end on SIGTERM."""

from __future__ import annotations

import dataclasses
import logging
import queue
import select
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache.errors import ConfigError, LaunchError, LifeCycleError, RequestError
from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.launch.reference_engine.generation import (
    Generation,
    GenerationBusyError,
    GenerationError,
    GenerationRefusedError,
)
from fastdeploy_cache.launch.reference_engine.paddle_runtime import import_paddle
from fastdeploy_cache.launch.reference_engine.serving import layout_of, running_engine
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles, load_model_files
from fastdeploy_cache.launch.server.chat_api import MODEL_NAME, ChatApi, ChatRequest, NotWantedError
from fastdeploy_cache.launch.server.control import ControlServer
from fastdeploy_cache.launch.server.engine_control import EngineControl
from fastdeploy_cache.launch.server.json_http import LAST_CHUNK, JsonHandler, JsonServer
from fastdeploy_cache.launch.server.status import status_of
from fastdeploy_cache.life_cycle import LifeCycleStatus

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 10.0
_DEFAULT_FILE = Path(__file__).parent.with_name("serve.toml")
_CHAT, _PREFILL = "/v1/chat/completions", "/v1/prefill"
_NOT_SERVED = {  # by role and path
    ("prefill", _CHAT): f"the role of this instance is prefill: use {_PREFILL}, or ask a decode instance",
    ("decode", _PREFILL): "the role of this instance is decode: ask a prefill instance",
}


def serve(
    config_file: Path | None,
    settings: Sequence[str],
    *,
    host: str,
    port: int,
    metrics_port: int,
    storage_folder: Path | None,
    control_socket: Path | None = None,
    role: str = "mixed",
    recompute_not_received: bool = True,
) -> None:
    """Run until SIGTERM or SIGINT. `settings` are KEY=VALUE and win over file and environment.

    `storage_folder` is short for a file store there, named by the digest of the model's weights. At `control_socket`
    it takes the verbs of `fastdeploy_cache.launch.server.control`. `role` is short for that setting and the peer's
    `weights_id`; without `recompute_not_received` a chat whose offered blocks do not come is answered with an error.

    Raises:
        LaunchError, PortInUseError: a port or the socket is taken.
        ConfigError, ModelLoadError, RankStartError, NotEnoughMemoryError: it cannot start as configured.
    """
    import_paddle()  # before the signal handlers below, which its own would replace
    files = load_model_files()
    settings = [*_role_settings(files, role), *_storage_settings(files, storage_folder), *settings]
    config = _config(files, config_file, settings)
    _check_secret(config)
    endings: queue.SimpleQueue[str] = queue.SimpleQueue()  # its put is safe in a signal handler, Event.set is not
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: endings.put("asked"))
    server, control = _listen(host, port, control_socket)  # before the ranks start: what is taken should cost nothing
    try:
        config = _named(config, server.server_port) if role != "mixed" else config
        with running_engine(files, config, recompute_not_received=recompute_not_received) as engine:
            metrics_url = engine.cache.serve_metrics(host, metrics_port)
            server.api, server.engine = ChatApi(engine, ChatTokenizer(files)), engine
            url = f"http://{host}:{server.server_port}"
            ranks, role = config.transfer.tp_size, config.role
            logger.info("event=serving url=%s metrics=%s ranks=%d role=%s", url, metrics_url, ranks, role)
            if control is not None:
                control.start(EngineControl(engine))
            ending = _run_until(endings, engine, server)
    finally:
        server.server_close()
        if control is not None:  # now that the cache is closed, what a verb waits for has ended
            control.stop()
    logger.info("event=stopped")
    if ending != "asked":
        raise LaunchError("the engine ended by itself; its log says why")


def _role_settings(files: ModelFiles, role: str) -> list[str]:
    return [f"role={role}", f"peer.weights_id={files.digest}"] if role != "mixed" else []


def _named(config: CacheConfig, port: int) -> CacheConfig:
    """With a name that tells the instances of a host apart, where nobody has named this one."""
    if config.peer is None or config.peer.name:
        return config
    return dataclasses.replace(config, peer=dataclasses.replace(config.peer, name=f"{config.role}-{port}"))


def _check_secret(config: CacheConfig) -> None:
    """Offers come over HTTP, from anybody who reaches the port."""
    if config.peer is not None and config.peer.secret_file is None:
        raise ConfigError(
            "peer.secret_file is not set, so anybody who reaches this server could have it cache blocks of his own "
            "making; make a secret with `fastdeploy-cache peer-secret FILE` and give all instances of the group "
            "--set peer.secret_file=FILE"
        )


def _storage_settings(files: ModelFiles, folder: Path | None) -> list[str]:
    if folder is None:
        return []
    store = {"kind": "file", "folder": str(folder), "weights_id": files.digest, "admission": "all"}
    return [f"storage.{key}={value}" for key, value in store.items()]


def device_settings(device: str, settings: Sequence[str]) -> list[str]:
    """What `--device` stands for, beside these settings.

    Raises:
        LaunchError: neither `cpu` nor `gpu:N`.
    """
    if device == "cpu":
        return []
    kind, _, number = device.partition(":")
    if kind != "gpu" or not number.isdigit():
        raise LaunchError(f"--device is {device!r}; use cpu, or gpu:N with the number of a GPU")
    sizes = [int(setting.partition("=")[2]) for setting in settings if setting.startswith("transfer.tp_size=")]
    ids = ",".join([number] * (sizes[-1] if sizes else 1))
    return ["transfer.device=cuda", f"transfer.device_ids={ids}"]


def _run_until(endings: queue.SimpleQueue[str], engine: Engine, server: _Server) -> str:
    def run_engine() -> None:
        try:
            engine.run()
        finally:  # whatever ended it: a server that cannot answer should not stay
            endings.put("engine")

    threads = [
        threading.Thread(target=run_engine, name="engine"),
        threading.Thread(target=server.serve_forever, name="http"),
    ]
    for thread in threads:
        thread.start()
    try:
        return endings.get()
    finally:
        logger.info("event=stopping")
        engine.stop()
        server.shutdown()
        for thread in threads:
            thread.join()
        if engine.cache.config.storage is not None:
            _flush(engine.cache)


def _flush(cache: PrefixCacheManager) -> None:
    """A paused cache goes on for it; one that sleeps is left alone."""
    try:
        if cache.life.status is not LifeCycleStatus.RUNNING:
            cache.life.resume(_FLUSH_SECONDS)
        logger.info("event=storage_flushed all=%s", cache.storage.flush(_FLUSH_SECONDS))
    except LifeCycleError as error:
        logger.warning("event=storage_not_flushed reason=%r", f"{error}; wake the server before it is ended")


def _config(files: ModelFiles, path: Path | None, settings: Sequence[str]) -> CacheConfig:
    overrides: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r} is no KEY=VALUE")
        table, _, key = name.rpartition(".")
        parsed = value.split(",") if key == "device_ids" else value
        (overrides.setdefault(table, {}) if table else overrides)[key] = parsed
    layout = layout_of(files.spec)
    config = CacheConfig.load(path or _DEFAULT_FILE, **{"layout": layout, **overrides})
    if config.layout != layout:
        raise ConfigError(f"layout is {config.layout}, but the model's is {layout}; leave the table [layout] out")
    if config.transfer.tp_size not in (1, 3):
        raise ConfigError(f"transfer.tp_size is {config.transfer.tp_size}; the model has 3 KV heads, so use 1 or 3")
    return config


class _Server(JsonServer):
    api: ChatApi
    engine: Engine


def _listen(host: str, port: int, control_socket: Path | None) -> tuple[_Server, ControlServer | None]:
    server = _Server((host, port), _Handler)
    try:
        return server, ControlServer(control_socket) if control_socket is not None else None
    except LaunchError:
        server.server_close()
        raise


class _Handler(JsonHandler):
    server: _Server

    def do_GET(self) -> None:
        """Health, state, models."""
        if self.path == "/health":
            self.send(200, {"status": "ok"})
        elif self.path == "/status":
            self.send(200, status_of(self.server.engine.cache))
        elif self.path == "/v1/models":
            self.send(200, {"object": "list", "data": [{"id": MODEL_NAME, "object": "model"}]})
        else:
            self.fail(404, f"no page {self.path}; there are /v1/chat/completions, /v1/models, /health and /status")

    def do_POST(self) -> None:
        """A chat, or a prompt to be computed for another instance."""
        if self.path not in (_CHAT, _PREFILL):
            self.refuse_body(_CHAT)
            return
        try:
            request = msgspec.json.decode(self.read_body(), type=ChatRequest)
            self._check_served()
            if self.path == _PREFILL:
                self._prefill(request)
            else:
                self._chat(request)
        except RecursionError:
            self.fail(400, "the body is nested too deeply")
        except (msgspec.DecodeError, LaunchError, RequestError, GenerationRefusedError, ValueError) as error:
            self.fail(400, str(error))
        except GenerationBusyError as error:
            self.fail(429, str(error))
        except GenerationError as error:
            self.fail(503, str(error))
        except NotWantedError:
            self.note_client_gone()

    def do_DELETE(self) -> None:
        """An offer that nobody will ask for: its blocks need not wait. Who knows its id may give it up."""
        offer_id = self.path.removeprefix(f"{_PREFILL}/")
        if offer_id == self.path:
            self.fail(404, f"nothing is deleted at {self.path}; use {_PREFILL}/OFFER_ID")
        elif self.server.api.cancel_prefill(offer_id):
            self.send(200, {"offer_id": offer_id, "status": "cancelled"})
        else:
            self.fail(404, f"no open offer has the id {offer_id!r}; it was read, or given up, already")

    def _check_served(self) -> None:
        config = self.server.engine.cache.config
        refusal = _NOT_SERVED.get((config.role, self.path))
        if self.path == _PREFILL and config.peer is None:
            refusal = "this instance has no others: start it with --role prefill"
        if refusal is not None:
            raise LaunchError(refusal)

    def _prefill(self, request: ChatRequest) -> None:
        generation, answer = self.server.api.prefill(request, self._is_wanted, self.client_address[0])
        if generation is not None and not self._is_wanted():
            self.server.api.cancel(generation)  # else its blocks would wait for somebody who never comes
        self.send(200, answer)

    def _chat(self, request: ChatRequest) -> None:
        generation = self.server.api.submit(request)
        if request.stream:
            usage = request.stream_options is not None and request.stream_options.include_usage
            self._stream(generation, self.server.api.stream(generation, usage, self._is_wanted))
        else:
            self.send(200, self.server.api.complete(generation, self._is_wanted))

    def _is_wanted(self) -> bool:
        """Whether the client is still there: one that has closed its end can be read, and has nothing to say."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        try:
            return not poll.poll(0) or self.connection.recv(1, socket.MSG_PEEK) != b""
        except OSError:  # reset
            return False

    def _stream(self, generation: Generation, chunks: Iterator[dict[str, Any]]) -> None:
        """Server-sent events. HTTP's chunks tell a client an end from a death in the middle."""
        is_chunked = self.request_version != "HTTP/1.0"
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-cache")
            self.send_header("Connection", "close")
            if is_chunked:
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.close_connection = True
            for data in _events(chunks):
                event = b"data: " + data + b"\n\n"
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event) if is_chunked else event)
            self.wfile.write(LAST_CHUNK if is_chunked else b"")
        except (OSError, NotWantedError):
            self.server.api.cancel(generation)
            self.note_client_gone()


def _events(chunks: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    try:
        for chunk in chunks:
            yield msgspec.json.encode(chunk)
        yield b"[DONE]"
    except GenerationError as error:  # the status is out: say it in the stream
        yield msgspec.json.encode({"error": {"message": str(error)}})

"""What an instance answers: chats, completions, prompts for other instances, its health and state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.errors import ClosedError, LaunchError, PeerError, RequestError
from fastdeploy_cache.insight.doctor.process_troubles import troubles_of
from fastdeploy_cache.launch.reference_engine.generation import (
    Generation,
    GenerationBusyError,
    GenerationError,
    GenerationRefusedError,
)
from fastdeploy_cache.launch.server.answer_forms import MODEL_NAME
from fastdeploy_cache.launch.server.answers import error_of, failure, success
from fastdeploy_cache.launch.server.api_fields import RefusedFieldError
from fastdeploy_cache.launch.server.api_requests import (
    CHAT_PATH,
    COMPLETION_PATH,
    KINDS,
    LEND_PATH,
    PREFILL_PATH,
    ApiRequest,
    decode_request,
)
from fastdeploy_cache.launch.server.chat import ChatApi
from fastdeploy_cache.launch.server.http_server import answering, route_of_the_rest
from fastdeploy_cache.launch.server.limits import connection_of, read_body
from fastdeploy_cache.launch.server.request_log import FACTS, GENERATIONS, REQUEST_ID
from fastdeploy_cache.launch.server.streams import StreamedAnswer
from fastdeploy_cache.life_cycle import LifeCycleStatus

_MODEL = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "HuggingFaceTB"}
_NOT_SERVED = {  # by role and path
    **{
        ("prefill", path): f"the role of this instance is prefill: use {PREFILL_PATH}, or ask a decode instance"
        for path in KINDS
    },
    ("decode", PREFILL_PATH): "the role of this instance is decode: ask a prefill instance",
    ("decode", LEND_PATH): "the role of this instance is decode: it only receives",
}
_NOT_HERE = {
    "GET": f"no page {{path}}; there are {CHAT_PATH}, {COMPLETION_PATH}, /v1/models, /health, /ready and /status",
    "POST": f"nothing is posted to {{path}}; use {CHAT_PATH} or {COMPLETION_PATH}",
    "DELETE": f"nothing is deleted at {{path}}; use {PREFILL_PATH}/OFFER_ID",
}
_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class InstanceApp:
    """The routes of one instance. Where a client goes, aiohttp cancels what answers it."""

    def __init__(self, api: ChatApi, cache: PrefixCacheManager, metrics_url: str = "") -> None:
        """`metrics_url`: where the metrics are, which is another port; who asks for them here is told."""
        self._api, self._cache = api, cache
        self._not_here = dict(_NOT_HERE)
        if metrics_url:
            self._not_here["GET"] += f"; metrics are at {metrics_url}"

    def build(self) -> web.Application:
        """The application, for one `HttpServer`."""
        app = web.Application(middlewares=[answering], client_max_size=0)  # `read_body` has the bound
        app.add_routes(
            [
                web.get("/health", self._health, allow_head=False),
                web.get("/ready", self._ready, allow_head=False),
                web.get("/status", self._status, allow_head=False),
                web.get("/v1/models", self._models, allow_head=False),
                web.get("/v1/models/{model:.+}", self._one_model, allow_head=False),
                web.post(CHAT_PATH, self._ask),
                web.post(COMPLETION_PATH, self._ask),
                web.post(PREFILL_PATH, self._prefill),
                web.post(LEND_PATH, self._lend),
                web.delete(PREFILL_PATH + "/{offer_id:.*}", self._give_up),
                route_of_the_rest(self._not_here),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.StreamResponse:
        """Whether this process lives; it says nothing of what it does."""
        return success({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.StreamResponse:
        """Whether what is asked now is answered now. It is also while processes are down: it takes longer then."""
        status = self._cache.life.status
        if status is LifeCycleStatus.RUNNING:
            troubles = [str(trouble) for trouble in troubles_of(self._cache.insight.processes())]
            return success({"status": "ready"} | ({"troubles": troubles} if troubles else {}))
        return failure(503, f"not ready: this instance is {status.value}; requests wait", code=status.value)

    async def _status(self, _: web.Request) -> web.StreamResponse:
        return success(await asyncio.to_thread(self._cache.control.status))  # it takes the cache's lock

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return success({"object": "list", "data": [_MODEL]})

    async def _one_model(self, request: web.Request) -> web.StreamResponse:
        try:
            _check_model(request.match_info["model"])
        except RefusedFieldError as error:
            return _refused(request, error)
        return success(_MODEL)

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, self._answer)

    async def _prefill(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, self._compute)

    async def _lend(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, self._offer_cached)

    async def _offer_cached(self, request: web.Request, asked: ApiRequest) -> web.StreamResponse:
        answer = await self._api.prefills.lend(asked, request.remote or "", name=request[REQUEST_ID])
        if connection_of(request).has_ended and answer["offer_id"] is not None:
            self._api.prefills.cancel(answer["offer_id"])  # else its blocks would wait for somebody who may never come
        return success(answer)

    async def _serve(
        self, request: web.Request, serve: Callable[[web.Request, ApiRequest], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            body = await read_body(request)
        except LaunchError as error:
            return failure(400, str(error), ends=True)
        try:
            asked = decode_request(body, KINDS.get(request.path))
            _check_model(asked.model)
            self._check_served(request.path)
            return await serve(request, asked)
        except RecursionError:
            return failure(400, "the body is nested too deeply")
        except RefusedFieldError as error:
            return _refused(request, error)
        except (PeerError, ClosedError) as error:
            return failure(503, str(error))
        except (LaunchError, RequestError, GenerationError, ValueError) as error:
            return failure(_status_of(error), str(error))

    def _check_served(self, path: str) -> None:
        config = self._cache.config
        refusal = _NOT_SERVED.get((config.role, path))
        if path in (PREFILL_PATH, LEND_PATH) and config.peer is None:
            refusal = "this instance has no others: start it with --role prefill, or with --peers"
        if refusal is not None:
            raise LaunchError(refusal)

    async def _compute(self, request: web.Request, asked: ApiRequest) -> web.StreamResponse:
        prefill = await self._api.prefills.compute(asked, request.remote or "", name=request[REQUEST_ID])
        if prefill.generation is not None:
            request[GENERATIONS] = [prefill.generation]
            if connection_of(request).has_ended:
                self._api.cancel(prefill.generation)  # else its blocks would wait for somebody who may never come
        return success(prefill.answer)

    async def _answer(self, request: web.Request, asked: ApiRequest) -> web.StreamResponse:
        generations = request[GENERATIONS] = await self._api.submit(asked, name=request[REQUEST_ID])
        if asked.stream:
            return await self._stream(request, asked, generations)
        return success(await self._api.complete(asked, generations, name=request[REQUEST_ID]))

    async def _stream(
        self, request: web.Request, asked: ApiRequest, generations: Sequence[Generation]
    ) -> web.StreamResponse:
        """Server-sent events. HTTP's chunks tell a client an end from a death in the middle."""
        answer = StreamedAnswer(request, 200, _STREAM_HEADERS)
        try:
            chunks = self._api.stream(asked, generations, name=request[REQUEST_ID])
            async with aclosing(_events(chunks)) as events:
                await answer.begin()
                async for event in events:
                    await answer.write(b"data: " + event + b"\n\n")
        except BaseException:
            self._api.cancel(*generations)
            raise
        return answer.end()

    async def _give_up(self, request: web.Request) -> web.StreamResponse:
        """An offer that nobody will ask for: its blocks need not wait. Who knows its id may give it up."""
        offer_id = request.match_info["offer_id"]
        if self._api.prefills.cancel(offer_id):
            return success({"offer_id": offer_id, "status": "cancelled"})
        return failure(404, f"no open offer has the id {offer_id!r}; it was read, or given up, already")


def _status_of(error: Exception) -> int:
    if isinstance(error, GenerationBusyError):
        return 429
    is_lasting = isinstance(error, GenerationRefusedError) or not isinstance(error, GenerationError)
    return 400 if is_lasting else 503


def _refused(request: web.Request, error: RefusedFieldError) -> web.StreamResponse:
    request[FACTS]["refused"] = ascii(error.field)
    return failure(error.status, str(error), field=error.field, code=error.code)


def _check_model(name: str | None) -> None:
    """Status 404 as OpenAI's own API answers, so that its clients raise what they raise there."""
    if name not in (None, MODEL_NAME):
        text = f"the model {name!r} is not here; use {MODEL_NAME!r}, or leave model out"
        raise RefusedFieldError("model", text, status=404, code="model_not_found")


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in chunks:
            yield msgspec.json.encode(chunk)
        yield b"[DONE]"
    except GenerationError as error:  # the status is out: say it in the stream
        yield msgspec.json.encode(error_of(503, str(error)))

"""Requests answered by two instances each: one computes the prompt, the other receives its blocks and answers."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.server.answers import failure, success
from fastdeploy_cache.launch.server.api_requests import CHAT_PATH, COMPLETION_PATH, LEND_PATH, PREFILL_PATH
from fastdeploy_cache.launch.server.choice import Choice, Chooser
from fastdeploy_cache.launch.server.forwarding import Forwarding, HungError
from fastdeploy_cache.launch.server.http_server import answering, route_of_the_rest
from fastdeploy_cache.launch.server.instances import Instances
from fastdeploy_cache.launch.server.limits import ClientCounts, read_body
from fastdeploy_cache.launch.server.prefix_lookup import PromptKnown
from fastdeploy_cache.launch.server.request_log import FACTS
from fastdeploy_cache.launch.server.router_pages import RouterPages
from fastdeploy_cache.launch.server.upstream import READINESS, Offer, Question, Upstream, give_up, offer_in

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 600.0  # a whole answer comes in one piece
_SHORT_SECONDS = 2.0
_LEND_SECONDS = 3.0
_PROBE_SECONDS = 5.0  # without a word of a decode instance
MAX_BODY_BYTES = 3 * 2**20  # with an offer it is still no more than instances take
MAX_OPEN_PREFILLS = 32  # of one client
_NOT_HERE = {
    "GET": f"no page {{path}}; there are {CHAT_PATH}, {COMPLETION_PATH}, /v1/models, /health, /ready, /status and "
    "/metrics",
    "POST": f"nothing is posted to {{path}}; use {CHAT_PATH} or {COMPLETION_PATH}",
}
_UPSTREAM = web.AppKey("upstream", Upstream)


class Router:
    """The routes of a router. Chats share the turns, and the counts of what clients have open."""

    def __init__(
        self,
        prefill: Instances,
        decode: Instances,
        prefill_seconds: float,
        *,
        chooser: Chooser | None = None,
        probe_seconds: float = _PROBE_SECONDS,
        max_open_prefills: int = MAX_OPEN_PREFILLS,
    ) -> None:
        """`chooser` orders instances: by turns by default. `max_open_prefills`: chats of one client beyond so many are
        computed by decode instances alone."""
        self.open_prefills = ClientCounts(max_open_prefills)
        self._prefill, self._decode, self._chooser = prefill, decode, chooser or Chooser()
        self._prefill_seconds, self._probe_seconds = prefill_seconds, probe_seconds

    def build(self) -> web.Application:
        """The application, for one `HttpServer`."""
        pages = RouterPages({"prefill": self._prefill, "decode": self._decode}, _UPSTREAM, self._chooser)
        middlewares = [pages.middleware(), answering]
        app = web.Application(middlewares=middlewares, client_max_size=0)  # `read_body` has the bound
        app.cleanup_ctx.append(_connect)
        app.add_routes(
            [
                web.get("/health", self._health, allow_head=False),
                web.get("/ready", self._ready, allow_head=False),
                web.get("/v1/models", self._models, allow_head=False),
                web.get("/v1/models/{model:.+}", self._models, allow_head=False),
                web.post(CHAT_PATH, self._ask),
                web.post(COMPLETION_PATH, self._ask),
                *pages.routes(),
                route_of_the_rest(_NOT_HERE),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.StreamResponse:
        """Whether this process lives; it says nothing of the instances."""
        return success({"status": "ok"})

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        """Whether there is a decode instance that answers now."""
        for place in self._decode.in_order():
            if await request.app[_UPSTREAM].is_healthy(place, READINESS):
                return success({"status": "ready"})
            logger.warning("event=decode_not_ready at=%s:%d", *place)
        return failure(503, "no decode instance is ready")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        question = Question("GET", request.rel_url.raw_path, None, _SHORT_SECONDS)
        forwarding = Forwarding(request.app[_UPSTREAM], self._decode, question)
        return await forwarding.run(request, self._decode.in_order())

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        try:
            chat = json.loads(await read_body(request))
            if not isinstance(chat, dict):
                raise ValueError(f"{type(chat).__name__} instead of an object")
            for field in ("kv_offer", "kv_is_lent"):  # only our own: an offer says where to read memory
                chat.pop(field, None)
            body = _encode(chat)
        except LaunchError as error:
            return failure(400, str(error), ends=True)
        except (ValueError, RecursionError) as error:
            return failure(400, f"the body is no JSON object: {error}")
        client, prefills = request.remote or "", self.open_prefills
        may_prefill = prefills.enter(client)
        if not may_prefill:
            logger.info("event=prefill_skipped client=%s num_open=%d", client, prefills.max_per_client)
        try:
            return await self._answer(request, chat, body, may_prefill)
        except HungError as error:
            return failure(504, str(error))
        except RecursionError as error:  # with the offer it is nested one deeper than it was
            return failure(400, f"the body is nested too deeply: {error}")
        finally:
            if may_prefill:
                prefills.leave(client)

    async def _answer(
        self, request: web.Request, chat: dict[str, Any], body: bytes, may_prefill: bool
    ) -> web.StreamResponse:
        upstream, forwarding = request.app[_UPSTREAM], None
        prompt = await self._chooser.look_up(body, request.path)
        offer = await self._compute_prefill(upstream, body, prompt) if may_prefill else None
        choice = self._chooser.choose(self._decode, prompt, may_lend=not len(self._prefill))
        is_lent = offer is None and choice.lender is not None
        plain = Question("POST", request.path, body, _ANSWER_SECONDS, self._probe_seconds)
        if is_lent:
            offer = await self._borrow(upstream, body, choice)
        try:
            question = plain
            if offer is not None:
                request[FACTS]["lender" if is_lent else "prefill"] = "{}:{}".format(*offer.place)
                lent = {"kv_is_lent": True} if is_lent else {}
                question = plain._replace(body=_encode(chat | {"kv_offer": offer.offer, **lent}))
            forwarding = Forwarding(
                upstream,
                self._decode,
                question,
                question_of_others=plain if is_lent else question,  # what was lent is for the first of them
                is_stream=bool(chat.get("stream")),
            )
            return await forwarding.run(request, choice.places, choice)
        finally:  # refused, nobody there, or the client has gone: blocks would wait for a reader until their deadline
            has_taken = forwarding is not None and forwarding.has_taken_offer
            if offer is not None and (is_lent or not has_taken):  # a loan may be declined without a word
                await give_up(upstream, offer)

    async def _borrow(self, upstream: Upstream, body: bytes, choice: Choice) -> Offer | None:
        """What an instance lends of this prompt, if it does soon; without that it is computed where it is answered.

        One that is too busy to lend is not taken for one that hangs: that it is busy is why it is asked."""
        lender, first = choice.lender, choice.places[0]
        assert lender is not None
        question = Question("POST", LEND_PATH, body, _LEND_SECONDS)
        try:
            with self._decode.loaded((lender, choice.load_of(lender)), (first, choice.load_of(first))):
                async with upstream.ask(lender, question) as answer:
                    text = await answer.body()
                    offer = offer_in(lender, json.loads(text)) if answer.response.status == 200 else None
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("event=not_lent at=%s:%d error=%r", *lender, error)
            return None
        if offer is None:
            logger.info("event=not_lent at=%s:%d answer=%r", *lender, text[:200])
        return offer

    async def _compute_prefill(self, upstream: Upstream, body: bytes, prompt: PromptKnown | None) -> Offer | None:
        """What a prefill instance offers of this prompt, if it does in time."""
        question = Question("POST", PREFILL_PATH, body, self._prefill_seconds)
        choice = self._chooser.choose(self._prefill, prompt)
        for place in choice.places:
            if self._prefill.is_hung(place):  # and all that follow
                return None
            try:
                async with self._prefill.asked(upstream, place, question, choice.load_of(place)) as answer:
                    choice.answered(place)
                    status, text = answer.response.status, await answer.body()
                    offer = offer_in(place, json.loads(text)) if status == 200 else None
            except TimeoutError as error:  # no time is left for another
                logger.warning("event=prefill_hung at=%s:%d error=%r", *place, error)
                if not await upstream.is_healthy(place):
                    raise HungError("prefill", place) from error
                return None  # it has much to do
            except ConnectionError as error:  # at once: there is time for another
                logger.warning("event=prefill_unreachable at=%s:%d error=%r", *place, error)
                continue
            except (OSError, ValueError, LookupError, TypeError) as error:
                logger.warning("event=prefill_failed at=%s:%d error=%r", *place, error)
                return None
            if status != 200:
                level = logging.WARNING if status >= 500 else logging.INFO  # the chat's own fault
                logger.log(level, "event=prefill_refused at=%s:%d status=%d answer=%r", *place, status, text[:200])
            return offer
        return None


async def _connect(app: web.Application) -> AsyncIterator[None]:
    app[_UPSTREAM] = Upstream()
    yield
    await app[_UPSTREAM].close()


def _encode(chat: dict[str, Any]) -> bytes:
    """No larger than it came, whatever it was escaped with."""
    return json.dumps(chat, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")

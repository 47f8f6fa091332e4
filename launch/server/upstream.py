"""Requests of the router to instances. Who is cancelled while he asks hangs up, and the instance notices."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import aiohttp

from fastdeploy_cache.ipc.log_lines import current_request
from fastdeploy_cache.launch.server.api_requests import PREFILL_PATH
from fastdeploy_cache.launch.server.request_log import ID_HEADER

logger = logging.getLogger(__name__)

_CONNECT_SECONDS, _SHORT_SECONDS = 5.0, 2.0

T = TypeVar("T")
Place = tuple[str, int]  # host and port


class NotSentError(ConnectionError):
    """The instance cannot be reached: it knows nothing of the request, so another one may have it.

    `is_late`: nothing answered at all, so that who asks next would wait again.
    """

    def __init__(self, reason: object, *, is_late: bool) -> None:
        super().__init__(f"no connection: {reason}")
        self.is_late = is_late


class Question(NamedTuple):
    """What an instance is asked, and how long its answer may take to begin, and each piece of it.

    With `probe_seconds` the instance is asked for its health after each such time without a word.
    """

    method: str
    path: str
    body: bytes | None
    timeout_seconds: float
    probe_seconds: float = math.inf

    @property
    def may_hang(self) -> bool:
        """Whether it gives an instance work, on which that may hang."""
        return self.body is not None


HEALTH = Question("GET", "/health", None, 2.0)
READINESS = Question("GET", "/ready", None, 2.0)


class WholeAnswer(NamedTuple):
    """An answer that has begun; it is read in one of two ways, which raise what `Upstream.ask` raises."""

    response: aiohttp.ClientResponse
    wait: Callable[[Coroutine[Any, Any, bytes]], Coroutine[Any, Any, bytes]]

    @property
    def is_good(self) -> bool:
        """Whether it says so."""
        return 200 <= self.response.status < 300

    async def body(self) -> bytes:
        """All of a short answer."""
        return await self.wait(self.response.read())

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes, until it is whole; where it is cut off, all that came before that."""
        content = self.response.content
        try:
            while piece := await self.wait(content.readany()):
                yield piece
        except OSError:
            content.set_exception(None)  # type: ignore[arg-type]  # else what came with the end is not given out
            if piece := content.read_nowait():
                yield piece
            raise


class Upstream:
    """Asks instances, each request on a connection of its own. Made, used and closed on one event loop."""

    def __init__(self) -> None:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_create_end.append(_note_connected)
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            trace_configs=[tracing],
        )

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    @asynccontextmanager
    async def ask(self, place: Place, question: Question) -> AsyncIterator[WholeAnswer]:
        """A request, once its answer has begun; at the end the connection is closed.

        Raises:
            NotSentError: the instance cannot be reached.
            TimeoutError: it has the request, or a part of it, and does not answer in time: it may hang on that.
            ConnectionError: it has ended.
            OSError: it talks nonsense, or its answer is cut off.
        """
        connected = asyncio.Event()

        async def wait(coroutine: Coroutine[Any, Any, T]) -> T:
            with _builtin_errors():
                return await self._wait(place, question, coroutine, connected)

        response = await wait(self._send(place, question, connected))
        try:
            yield WholeAnswer(response, wait)
        finally:
            response.close()

    async def is_healthy(self, place: Place, question: Question = HEALTH) -> bool:
        """Whether it answers for its health, or for its readiness."""
        try:
            async with self.ask(place, question) as answer:
                await answer.body()
                return answer.response.status == 200
        except OSError:
            return False

    async def _send(self, place: Place, question: Question, connected: asyncio.Event) -> aiohttp.ClientResponse:
        seconds = min(_CONNECT_SECONDS, question.timeout_seconds)
        host = f"[{place[0]}]" if ":" in place[0] else place[0]
        return await self._session.request(
            question.method,
            f"http://{host}:{place[1]}{question.path}",
            data=question.body,
            headers=_headers(),
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None, connect=seconds, sock_connect=seconds),
            trace_request_ctx=SimpleNamespace(connected=connected),
        )

    async def _wait(
        self, place: Place, question: Question, coroutine: Coroutine[Any, Any, T], connected: asyncio.Event
    ) -> T:
        """What the instance says next. It may have much to do, or hang: then its HTTP server does not answer either."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(coroutine)
        try:
            if not connected.is_set():  # that has a deadline of its own, and no probes
                await _first(task, connected)
            until = loop.time() + question.timeout_seconds
            while not task.done():
                left = until - loop.time()
                if left <= 0:
                    raise TimeoutError(f"no answer within {question.timeout_seconds} s")
                done, _ = await asyncio.wait({task}, timeout=min(left, question.probe_seconds))
                if not done and question.probe_seconds < left and not await self.is_healthy(place) and not task.done():
                    raise TimeoutError("no answer, and none for its health")
            return task.result()
        finally:
            if task.cancel():
                await asyncio.wait({task})


def _headers() -> dict[str, str]:
    """The instance is to call the request as it is called here."""
    request_id = current_request()
    named = {} if request_id is None else {ID_HEADER: request_id}
    return {"Content-Type": "application/json", "Connection": "close", **named}


async def _first(task: asyncio.Future[Any], connected: asyncio.Event) -> None:
    """Wait until the connection stands, or cannot."""
    waiting = asyncio.ensure_future(connected.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _note_connected(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    context.trace_request_ctx.connected.set()


@contextmanager
def _builtin_errors() -> Iterator[None]:
    """Errors of aiohttp as Python's own, told apart by what they mean for the request."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise NotSentError(error, is_late=True) from error
    except aiohttp.ClientConnectorError as error:
        raise NotSentError(error, is_late=isinstance(error.os_error, TimeoutError)) from error
    except aiohttp.ClientConnectionError as error:
        raise ConnectionResetError(f"the connection ended: {error!r}") from error
    except (aiohttp.ClientError, aiohttp.http_exceptions.HttpProcessingError) as error:
        raise OSError(f"no whole answer: {error!r}") from error


class Offer(NamedTuple):
    """What an instance has computed or lends, as base64, and where it is given up."""

    offer: str
    place: Place
    offer_id: str


def offer_in(place: Place, answer: Any) -> Offer | None:
    """None where the prompt is too short for one. Raises `LookupError`, `TypeError` for what is no answer."""
    offer, offer_id = answer["offer"], answer["offer_id"]
    return Offer(offer, place, offer_id) if isinstance(offer, str) and isinstance(offer_id, str) else None


async def give_up(upstream: Upstream, offer: Offer) -> None:
    """Nobody takes it: its blocks would be held until its deadline."""
    question = Question("DELETE", f"{PREFILL_PATH}/{quote(offer.offer_id)}", None, _SHORT_SECONDS)
    try:
        async with upstream.ask(offer.place, question) as answer:
            await answer.body()
            logger.info("event=offer_given_up at=%s:%d status=%d", *offer.place, answer.response.status)
    except OSError as error:
        logger.warning("event=offer_not_given_up at=%s:%d error=%r", *offer.place, error)

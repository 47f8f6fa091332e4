"""Chats answered by two instances each: one computes the prompt, the other receives its blocks and answers."""

from __future__ import annotations

import http.client
import json
import logging
import queue
import signal
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.server.json_http import JsonHandler, JsonServer
from fastdeploy_cache.launch.server.open_prefills import OpenPrefills
from fastdeploy_cache.launch.server.upstream import (
    AnswerSoFar,
    ClientGoneError,
    Instances,
    Place,
    Question,
    Upstream,
    is_healthy,
)

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 600.0  # a whole answer comes in one piece
_SHORT_SECONDS = 2.0
_PROBE_SECONDS = 5.0  # without a word of a decode instance
MAX_OPEN_PREFILLS = 32  # of one client
_CHAT, _PREFILL = "/v1/chat/completions", "/v1/prefill"
_UNREACHABLE = (OSError, http.client.HTTPException)


def route(
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    host: str,
    port: int,
    prefill_seconds: float,
    max_open_prefills: int,
) -> None:
    """Run until SIGTERM or SIGINT.

    Without an offer of a prefill instance within `prefill_seconds` the decode instance computes the prompt itself. An
    instance that cannot be reached, or ends without an answer, is passed over. One that hangs, so that its health does
    not answer either, may do so because of what it was asked: the chat is answered with status 504, no other instance
    gets it, and other chats go elsewhere. An offer that no decode instance takes is given up.

    Raises:
        LaunchError: the port is taken, or a URL is none.
    """
    endings: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: endings.put(number))
    instances = Instances(prefill), Instances(decode)
    server = Router((host, port), *instances, prefill_seconds, max_open_prefills=max_open_prefills)
    thread = threading.Thread(target=server.serve_forever, name="http")
    thread.start()
    try:
        url = f"http://{host}:{server.server_port}"
        logger.info("event=serving url=%s prefill=%s decode=%s", url, ",".join(prefill), ",".join(decode))
        endings.get()
    finally:
        logger.info("event=stopping")
        server.shutdown()
        thread.join()
        server.server_close()


class Offer(NamedTuple):
    """What a prefill instance has computed, and where it is given up."""

    offer: str
    place: Place
    offer_id: str


class HungError(Exception):
    """An instance hangs, and has this request: no other one is to have it."""


class Router(JsonServer):
    """Connections share the turns, and the counts of what clients have open."""

    def __init__(
        self,
        address: tuple[str, int],
        prefill: Instances,
        decode: Instances,
        prefill_seconds: float,
        *,
        probe_seconds: float = _PROBE_SECONDS,
        max_open_prefills: int = MAX_OPEN_PREFILLS,
    ) -> None:
        """`max_open_prefills`: chats of one client beyond so many are computed by decode instances alone.

        Raises `LaunchError` where the address cannot be listened on.
        """
        self.open_prefills = OpenPrefills(max_open_prefills)
        self.prefill, self.decode = prefill, decode
        self.prefill_seconds, self.probe_seconds = prefill_seconds, probe_seconds
        super().__init__(address, _Handler)


class _Handler(JsonHandler):
    server: Router
    max_body_bytes = 3 * 2**20  # with an offer it is still no more than instances take

    def do_GET(self) -> None:
        """Health, models."""
        try:
            if self.path == "/health":
                self._health()
            elif self.path == "/v1/models":
                self._forward(Question("GET", self.path, None, _SHORT_SECONDS), self.server.decode.in_order())
            else:
                self.fail(404, f"no page {self.path}; there are {_CHAT}, /v1/models and /health")
        except ClientGoneError:
            self.note_client_gone()

    def do_POST(self) -> None:
        """A chat."""
        if self.path != _CHAT:
            self.refuse_body(_CHAT)
            return
        try:
            chat = json.loads(self.read_body())
            if not isinstance(chat, dict):
                raise ValueError(f"{type(chat).__name__} instead of an object")
            chat.pop("kv_offer", None)  # only our own: an offer says where to read memory
            body = _encode(chat)
        except LaunchError as error:
            self.fail(400, str(error))
            return
        except (ValueError, RecursionError) as error:
            self.fail(400, f"the body is no JSON object: {error}")
            return
        client, prefills = self.client_address[0], self.server.open_prefills
        may_prefill = prefills.enter(client)
        if not may_prefill:
            logger.info("event=prefill_skipped client=%s num_open=%d", client, prefills.max_per_client)
        try:
            self._answer(chat, body, may_prefill)
        except ClientGoneError:
            self.note_client_gone()
        except HungError as error:
            self.fail(504, str(error))
        except RecursionError as error:  # with the offer it is nested one deeper than it was
            self.fail(400, f"the body is nested too deeply: {error}")
        finally:
            if may_prefill:
                prefills.leave(client)

    def _answer(self, chat: dict[str, Any], body: bytes, may_prefill: bool) -> None:
        offer, is_taken = self._prefill(body) if may_prefill else None, False
        try:
            if offer is not None:
                body = _encode(chat | {"kv_offer": offer.offer})
            question = Question("POST", _CHAT, body, _ANSWER_SECONDS, self.server.probe_seconds)
            is_taken = self._forward(question, self.server.decode.in_turn(), is_stream=bool(chat.get("stream")))
        finally:  # refused, nobody there, or the client has gone: blocks would wait for a reader until their deadline
            if offer is not None and not is_taken:
                self._give_up(offer)

    def _give_up(self, offer: Offer) -> None:
        question = Question("DELETE", f"{_PREFILL}/{quote(offer.offer_id)}", None, _SHORT_SECONDS)
        try:
            with Upstream(offer.place, question, None) as upstream:
                status, _ = upstream.answer()
            logger.info("event=offer_given_up at=%s:%d status=%d", *offer.place, status)
        except _UNREACHABLE as error:
            logger.warning("event=offer_not_given_up at=%s:%d error=%r", *offer.place, error)

    def _prefill(self, body: bytes) -> Offer | None:
        """What a prefill instance offers of this prompt, if it does in time."""
        question = Question("POST", _PREFILL, body, self.server.prefill_seconds)
        for place in self.server.prefill.in_turn():
            if self.server.prefill.is_hung(place):  # and all that follow
                return None
            try:
                with self.server.prefill.asked(place, question, self.connection) as upstream:
                    status, text = upstream.answer()
                    offer = _offer(place, json.loads(text)) if status == 200 else None
            except TimeoutError as error:  # no time is left for another
                logger.warning("event=prefill_hung at=%s:%d error=%r", *place, error)
                if not is_healthy(place, self.connection):
                    raise _hung_error("prefill", place) from error
                return None  # it has much to do
            except ConnectionError as error:  # at once: there is time for another
                logger.warning("event=prefill_unreachable at=%s:%d error=%r", *place, error)
                continue
            except (*_UNREACHABLE, ValueError, LookupError, TypeError) as error:
                logger.warning("event=prefill_failed at=%s:%d error=%r", *place, error)
                return None
            if status != 200:
                level = logging.WARNING if status >= 500 else logging.INFO  # the chat's own fault
                logger.log(level, "event=prefill_refused at=%s:%d status=%d answer=%r", *place, status, text[:200])
            return offer
        return None

    def _forward(self, question: Question, places: Sequence[Place], *, is_stream: bool = False) -> bool:
        """Pass the request on, and the answer back as it comes; whether the offer in it was taken."""
        for place in places:
            answer, has_failed = AnswerSoFar(), False
            try:
                with self.server.decode.asked(place, question, self.connection) as upstream:
                    self._pass_on(upstream, answer)
            except ClientGoneError:
                if not answer.is_good:
                    raise
                self.note_client_gone()  # a stream begins before the offer is asked for, other answers after that
                return not is_stream
            except TimeoutError as error:
                has_failed = True
                logger.warning("event=decode_hung at=%s:%d begun=%s error=%r", *place, answer.has_begun, error)
                if question.may_hang and not answer.has_begun:
                    raise _hung_error("decode", place) from error
            except _UNREACHABLE as error:
                has_failed = True
                logger.warning("event=decode_unreachable at=%s:%d begun=%s error=%r", *place, answer.has_begun, error)
            if answer.has_begun:
                if answer.is_cut:  # the client sees that, too
                    logger.warning("event=answer_cut_off at=%s:%d", *place)
                self.log_request("forwarded")
                return answer.is_good and not answer.is_cut and not has_failed
        self.fail(503, "no decode instance can be reached")
        return False

    def _pass_on(self, upstream: Upstream, answer: AnswerSoFar) -> None:
        for piece in upstream.pieces():
            answer.note(piece)
            self.close_connection = True  # the answer ends with the connection
            self._write(piece)
            if answer.is_whole:  # the client may go now
                return

    def _write(self, piece: bytes) -> None:
        try:
            self.wfile.write(piece)
        except OSError as error:
            raise ClientGoneError from error

    def _health(self) -> None:
        for place in self.server.decode.in_order():
            if is_healthy(place, self.connection):
                self.send(200, {"status": "ok"})
                return
            logger.warning("event=decode_unhealthy at=%s:%d", *place)
        self.fail(503, "no decode instance is healthy")


def _hung_error(role: str, place: Place) -> HungError:
    return HungError(
        f"the {role} instance at {place[0]}:{place[1]} does not answer, nor for its health; it may be because of this "
        "request, so no other instance gets it. Ask for less, or once more"
    )


def _encode(chat: dict[str, Any]) -> bytes:
    """No larger than it came, whatever it was escaped with."""
    return json.dumps(chat, ensure_ascii=False, separators=(",", ":")).encode(errors="surrogatepass")


def _offer(place: Place, answer: Any) -> Offer | None:
    """None where the prompt is too short for one. Raises `LookupError`, `TypeError` for what is no answer."""
    offer, offer_id = answer["offer"], answer["offer_id"]
    return Offer(offer, place, offer_id) if isinstance(offer, str) and isinstance(offer_id, str) else None

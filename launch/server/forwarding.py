"""A request passed on to the first instance that takes it, and the answer back as it comes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aiohttp import web

from fastdeploy_cache.launch.server.answers import failure
from fastdeploy_cache.launch.server.choice import ROUTE_HEADER, Choice
from fastdeploy_cache.launch.server.instances import Instances, Load
from fastdeploy_cache.launch.server.limits import ClientGoneError
from fastdeploy_cache.launch.server.request_log import FACTS, LOGGED_STATUS
from fastdeploy_cache.launch.server.streams import StreamedAnswer
from fastdeploy_cache.launch.server.upstream import Place, Question, Upstream, WholeAnswer

logger = logging.getLogger(__name__)

_OF_A_CONNECTION = ("Connection", "Keep-Alive", "Proxy-Connection", "TE", "Trailer", "Transfer-Encoding", "Upgrade")


class HungError(Exception):
    """An instance hangs, and has this request: no other one is to have it."""

    def __init__(self, role: str, place: Place) -> None:
        super().__init__(
            f"the {role} instance at {place[0]}:{place[1]} does not answer, nor for its health; it may be because of "
            "this request, so no other instance gets it. Ask for less, or once more"
        )


class Forwarding:
    """One request of a client to decode instances."""

    def __init__(
        self,
        upstream: Upstream,
        decode: Instances,
        question: Question,
        *,
        question_of_others: Question | None = None,
        is_stream: bool = False,
    ) -> None:
        """`question_of_others`: for all but the first that is asked, where that is another one."""
        self._upstream, self._decode = upstream, decode
        self._question, self._is_stream = question, is_stream
        self._question_of_others = question_of_others or question
        self._answer: StreamedAnswer | None = None  # once it has begun
        self._has_offer = True  # the question has the offer, if there is one
        self.has_taken_offer = False  # as far as can be told, also where `run` is cancelled

    async def run(
        self, request: web.Request, places: Sequence[Place], choice: Choice | None = None
    ) -> web.StreamResponse:
        """What the client is answered by the first of these instances that does. `choice`: why they have this order.

        Raises:
            HungError: an instance hangs on it.
            ClientGoneError: there is nobody to answer.
        """
        for place in places:
            if place != places[0] and self._question is not self._question_of_others:
                self._question, self._has_offer = self._question_of_others, False
                request[FACTS].pop("lender", None)
            request[FACTS]["decode"] = "{}:{}".format(*place)
            try:
                load = choice.load_of(place) if choice is not None else Load(0.0, 0.0)
                async with self._decode.asked(self._upstream, place, self._question, load) as answer:
                    await self._pass_on(request, answer, load, choice.answered(place) if choice is not None else None)
            except ClientGoneError:
                raise
            except TimeoutError as error:
                logger.warning("event=decode_hung at=%s:%d begun=%s error=%r", *place, self._has_begun, error)
                if self._question.may_hang and not self._has_begun:
                    raise HungError("decode", place) from error
            except OSError as error:
                logger.warning("event=decode_unreachable at=%s:%d begun=%s error=%r", *place, self._has_begun, error)
            else:
                assert self._answer is not None
                return self._answer.end()
            if self._answer is not None:  # the client sees that, too
                self.has_taken_offer = False
                logger.warning("event=answer_cut_off at=%s:%d", *place)
                return self._answer.cut()
        return failure(503, "no decode instance can be reached")

    @property
    def _has_begun(self) -> bool:
        return self._answer is not None

    async def _pass_on(self, request: web.Request, answer: WholeAnswer, load: Load, route: str | None) -> None:
        headers = answer.response.headers.copy()
        if route is not None:
            if "lender" in request[FACTS]:
                route += f"; lender={request[FACTS]['lender']}"
            headers[ROUTE_HEADER] = request[FACTS]["route"] = route
        for name in _OF_A_CONNECTION:
            headers.popall(name, None)
        request[LOGGED_STATUS] = "forwarded"
        request[FACTS]["decode_status"] = answer.response.status
        self._answer = StreamedAnswer(request, answer.response.status, headers, answer.response.reason)
        # a stream begins before the offer is asked for, other answers after that
        self.has_taken_offer = self._has_offer and answer.is_good and not self._is_stream
        await self._answer.begin()
        has_said = not self._is_stream  # the first piece of a stream comes before anything is computed
        async for piece in answer.pieces():
            if has_said:
                load.note_prompt_computed()
            has_said = True
            await self._answer.write(piece)
        self.has_taken_offer = self._has_offer and answer.is_good

"""Instances that serve, as those who lend: their events say what they have cached, and `/v1/lend` has it lent."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_cache.errors import CacheError, LaunchError
from fastdeploy_cache.events import Mirror
from fastdeploy_cache.launch.server.api_requests import LEND_PATH
from fastdeploy_cache.launch.server.prefix_lookup import EventSource
from fastdeploy_cache.launch.server.upstream import Offer, Place, Question, Upstream, give_up, offer_in
from fastdeploy_cache.peers.borrowing import Loan
from fastdeploy_cache.request import Request

logger = logging.getLogger(__name__)

_SHORT_SECONDS, _QUIET_SECONDS = 2.0, 10.0  # of giving up; for so long one that has failed is left alone
_MOST_BYTES = 2**20  # of an answer


class ServingLenders:
    """See `fastdeploy_cache.peers.borrowing.Lenders`. Any thread."""

    def __init__(self, sources: Sequence[EventSource], keys_folder: Path | None = None) -> None:
        """Raises `LaunchError`: one is named twice; `ConfigError`, `IPCError`: an address that is none, or keys that
        cannot be read."""
        self._mirrors: dict[Place, Mirror] = {}
        self._quiet_until: dict[Place, float] = {}
        try:
            for source in sources:
                if source.place in self._mirrors:
                    raise LaunchError(f"--borrow-from names {source.place[0]}:{source.place[1]} twice; name it once")
                self._mirrors[source.place] = Mirror(source.endpoint, keys_folder=keys_folder, publisher_key=source.key)
        except (CacheError, LaunchError):
            self.close()
            raise

    def close(self) -> None:
        """Listen no more."""
        for mirror in self._mirrors.values():
            mirror.close()

    def num_tokens(self, request: Request) -> int:
        """See `Lenders`."""
        return self._best(request)[1]

    def lend(self, request: Request, timeout_seconds: float) -> Loan | None:
        """See `Lenders`. Whatever goes wrong, nothing is lent, and who has failed is left alone for a while."""
        place, _ = self._best(request)
        if place is None:
            return None
        salt = {"cache_salt": request.namespace} if request.namespace else {}
        body = json.dumps({"prompt": np.frombuffer(request.prompt, np.int32).tolist(), **salt}).encode()
        question = Question("POST", LEND_PATH, body, timeout_seconds)
        try:
            status, answer = _run(lambda upstream: _asked(upstream, place, question), timeout_seconds)
            if status != 200:
                raise ValueError(f"status {status}: {answer}")
            offer = offer_in(place, answer)
            return Loan(b64decode(offer.offer), functools.partial(_give_up, offer)) if offer is not None else None
        except (OSError, ValueError, LookupError, TypeError) as error:
            self._quiet_until[place] = time.monotonic() + _QUIET_SECONDS
            logger.warning("event=not_lent at=%s:%d error=%.200r", *place, error)
            return None

    def _best(self, request: Request) -> tuple[Place | None, int]:
        """Who has most of it in its tiers, and how many tokens. What lies on a disk is not lent."""
        best, most = None, 0
        if request.images:  # which nobody can say to `/v1/lend`
            return None, 0
        tokens, now = np.frombuffer(request.prompt, np.int32), time.monotonic()
        for place, mirror in self._mirrors.items():
            if self._quiet_until.get(place, 0.0) > now:
                continue
            found = mirror.find(tokens, request.namespace)
            if (num_tokens := found.num_gpu_tokens + found.num_cpu_tokens) > most:
                best, most = place, num_tokens
        return best, most


def _give_up(offer: Offer) -> None:
    try:
        _run(lambda upstream: give_up(upstream, offer), _SHORT_SECONDS)
    except TimeoutError as error:
        logger.warning("event=offer_not_given_up at=%s:%d error=%r", *offer.place, error)


def _run(call: Callable[[Upstream], Awaitable[Any]], timeout_seconds: float) -> Any:
    """What this comes to, all of it within that time: else `TimeoutError`."""

    async def run() -> Any:
        upstream = Upstream()
        try:
            return await asyncio.wait_for(call(upstream), timeout_seconds)
        finally:
            await upstream.close()

    return asyncio.run(run())


async def _asked(upstream: Upstream, place: Place, question: Question) -> tuple[int, Any]:
    """Status and answer. Raises `OSError`, and `ValueError` for an answer that is none."""
    data = bytearray()
    async with upstream.ask(place, question) as answer:
        async for piece in answer.pieces():
            data += piece
            if len(data) > _MOST_BYTES:
                raise ValueError(f"an answer of more than {_MOST_BYTES} bytes")
        return answer.response.status, json.loads(data)

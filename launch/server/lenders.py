"""Instances that serve, as those who lend: their events say what they have cached, and `/v1/lend` has it lent."""

from __future__ import annotations

import functools
import http.client
import json
import logging
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from fastdeploy_cache.errors import CacheError
from fastdeploy_cache.events import Mirror
from fastdeploy_cache.launch.server.api_requests import LEND_PATH, PREFILL_PATH
from fastdeploy_cache.launch.server.prefix_lookup import EventSource
from fastdeploy_cache.launch.server.upstream import Place
from fastdeploy_cache.peers.borrowing import Loan
from fastdeploy_cache.request import Request

logger = logging.getLogger(__name__)

_SHORT_SECONDS = 2.0


class ServingLenders:
    """See `fastdeploy_cache.peers.borrowing.Lenders`. Any thread."""

    def __init__(self, sources: Sequence[EventSource], keys_folder: Path | None = None) -> None:
        """Raises `ConfigError`, `IPCError`: an address that is none, or keys that cannot be read."""
        self._mirrors: dict[Place, Mirror] = {}
        try:
            for source in sources:
                self._mirrors[source.place] = Mirror(source.endpoint, keys_folder=keys_folder, publisher_key=source.key)
        except CacheError:
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
        """See `Lenders`. Whatever goes wrong, nothing is lent."""
        place, _ = self._best(request)
        if place is None:
            return None
        salt = {"cache_salt": request.namespace} if request.namespace else {}
        body = {"prompt": _tokens_of(request).tolist(), **salt}
        try:
            answer = _asked(place, "POST", LEND_PATH, timeout_seconds, body)
            offer, offer_id = answer["offer"], answer["offer_id"]
            if offer is None:
                return None
            give_up = functools.partial(_give_up, place, str(offer_id))
            return Loan(b64decode(offer), give_up)
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            logger.warning("event=not_lent at=%s:%d error=%r", *place, error)
            return None

    def _best(self, request: Request) -> tuple[Place | None, int]:
        """Who has most of it in its tiers, and how many tokens. What lies on a disk is not lent."""
        best, most = None, 0
        if request.images:  # which nobody can say to `/v1/lend`
            return None, 0
        tokens = _tokens_of(request)
        for place, mirror in self._mirrors.items():
            found = mirror.find(tokens, request.namespace)
            num_tokens = found.num_tokens if not found.num_disk_tokens else found.num_gpu_tokens
            if num_tokens > most:
                best, most = place, num_tokens
        return best, most


def _tokens_of(request: Request) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.frombuffer(request.prompt, np.int32)


def _give_up(place: Place, offer_id: str) -> None:
    try:
        _asked(place, "DELETE", f"{PREFILL_PATH}/{quote(offer_id)}", _SHORT_SECONDS)
    except (OSError, http.client.HTTPException, ValueError) as error:
        logger.warning("event=offer_not_given_up at=%s:%d error=%r", *place, error)


def _asked(place: Place, method: str, path: str, timeout_seconds: float, body: Any = None) -> Any:
    connection = http.client.HTTPConnection(*place, timeout=timeout_seconds)
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()

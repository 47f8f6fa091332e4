"""Prompts that are computed for other instances, and the offers of their blocks."""

from __future__ import annotations

import asyncio
import base64
import functools
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.launch.reference_engine.generation import (
    Generation,
    GenerationBusyError,
    GenerationError,
    GenerationTimeoutError,
)
from fastdeploy_cache.launch.server.api_requests import ApiRequest
from fastdeploy_cache.launch.server.arrivals import Arrivals
from fastdeploy_cache.launch.server.limits import ClientCounts
from fastdeploy_cache.peers.transfers import Send
from fastdeploy_cache.request import Request

_OFFER_TIMEOUT_SECONDS = 60.0  # for a prompt to be begun
_STORED_TIMEOUT_SECONDS = 120.0  # for all of it to be in storage
_LOAD_SECONDS = 2.0  # for what is lent, to the GPU
_NOTHING: dict[str, Any] = {"offer": None, "offer_id": None, "num_blocks": 0}


class Prefill(NamedTuple):
    """A prompt that is computed for another instance: what is done, None where nothing is offered, and the answer."""

    generation: Generation | None
    answer: dict[str, Any]


class Prefills:
    """Computes prompts, and remembers what is offered of them. Its coroutines are for one event loop."""

    def __init__(self, engine: Engine, prompts_of: Callable[[ApiRequest], Sequence[Any]]) -> None:
        """`prompts_of` a request are the token ids of each of its prompts."""
        self._engine, self._prompts_of = engine, prompts_of
        peer = engine.cache.config.peer
        # half of them, so that one client leaves the others room; the router is one client, whomever it asks for
        self._open = ClientCounts(max(1, peer.max_transfers // 2) if peer is not None else 1)
        self._lock = threading.Lock()  # a send ends on the cache's thread
        self._offered: dict[str, Callable[[], object]] = {}  # by offer id, while their sends are open

    async def compute(self, request: ApiRequest, client: str = "", *, name: str = "request") -> Prefill:
        """Have the prompt computed for another instance; returns once its blocks can be asked for.

        With the link `storage` that is when they are in the store, with all others as soon as it has begun. The cache
        knows it by its `name`. It counts as one of the `client`'s until its blocks have been read or given up. Nothing
        is offered of a prompt without a full block, nor of several prompts in one request.

        Raises:
            GenerationBusyError: that client has as many as it may.
            GenerationError: too long with its answer, not now, or the engine has stopped.
        """
        if not self._open.enter(client):
            num = self._open.max_per_client
            text = f"{num} prompts of {client} are computed, or offered and not read yet; that is as many as may be"
            raise GenerationBusyError(f"{text}: ask again when one of them is over")
        with ExitStack() as stack:
            stack.callback(self._open.leave, client)
            prefill = await self._compute(request, name)
            if prefill.generation is not None and prefill.generation.send is not None:
                prefill.generation.send.on_done(stack.pop_all().close)
            return prefill

    async def _compute(self, request: ApiRequest, name: str) -> Prefill:
        config = self._engine.cache.config
        nothing = Prefill(None, _NOTHING)
        if request.num_prompts > 1:  # an offer is of one prompt
            return nothing
        (prompt,) = await asyncio.to_thread(self._prompts_of, request)
        if len(prompt) < config.block_size:
            return nothing
        generation = self._engine.intake.submit_prefill(
            prompt, request.max_new_tokens, namespace=request.namespace, name=name
        )
        arrivals = Arrivals(self._engine, [generation])
        send = await arrivals.take(generation.wait_send, _OFFER_TIMEOUT_SECONDS)
        if config.peer is not None and config.peer.link == "storage":
            send.on_done(arrivals.note)
            await arrivals.take(lambda seconds: _wait_stored(send, seconds), _STORED_TIMEOUT_SECONDS)
        cancel = functools.partial(self._engine.intake.cancel, generation)
        return Prefill(generation, self._offered_by(send, cancel))

    async def lend(self, request: ApiRequest, client: str = "", *, name: str = "request") -> dict[str, Any]:
        """Offer what is cached of a prompt; nothing is computed. It counts as one of the client's, as `compute` does.

        Raises:
            GenerationBusyError: that client has as many as it may.
            CacheError: not now, or it can never fit.
        """
        if request.num_prompts > 1:
            return _NOTHING
        if not self._open.enter(client):
            raise GenerationBusyError(f"{self._open.max_per_client} prompts of {client} are offered; ask again later")
        with ExitStack() as stack:
            stack.callback(self._open.leave, client)
            (prompt,) = await asyncio.to_thread(self._prompts_of, request)
            asked = Request(request_id=f"lent {name}", prompt_token_ids=prompt, namespace=request.namespace)
            send = await self._lend(asked)
            if send is None:
                return _NOTHING
            send.on_done(stack.pop_all().close)
            return self._offered_by(send, functools.partial(self._engine.cache.peers.cancel_send, send))

    async def _lend(self, asked: Request) -> Send | None:
        """Wait for what has to be loaded, and offer it; None where a block of it is not here. Who is cancelled while he
        waits has offered nothing."""
        cache = self._engine.cache
        asked.counted = asked.used = True  # nobody's request here: neither hit rates nor policies hear of it
        match = cache.match(asked)
        try:
            match = await match.arrived(_LOAD_SECONDS)
            return cache.peers.lend(asked) if match.num_tokens >= cache.config.block_size else None
        finally:
            cache.release(asked)

    def _offered_by(self, send: Send, cancel: Callable[[], object]) -> dict[str, Any]:
        """The answer to who asked for it. Nobody can guess its id: who knows it may give the offer up, by `cancel`."""
        offer_id = secrets.token_urlsafe()
        with self._lock:
            self._offered[offer_id] = cancel

        def forget() -> None:
            with self._lock:
                self._offered.pop(offer_id, None)

        send.on_done(forget)
        offer = base64.b64encode(send.offer).decode()
        return {"offer": offer, "offer_id": offer_id, "num_blocks": send.num_blocks}

    def cancel(self, offer_id: str) -> bool:
        """Nobody will ask for what was offered under this id; False where it is read or given up already."""
        with self._lock:
            cancel = self._offered.get(offer_id)
        if cancel is not None:
            cancel()
        return cancel is not None


def _wait_stored(send: Send, seconds: float) -> None:
    if send.wait(seconds):
        return
    if not send.done:
        raise GenerationTimeoutError("the blocks are not in storage yet")
    raise GenerationError(f"the blocks are not in storage: {send.error}")

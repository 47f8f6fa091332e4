"""The OpenAI-style chat endpoint over the engine: parsing, answers, streams."""

from __future__ import annotations

import base64
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.launch.reference_engine.generation import (
    Generation,
    GenerationBusyError,
    GenerationError,
    GenerationRefusedError,
    GenerationTimeoutError,
)
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer, StreamDecoder
from fastdeploy_cache.launch.server.open_prefills import OpenPrefills
from fastdeploy_cache.peers.transfers import Send

MODEL_NAME = "SmolLM2-135M-Instruct"
_SLICE_SECONDS = 1.0  # so soon it is noticed that a client has gone
_TOKEN_TIMEOUT_SECONDS = 120.0
_OFFER_TIMEOUT_SECONDS = 60.0  # for a prompt to be begun
_STORED_TIMEOUT_SECONDS = 120.0  # for all of it to be in storage


T = TypeVar("T")


class NotWantedError(Exception):
    """The client has gone; what worked for it is cancelled."""


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A part of a message; the model reads text alone."""

    text: str


class Message(msgspec.Struct):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart] | None = None

    def text(self) -> str:
        """The whole content."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(msgspec.Struct):
    """Only `include_usage` is known."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    """The body of POST /v1/chat/completions and /v1/prefill. Sampling is greedy; other fields of the API are ignored.

    `cache_salt`: who uses another one, or none, shares no cached block with this chat.
    `kv_offer`: what /v1/prefill of another instance has answered for the same messages.
    """

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 64
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    kv_offer: bytes | None = None  # base64 in JSON

    @property
    def max_new_tokens(self) -> int:
        """Of the answer."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def namespace(self) -> str:
        """In which its blocks are cached."""
        return self.cache_salt or ""


class Prefill(NamedTuple):
    """A prompt that is computed for another instance: what is done, None where it is too short, and the answer."""

    generation: Generation | None
    answer: dict[str, Any]


class ChatApi:
    """Answers chat requests with the engine. Any number of threads."""

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        peer = engine.cache.config.peer
        # half of them, so that one client leaves the others room; the router is one client, whomever it asks for
        self._open = OpenPrefills(max(1, peer.max_transfers // 2) if peer is not None else 1)
        self._lock = threading.Lock()
        self._offered: dict[str, Generation] = {}  # by offer id, while their sends are open

    def submit(self, request: ChatRequest) -> Generation:
        """Queue it.

        Raises:
            GenerationError: too long, or the engine has stopped.
        """
        return self._engine.submit(
            self._prompt(request), request.max_new_tokens, request.kv_offer, namespace=request.namespace
        )

    def prefill(self, request: ChatRequest, is_wanted: Callable[[], bool], client: str = "") -> Prefill:
        """Have the prompt computed for another instance; returns once its blocks can be asked for.

        With the link `storage` that is when they are in the store, with all others as soon as it has begun. It counts
        as one of the `client`'s until its blocks have been read or given up.

        Raises:
            NotWantedError: nobody waits for it any more.
            GenerationBusyError: that client has as many as it may.
            GenerationError: too long with its answer, not now, or the engine has stopped.
        """
        if not self._open.enter(client):
            num = self._open.max_per_client
            text = f"{num} prompts of {client} are computed, or offered and not read yet; that is as many as may be"
            raise GenerationBusyError(f"{text}: ask again when one of them is over")
        with ExitStack() as stack:
            stack.callback(self._open.leave, client)
            prefill = self._prefill(request, is_wanted)
            if prefill.generation is not None and prefill.generation.send is not None:
                prefill.generation.send.on_done(stack.pop_all().close)
            return prefill

    def _prefill(self, request: ChatRequest, is_wanted: Callable[[], bool]) -> Prefill:
        config, prompt = self._engine.cache.config, self._prompt(request)
        if len(prompt) < config.block_size:
            return Prefill(None, {"offer": None, "offer_id": None, "num_blocks": 0})
        generation = self._engine.submit_prefill(prompt, request.max_new_tokens, namespace=request.namespace)
        send = self._wait(generation, generation.wait_send, _OFFER_TIMEOUT_SECONDS, is_wanted)
        if config.peer is not None and config.peer.link == "storage":
            self._wait(generation, lambda seconds: _wait_stored(send, seconds), _STORED_TIMEOUT_SECONDS, is_wanted)
        offer = base64.b64encode(send.offer).decode()
        answer = {"offer": offer, "offer_id": self._note_offered(generation, send), "num_blocks": send.num_blocks}
        return Prefill(generation, answer)

    def _note_offered(self, generation: Generation, send: Send) -> str:
        """Returns an id that nobody can guess: who knows it may give the offer up."""
        offer_id = secrets.token_urlsafe()
        with self._lock:
            self._offered[offer_id] = generation

        def forget() -> None:
            with self._lock:
                self._offered.pop(offer_id, None)

        send.on_done(forget)
        return offer_id

    def cancel_prefill(self, offer_id: str) -> bool:
        """Nobody will ask for what `prefill` has answered under this id; False where it is read or given up already."""
        with self._lock:
            generation = self._offered.get(offer_id)
        if generation is not None:
            self._engine.cancel(generation)
        return generation is not None

    def _wait(
        self, generation: Generation, wait: Callable[[float], T], seconds: float, is_wanted: Callable[[], bool]
    ) -> T:
        """What `wait` brings within these seconds; else the generation is cancelled.

        Raises:
            NotWantedError, GenerationError: see `complete`.
        """
        until = time.monotonic() + seconds
        try:
            while True:
                try:
                    return wait(max(0.0, min(_SLICE_SECONDS, until - time.monotonic())))
                except GenerationTimeoutError:
                    if not is_wanted():
                        raise NotWantedError from None
                    if time.monotonic() >= until:
                        text = f"nothing came within {seconds} s; the engine is overloaded, paused or asleep"
                        raise GenerationTimeoutError(text) from None
        except (GenerationError, NotWantedError):
            self._engine.cancel(generation)
            raise

    def cancel(self, generation: Generation) -> None:
        """Nobody waits for it any more."""
        self._engine.cancel(generation)

    def _prompt(self, request: ChatRequest) -> Any:
        """Its tokens. What can never fit is refused by its length: to tokenise it may take many seconds."""
        messages = [{"role": message.role, "content": message.text()} for message in request.messages]
        num_least, limit = self._tokenizer.min_tokens(messages), self._engine.max_tokens
        if num_least + request.max_new_tokens > limit:
            num_chars = sum(len(message["content"]) for message in messages)
            raise GenerationRefusedError(
                f"{num_chars} characters in {len(messages)} messages count as {num_least} tokens or more, and "
                f"{request.max_new_tokens} new ones are asked for; together they must be at most {limit}"
            )
        return self._tokenizer.encode_chat(messages)

    def complete(self, generation: Generation, is_wanted: Callable[[], bool]) -> dict[str, Any]:
        """Wait for the whole answer.

        Raises:
            NotWantedError: nobody waits for it any more.
            GenerationError: the engine failed it, or is too slow.
        """
        while self._wait(generation, generation.next_token, _TOKEN_TIMEOUT_SECONDS, is_wanted) is not None:
            if not is_wanted():
                self._engine.cancel(generation)
                raise NotWantedError
        message = {"role": "assistant", "content": self._tokenizer.decode(generation.output)}
        choice = {"index": 0, "message": message, "finish_reason": generation.finish_reason}
        return {**_envelope("chat.completion"), "choices": [choice], "usage": _usage(generation)}

    def stream(
        self, generation: Generation, include_usage: bool, is_wanted: Callable[[], bool]
    ) -> Iterator[dict[str, Any]]:
        """The answer piece by piece.

        Raises:
            NotWantedError: nobody waits for it any more.
            GenerationError: the engine failed it, or is too slow.
        """
        envelope, decoder = _envelope("chat.completion.chunk"), StreamDecoder(self._tokenizer)

        def chunk(delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
            return {**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

        yield chunk({"role": "assistant", "content": ""})
        wait = generation.next_token
        while (token := self._wait(generation, wait, _TOKEN_TIMEOUT_SECONDS, is_wanted)) is not None:
            if text := decoder.push(token):
                yield chunk({"content": text})
        if text := decoder.finish():
            yield chunk({"content": text})
        yield chunk({}, generation.finish_reason)
        if include_usage:
            yield {**envelope, "choices": [], "usage": _usage(generation)}


def _wait_stored(send: Send, seconds: float) -> None:
    if send.wait(seconds):
        return
    if not send.done:
        raise GenerationTimeoutError("the blocks are not in storage yet")
    raise GenerationError(f"the blocks are not in storage: {send.error}")


def _envelope(kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": MODEL_NAME}


def _usage(generation: Generation) -> dict[str, Any]:
    num_prompt, num_output = generation.request.num_prompt_tokens, len(generation.output)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }

"""The OpenAI-style chat endpoint over the engine: parsing, answers, streams."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from launch.reference_engine.engine import Engine
from launch.reference_engine.generation import Generation, GenerationError
from launch.reference_engine.tokenizer import ChatTokenizer, StreamDecoder

MODEL_NAME = "SmolLM2-135M-Instruct"
_TOKEN_TIMEOUT_SECONDS = 120.0
_OFFER_TIMEOUT_SECONDS = 60.0  # for a prompt to be begun
_STORED_TIMEOUT_SECONDS = 120.0  # for all of it to be in storage


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

    `kv_offer`: what /v1/prefill of another instance has answered for the same messages.
    """

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 64
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    kv_offer: bytes | None = None  # base64 in JSON


class Prefill(NamedTuple):
    """A prompt that is computed for another instance: what is done, None where it is too short, and the answer."""

    generation: Generation | None
    answer: dict[str, Any]


class ChatApi:
    """Answers chat requests with the engine. Any number of threads."""

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer

    def submit(self, request: ChatRequest) -> Generation:
        """Queue it.

        Raises:
            GenerationError: too long, or the engine has stopped.
        """
        max_new_tokens = request.max_completion_tokens or request.max_tokens
        return self._engine.submit(self._prompt(request), max_new_tokens, request.kv_offer)

    def prefill(self, request: ChatRequest) -> Prefill:
        """Have the prompt computed for another instance; returns once its blocks can be asked for.

        With the link `storage` that is when they are in the store, with all others as soon as it has begun.

        Raises:
            GenerationError: too long, not now, or the engine has stopped.
        """
        config, prompt = self._engine.cache.config, self._prompt(request)
        if len(prompt) < config.block_size:
            return Prefill(None, {"offer": None, "request_id": None, "num_blocks": 0})
        generation = self._engine.submit_prefill(prompt)
        try:
            send = generation.wait_send(_OFFER_TIMEOUT_SECONDS)
            in_storage = config.peer is not None and config.peer.link == "storage"
            if in_storage and not send.wait(_STORED_TIMEOUT_SECONDS):
                raise GenerationError(f"the blocks are not in storage: {send.error or 'not in time'}")
        except GenerationError:
            self._engine.cancel(generation)
            raise
        offer = base64.b64encode(send.offer).decode()
        answer = {"offer": offer, "request_id": generation.request.request_id, "num_blocks": send.num_blocks}
        return Prefill(generation, answer)

    def cancel(self, generation: Generation) -> None:
        """Nobody waits for it any more."""
        self._engine.cancel(generation)

    def _prompt(self, request: ChatRequest) -> Any:
        messages = [{"role": message.role, "content": message.text()} for message in request.messages]
        return self._tokenizer.encode_chat(messages)

    def complete(self, generation: Generation, is_wanted: Callable[[], bool]) -> dict[str, Any] | None:
        """Wait for the whole answer; None where it is no longer wanted.

        Raises:
            GenerationError: the engine failed it, or is too slow.
        """
        while generation.next_token(_TOKEN_TIMEOUT_SECONDS) is not None:
            if not is_wanted():
                self._engine.cancel(generation)
                return None
        message = {"role": "assistant", "content": self._tokenizer.decode(generation.output)}
        choice = {"index": 0, "message": message, "finish_reason": generation.finish_reason}
        return {**_envelope("chat.completion"), "choices": [choice], "usage": _usage(generation)}

    def stream(self, generation: Generation, include_usage: bool) -> Iterator[dict[str, Any]]:
        """The answer piece by piece.

        Raises:
            GenerationError: the engine failed it, or is too slow.
        """
        envelope, decoder = _envelope("chat.completion.chunk"), StreamDecoder(self._tokenizer)

        def chunk(delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
            return {**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

        yield chunk({"role": "assistant", "content": ""})
        while (token := generation.next_token(_TOKEN_TIMEOUT_SECONDS)) is not None:
            if text := decoder.push(token):
                yield chunk({"content": text})
        if text := decoder.finish():
            yield chunk({"content": text})
        yield chunk({}, generation.finish_reason)
        if include_usage:
            yield {**envelope, "choices": [], "usage": _usage(generation)}


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

"""The OpenAI-style chat endpoint over the engine: parsing, answers, streams."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec

from launch.reference_engine.engine import Engine
from launch.reference_engine.generation import Generation
from launch.reference_engine.tokenizer import ChatTokenizer, StreamDecoder

MODEL_NAME = "SmolLM2-135M-Instruct"
_TOKEN_TIMEOUT_SECONDS = 120.0


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
    """The body of POST /v1/chat/completions. Sampling is greedy; other fields of the API are ignored."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 64
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None


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
        messages = [{"role": message.role, "content": message.text()} for message in request.messages]
        prompt = self._tokenizer.encode_chat(messages)
        return self._engine.submit(prompt, request.max_completion_tokens or request.max_tokens)

    def complete(self, generation: Generation) -> dict[str, Any]:
        """Wait for the whole answer.

        Raises:
            GenerationError: the engine failed it, or is too slow.
        """
        while generation.next_token(_TOKEN_TIMEOUT_SECONDS) is not None:
            pass
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

"""The OpenAI-style chat over the engine: whole answers, and streams of them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.launch.reference_engine.generation import Generation, GenerationRefusedError
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer, StreamDecoder
from fastdeploy_cache.launch.server.arrivals import Arrivals
from fastdeploy_cache.launch.server.chat_request import ChatRequest
from fastdeploy_cache.launch.server.prefills import Prefills

MODEL_NAME = "SmolLM2-135M-Instruct"
_TOKEN_TIMEOUT_SECONDS = 120.0


class ChatApi:
    """Answers chat requests with the engine, on one event loop. Who is cancelled while it waits has cancelled what it
    waits for."""

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self.prefills = Prefills(engine, self._tokens_of)

    async def submit(self, request: ChatRequest) -> Generation:
        """Queue it.

        Raises:
            GenerationError: too long, or the engine has stopped.
        """
        prompt = await asyncio.to_thread(self._tokens_of, request)  # others are answered meanwhile
        return self._engine.intake.submit(prompt, request.max_new_tokens, request.kv_offer, namespace=request.namespace)

    def _tokens_of(self, request: ChatRequest) -> Any:
        """The tokens of the prompt. One that can never fit is refused by its length: tokenising it may take seconds."""
        messages = [{"role": message.role, "content": message.text()} for message in request.messages]
        num_least, limit = self._tokenizer.min_tokens(messages), self._engine.intake.max_tokens
        if num_least + request.max_new_tokens > limit:
            num_chars = sum(len(message["content"]) for message in messages)
            raise GenerationRefusedError(
                f"{num_chars} characters in {len(messages)} messages count as {num_least} tokens or more, and "
                f"{request.max_new_tokens} new ones are asked for; together they must be at most {limit}"
            )
        return self._tokenizer.encode_chat(messages)

    def cancel(self, generation: Generation) -> None:
        """Nobody waits for it any more."""
        self._engine.intake.cancel(generation)

    async def complete(self, generation: Generation) -> dict[str, Any]:
        """Wait for the whole answer.

        Raises:
            GenerationError: the engine failed it, or is too slow.
        """
        arrivals = Arrivals(self._engine, generation)
        while await arrivals.take(generation.next_token, _TOKEN_TIMEOUT_SECONDS) is not None:
            pass
        message = {"role": "assistant", "content": self._tokenizer.decode(generation.output)}
        choice = {"index": 0, "message": message, "finish_reason": generation.finish_reason}
        return {**_envelope("chat.completion"), "choices": [choice], "usage": _usage(generation)}

    async def stream(self, generation: Generation, include_usage: bool) -> AsyncIterator[dict[str, Any]]:
        """The answer piece by piece.

        Raises:
            GenerationError: the engine failed it, or is too slow.
        """
        envelope, decoder = _envelope("chat.completion.chunk"), StreamDecoder(self._tokenizer)
        arrivals = Arrivals(self._engine, generation)

        def chunk(delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
            return {**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

        yield chunk({"role": "assistant", "content": ""})
        while (token := await arrivals.take(generation.next_token, _TOKEN_TIMEOUT_SECONDS)) is not None:
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

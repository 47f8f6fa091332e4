"""OpenAI-style chats and completions over the engine: whole answers, and streams of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.launch.reference_engine.generation import Generation, GenerationRefusedError
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.server import answer_forms
from fastdeploy_cache.launch.server.answer_text import AnswerText
from fastdeploy_cache.launch.server.api_fields import RefusedFieldError
from fastdeploy_cache.launch.server.api_requests import ApiRequest, CompletionRequest
from fastdeploy_cache.launch.server.arrivals import Arrivals
from fastdeploy_cache.launch.server.prefills import Prefills

_TOKEN_TIMEOUT_SECONDS = 120.0


class ChatApi:
    """Answers requests with the engine, on one event loop. Who is cancelled while it waits has cancelled what it waits
    for."""

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self.prefills = Prefills(engine, self._tokens_of)

    async def submit(self, request: ApiRequest, *, name: str = "request") -> Generation:
        """Queue it; the cache knows it by this name.

        Raises:
            GenerationError: too long, or the engine has stopped.
            RefusedFieldError: a token that the model does not have.
        """
        prompt = await asyncio.to_thread(self._tokens_of, request)  # others are answered meanwhile
        return self._engine.intake.submit(
            prompt,
            request.max_new_tokens,
            request.kv_offer,
            sampling=request.sampling,
            namespace=request.namespace,
            name=name,
        )

    def _tokens_of(self, request: ApiRequest) -> Any:
        """The tokens of the prompt. One that can never fit is refused by its length: tokenising it may take seconds."""
        if isinstance(request, CompletionRequest):
            return self._tokens_of_prompt(request)
        messages = [{"role": message.role, "content": message.text()} for message in request.messages]
        num_chars = sum(len(message["content"]) for message in messages)
        what = f"{num_chars} characters in {len(messages)} messages"
        self._check_fits(what, self._tokenizer.min_tokens(messages), request)
        return self._tokenizer.encode_chat(messages)

    def _tokens_of_prompt(self, request: CompletionRequest) -> Any:
        prompt, num_known = request.prompt, self._tokenizer.num_tokens
        if isinstance(prompt, list):
            for place, token_id in enumerate(prompt):
                if not 0 <= token_id < num_known:
                    text = f"prompt[{place}] is {token_id}; the model's token ids are 0 to {num_known - 1}"
                    raise RefusedFieldError("prompt", text, code="invalid_value")
            return prompt
        self._check_fits(f"{len(prompt)} characters", self._tokenizer.min_text_tokens(prompt), request)
        return self._tokenizer.encode(prompt)

    def _check_fits(self, what: str, num_least: int, request: ApiRequest) -> None:
        limit = self._engine.intake.max_tokens
        if num_least + request.max_new_tokens > limit:
            raise GenerationRefusedError(
                f"{what} count as {num_least} tokens or more, and {request.max_new_tokens} new ones are asked for; "
                f"together they must be at most {limit}"
            )

    def cancel(self, generation: Generation) -> None:
        """Nobody waits for it any more."""
        self._engine.intake.cancel(generation)

    async def complete(self, request: ApiRequest, generation: Generation) -> dict[str, Any]:
        """Wait for the whole answer.

        Raises:
            GenerationError: the engine failed it, or is too slow.
        """
        text = AnswerText(self._tokenizer, request.stop_texts)
        said = "".join([piece async for piece in self._pieces(generation, text)])
        choice = answer_forms.whole_choice(request, said, _reason(generation, text))
        usage = answer_forms.usage_of(generation, text.num_tokens)
        return {**answer_forms.envelope(request), "choices": [choice], "usage": usage}

    async def stream(self, request: ApiRequest, generation: Generation) -> AsyncIterator[dict[str, Any]]:
        """The answer piece by piece.

        Raises:
            GenerationError: the engine failed it, or is too slow.
        """
        text = AnswerText(self._tokenizer, request.stop_texts)
        envelope: dict[str, Any] = answer_forms.envelope(request) | ({"usage": None} if request.wants_usage else {})
        for choice in answer_forms.first_choices(request):
            yield {**envelope, "choices": [choice]}
        async with aclosing(self._pieces(generation, text)) as pieces:
            async for piece in pieces:
                yield {**envelope, "choices": [answer_forms.text_choice(request, piece)]}
        yield {**envelope, "choices": [answer_forms.last_choice(request, _reason(generation, text))]}
        if request.wants_usage:
            yield {**envelope, "choices": [], "usage": answer_forms.usage_of(generation, text.num_tokens)}

    async def _pieces(self, generation: Generation, text: AnswerText) -> AsyncGenerator[str, None]:
        arrivals = Arrivals(self._engine, generation)
        while not text.has_stopped:
            token = await arrivals.take(generation.next_token, _TOKEN_TIMEOUT_SECONDS)
            if token is None:
                break
            if piece := text.push(token):
                yield piece
        if text.has_stopped:
            self._engine.intake.cancel(generation, "stop")  # the engine knows of no texts, and would go on
        if piece := text.finish():
            yield piece


def _reason(generation: Generation, text: AnswerText) -> str | None:
    return "stop" if text.has_stopped else generation.finish_reason

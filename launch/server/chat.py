"""OpenAI-style chats and completions over the engine: whole answers, and streams of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.launch.reference_engine.generation import Generation, GenerationTimeoutError
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.server import answer_forms
from fastdeploy_cache.launch.server.answer_text import AnswerText
from fastdeploy_cache.launch.server.api_fields import RefusedFieldError
from fastdeploy_cache.launch.server.api_prompts import PromptReader
from fastdeploy_cache.launch.server.api_requests import ApiRequest
from fastdeploy_cache.launch.server.arrivals import Arrivals
from fastdeploy_cache.launch.server.prefills import Prefills

_TOKEN_TIMEOUT_SECONDS = 120.0


class ChatApi:
    """Answers requests with the engine, on one event loop. Who is cancelled while it waits has cancelled what it waits
    for."""

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._reader = PromptReader(tokenizer, self._check_fits)
        self.prefills = Prefills(engine, self._reader.prompts_of)

    async def submit(self, request: ApiRequest, *, name: str = "request") -> list[Generation]:
        """Queue each of its prompts, in their order, or none; the cache knows them by this name.

        Raises:
            RefusedFieldError: too long, or a token that the model does not have.
            GenerationError: not what this instance takes, or the engine has stopped.
        """
        generations: list[Generation] = []
        try:
            for prompt in await asyncio.to_thread(self._reader.prompts_of, request):  # others are answered meanwhile
                generations.append(
                    self._engine.intake.submit(
                        prompt,
                        request.max_new_tokens,
                        request.kv_offer,
                        sampling=request.sampling,
                        namespace=request.namespace,
                        name=name,
                        is_lent=request.kv_is_lent,
                        session_id=request.session_id or "",
                        will_go_on=request.will_go_on,
                    )
                )
                await asyncio.sleep(0)  # others, again: where there is storage, each prompt is hashed
        except BaseException:
            self.cancel(*generations)
            raise
        return generations

    def _check_fits(self, what: str, num_least: int, unit: str, request: ApiRequest) -> None:
        intake, num_new = self._engine.intake, request.max_new_tokens
        limit, why = intake.max_tokens, intake.limit_reason
        if num_least + num_new <= limit:
            return
        if num_new >= limit and request.new_tokens_field is not None:  # no prompt at all would fit
            at_most = f"prompt and answer together have at most {limit} tokens, {why}"
            text = f"{request.new_tokens_field} is {num_new}; {at_most}"
            raise RefusedFieldError(request.new_tokens_field, text, code="invalid_value")
        by_default = " by default (max_tokens)" if request.new_tokens_field is None else ""
        asked = f"{num_new} new ones are asked for{by_default}"
        text = f"{what} {num_least} {unit}, and {asked}; together they must be at most {limit}, {why}"
        raise RefusedFieldError(request.prompt_field, text, code="context_length_exceeded")

    def cancel(self, *generations: Generation) -> None:
        """Nobody waits for them any more."""
        for generation in generations:
            self._engine.intake.cancel(generation)

    async def complete(self, request: ApiRequest, generations: Sequence[Generation], *, name: str) -> dict[str, Any]:
        """Wait for the whole answer, a choice for each prompt. Its id has the request's `name`.

        Raises:
            GenerationError: the engine failed one of them, or is too slow.
        """
        choices = self._choices(request, generations)
        said: list[list[str]] = [[] for _ in choices]
        async for choice, piece in self._pieces(choices):
            said[choice.index].append(piece or "")
        whole = [
            answer_forms.whole_choice(request, "".join(said[each.index]), each.reason, each.index) for each in choices
        ]
        return {**answer_forms.envelope(request, name), "choices": whole, "usage": _usage_of(choices)}

    async def stream(
        self, request: ApiRequest, generations: Sequence[Generation], *, name: str
    ) -> AsyncIterator[dict[str, Any]]:
        """The answer piece by piece, those of its choices as they come. Its id has the request's `name`.

        Raises:
            GenerationError: the engine failed one of them, or is too slow.
        """
        choices = self._choices(request, generations)
        envelope = answer_forms.envelope(request, name)
        if request.wants_usage:
            envelope["usage"] = None
        for first in answer_forms.first_choices(request):
            yield {**envelope, "choices": [first]}
        async with aclosing(self._pieces(choices)) as pieces:
            async for choice, piece in pieces:
                if piece is None:
                    said = answer_forms.last_choice(request, choice.reason, choice.index)
                else:
                    said = answer_forms.text_choice(request, piece, choice.index)
                yield {**envelope, "choices": [said]}
        if request.wants_usage:
            yield {**envelope, "choices": [], "usage": _usage_of(choices)}

    def _choices(self, request: ApiRequest, generations: Sequence[Generation]) -> list[_Choice]:
        return [
            _Choice(index, generation, AnswerText(self._tokenizer, request.stop_texts))
            for index, generation in enumerate(generations)
        ]

    async def _pieces(self, choices: Sequence[_Choice]) -> AsyncGenerator[tuple[_Choice, str | None], None]:
        """What is said, with the choice that says it; None where that one has ended."""
        arrivals = Arrivals(self._engine, [choice.generation for choice in choices])
        going = deque(choices)
        while going:
            choice, token = await arrivals.take(partial(_next_of, going), _TOKEN_TIMEOUT_SECONDS)
            if token is not None and (piece := choice.text.push(token)):
                yield choice, piece
            if token is not None and not choice.text.has_stopped:
                continue
            going.remove(choice)
            if choice.text.has_stopped:
                self._engine.intake.cancel(choice.generation, "stop")  # the engine knows of no texts, and would go on
            if piece := choice.text.finish():
                yield choice, piece
            yield choice, None


@dataclass(frozen=True, eq=False)
class _Choice:
    """One of the answers to a request, as it comes."""

    index: int
    generation: Generation
    text: AnswerText

    @property
    def reason(self) -> str | None:
        """Why it has ended."""
        return "stop" if self.text.has_stopped else self.generation.finish_reason


def _next_of(choices: deque[_Choice], seconds: float) -> tuple[_Choice, int | None]:
    """A token of the first of them that has one, None for its end; that one is looked at last the next time."""
    for _ in range(len(choices)):
        choice = choices[0]
        choices.rotate(-1)
        with contextlib.suppress(GenerationTimeoutError):
            return choice, choice.generation.next_token(seconds)
    raise GenerationTimeoutError("no token of any of them is here")


def _usage_of(choices: Sequence[_Choice]) -> dict[str, Any]:
    num_output = sum(choice.text.num_tokens for choice in choices)
    return answer_forms.usage_of([choice.generation for choice in choices], num_output)

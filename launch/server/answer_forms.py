"""Answers of a chat and of a completion, in OpenAI's form."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastdeploy_cache.launch.reference_engine.generation import Generation
from fastdeploy_cache.launch.server.api_requests import ApiRequest, ChatRequest

MODEL_NAME = "SmolLM2-135M-Instruct"


def envelope(request: ApiRequest, name: str) -> dict[str, Any]:
    """What a whole answer, and each piece of a streamed one, has around its choices.

    Its id is the `name` of the request behind what OpenAI's clients expect there, so that `explain` finds it by this.
    """
    if isinstance(request, ChatRequest):
        prefix, kind = "chatcmpl", "chat.completion.chunk" if request.stream else "chat.completion"
    else:
        prefix, kind = "cmpl", "text_completion"
    return {"id": f"{prefix}-{name}", "object": kind, "created": int(time.time()), "model": MODEL_NAME}


def whole_choice(request: ApiRequest, text: str, reason: str | None, index: int) -> dict[str, Any]:
    """The choice of a whole answer to the prompt at this place."""
    said = {"message": {"role": "assistant", "content": text}} if isinstance(request, ChatRequest) else {"text": text}
    return _choice(said, reason, index)


def first_choices(request: ApiRequest) -> list[dict[str, Any]]:
    """What a stream says before there is text: the role, in a chat."""
    is_chat = isinstance(request, ChatRequest)
    return [_choice({"delta": {"role": "assistant", "content": ""}}, None, 0)] if is_chat else []


def text_choice(request: ApiRequest, text: str, index: int) -> dict[str, Any]:
    """A piece of the text."""
    return _choice({"delta": {"content": text}} if isinstance(request, ChatRequest) else {"text": text}, None, index)


def last_choice(request: ApiRequest, reason: str | None, index: int) -> dict[str, Any]:
    """The end of a choice, without text."""
    return _choice({"delta": {}} if isinstance(request, ChatRequest) else {"text": ""}, reason, index)


def usage_of(generations: Sequence[Generation], num_output: int) -> dict[str, Any]:
    """The tokens of all choices together."""
    num_prompt = sum(generation.request.num_prompt_tokens for generation in generations)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(each.num_cached_tokens for each in generations)},
    }


def _choice(said: dict[str, Any], reason: str | None, index: int) -> dict[str, Any]:
    return {"index": index, **said, "logprobs": None, "finish_reason": reason}

"""Answers of a chat and of a completion, in OpenAI's form."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastdeploy_cache.launch.reference_engine.generation import Generation
from fastdeploy_cache.launch.server.api_requests import ApiRequest, ChatRequest

MODEL_NAME = "SmolLM2-135M-Instruct"


def envelope(request: ApiRequest) -> dict[str, Any]:
    """What a whole answer, and each piece of a streamed one, has around its choices."""
    if isinstance(request, ChatRequest):
        prefix, kind = "chatcmpl", "chat.completion.chunk" if request.stream else "chat.completion"
    else:
        prefix, kind = "cmpl", "text_completion"
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": MODEL_NAME}


def whole_choice(request: ApiRequest, text: str, reason: str | None) -> dict[str, Any]:
    """The one choice of a whole answer."""
    said = {"message": {"role": "assistant", "content": text}} if isinstance(request, ChatRequest) else {"text": text}
    return {"index": 0, **said, "logprobs": None, "finish_reason": reason}


def first_choices(request: ApiRequest) -> list[dict[str, Any]]:
    """What a stream says before there is text: the role, in a chat."""
    is_chat = isinstance(request, ChatRequest)
    return [_piece({"delta": {"role": "assistant", "content": ""}}, None)] if is_chat else []


def text_choice(request: ApiRequest, text: str) -> dict[str, Any]:
    """A piece of the text."""
    return _piece({"delta": {"content": text}} if isinstance(request, ChatRequest) else {"text": text}, None)


def last_choice(request: ApiRequest, reason: str | None) -> dict[str, Any]:
    """The end of a stream, without text."""
    return _piece({"delta": {}} if isinstance(request, ChatRequest) else {"text": ""}, reason)


def usage_of(generation: Generation, num_output: int) -> dict[str, Any]:
    """The tokens of an answer."""
    num_prompt = generation.request.num_prompt_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }


def _piece(said: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": 0, **said, "logprobs": None, "finish_reason": reason}

"""The token ids of what a request asks: an instance computes them, and a router looks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.server.api_fields import RefusedFieldError
from fastdeploy_cache.launch.server.api_requests import ApiRequest, CompletionRequest

CheckFits = Callable[[str, int, str, ApiRequest], None]


class PromptReader:
    """Makes tokens of the texts of a request. Any thread."""

    def __init__(self, tokenizer: ChatTokenizer, check_fits: CheckFits) -> None:
        """`check_fits` is given what has so many tokens, the number, its unit, and the request; it raises
        `RefusedFieldError` for too many. It is asked before a text is tokenised, too, which may take seconds."""
        self._tokenizer, self._check_fits = tokenizer, check_fits

    def prompts_of(self, request: ApiRequest) -> list[Any]:
        """The tokens of each prompt, in their order.

        Raises:
            RefusedFieldError: too long, or a token that the model does not have.
        """
        if isinstance(request, CompletionRequest):
            return [self._tokens_of(where, prompt, request) for where, prompt in request.prompts.items()]
        messages = [{"role": message.model_role, "content": message.text()} for message in request.messages]
        num_chars = sum(len(message["content"]) for message in messages)
        what = f"{num_chars} characters in {len(messages)} messages count as"
        self._check_fits(f"messages: {what}", self._tokenizer.min_tokens(messages), "tokens or more", request)
        tokens = self._tokenizer.encode_chat(messages)
        self._check_fits("messages have", len(tokens), "tokens", request)
        return [tokens]

    def _tokens_of(self, where: str, prompt: str | list[int], request: ApiRequest) -> Any:
        tokens: Any = prompt
        if isinstance(prompt, str):
            what = f"{where}: {len(prompt)} characters count as"
            self._check_fits(what, self._tokenizer.min_text_tokens(prompt), "tokens or more", request)
            tokens = self._tokenizer.encode(prompt)
        self._check_fits(f"{where} has", len(tokens), "tokens", request)
        if isinstance(prompt, list):
            self._check_known(where, prompt)
        return tokens

    def _check_known(self, where: str, token_ids: list[int]) -> None:
        num_known = self._tokenizer.num_tokens
        for place, token_id in enumerate(token_ids):
            if not 0 <= token_id < num_known:
                text = f"{where}[{place}] is {token_id}; the model's token ids are 0 to {num_known - 1}"
                raise RefusedFieldError("prompt", text, code="invalid_value")

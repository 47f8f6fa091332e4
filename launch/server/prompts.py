"""The tokens of a chat's prompt."""

from __future__ import annotations

import asyncio
from typing import Any

from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.launch.reference_engine.generation import GenerationRefusedError
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.server.chat_request import ChatRequest


class Prompts:
    """Tokenises, in a few threads of the event loop's: a long text takes a second, in which others are answered."""

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer

    async def tokens_of(self, request: ChatRequest) -> Any:
        """What can never fit is refused by its length: to tokenise it may take many seconds.

        Raises:
            GenerationRefusedError: it is too long with its answer.
        """
        messages = [{"role": message.role, "content": message.text()} for message in request.messages]
        num_least, limit = self._tokenizer.min_tokens(messages), self._engine.max_tokens
        if num_least + request.max_new_tokens > limit:
            num_chars = sum(len(message["content"]) for message in messages)
            raise GenerationRefusedError(
                f"{num_chars} characters in {len(messages)} messages count as {num_least} tokens or more, and "
                f"{request.max_new_tokens} new ones are asked for; together they must be at most {limit}"
            )
        return await asyncio.to_thread(self._tokenizer.encode_chat, messages)

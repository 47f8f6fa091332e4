"""The bodies that chats come in."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


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
        """The most tokens that the answer may have."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def namespace(self) -> str:
        """The namespace in which its blocks are cached."""
        return self.cache_salt or ""

    @property
    def wants_usage(self) -> bool:
        """Whether the end of its stream shall have the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

"""The bodies of /v1/chat/completions, /v1/completions and /v1/prefill."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from fastdeploy_cache.ipc.codec import taken_apart
from fastdeploy_cache.launch.reference_engine.sampling import Sampling
from fastdeploy_cache.launch.server.api_fields import MAX_PROMPTS, RefusedFieldError, asked_fields, refusal_of

DEFAULT_NEW_TOKENS = 64  # of a chat
_Count = Annotated[int, msgspec.Meta(ge=1)]
_StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_TokenIds = Annotated[list[int], msgspec.Meta(min_length=1)]


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A part of a message; the model reads text alone."""

    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a chat. What clients send back of an answer may be there, and is null or empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None  # the model's chat format has no place for it
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None
    annotations: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None

    @property
    def model_role(self) -> str:
        """The role as the model knows it: what OpenAI's newer models call `developer` is `system` here."""
        return "system" if self.role == "developer" else self.role

    def text(self) -> str:
        """The whole content."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream shall have beside the text."""

    include_usage: bool = False
    include_obfuscation: bool = False  # changes nothing here


class _Asked(msgspec.Struct, kw_only=True):
    """What a chat and a completion have in common.

    `cache_salt`: who uses another one, or none, shares no cached block with this request. `session_id`: names the
    conversation, for the cache. `will_go_on`: the chance that it goes on.
    `kv_offer`: what /v1/prefill of another instance has answered for the same prompt, or, where `kv_is_lent`, /v1/lend.
    """

    model: str | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _StopText | Annotated[list[_StopText], msgspec.Meta(max_length=4)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    session_id: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)] | None = None
    will_go_on: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    kv_offer: bytes | None = None  # base64 in JSON
    kv_is_lent: bool = False

    @property
    def stop_texts(self) -> list[str]:
        """Where the answer ends, whichever comes first."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def sampling(self) -> Sampling:
        """How its tokens are chosen: another draw for each call where no seed is given."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return Sampling(self.temperature, self.top_p, seed)

    @property
    def namespace(self) -> str:
        """The namespace in which its blocks are cached."""
        return self.cache_salt or ""

    @property
    def new_tokens_field(self) -> str | None:
        """The field that says how many tokens the answer may have, where one does."""
        given = {"max_completion_tokens": self.max_completion_tokens, "max_tokens": self.max_tokens}
        return next((name for name, value in given.items() if value is not None), None)

    @property
    def wants_usage(self) -> bool:
        """Whether the end of its stream shall have the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_Asked):
    """The body of POST /v1/chat/completions; /v1/prefill takes it, too."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]

    prompt_field: ClassVar[str] = "messages"
    num_prompts: ClassVar[int] = 1

    def check(self) -> None:
        """All that could be wrong is found when it is read."""

    @property
    def max_new_tokens(self) -> int:
        """The most tokens that the answer may have."""
        return self.max_completion_tokens or self.max_tokens or DEFAULT_NEW_TOKENS


class CompletionRequest(_Asked):
    """The body of POST /v1/completions; /v1/prefill takes it, too. Control tokens are recognised in a text."""

    prompt_field: ClassVar[str] = "prompt"
    prompt: _Text | Annotated[list[int | _Text | _TokenIds], msgspec.Meta(min_length=1)]

    @property
    def prompts(self) -> dict[str, str | list[int]]:
        """The prompts by their places in the body, in their order: `prompt`, or `prompt[0]` and so on.

        Token ids beside prompts are left out; `check` refuses them.
        """
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt}
        prompts = {f"prompt[{place}]": each for place, each in enumerate(self.prompt) if not isinstance(each, int)}
        return prompts or {"prompt": [each for each in self.prompt if isinstance(each, int)]}

    @property
    def num_prompts(self) -> int:
        """How many answers it asks for."""
        return len(self.prompts)

    def check(self) -> None:
        """Raises `RefusedFieldError` for a list of unlike things, or of more prompts than are taken."""
        if len({type(each) for each in self.prompt}) > 1:
            text = "prompt is a list of unlike things; send one of texts, of token ids, or of lists of token ids"
            raise RefusedFieldError("prompt", text, code="invalid_value")
        if self.num_prompts > MAX_PROMPTS:
            text = f"prompt has {self.num_prompts} prompts; send at most {MAX_PROMPTS} in one request"
            raise RefusedFieldError("prompt", text, code="invalid_value")
        if self.kv_offer is not None and self.num_prompts > 1:
            text = f"kv_offer is of one prompt, and prompt has {self.num_prompts}; send each with its own"
            raise RefusedFieldError("kv_offer", text, code="invalid_value")

    @property
    def max_new_tokens(self) -> int:
        """The most tokens that the answer may have."""
        return self.max_completion_tokens or self.max_tokens or 16


ApiRequest = ChatRequest | CompletionRequest
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
PREFILL_PATH, LEND_PATH = "/v1/prefill", "/v1/lend"
KINDS: Mapping[str, type[ApiRequest]] = {CHAT_PATH: ChatRequest, COMPLETION_PATH: CompletionRequest}  # by path


def decode_request(body: bytes, kind: type[ApiRequest] | None = None) -> ApiRequest:
    """The request in a body; without a `kind` it has a prompt, or else is a chat.

    Raises:
        RefusedFieldError: not JSON, or a field that is not known, not done or not what it may be.
        RecursionError: nested too deeply.
    """
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedFieldError(None, f"the body is no JSON: {error}") from error
    if kind is None:
        kind = CompletionRequest if isinstance(content, dict) and "prompt" in content else ChatRequest
    known = kind.__struct_fields__
    fields = asked_fields(content, known)
    try:
        asked: ChatRequest | CompletionRequest = msgspec.convert(fields, taken_apart(kind))
    except msgspec.ValidationError as error:
        raise refusal_of(
            error, fields, {*known, *Message.__struct_fields__, *StreamOptions.__struct_fields__}
        ) from error
    asked.check()
    return asked

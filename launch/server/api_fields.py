"""Fields of OpenAI's API: which change nothing here, which are not done, and how one is refused by its name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

MAX_PROMPTS = 64  # of one request
# What clients send and what changes no answer here.
_IDLE = frozenset(
    {
        *("metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "user"),
    }
)
# What is not done here, with the values that ask for nothing.
_NOT_DONE: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
# What each field has to be, those of a message among them.
ALLOWED = {
    "annotations": "null or empty",
    "audio": "null: the model writes text alone",
    "cache_salt": "a text of 1 to 1024 characters",
    "content": "a text, or a list of parts of type text",
    "function_call": "null: tools are not done here",
    "include_obfuscation": "true or false",
    "include_usage": "true or false",
    "session_id": "a text of 1 to 1024 characters",
    "will_go_on": "a number from 0 to 1",
    "kv_is_lent": "true or false",
    "kv_offer": "what /v1/prefill has answered for the same prompt, as base64",
    "max_completion_tokens": "a whole number from 1 on",
    "max_tokens": "a whole number from 1 on",
    "messages": "a list of at least one message, each an object with a role and a content",
    "model": "a text",
    "name": "a text",
    "prompt": f"a text, a list of token ids, or a list of up to {MAX_PROMPTS} of either; not empty",
    "refusal": "null",
    "role": "system, developer, user or assistant",
    "seed": "a whole number of 64 bits",
    "stop": "a text, or up to 4 of them, none empty and none over 1024 characters",
    "stream": "true or false",
    "stream_options": "an object with include_usage",
    "temperature": "a number from 0 to 2",
    "text": "a text",
    "tool_calls": "null: tools are not done here",
    "top_p": "a number from 0 to 1",
    "type": "text",
}
_MAX_VALUE_CHARS, _MAX_MESSAGE_CHARS = 80, 500  # of what a client has sent, in what it is answered
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`")
_MISSING = re.compile(r"^Object missing required field `(.*)`")


class RefusedFieldError(ValueError):
    """A request that asks for what is not done here; `field` is None where it is no single one's fault."""

    def __init__(self, field: str | None, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message if len(message) <= _MAX_MESSAGE_CHARS else f"{message[:_MAX_MESSAGE_CHARS]}...")
        self.field, self.status, self.code = field and field[:_MAX_VALUE_CHARS], status, code


def asked_fields(body: Any, known: Collection[str]) -> dict[str, Any]:
    """The fields of a body that are to be looked at, `known` by name; null is as good as absent.

    Raises:
        RefusedFieldError: a field that nobody knows, or one that asks for what is not done here.
    """
    if not isinstance(body, dict):
        raise RefusedFieldError(None, f"the body is a {type(body).__name__}; send a JSON object")
    for name in body:
        if name not in known and name not in _IDLE and name not in _NOT_DONE:
            raise _unknown(name, name, known)
    for name, value in body.items():
        if value is not None and name in _NOT_DONE and not _asks_for_nothing(value, _NOT_DONE[name]):
            values = [_short(each) for each in _NOT_DONE[name]]
            allowed = f", or use {' or '.join(dict.fromkeys(values))}" if values else ""
            text = f"{name} is {_short(value)}, which is not done here; leave it out{allowed}"
            raise RefusedFieldError(name, text, code="unsupported_value")
    return {name: value for name, value in body.items() if value is not None and name in known}


def refusal_of(error: Exception, fields: Mapping[str, Any], known: Collection[str]) -> RefusedFieldError:
    """What msgspec has found in these fields, by the name of the field, with its value and what it has to be."""
    text, path = str(error), ""
    if found := _PATH.search(text):
        text, path = text[: found.start()], found.group(1)
    if found := _UNKNOWN.match(text):
        name = found.group(1)
        field = f"{path}.{name}" if path else name
        return _unknown(field, name, known)
    is_missing = (found := _MISSING.match(text)) is not None
    if found is not None:
        path = f"{path}.{found.group(1)}" if path else found.group(1)
    last = re.sub(r"\[[^]]*\]", "", path).rpartition(".")[2]
    wanted = f"; {last} has to be {ALLOWED[last]}" if last in ALLOWED else f": {text}"
    seen = "missing" if is_missing else _short(_value_at(fields, path))
    return RefusedFieldError(path or None, f"{path} is {seen}{wanted}" if path else text, code="invalid_value")


def _value_at(fields: Any, path: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", path):
        if isinstance(fields, list):
            fields = fields[int(part)] if part.isdigit() else fields
        elif isinstance(fields, Mapping):
            fields = fields.get(part)
    return fields


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether it is one of them, and of its type: True is no 1, and 0 log-probabilities are some."""
    return any(type(value) is type(each) and value == each for each in neutral)


def _unknown(field: str, name: str, known: Collection[str]) -> RefusedFieldError:
    near = difflib.get_close_matches(name[:_MAX_VALUE_CHARS], sorted({*known, *_IDLE, *_NOT_DONE}), n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"taken are {', '.join(sorted(known))}"
    return RefusedFieldError(field, f"unknown field {_short(field)}; {advice}", code="unknown_field")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."

"""What of OpenAI's API is taken, and what is refused by the name of the field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache.launch.reference_engine.sampling import Sampling
from fastdeploy_cache.launch.server.api_fields import _IDLE, _NOT_DONE, ALLOWED, RefusedFieldError
from fastdeploy_cache.launch.server.api_requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    StreamOptions,
    TextPart,
    decode_request,
)

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> Any:
    return decode_request(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatRequest)


def completion(**fields: Any) -> Any:
    return decode_request(json.dumps({"prompt": "hello", **fields}).encode(), CompletionRequest)


def refusal(make: Any, **fields: Any) -> RefusedFieldError:
    with pytest.raises(RefusedFieldError) as refused:
        make(**fields)
    return refused.value


def test_what_is_not_given_is_greedy() -> None:
    """Temperature 0, no stop, and OpenAI's way to count tokens; null is as good as nothing."""
    for asked in (chat(), chat(temperature=None, top_p=None, seed=None, stop=None, max_tokens=None, stream=None)):
        assert (asked.sampling.temperature, asked.sampling.top_p, asked.stop_texts) == (0.0, 1.0, [])
        assert asked.max_new_tokens == 64
    assert completion().max_new_tokens == 16


@pytest.mark.parametrize("make", [chat, completion])
def test_what_is_given_is_taken(make: Any) -> None:
    """By chats and completions alike; of two bounds of the answer OpenAI's newer name wins."""
    asked = make(temperature=1, top_p=0.5, seed=-3, stop="a", max_tokens=5, max_completion_tokens=6)
    assert (asked.sampling, asked.stop_texts, asked.max_new_tokens) == (Sampling(1.0, 0.5, -3), ["a"], 6)
    assert make(stop=["a", "b"]).stop_texts == ["a", "b"]
    assert make(max_tokens=5).max_new_tokens == 5
    assert make(temperature=1).sampling.seed != make(temperature=1).sampling.seed  # else every answer were the same


def test_a_prompt_is_a_text_or_tokens() -> None:
    """And makes a body a completion where its path does not say what it is."""
    assert completion().prompt == "hello" and completion(prompt=[1, 2]).prompt == [1, 2]
    assert isinstance(decode_request(b'{"prompt": [1]}'), CompletionRequest)
    assert isinstance(decode_request(json.dumps({"messages": MESSAGES}).encode()), ChatRequest)


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ([1], [2, 3])])
def test_several_prompts(one: Any, other: Any) -> None:
    """As texts or as lists of token ids, up to a bound; each is known by its place."""
    assert completion(prompt=[one, other]).prompts == {"prompt[0]": one, "prompt[1]": other}
    assert completion(prompt=one).prompts == {"prompt": one}
    assert completion(prompt=[one] * 64).num_prompts == 64
    refused = refusal(completion, prompt=[one] * 65)
    assert refused.field == "prompt" and "has 65 prompts; send at most 64" in str(refused)


def test_a_developer_is_the_system() -> None:
    """To the model, which knows no other word for it."""
    roles = ("system", "developer", "user", "assistant")
    messages = chat(messages=[{"role": role, "content": "a"} for role in roles]).messages
    assert [message.model_role for message in messages] == ["system", "system", "user", "assistant"]


STRUCTS = (ChatRequest, CompletionRequest, Message, TextPart, StreamOptions)
IN_A_MESSAGE = {
    **{name: {"role": "user", name: [[]]} for name in Message.__struct_fields__},
    "text": {"role": "user", "content": [{"type": "text", "text": [[]]}]},
    "type": {"role": "user", "content": [{"type": []}]},
}
WRONG: dict[str, dict[str, Any]] = {
    **{name: {name: [[]]} for name in (*ChatRequest.__struct_fields__, "prompt")},
    **{name: {"stream_options": {name: [[]]}} for name in StreamOptions.__struct_fields__},
    **{name: {"messages": [message]} for name, message in IN_A_MESSAGE.items()},
}


@pytest.mark.parametrize("name", WRONG)
def test_every_field_says_what_it_has_to_be(name: str) -> None:
    """In our words, with the value that was sent: none of the library's is in the answer."""
    said = str(refusal(completion if name == "prompt" else chat, **WRONG[name]))
    assert re.fullmatch(rf"[\w.\[\]]+ is \[.*\]; {name} has to be {re.escape(ALLOWED[name])}", said), said


def test_no_field_is_forgotten() -> None:
    """Each field of each structure is among those."""
    assert {name for kind in STRUCTS for name in kind.__struct_fields__} <= set(WRONG)


IDLE = {
    "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True,
    "prompt_cache_key": "k", "safety_identifier": "s", "stream_options": {"include_usage": True},
    "n": 1, "logprobs": False, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"},
    "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1, "echo": False,
}  # fmt: skip


@pytest.mark.parametrize("name", IDLE)
def test_what_changes_nothing_is_accepted(name: str) -> None:
    """With a value that asks for nothing that is not done, or null."""
    assert chat(**{name: IDLE[name]}) == chat(**{name: None}) or name == "stream_options"


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "not done here; leave it out, or use []"),
        ({"response_format": {"type": "json_object"}}, "response_format", "use {'type': 'text'}"),
        ({"logprobs": True}, "logprobs", "use False"),
        ({"logprobs": 0}, "logprobs", "use False"),  # of a completion it asks for those of the tokens
        ({"n": 2}, "n", "n is 2, which is not done here; leave it out, or use 1"),
        ({"n": True}, "n", "use 1"),
        ({"tool_choice": "required"}, "tool_choice", "'none' or 'auto'"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "use 0"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "use 'none'"),
        ({"echo": True}, "echo", "use False"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"max_token": 1}, "max_token", "did you mean 'max_tokens'?"),
        ({"top_k": 1}, "top_k", "did you mean 'top_p'?"),
        ({"zzz": 1}, "zzz", "taken are cache_salt, kv_is_lent, kv_offer, "),
        ({"session_id": ""}, "session_id", "session_id"),
        ({"will_go_on": 1.5}, "will_go_on", "a number from 0 to 1"),
        ({"temperature": 2.5}, "temperature", "a number from 0 to 2"),
        ({"temperature": "hot"}, "temperature", "temperature is 'hot'; temperature has to be a number from 0 to 2"),
        ({"top_p": -0.1}, "top_p", "a number from 0 to 1"),
        ({"seed": 1.5}, "seed", "a whole number of 64 bits"),
        ({"seed": 2**63}, "seed", "a whole number of 64 bits"),
        ({"max_tokens": 0}, "max_tokens", "a whole number from 1 on"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens", "a whole number from 1 on"),
        ({"stop": ""}, "stop", "none empty"),
        ({"stop": list("abcde")}, "stop", "up to 4"),
        ({"stop": ["a", 1]}, "stop[1]", "stop[1] is 1; stop has to be a text, or up to 4"),
        ({"stream": "yes"}, "stream", "stream is 'yes'; stream has to be true or false"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages", "'include_usage'"),
        ({"stream_options": []}, "stream_options", "include_usage"),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_what_is_not_done_is_refused_by_its_name(make: Any, fields: dict[str, Any], field: str, words: str) -> None:
    """With status 400, the field and what is allowed."""
    refused = refusal(make, **fields)
    assert (refused.status, refused.field) == (400, field)
    assert words in str(refused) and field in str(refused)


@pytest.mark.parametrize(
    ("message", "field", "words"),
    [
        ({"role": "tool", "content": "a"}, "messages[0].role", "system, developer, user or assistant"),
        ({"role": "user", "contant": "a"}, "messages[0].contant", "did you mean 'content'?"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type", "text"),
        ({"role": "user", "content": 7}, "messages[0].content", "a text, or a list of parts of type text"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls", "tools are not done here"),
        ({"content": "a"}, "messages[0].role", "system, developer, user or assistant"),
    ],
)
def test_what_is_wrong_in_a_message_is_named(message: dict[str, Any], field: str, words: str) -> None:
    """By the place of the message and the name of the field."""
    refused = refusal(chat, messages=[message])
    assert refused.field == field and words in str(refused)


def test_what_an_answer_has_can_be_sent_back() -> None:
    """Clients append an answer's message to the next chat with all that is null in it."""
    answer = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    assert chat(messages=[*MESSAGES, answer, *MESSAGES]).messages[1].text() == "a"


def test_the_page_names_every_field() -> None:
    """Those that are taken, those that change nothing, and those that are not done."""
    page = (Path(__file__).parent.parent.parent / "docs" / "server.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    taken = {name for kind in STRUCTS for name in kind.__struct_fields__} - {"messages", "text"}
    assert not {*taken, *_IDLE, *_NOT_DONE} - named


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        (b"[]", None, "the body is a list; send a JSON object"),
        (b"no", None, "no JSON"),
        (b"{}", "messages", "messages is missing; messages has to be a list of at least one message"),
        (b'{"messages": []}', "messages", "messages has to be a list of at least one message"),
        (b'{"prompt": ""}', "prompt", "not empty"),
        (b'{"prompt": []}', "prompt", "not empty"),
        (b'{"prompt": ["a", ""]}', "prompt[1]", "not empty"),
        (b'{"prompt": [[1], []]}', "prompt[1]", "not empty"),
        (b'{"prompt": [[1, "a"]]}', "prompt[0][1]", "up to 64 of either"),
        (b'{"prompt": ["a", 1]}', "prompt", "a list of unlike things"),
        (b'{"prompt": [1, [1]]}', "prompt", "a list of unlike things"),
        (b'{"prompt": ["a", [1]]}', "prompt", "a list of unlike things"),
        (b'{"prompt": ["a", "b"], "kv_offer": "QUJD"}', "kv_offer", "of one prompt, and prompt has 2"),
        (b'{"prompt": "a", "messages": []}', "messages", "unknown field 'messages'"),
    ],
)
def test_bodies_that_are_no_request(body: bytes, field: str | None, words: str) -> None:
    """Each with what is missing, or too much."""
    with pytest.raises(RefusedFieldError, match=words) as refused:
        decode_request(body)
    assert refused.value.field == field


def test_what_a_client_sends_is_not_said_back_at_length() -> None:
    """Neither a name nor a value makes an answer long."""
    for fields in ({"x" * 10**6: 1}, {"tools": ["x" * 10**6]}, {"messages": [{"role": "x" * 10**6}]}):
        refused = refusal(chat, **fields)
        assert len(str(refused)) < 600 and len(refused.field or "") < 100

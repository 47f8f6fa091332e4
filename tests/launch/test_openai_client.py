"""OpenAI's own client against a server process: what it sends is honoured, or refused as it expects."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

openai = pytest.importorskip("openai")

ROOT = Path(__file__).parent.parent.parent
MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "what is a cache, and who is it for"}]
PROMPT = "a prompt of some words"

pytestmark = pytest.mark.processes


class Served(NamedTuple):
    """A server that runs, and a client of it."""

    process: subprocess.Popen[str]
    client: Any

    def tell(self, verb: str) -> None:
        """Have the cache do it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{verb}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def chat(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(
            **({"model": MODEL, "messages": QUESTION, "max_tokens": 40} | fields)
        )

    def complete(self, **fields: Any) -> Any:
        usual = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40}
        return self.client.completions.create(**(usual | fields))

    def said(self, **fields: Any) -> str:
        return self.chat(**fields).choices[0].message.content


@pytest.fixture(scope="module")
def process() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server and its port."""
    command = [sys.executable, "-m", "tests.rigs.letter_server"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:  # type: ignore[call-overload]
        yield process, int(process.stdout.readline())
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.fixture
def server(process: tuple[subprocess.Popen[str], int]) -> Iterator[Served]:
    """A client of its own for each test: it keeps connections open."""
    url = f"http://127.0.0.1:{process[1]}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30.0) as client:
        yield Served(process[0], client)


def test_models_are_listed(server: Served) -> None:
    """There is the one that requests may name."""
    assert [model.id for model in server.client.models.list()] == [MODEL]
    assert server.client.models.retrieve(MODEL) == server.client.models.list().data[0]
    for name in ("gpt-4", "a/b c?", "x" * 5000):
        with pytest.raises(openai.NotFoundError, match=MODEL if len(name) < 10 else "xxx") as refused:
            server.client.models.retrieve(name)
        assert (refused.value.param, refused.value.code) == ("model", "model_not_found")


def test_an_answer_is_greedy_unless_it_is_to_be_drawn(server: Served) -> None:
    """Temperature 0 is what is taken when none is given; a draw is another answer."""
    greedy = server.said()
    assert server.said() == greedy == server.said(temperature=0, seed=5)
    assert server.said(temperature=1, seed=5) != greedy == server.said(temperature=1, top_p=0)
    assert server.said(temperature=1) != server.said(temperature=1)


@pytest.mark.parametrize("name", ["chat", "complete"])
def test_the_same_seed_gives_the_same_answer(server: Served, name: str) -> None:
    """Whole or streamed; another seed gives another one."""
    ask, fields = getattr(server, name), {"temperature": 1.2, "top_p": 0.9, "seed": 7}

    def text(choice: Any) -> str:
        return choice.message.content if name == "chat" else choice.text

    def piece(choice: Any) -> str:
        return (choice.delta.content if name == "chat" else choice.text) or ""

    first = text(ask(**fields).choices[0])
    assert text(ask(**fields).choices[0]) == first
    assert "".join(piece(chunk.choices[0]) for chunk in ask(**fields, stream=True)) == first
    assert text(ask(**(fields | {"seed": 8})).choices[0]) != first


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_an_answer_is_no_longer_than_it_may_be(server: Served, field: str) -> None:
    """And says that this was why it ended."""
    answer = server.chat(**({"max_tokens": openai.omit} | {field: 5}))
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_ends_before_its_stop_text(server: Served, is_stream: bool) -> None:
    """Of several the first to come; the tokens that were made for it are counted, and no others."""
    whole = server.said()
    stops = [whole[12:15], whole[20:22], "0"]
    end = min(place for stop in stops if (place := whole.find(stop)) >= 0)
    answer = server.chat(
        stop=stops, stream=is_stream, **({"stream_options": {"include_usage": True}} if is_stream else {})
    )
    if is_stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        reason, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
    else:
        text, reason, usage = answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage
    assert (text, reason) == (whole[:end], "stop")
    assert end < usage.completion_tokens <= end + 3


def test_a_completion_goes_on_with_its_prompt(server: Served) -> None:
    """Given as text or as the token ids of that text; what is cached of it is found by both."""
    by_text, by_ids = (
        server.complete(),
        server.complete(prompt=ids_of(PROMPT)),
    )
    assert by_text.choices[0].text == by_ids.choices[0].text and by_text.object == "text_completion"
    assert by_text.usage.prompt_tokens == len(PROMPT)
    assert by_ids.usage.prompt_tokens_details.cached_tokens == len(PROMPT) // 4 * 4
    with pytest.raises(openai.BadRequestError, match=r"prompt\[1\] is 99; the model's token ids are 0 to 31"):
        server.complete(prompt=[1, 99])


def ids_of(text: str) -> list[int]:
    return [1 + "abcdefghijklmnopqrstuvwxyz ".find(letter) for letter in text]


@pytest.mark.parametrize("as_ids", [False, True])
def test_several_prompts_have_an_answer_each(server: Served, as_ids: bool) -> None:
    """In their order and as each has alone, whole or streamed, stopped or not; the counts are of all together."""
    texts = ["one prompt", "another one of more words", "one prompt", "z"]
    prompts = [ids_of(text) if as_ids else text for text in texts]
    fields = {"temperature": 1, "seed": 3, "stop": ["e", "q"], "max_tokens": 30}
    alone = [server.complete(prompt=prompt, **fields) for prompt in prompts]
    together = server.complete(prompt=prompts, **fields)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    expected = [(answer.choices[0].text, answer.choices[0].finish_reason) for answer in alone]
    assert [(choice.text, choice.finish_reason) for choice in together.choices] == expected
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(together.usage, name) == sum(getattr(answer.usage, name) for answer in alone)
    said, ends = [""] * 4, [""] * 4
    *chunks, last = server.complete(prompt=prompts, stream=True, stream_options={"include_usage": True}, **fields)
    for chunk in chunks:
        (choice,) = chunk.choices
        assert not ends[choice.index], "something came after its end"
        said[choice.index] += choice.text
        ends[choice.index] = choice.finish_reason or ""
    assert list(zip(said, ends, strict=True)) == expected
    assert last.choices == [] and last.usage.total_tokens == together.usage.total_tokens


def test_one_bad_prompt_refuses_all(server: Served) -> None:
    """By its place; and there is a bound to their number."""
    with pytest.raises(openai.BadRequestError, match=r"prompt\[1\]\[2\] is 99"):
        server.complete(prompt=[[1], [1, 2, 99]])
    with pytest.raises(openai.BadRequestError, match="has 65 prompts; send at most 64") as refused:
        server.complete(prompt=["a"] * 65)
    assert refused.value.param == "prompt"
    assert len(server.complete(prompt=["a"] * 64, max_tokens=1).choices) == 64


def test_a_developer_is_the_system(server: Served) -> None:
    """The same answer, and the same cached blocks."""
    system, developer = ([{"role": role, "content": "be brief"}, *QUESTION] for role in ("system", "developer"))
    assert server.said(messages=developer) == server.said(messages=system)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{"role": "user", "content": "x" * 400}]}, "messages: 400 characters in 1 messages count as"),
        ({"messages": [{"role": "user", "content": "x" * 350}]}, r"messages have \d+ tokens, and 40 new ones"),
        ({"prompt": "x" * 380}, "prompt: 380 characters count as 380 tokens or more, and 40 new ones"),
        ({"prompt": [1] * 380}, "prompt has 380 tokens, and 40 new ones"),
        ({"prompt": ["a", "x" * 380]}, r"prompt\[1\]: 380 characters"),
        ({"prompt": [[1], [1] * 380]}, r"prompt\[1\] has 380 tokens"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_prompt_that_is_too_long(server: Served, fields: dict[str, Any], words: str, is_stream: bool) -> None:
    """Is refused by the code that clients know, with the field that has it and the numbers; a stream does not begin."""
    (field,), ask = fields, server.chat if "messages" in fields else server.complete
    with pytest.raises(openai.BadRequestError, match=f"{words}.*at most 400") as refused:
        ask(**fields, stream=is_stream)
    assert (refused.value.param, refused.value.code) == (field, "context_length_exceeded")


def test_an_answer_that_no_prompt_leaves_room_for(server: Served) -> None:
    """It is the number of new tokens that is wrong then, and not the prompt."""
    with pytest.raises(openai.BadRequestError, match=r"max_tokens is 400; .* at most 400 tokens") as refused:
        server.chat(max_tokens=400)
    assert (refused.value.param, refused.value.code) == ("max_tokens", "invalid_value")


def test_the_end_of_a_stream_has_the_counts_where_they_are_asked_for(server: Served) -> None:
    """In a chunk of their own; the others say that they have none."""
    chunks = list(server.chat(stream=True, max_tokens=3, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 3 and chunks[-1].choices == []
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert all(chunk.choices for chunk in server.chat(stream=True, max_tokens=3))


@pytest.mark.parametrize(
    ("fields", "field", "code"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_value"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_value"),
        ({"logprobs": True}, "logprobs", "unsupported_value"),
        ({"n": 2}, "n", "unsupported_value"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"extra_body": {"temprature": 1}}, "temprature", "unknown_field"),
    ],
)
def test_what_is_not_done_is_refused(server: Served, fields: dict[str, Any], field: str, code: str) -> None:
    """As the error that the client raises for it, with the field's name."""
    with pytest.raises(openai.BadRequestError) as refused:
        server.chat(**fields)
    assert (refused.value.param, refused.value.code, refused.value.type) == (field, code, "invalid_request_error")


def test_another_model_is_not_found(server: Served) -> None:
    """As OpenAI's own API answers; what it may be is said."""
    with pytest.raises(openai.NotFoundError, match=MODEL) as refused:
        server.chat(model="gpt-4")
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")


def test_what_changes_nothing_is_accepted(server: Served) -> None:
    """The answer is the same as without."""
    idle = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "n": 1}
    assert server.said(**idle) == server.said()


def test_an_answer_names_its_request(server: Served) -> None:
    """As the client called it, where that is short and plain; otherwise by a new name. Streams and refusals, too."""
    named = {"X-Request-Id": "my-request.1"}
    assert server.chat(extra_headers=named)._request_id == "my-request.1"
    with server.client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=QUESTION, stream=True, extra_headers=named
    ) as response:
        assert response.headers["x-request-id"] == "my-request.1"
    with pytest.raises(openai.BadRequestError) as refused:
        server.chat(n=2, extra_headers=named)
    assert refused.value.request_id == "my-request.1"
    made = {server.chat(extra_headers={"X-Request-Id": bad})._request_id for bad in ("a b", "x" * 129, "a/b", "a=b")}
    made.add(server.chat()._request_id)
    assert len(made) == 5 and all(len(name) == 32 and name.isalnum() for name in made)


def test_a_paused_server_lives_and_is_not_ready(server: Served) -> None:
    """Its health is answered all the same."""

    def status(path: str) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(str(server.client.base_url.join(path)), timeout=30) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    assert status("/ready") == (200, {"status": "ready"})
    server.tell("pause")
    code, answer = status("/ready")
    assert (code, answer["error"]["code"]) == (503, "paused") and "requests wait" in answer["error"]["message"]
    assert status("/health") == (200, {"status": "ok"})
    server.tell("resume")
    assert status("/ready")[0] == 200

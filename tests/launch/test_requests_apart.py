"""Requests through a router, prefill and decode: drawn as by one instance, and called by one name in all logs."""

from __future__ import annotations

import http.client
import json
import logging
import queue
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest

from fastdeploy_cache.ipc.log_lines import JsonLines
from fastdeploy_cache.launch.server.answer_forms import MODEL_NAME
from fastdeploy_cache.launch.server.chat import ChatApi
from fastdeploy_cache.launch.server.instance_app import InstanceApp
from fastdeploy_cache.launch.server.instances import Instances
from fastdeploy_cache.launch.server.router import Router
from tests.rigs.http_rig import served
from tests.rigs.integer_instance import PROMPT, SECONDS, Instance, Numbers, instances, prefill

pytestmark = pytest.mark.processes

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
NUM_FULL = len(PROMPT) // 4 * 4
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    COMPLETION: {"prompt": PROMPT},
}


class Group(NamedTuple):
    """Ports, and the decode instance."""

    mixed: int
    router: int
    decode: Instance


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """One instance of each role, and a router before two of them."""
    with ExitStack() as stack:
        made = stack.enter_context(instances(lambda: Instance("mixed", 1), prefill, lambda: Instance("decode", 1)))
        apps = [InstanceApp(ChatApi(each.engine, Numbers()), each.cache).build() for each in made]
        ports = [stack.enter_context(served(app)) for app in apps]
        computes, answers = (Instances([f"http://127.0.0.1:{port}"]) for port in ports[1:])
        router = stack.enter_context(served(Router(computes, answers, SECONDS).build()))
        yield Group(ports[0], router, made[2])


def ask(port: int, path: str, body: Any = None, name: str = "") -> tuple[int, dict[str, Any], str]:
    """Status, answer (of a stream its first piece) and the request's name there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        method, headers = ("GET" if body is None else "POST"), ({"X-Request-Id": name} if name else {})
        connection.request(method, path, body and json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
        if response.headers.get_content_type() == "text/event-stream":
            text = text.removeprefix(b"data: ").split(b"\n")[0]
        return response.status, json.loads(text), response.headers["X-Request-Id"]
    finally:
        connection.close()


def text(port: int, path: str, **fields: Any) -> str:
    status, answer, _ = ask(port, path, BODIES[path] | {"max_tokens": 12} | fields)
    assert status == 200, answer
    choice = answer["choices"][0]
    return choice["message"]["content"] if path == CHAT else choice["text"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_the_same_seed_gives_the_same_answer_apart(group: Group, path: str) -> None:
    """As one instance answers it; what decode received, or had, changes nothing, and another seed does."""
    for fields in ({"temperature": 1.5, "seed": 3}, {"temperature": 1.5, "seed": 4, "top_p": 0.7}, {}):
        expected = text(group.mixed, path, **fields)
        assert [text(group.router, path, cache_salt=salt, **fields) for salt in ("a", "b", "a")] == [expected] * 3
    assert text(group.router, path, temperature=1.5, seed=5) != text(group.router, path, temperature=1.5, seed=6)


def test_several_prompts_apart(group: Group, lines: Lines) -> None:
    """The decode instance computes them, as one instance would; its line of the log has all of them."""
    body = {"prompt": [PROMPT, PROMPT[::-1]], "max_tokens": 5, "cache_salt": "several"}
    status, expected, _ = ask(group.mixed, COMPLETION, body)
    lines.take(1)
    assert status == 200 and len(expected["choices"]) == 2
    assert ask(group.router, COMPLETION, body)[1]["choices"] == expected["choices"]
    (decoded,) = [line for line in lines.take(3) if "engine_request" in line]
    assert (decoded["prompts"], decoded["prompt_tokens"], decoded["output_tokens"]) == (2, 2 * len(PROMPT), 10)
    assert (decoded["finish"], decoded["peer_tokens"]) == ("length", 0)


def test_models_through_a_router(group: Group) -> None:
    """The one that there is, and others as OpenAI's API says that they are not there."""
    assert ask(group.router, f"/v1/models/{MODEL_NAME}")[:2] == ask(group.mixed, f"/v1/models/{MODEL_NAME}")[:2]
    for name in ("gpt-4", "a%2Fb%20c"):
        status, answer, _ = ask(group.router, f"/v1/models/{name}")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert repr(unquote(name)) in answer["error"]["message"]


def test_a_refusal_comes_through(group: Group) -> None:
    """With the field that it is about."""
    status, answer, _ = ask(group.router, CHAT, BODIES[CHAT] | {"temprature": 1})
    assert (status, answer["error"]["param"]) == (400, "temprature")


class Lines(logging.Handler):
    """What is logged of requests."""

    def __init__(self) -> None:
        super().__init__()
        self._told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.setFormatter(JsonLines())

    def emit(self, record: logging.LogRecord) -> None:
        line = json.loads(self.format(record))
        if "request" in line:
            self._told.put(line)

    def take(self, num: int) -> list[dict[str, Any]]:
        """The next lines; some come after the answer."""
        return [self._told.get(timeout=SECONDS) for _ in range(num)]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("fastdeploy_cache")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_one_name_joins_router_prefill_decode_and_the_answer(group: Group, lines: Lines) -> None:
    """Each has one line of it, with where it went, its tokens by tier and its milliseconds."""
    body = BODIES[COMPLETION] | {"max_tokens": 3, "cache_salt": "logged"}
    tiers = [f"{tier}_tokens" for tier in ("gpu", "cpu", "storage", "peer")]
    for name, found in (("a-name", [0, 0, 0, NUM_FULL]), ("another", [NUM_FULL, 0, 0, 0])):
        assert ask(group.router, COMPLETION, body, name)[2] == name
        told = lines.take(3)
        assert {(line["event"], line["request"]) for line in told} == {("request", name)}
        (routed,) = [line for line in told if line["status"] == "forwarded"]
        assert routed["decode_status"] == 200 and {"prefill", "decode"} < set(routed)
        (prefilled,) = [line for line in told if line["path"] == "/v1/prefill"]
        (decoded,) = [line for line in told if line not in (routed, prefilled)]
        assert [decoded[tier] for tier in tiers] == found
        assert (decoded["prompt_tokens"], decoded["output_tokens"], decoded["finish"]) == (len(PROMPT), 3, "length")
        assert decoded["milliseconds"] >= decoded["first_token_milliseconds"] >= decoded["queue_milliseconds"] >= 0
        assert all(line["engine_request"].startswith(f"{name}-") for line in (prefilled, decoded))


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "chatcmpl"), (COMPLETION, "cmpl")])
def test_the_id_of_an_answer_is_the_name_of_its_request(group: Group, path: str, kind: str) -> None:
    """The client's, or the new one that the header says; of a whole answer and of a stream, here and apart."""
    for stream in (False, True):
        body = BODIES[path] | {"max_tokens": 2, "stream": stream}
        for port in (group.mixed, group.router):
            assert ask(port, path, body, "a-name")[1]["id"] == f"{kind}-a-name"
            _, answer, name = ask(port, path, body)
            assert len(name) == 32 and answer["id"] == f"{kind}-{name}"


def test_a_router_is_ready_where_a_decode_instance_is(group: Group) -> None:
    """A paused one lives and is not ready; the router's own health says nothing of it."""
    assert (ask(group.router, "/ready")[0], ask(group.router, "/health")[0]) == (200, 200)
    group.decode.cache.life.pause(SECONDS)
    status, answer, _ = ask(group.router, "/ready")
    assert (status, answer["error"]["message"]) == (503, "no decode instance is ready")
    assert ask(group.router, "/health")[0] == 200
    group.decode.cache.life.resume(SECONDS)
    assert ask(group.router, "/ready")[0] == 200

"""The router between stand-ins for instances: whom it asks, in which order, and what it does without them."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable

import pytest

from fastdeploy_cache.errors import LaunchError, MetricsError
from fastdeploy_cache.launch.server.http_server import HttpServer
from fastdeploy_cache.launch.server.instances import Instances
from fastdeploy_cache.launch.server.serve import check_metrics_port
from fastdeploy_cache.metrics.exporter import MetricsExporter
from tests.rigs.router_rig import (
    CHAT,
    SECONDS,
    Instance,
    _Handler,
    answers,
    ask,
    hangs_up,
    never_answers,
    offers,
    refuses,
    routed,
    running,
)

pytestmark = pytest.mark.processes


def test_the_offer_goes_to_the_decode_instance() -> None:
    """The chat is posted to both, to the second with what the first has offered; a client's own offer goes nowhere."""
    prefill, decode = Instance(offers), Instance(answers)
    with routed([prefill], [decode]) as router:
        assert ask(router, {**CHAT, "kv_offer": "Zm9yZ2Vk"}) == (200, {"by": decode.url})
    assert prefill.asked == [CHAT]
    assert decode.asked == [{**CHAT, "kv_offer": "b2ZmZXI="}]


def test_instances_take_turns() -> None:
    """Four chats over two and two: each has two."""
    everyone = [Instance(offers), Instance(offers), Instance(answers), Instance(answers)]
    with routed(everyone[:2], [*everyone[2:]]) as router:
        for _ in range(4):
            assert ask(router)[0] == 200
    assert [len(each.asked) for each in everyone] == [2, 2, 2, 2]
    assert everyone[0].deleted == everyone[1].deleted == []  # decode has taken what they offered


def test_looking_takes_no_turn() -> None:
    """Health and models between two chats: they go to both decode instances all the same."""
    everyone = [Instance(answers), Instance(answers)]
    with routed([], [*everyone]) as router:
        for _ in range(2):
            assert ask(router)[0] == 200
            assert ask(router, method="GET", path="/ready")[0] == 200
            assert ask(router, method="GET", path="/v1/models")[0] == 200
            assert ask(router, method="GET", path="/v1/models")[0] == 200
    assert [len(each.asked) for each in everyone] == [1, 1]


@pytest.mark.parametrize("fault", [refuses, hangs_up, None])
def test_an_offer_that_nobody_takes_is_given_up(nobody: str, fault: Callable[[_Handler], None] | None) -> None:
    """The decode instance refuses, breaks off or is not there: the prefill instance hears of it."""
    prefill = Instance(offers)
    with routed([prefill], [Instance(fault) if fault else nobody]) as router:
        assert ask(router)[0] == 503
        assert prefill.is_given_up.wait(SECONDS)
    assert prefill.deleted == ["/v1/prefill/a-secret"]


def test_an_offer_whose_client_leaves_is_given_up() -> None:
    """While decode has not answered yet."""
    prefill, held = Instance(offers), Instance(never_answers)
    with routed([prefill], [held]) as router:
        connection = http.client.HTTPConnection("127.0.0.1", router.server_port, timeout=SECONDS)
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT))
        assert held.is_held.wait(SECONDS)
        connection.close()
        assert prefill.is_given_up.wait(SECONDS)
        assert held.has_lost_client.wait(SECONDS)


@pytest.mark.parametrize("fault", [refuses, hangs_up, never_answers, lambda h: h.reply(200, b"[]")])
def test_without_an_offer_decode_computes(fault: Callable[[_Handler], None]) -> None:
    """A prefill instance that refuses, breaks off, is too late or talks nonsense: the chat is answered all the same."""
    prefill, decode = Instance(fault), Instance(answers)
    with routed([prefill], [decode], prefill_seconds=0.3) as router:
        assert ask(router) == (200, {"by": decode.url})
    assert decode.asked == [CHAT]


def test_no_prefill_instance_at_all() -> None:
    """Decode instances alone are served as well."""
    decode = Instance(answers)
    with routed([], [decode]) as router:
        assert ask(router) == (200, {"by": decode.url})


@pytest.mark.parametrize("fault", [None, hangs_up])
def test_the_next_decode_instance_is_asked(nobody: str, fault: Callable[[_Handler], None] | None) -> None:
    """One that is not there, or ends before it has said anything, is passed over; the offer is still good."""
    prefill, broken, decode = Instance(offers), Instance(fault) if fault else nobody, Instance(answers)
    with routed([prefill], [broken, decode]) as router:
        for _ in range(2):
            assert ask(router) == (200, {"by": decode.url})
    assert [chat["kv_offer"] for chat in decode.asked] == ["b2ZmZXI="] * 2


def test_no_decode_instance(nobody: str) -> None:
    """Status 503, for chats, readiness and models alike; the router itself lives."""
    with routed([], [nobody]) as router:
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/ready"), ("GET", "/v1/models")):
            status, answer = ask(router, CHAT, method, path)
            assert (status, answer["error"]["type"]) == (503, "server_error")
        assert ask(router, method="GET", path="/health") == (200, {"status": "ok"})


def test_what_decode_says_is_said(nobody: str) -> None:
    """Its refusals are passed on, and its models; one instance that is ready is enough."""
    decode = Instance(refuses)
    with routed([], [nobody, decode]) as router:
        assert ask(router) == (503, {"error": {"message": "not now"}})
        assert ask(router, method="GET", path="/v1/models") == (200, {"path": "/v1/models"})
        assert ask(router, method="GET", path="/ready") == (200, {"status": "ready"})


@pytest.mark.parametrize(
    ("body", "path", "status"),
    [
        (b"no json", "/v1/chat/completions", 400),
        (b"[1]", "/v1/chat/completions", 400),
        (b"[" * 100_000, "/v1/chat/completions", 400),
        (b"{}", "/v1/prefill", 404),
    ],
)
def test_what_is_no_chat_goes_nowhere(body: bytes, path: str, status: int) -> None:
    """It is refused with a reason; no instance hears of it."""
    decode = Instance(answers)
    with routed([], [decode]) as router:
        assert ask(router, body, path=path)[0] == status
    assert decode.asked == []


def test_a_stream_comes_through_as_it_is_made() -> None:
    """The first piece is at the client before the second one exists."""
    may_go_on = threading.Event()

    def stream(handler: _Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b"data: first\n\n")
        assert may_go_on.wait(SECONDS)
        handler.wfile.write(b"data: second\n\n")

    with routed([], [Instance(stream)]) as router:
        connection = http.client.HTTPConnection("127.0.0.1", router.server_port, timeout=SECONDS)
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT))
        response = connection.getresponse()
        assert response.read1() == b"data: first\n\n"
        may_go_on.set()
        assert response.read() == b"data: second\n\n"
        connection.close()


def test_a_stream_that_breaks_off_breaks_off_at_the_client(caplog: pytest.LogCaptureFixture) -> None:
    """A decode instance dies in the middle: the client cannot take that for the end, and the log says it."""

    def dies(handler: _Handler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"d\r\ndata: first\n\n\r\n")

    with routed([], [Instance(dies)]) as router:
        connection = http.client.HTTPConnection("127.0.0.1", router.server_port, timeout=SECONDS)
        connection.request("POST", "/v1/chat/completions", json.dumps({**CHAT, "stream": True}))
        response = connection.getresponse()
        with pytest.raises(http.client.IncompleteRead) as cut:
            response.read()
        assert cut.value.partial == b"data: first\n\n"
        connection.close()
    assert "event=answer_cut_off" in caplog.text


def test_a_whole_answer_ends_without_its_instance(caplog: pytest.LogCaptureFixture) -> None:
    """Once all that it announced has come nothing is waited for, and a client that goes then is not missed."""
    caplog.set_level("INFO")

    def stays(handler: _Handler) -> None:
        handler.reply(200, {"by": "me"})
        never_answers(handler)

    decode = Instance(stays)
    with routed([], [decode]) as router:
        assert ask(router) == (200, {"by": "me"})
        assert decode.has_lost_client.wait(SECONDS)
    assert "client_gone" not in caplog.text and "forwarded" in caplog.text


def test_a_chat_is_passed_on_no_larger_than_it_came() -> None:
    """Text outside ASCII, too; what would not fit with its offer is refused here."""
    prefill, decode = Instance(offers), Instance(answers)
    with routed([prefill], [decode]) as router:
        text = "\u4e2d" * 900_000
        assert ask(router, json.dumps({"text": text}, ensure_ascii=False).encode())[0] == 200
        assert ask(router, b'{"text": "' + b"a" * (3 * 2**20) + b'"}')[0] == 400
    assert [each["text"] == text for each in (*prefill.asked, *decode.asked)] == [True, True]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_client_that_leaves_is_not_answered(kind: str) -> None:
    """Whoever works for it loses the connection; nobody else is asked."""
    held, decode = Instance(never_answers), Instance(answers)
    with routed(*(([held], [decode]) if kind == "prefill" else ([], [held, decode]))) as router:
        connection = http.client.HTTPConnection("127.0.0.1", router.server_port, timeout=SECONDS)
        connection.request("POST", "/v1/chat/completions", json.dumps(CHAT))
        assert held.is_held.wait(SECONDS)
        connection.close()
        assert held.has_lost_client.wait(SECONDS)
    assert decode.asked == []


@pytest.mark.parametrize("url", ["127.0.0.1:80", "https://a:1", "http://a", "http://a:x", "http://a:1/v1", ""])
def test_urls_that_are_none(url: str) -> None:
    """They are named."""
    with pytest.raises(LaunchError, match="use http://HOST:PORT"):
        Instances([url])


def test_a_taken_port() -> None:
    """It is said which."""
    taken = Instance(answers)
    with running(taken), pytest.raises(LaunchError, match=f"cannot listen on 127.0.0.1:{taken.server_port}"):
        HttpServer("127.0.0.1", taken.server_port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-host.invalid"])
def test_an_address_of_another_machine_is_blamed_and_no_port(host: str) -> None:
    """By the API's port, by that of metrics as `serve` looks at it first, and by an engine's own exporter."""
    for what, listen, error in (
        ("", HttpServer, LaunchError),
        ("metrics ", check_metrics_port, LaunchError),
        ("metrics ", lambda host, port: MetricsExporter(host=host, port=port), MetricsError),
    ):
        with pytest.raises(error) as refusal:
            listen(host, 0)
        assert str(refusal.value).startswith(f"{what}cannot listen on {host}:0: {host} is no address of this machine (")
        assert "host, such as 127.0.0.1" in str(refusal.value) and "another port" not in str(refusal.value)

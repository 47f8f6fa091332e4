"""The router between stand-ins for instances: whom it asks, in which order, and what it does without them."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from launch import upstream
from launch.errors import LaunchError
from launch.router import Router
from launch.upstream import Instances

SECONDS = 10.0
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


class Instance(ThreadingHTTPServer):
    """Answers as it is told to, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self, answer: Callable[[_Handler], None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.is_held = threading.Event()  # somebody waits for an answer that does not come
        self.has_lost_client = threading.Event()
        self.is_given_up = threading.Event()
        self.deleted: list[str] = []
        self.num_probes = 0
        self.is_hung = False  # its health does not answer either

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Instance

    def do_GET(self) -> None:
        self.server.num_probes += 1
        if self.server.is_hung:
            never_answers(self)
        else:
            self.reply(200, {"path": self.path})

    def do_DELETE(self) -> None:
        self.server.deleted.append(self.path)
        self.reply(200, {})
        self.server.is_given_up.set()

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.answer(self)

    def reply(self, status: int, content: Any) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
        pass


def offers(handler: _Handler) -> None:
    handler.reply(200, {"offer": "b2ZmZXI=", "offer_id": "a-secret", "num_blocks": 1})


def answers(handler: _Handler) -> None:
    handler.reply(200, {"by": handler.server.url})


def refuses(handler: _Handler) -> None:
    handler.reply(503, {"error": {"message": "not now"}})


def hangs_up(handler: _Handler) -> None:
    handler.close_connection = True


def never_answers(handler: _Handler) -> None:
    """Until the router hangs up."""
    handler.server.is_held.set()
    handler.connection.settimeout(SECONDS)
    assert handler.connection.recv(1) == b""
    handler.server.has_lost_client.set()
    handler.close_connection = True


@contextmanager
def running(*servers: ThreadingHTTPServer) -> Iterator[None]:
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            thread.join(SECONDS)
            server.server_close()


@contextmanager
def routed(
    prefill: list[Instance],
    decode: list[Instance | str],
    prefill_seconds: float = SECONDS,
    probe_seconds: float = 5.0,
    max_open_prefills: int = 32,
) -> Iterator[Router]:
    """A router before these; a text is a URL that nobody listens at."""
    urls = [each if isinstance(each, str) else each.url for each in decode]
    instances = Instances([each.url for each in prefill]), Instances(urls)
    bounds: dict[str, Any] = {"probe_seconds": probe_seconds, "max_open_prefills": max_open_prefills}
    router = Router(("127.0.0.1", 0), *instances, prefill_seconds, **bounds)
    servers = [*prefill, *(each for each in decode if not isinstance(each, str)), router]
    with ExitStack() as stack:
        stack.enter_context(running(*servers))
        yield router


def ask(router: Router, body: Any = CHAT, method: str = "POST", path: str = "/v1/chat/completions") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", router.server_port, timeout=SECONDS)
    try:
        connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.fixture
def nobody() -> str:
    """A URL of this host that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


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
            assert ask(router, method="GET", path="/health")[0] == 200
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


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_hung_one_instance_is_given_to_no_other(role: str, is_stream: bool) -> None:
    """Neither answer nor health: the chat fails with status 504 and its offer is given up; the next chats are answered
    by others, and reach the hung one no more."""
    hung, prefill, decode = Instance(never_answers), Instance(offers), Instance(answers)
    hung.is_hung = True
    instances = ([hung, prefill], [decode]) if role == "prefill" else ([prefill], [hung, decode])
    with routed(*instances, prefill_seconds=0.3, probe_seconds=0.1) as router:  # type: ignore[arg-type]
        status, answer = ask(router, {**CHAT, "stream": is_stream})
        assert status == 504
        assert f"the {role} instance at 127.0.0.1:{hung.server_port} does not answer" in answer["error"]["message"]
        assert hung.has_lost_client.wait(SECONDS)
        assert decode.asked == []
        assert len(prefill.asked) == len(prefill.deleted) == (role == "decode")
        for _ in range(3):
            assert ask(router) == (200, {"by": decode.url})
    assert [len(hung.asked), len(decode.asked)] == [1, 3]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_that_has_hung_is_asked_for_its_health_first(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """When its time is over it gets no chat before it has answered that; then it is one like the others."""
    monkeypatch.setattr(upstream, "_HUNG_SECONDS", 0.0)
    hung, prefill, decode = Instance(never_answers), Instance(offers), Instance(answers)
    hung.is_hung = True
    instances = ([hung], [decode]) if role == "prefill" else ([prefill], [hung, decode])
    with routed(*instances, prefill_seconds=0.3, probe_seconds=0.1) as router:  # type: ignore[arg-type]
        assert ask(router)[0] == 504
        num_probes = hung.num_probes
        for _ in range(2):
            assert ask(router) == (200, {"by": decode.url})
        assert len(hung.asked) == 1 and hung.num_probes > num_probes
        hung.is_hung, hung.answer = False, offers if role == "prefill" else answers
        for _ in range(2):
            assert ask(router)[0] == 200
    assert len(hung.asked) > 1


def test_a_request_that_hangs_everybody_hangs_one(nobody: str) -> None:
    """Three decode instances, of which the first cannot be reached: the second gets it, and the third never."""
    second, third = Instance(never_answers), Instance(never_answers)
    second.is_hung = third.is_hung = True
    with routed([], [nobody, second, third], probe_seconds=0.1) as router:
        assert ask(router)[0] == 504
        assert second.has_lost_client.wait(SECONDS)
    assert [len(second.asked), len(third.asked)] == [1, 0]


def test_looking_can_hang_nobody() -> None:
    """What is read of an instance that hangs is asked of the next one."""
    hung, decode = Instance(never_answers), Instance(answers)
    hung.is_hung = True
    with routed([], [hung, decode]) as router:
        assert ask(router, method="GET", path="/v1/models") == (200, {"path": "/v1/models"})


def test_open_prefills_of_a_client_are_bounded() -> None:
    """While as many of its chats are open as may be, the next one is computed by decode alone; then it is as before."""
    may_answer = threading.Event()

    def answers_late(handler: _Handler) -> None:
        handler.server.is_held.set()
        assert may_answer.wait(SECONDS)
        answers(handler)

    prefill, decode = Instance(offers), Instance(answers_late)
    with routed([prefill], [decode], max_open_prefills=1) as router, ThreadPoolExecutor() as pool:
        first = pool.submit(ask, router)
        assert decode.is_held.wait(SECONDS)
        decode.answer = answers
        assert ask(router)[0] == 200
        assert [len(prefill.asked), "kv_offer" in decode.asked[-1]] == [1, False]
        may_answer.set()
        assert first.result(SECONDS)[0] == 200
        until = time.monotonic() + SECONDS
        while router.open_prefills.num_open:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert ask(router)[0] == 200
    assert len(prefill.asked) == 2


def test_a_decode_instance_that_has_much_to_do_is_waited_for() -> None:
    """Its health answers while its answer takes long."""

    def answers_late(handler: _Handler) -> None:
        until = time.monotonic() + SECONDS
        while handler.server.num_probes < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        answers(handler)

    slow, other = Instance(answers_late), Instance(answers)
    with routed([], [slow, other], probe_seconds=0.05) as router:
        assert ask(router) == (200, {"by": slow.url})
    assert other.asked == []


def test_a_prefill_instance_that_hangs_is_remembered() -> None:
    """The first chat waits for it; the next ones take the other, or do without."""
    hung, prefill, decode = Instance(never_answers), Instance(offers), Instance(answers)
    with routed([hung, prefill], [decode], prefill_seconds=0.3) as router:
        for _ in range(3):
            assert ask(router)[0] == 200
    assert ["kv_offer" in chat for chat in decode.asked] == [False, True, True]
    assert [len(hung.asked), len(prefill.asked)] == [1, 2]


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
    """Status 503, for chats, health and models alike."""
    with routed([], [nobody]) as router:
        for method, path in (("POST", "/v1/chat/completions"), ("GET", "/health"), ("GET", "/v1/models")):
            status, answer = ask(router, CHAT, method, path)
            assert (status, answer["error"]["type"]) == (503, "server_error")


def test_what_decode_says_is_said(nobody: str) -> None:
    """Its refusals are passed on, and its models; one healthy instance is enough."""
    decode = Instance(refuses)
    with routed([], [nobody, decode]) as router:
        assert ask(router) == (503, {"error": {"message": "not now"}})
        assert ask(router, method="GET", path="/v1/models") == (200, {"path": "/v1/models"})
        assert ask(router, method="GET", path="/health") == (200, {"status": "ok"})


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
        Router(("127.0.0.1", taken.server_port), Instances([]), Instances([taken.url]), SECONDS)

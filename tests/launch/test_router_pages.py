"""What a router shows of itself."""

from __future__ import annotations

import http.client
import json
import time

import pytest

from tests.rigs.router_rig import SECONDS, Instance, Routed, answers, ask, offers, routed

pytestmark = pytest.mark.processes


def page(router: Routed, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", router.server_port, timeout=SECONDS)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_metrics_count_what_was_answered() -> None:
    """By path and status; a path that there is not is one of all others; nobody hangs."""
    prefill, decode = Instance(offers), Instance(answers)
    with routed([prefill], [decode]) as router:
        for _ in range(2):
            assert ask(router)[0] == 200
        assert ask(router, method="GET", path="/made/up")[0] == 404
        chats = 'fastdeploy_cache_router_answers_total{path="/v1/chat/completions",status="200"} 2.0'
        deadline = time.monotonic() + SECONDS
        lines: list[str] = []
        while chats not in lines:  # a client has an answer a moment before it is counted
            assert time.monotonic() < deadline, "\n".join(lines)
            status, text = page(router, "/metrics")
            assert status == 200
            lines = text.splitlines()
    assert 'fastdeploy_cache_router_answers_total{path="other",status="404"} 1.0' in lines
    assert f'fastdeploy_cache_router_instance_hung{{instance_url="{decode.url}",role="decode"}} 0.0' in lines
    assert "fastdeploy_cache_router_open_requests 1.0" in lines


def test_status_says_who_is_there() -> None:
    """Each instance with its address, and whether it is healthy now."""
    prefill, decode = Instance(offers), Instance(answers)
    with routed([prefill], [decode]) as router:
        status, text = page(router, "/status")
    assert status == 200
    assert json.loads(text) == {
        "role": "router",
        "open_requests": 0,
        "prefill": [{"url": prefill.url, "healthy": True, "hung": False}],
        "decode": [{"url": decode.url, "healthy": True, "hung": False}],
    }

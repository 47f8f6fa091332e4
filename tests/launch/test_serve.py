"""`fastdeploy-cache serve` as a client and an operator see it: a real server, real ranks, real answers."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.rigs.command_line import CLI
from tests.rigs.reference_model import needs_model
from tests.rigs.server_process import CHAT, Server

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.processes, needs_model]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with 3 ranks for the tests that only talk to it."""
    server = Server(tmp_path_factory.mktemp("serve") / "log", "--ranks", "3")
    yield server
    assert server.end(signal.SIGTERM) == 0, server.rest


def test_the_second_question_hits_the_cache_and_gets_the_same_answer(server: Server) -> None:
    """cached_tokens counts full blocks of the earlier prompt, and the text does not change."""
    answers = [json.loads(server.post(CHAT)[1]) for _ in range(2)]
    texts = {answer["choices"][0]["message"]["content"] for answer in answers}
    assert len(texts) == 1
    assert "Paris" in texts.pop()
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[1] > 0
    assert cached[1] % 16 == 0


def test_a_stream_says_the_same_as_a_whole_answer(server: Server) -> None:
    """The pieces of the stream joined are the answer; usage comes last, then [DONE]."""
    whole = json.loads(server.post(CHAT)[1])["choices"][0]["message"]["content"]
    status, body = server.post({**CHAT, "stream": True, "stream_options": {"include_usage": True}})
    events = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert status == 200
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == whole
    assert chunks[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"not json", "malformed"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({**CHAT, "max_tokens": 0}, "from 1 on"),
        ({**CHAT, "cache_salt": ""}, "cache_salt"),
        ({**CHAT, "cache_salt": "x" * 1025}, "cache_salt"),
        ({**CHAT, "cache_salt": 7}, "cache_salt"),
        ({**CHAT, "cache_salt": ["a"]}, "cache_salt"),
        ({**CHAT, "cache_salt": {"a": 1}}, "cache_salt"),
        ({**CHAT, "cache_salt": True}, "cache_salt"),
        ({**CHAT, "messages": [{"role": "user", "content": "x" * 3_000_000}]}, "3000000 characters in 1 messages"),
        ({**CHAT, "n": 2}, "n is 2, which is not done here"),
        ({**CHAT, "temprature": 1}, "did you mean 'temperature'?"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({**CHAT, "max_tokens": 10**6}, "at most 8192"),
    ],
)
def test_bad_requests_are_refused_with_a_reason(server: Server, body: Any, words: str) -> None:
    """Status 400 and a message that says what is wrong; the server goes on."""
    status, answer = server.post(body)
    assert status == 400
    assert words in json.loads(answer)["error"]["message"]


def test_the_first_question_of_the_pages_has_a_sensible_answer(server: Server) -> None:
    """What a reader types first is answered with Paris, as it is written there."""
    pages = [ROOT / "README.md", ROOT / "docs" / "quickstart.md", ROOT / "docs" / "server.md"]
    found = [body for page in pages for body in re.findall(r"/chat/completions -d '(.*)'", page.read_text())]
    assert found
    for body in dict.fromkeys(found):
        status, answer = server.post(body.encode())
        assert status == 200 and "Paris" in json.loads(answer)["choices"][0]["message"]["content"]


def test_a_salt_keeps_chats_apart(server: Server) -> None:
    """The words are the same; what is cached is found with the same salt alone."""
    chat = {"messages": [{"role": "user", "content": "Who shares a cache with whom?"}], "max_tokens": 8}
    salts = [{}, {"cache_salt": "one"}, {"cache_salt": "other"}, {"cache_salt": None}, {"cache_salt": "one"}]
    answers = [json.loads(server.post({**chat, **salt})[1]) for salt in salts]
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[3] == cached[4] > 0
    assert cached[:3] == [cached[0]] + [0] * 2


def test_metrics_show_the_hits(server: Server) -> None:
    """A scrape shows requests, hits and three ranks that are up."""
    server.post(CHAT)
    server.post(CHAT)
    families = {f.name: f for f in text_string_to_metric_families(server.get(server.metrics_url).decode())}
    hits = {s.labels["tier"]: s.value for s in families["fastdeploy_cache_tokens_hit"].samples}
    assert hits["gpu"] > 0
    assert [s.value for s in families["fastdeploy_cache_rank_up"].samples] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_server_is_the_end_of_its_ranks(tmp_path: Path, number: int) -> None:
    """SIGTERM ends it with status 0, SIGKILL abruptly; no rank stays (the leak fixture looks at /dev/shm)."""
    server = Server(tmp_path / "log", "--ranks", "1")
    server.post({**CHAT, "max_tokens": 2})
    (pid,) = server.rank_pids()
    handle = os.pidfd_open(pid)
    assert server.end(number) == (0 if number == signal.SIGTERM else -number)
    ended, _, _ = select.select([handle], [], [], 3)
    os.close(handle)
    assert ended, "the rank outlived its engine by 3 seconds"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_normal_end_is_no_alarm(tmp_path: Path, number: int) -> None:
    """In the midst of a stream, with a store: the logs of all processes are lines of JSON, and none is a warning."""
    arguments = ["--ranks", "1", "--log-format", "json", "--log-dir", str(tmp_path / "log")]
    for setting in ("num_gpu_blocks=64", "num_cpu_blocks=64", "storage.capacity_bytes=300000000"):
        arguments += ["--set", setting]
    arguments += ["--set", "storage.slab_bytes=67108864", "--storage", str(tmp_path / "store")]
    server = Server(tmp_path / "out", *arguments)
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 900, "stream": True}).encode()
    with urllib.request.urlopen(f"{server.url}/v1/completions", body, timeout=60) as answer:
        assert answer.readline().startswith(b"data: ")
        assert server.end(number) == 0, server.rest
        assert b"the engine has stopped" in answer.read()
    logs = [server.rest, *(path.read_text() for path in (tmp_path / "log").iterdir())]
    lines = [json.loads(line) for log in logs for line in log.splitlines()]
    assert len(logs) == 3 and {line["event"] for line in lines} >= {"stopping", "stopped", "request", "storage_flushed"}
    assert {line["level"] for line in lines} == {"info"}


def test_what_was_asked_before_a_restart_hits_from_disk(tmp_path: Path) -> None:
    """SIGTERM writes all that is cached; the server that comes after finds it, says the same, and its status shows the
    store."""
    arguments = ["--ranks", "3", "--storage", str(tmp_path / "store")]
    for setting in ("storage.admission=all", "storage.capacity_bytes=300000000", "storage.slab_bytes=67108864"):
        arguments += ["--set", setting]
    arguments += ["--set", "min_prefetch_tokens=16", "--set", "load_policy=always"]
    texts, cached = [], []
    for number in range(2):
        server = Server(tmp_path / f"log{number}", *arguments)
        answer = json.loads(server.post(CHAT)[1])
        texts.append(answer["choices"][0]["message"]["content"])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        storage = json.loads(server.get(f"{server.url}/status"))["storage"]
        assert storage["available"] and storage["breakers"] == {"read": "closed", "write": "closed"}
        assert server.end(signal.SIGTERM) == 0, server.rest
        assert "event=storage_flushed all=True" in server.rest
    assert texts[0] == texts[1]
    assert cached[0] == 0 < cached[1]
    assert storage["blocks"]["fetched"] * 16 == cached[1]


def test_a_taken_port_is_one_line(server: Server) -> None:
    """A second server on a port of the API or of metrics says so in one line, with the option; no rank was started."""
    port = server.url.rpartition(":")[2]
    words = {"--port": "", "--metrics-port": "metrics "}
    for option, what in words.items():
        command = [*CLI, "serve", "--port", "0", "--metrics-port", "0", option, port]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (result.returncode, "Traceback" in result.stderr, "rank" in result.stderr) == (1, False, False)
        line = result.stderr.strip().splitlines()[-1]
        assert line.startswith(f"fastdeploy-cache: {what}cannot listen on 127.0.0.1:{port}: Address already in use")
        assert f"choose another {option}" in line

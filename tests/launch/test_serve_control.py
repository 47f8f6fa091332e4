"""A real server told to pause, sleep and so on: chats wait for it, and no answer changes."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastdeploy_cache.errors import ControlError
from fastdeploy_cache.insight.control.client import ask
from tests.rigs.command_line import CLI
from tests.rigs.reference_model import needs_model
from tests.rigs.server_process import CHAT, Server

pytestmark = [pytest.mark.processes, needs_model]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """One with a store, so that weights have a name."""
    folder = tmp_path_factory.mktemp("control")
    path = folder / "private" / "serve.sock"
    arguments = ["--control-socket", str(path), "--storage", str(folder / "store")]
    for setting in ("storage.capacity_bytes=300000000", "storage.slab_bytes=67108864", "load_policy=always"):
        arguments += ["--set", setting]
    server = Server(folder / "log", "--ranks", "3", *arguments)
    yield server, path
    assert server.end(signal.SIGTERM) == 0, server.rest
    assert not path.exists()


def chat(server: Server, num_tokens: int = 24) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    status, body = server.post({**CHAT, "max_tokens": num_tokens})
    answer = json.loads(body)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def life_cycle(server: Server) -> str:
    return str(json.loads(server.get(f"{server.url}/status"))["life_cycle"])


@pytest.mark.parametrize(("verb", "status", "reverse"), [("pause", "paused", "resume"), ("sleep", "asleep", "wake")])
def test_a_chat_waits_until_it_goes_on(server: tuple[Server, Path], verb: str, status: str, reverse: str) -> None:
    """Asked while the server is still, it is answered after that, with the same words as ever; /status shows it."""
    running, path = server
    text, _ = chat(running)
    assert ask(path, verb, 30) == life_cycle(running) == status
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(chat, running)
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        assert ask(path, reverse, 30) == life_cycle(running) == "running"
        assert waiting.result(60)[0] == text


def test_verbs_in_the_middle_of_answers_change_no_word(server: tuple[Server, Path]) -> None:
    """While long answers are being generated it sleeps, wakes, is cleared and told of weights: the same answers."""
    running, path = server
    text, _ = chat(running, 60)
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(chat, running, 60) for _ in range(3)]
        for verb in ("sleep", "wake", "clear", "pause", "resume"):
            ask(path, verb, 30)
        ask(path, "sleep", 30, tiers=["gpu"])
        ask(path, "wake", 30)
        ask(path, "update-weights", 30, weights_id="middle")
        assert {answer.result(60)[0] for answer in answers} == {text}


def test_new_weights_find_nothing_of_the_old_ones(server: tuple[Server, Path]) -> None:
    """After update-weights a known prompt is computed again, though storage holds it, and is cached under the new
    name; without a name it is refused."""
    running, path = server
    chat(running)
    assert chat(running)[1] > 0
    with pytest.raises(ControlError, match="weights_id"):
        ask(path, "update-weights", 30)
    assert ask(path, "update-weights", 30, weights_id="new") == "running"
    assert [chat(running)[1] > 0 for _ in range(2)] == [False, True]


@pytest.mark.parametrize("verb", ["pause", "sleep"])
def test_a_server_that_is_still_ends_on_sigterm(tmp_path: Path, verb: str) -> None:
    """Paused or asleep, with a chat that waits: status 0, the chat is answered 503, a paused one's store is flushed."""
    path = tmp_path / "private" / "serve.sock"
    store = ["--storage", str(tmp_path / "store"), "--set", "storage.capacity_bytes=300000000"]
    server = Server(
        tmp_path / "log", "--control-socket", str(path), *store, "--set", "storage.slab_bytes=67108864", "--ranks", "1"
    )
    chat(server)
    ask(path, verb, 30)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.post, CHAT)
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        assert server.end(signal.SIGTERM) == 0, server.rest
        status, body = waiting.result(30)
    assert status == 503 and b"stopped" in body
    assert ("event=storage_flushed all=True" if verb == "pause" else "event=storage_not_flushed") in server.rest
    assert not path.exists()


def explain(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*CLI, "explain", *arguments, "--socket", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_request_can_be_explained_by_the_id_that_it_was_sent_with(server: tuple[Server, Path]) -> None:
    """By the command line, as text and as JSON: where its tokens came from, adding up to its prompt; an id that nobody
    knows is one line and status 1."""
    running, path = server
    prompt = {"messages": [{"role": "user", "content": "Why is the sky blue, and why is it red in the evening?"}]}
    for name in ("first-of-two", "second-of-two"):
        status, body = running.post({**prompt, "max_tokens": 4}, request_id=name)
        assert status == 200
    num_cached = json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    (found,) = json.loads(explain(path, "second-of-two", "--json").stdout)
    hits, misses = (sum(part["num_tokens"] for part in found[name]) for name in ("hits", "misses"))
    assert hits == num_cached > 0 and hits + misses == found["num_tokens"]
    assert "missed (new)" in explain(path, "first-of-two").stdout
    status = json.loads(running.get(f"{running.url}/status"))
    assert status["missed_tokens"]["new"] > 0 and status["saved_seconds"]["gpu"] > 0
    healthy = subprocess.run(
        [*CLI, "doctor", "--socket", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (healthy.returncode, healthy.stdout.strip()) == (0, "nothing is wrong, as far as can be seen")
    unknown = explain(path, "third")
    assert (unknown.returncode, unknown.stdout) == (1, "") and "no request 'third'" in unknown.stderr

"""Prefill, decode and mixed servers with the real model, as a client sees them."""

from __future__ import annotations

import base64
import json
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fastdeploy_cache.launch.server.instances import Instances
from fastdeploy_cache.launch.server.router import Router
from fastdeploy_cache.transfer_manager.peer.offer import Offer
from fastdeploy_cache.transfer_manager.peer.signature import OfferSigner, make_secret
from tests.rigs.command_line import CLI
from tests.rigs.http_rig import served
from tests.rigs.reference_model import needs_model
from tests.rigs.server_process import Server

pytestmark = [pytest.mark.processes, needs_model]
SECONDS = 120.0
BLOCK_BYTES = 16 * 30 * 2 * 3 * 64 * 4  # 16 tokens, 30 layers, keys and values, 3 heads of 64 floats
SYSTEM = {"role": "system", "content": "You answer in one short sentence. " * 6}
QUESTIONS = ["What is the capital of France?", "And of Spain?", "Which of the two is larger?"]
SMALL = ["--set", "num_gpu_blocks=256", "--set", "num_cpu_blocks=0"]


class Group(NamedTuple):
    mixed: Server
    prefill: Server  # 3 ranks
    decode: Server  # 1 rank
    router_url: str
    secret: list[str]  # as arguments


def prefill_of(log: Path, *arguments: str) -> Server:
    return Server(log, "--role", "prefill", *SMALL, *arguments)


@contextmanager
def routed(prefill: list[str], decode: list[str]) -> Iterator[str]:
    with served(Router(Instances(prefill), Instances(decode), SECONDS).build()) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """One server of each role, and a router."""
    folder = tmp_path_factory.mktemp("group")
    with ThreadPoolExecutor() as pool:
        mixed = pool.submit(Server, folder / "mixed", "--ranks", "1", *SMALL)
        make_secret(folder / "secret")
        secret = ["--set", f"peer.secret_file={folder / 'secret'}"]
        prefill = pool.submit(prefill_of, folder / "prefill", "--ranks", "3", *secret)
        more = ["--ranks", "1", "--set", "peer.silence_timeout_seconds=1", *secret]
        decode = pool.submit(Server, folder / "decode", "--role", "decode", *SMALL, *more)
        servers = [each.result() for each in (mixed, prefill, decode)]
    with routed([servers[1].url], [servers[2].url]) as url:
        yield Group(*servers, url, secret)
    for server in servers:
        assert server.end(signal.SIGTERM) == 0, server.rest


def post(url: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}{path}", json.dumps(body).encode(), timeout=SECONDS) as answer:
        return json.loads(answer.read())


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def status(server: Server) -> dict[str, Any]:
    return json.loads(server.get(f"{server.url}/status"))


def num_received_blocks(server: Server) -> float:
    return sum(peer.get("bytes", 0) for peer in status(server)["peers"]) / BLOCK_BYTES


def test_a_conversation_is_answered_as_by_one_server(group: Group) -> None:
    """Turn by turn the same words as from a mixed server with other ranks; of a later turn only new blocks are sent."""
    messages = [SYSTEM]
    for turn, question in enumerate(QUESTIONS):
        before = num_received_blocks(group.decode)
        messages.append({"role": "user", "content": question})
        chat = {"messages": messages, "max_tokens": 16}
        answer = post(group.router_url, chat)
        assert text_of(answer) == text_of(post(group.mixed.url, chat))
        messages.append({"role": "assistant", "content": text_of(answer)})
        num_full, num_sent = answer["usage"]["prompt_tokens"] // 16, num_received_blocks(group.decode) - before
        assert num_sent == num_full if turn == 0 else 0 < num_sent < num_full
    assert status(group.decode)["role"] == "decode"
    assert {peer["peer"] for peer in status(group.decode)["peers"]} == {
        f"prefill-{group.prefill.url.rpartition(':')[2]}"
    }


def test_a_hybrid_model_is_answered_as_by_one_server(tmp_path: Path) -> None:
    """Its states and windows are received, too: the same words, and of each prompt all but its last part block."""
    make_secret(tmp_path / "secret")
    alike = ["--model", "hybrid", "--ranks", "1", *SMALL]
    secret = ["--set", f"peer.secret_file={tmp_path / 'secret'}"]
    with ThreadPoolExecutor() as pool:
        mixed = pool.submit(Server, tmp_path / "mixed", *alike)
        prefill = pool.submit(Server, tmp_path / "prefill", "--role", "prefill", *alike, *secret)
        decode = pool.submit(Server, tmp_path / "decode", "--role", "decode", *alike, *secret)
        servers = [each.result() for each in (mixed, prefill, decode)]
    messages = [SYSTEM]
    with routed([servers[1].url], [servers[2].url]) as url:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = post(url, {"messages": messages, "max_tokens": 16})
            assert text_of(answer) == text_of(post(servers[0].url, {"messages": messages, "max_tokens": 16}))
            messages.append({"role": "assistant", "content": text_of(answer)})
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == (usage["prompt_tokens"] - 1) // 16 * 16
    assert [peer["transfers"] for peer in status(servers[2])["peers"]] == [len(QUESTIONS)], status(servers[2])["peers"]
    for server in servers:
        assert server.end(signal.SIGTERM) == 0, server.rest


def test_what_decode_has_is_not_sent(group: Group) -> None:
    """The same chat again: the same words, and not a byte."""
    chat = {"messages": [SYSTEM, {"role": "user", "content": "What is a cache?"}], "max_tokens": 8}
    text = text_of(post(group.router_url, chat))
    before = num_received_blocks(group.decode)
    assert text_of(post(group.router_url, chat)) == text
    assert num_received_blocks(group.decode) == before > 0


def test_a_stream_through_the_router(group: Group) -> None:
    """Its pieces are the whole answer."""
    chat = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 12}
    request = urllib.request.Request(
        f"{group.router_url}/v1/chat/completions", json.dumps({**chat, "stream": True}).encode()
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        events = [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(pieces) == text_of(post(group.mixed.url, chat))


def test_each_role_says_what_it_does_not_do(group: Group) -> None:
    """Status 400 with where to turn to; a prompt without a full block has no offer; what is no base64 is no offer."""
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    for server, path, body, words in (
        (group.prefill, "/v1/chat/completions", chat, "ask a decode instance"),
        (group.decode, "/v1/prefill", chat, "ask a prefill instance"),
        (group.mixed, "/v1/prefill", chat, "--role prefill"),
        (group.decode, "/v1/chat/completions", {**chat, "kv_offer": "!"}, "base64"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            post(server.url, body, path)
        assert refusal.value.code == 400
        assert words in json.loads(refusal.value.read())["error"]["message"]


def test_an_offer_that_nobody_wants(group: Group) -> None:
    """DELETE gives it up, once; what decode would refuse is not computed at all."""
    chat = {"messages": [SYSTEM, {"role": "user", "content": "Who reads this?"}], "max_tokens": 8}
    offer_id = post(group.prefill.url, chat, "/v1/prefill")["offer_id"]
    delete = urllib.request.Request(f"{group.prefill.url}/v1/prefill/{offer_id}", method="DELETE")
    with urllib.request.urlopen(delete, timeout=SECONDS) as answer:
        assert json.loads(answer.read()) == {"offer_id": offer_id, "status": "cancelled"}
    until = time.monotonic() + SECONDS
    while {"cancelled": 1} not in [peer["failures"] for peer in status(group.prefill)["peers"]]:
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(delete, timeout=SECONDS)
    assert refusal.value.code == 404
    with pytest.raises(urllib.error.HTTPError) as refusal:
        post(group.prefill.url, {**chat, "max_tokens": 10_000}, "/v1/prefill")
    assert refusal.value.code == 400


def test_an_offer_that_is_not_of_the_group_is_refused(group: Group) -> None:
    """Forged, altered or of another prompt: status 400, and neither the metrics nor the cache know of its bytes."""
    system = {"role": "system", "content": "Nobody has asked this before. " * 6}
    chat = {"messages": [system, {"role": "user", "content": "Who may fill this cache?"}], "max_tokens": 4}
    other = {"messages": [system, {"role": "user", "content": "Who may fill that cache?"}], "max_tokens": 4}
    true = post(group.prefill.url, chat, "/v1/prefill")
    data = base64.b64decode(true["offer"])
    forged = OfferSigner().sign(Offer.from_bytes(data[32:]))
    before = num_received_blocks(group.decode), status(group.decode)["tiers"]["gpu"]
    for body, offer, words in (
        (chat, forged, "no offer of this group"),
        (chat, data[:40] + bytes([data[40] ^ 1]) + data[41:], "no offer of this group"),
        (other, data, "another prompt"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refusal:
            post(group.decode.url, {**body, "kv_offer": base64.b64encode(offer).decode()})
        assert refusal.value.code == 400
        assert words in json.loads(refusal.value.read())["error"]["message"]
    assert before == (num_received_blocks(group.decode), status(group.decode)["tiers"]["gpu"])
    assert text_of(post(group.decode.url, {**chat, "kv_offer": true["offer"]})) == text_of(post(group.mixed.url, chat))
    assert num_received_blocks(group.decode) > before[0]


def test_a_prefill_server_killed_midway(group: Group, tmp_path: Path) -> None:
    """While it sends a long prompt: the decode server computes the prompt, and says what a mixed one says."""
    chat = {"messages": [{"role": "user", "content": "Tell me a story of the sea. " * 70}], "max_tokens": 8}
    killed = prefill_of(tmp_path / "log", "--ranks", "1", *group.secret)
    offer = post(killed.url, chat, "/v1/prefill")["offer"]
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(post, group.decode.url, {**chat, "kv_offer": offer})
        until = time.monotonic() + SECONDS
        while not status(group.decode)["tiers"]["gpu"]["in_flight"]:  # blocks for what is to come
            assert time.monotonic() < until
            assert not answer.done()
            time.sleep(0.01)
        killed.end(signal.SIGKILL)
        assert text_of(answer.result()) == text_of(post(group.mixed.url, chat))
    failures = [peer["failures"] for peer in status(group.decode)["peers"]]
    assert {"gone": 1} in failures


def test_the_command_route(group: Group) -> None:
    """It says where it listens, answers without prefill instances, and ends on SIGTERM with status 0."""
    command = [*CLI, "route", "--decode", group.decode.url, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.search(r"event=serving url=(\S+)", process.stderr.readline())
        assert found is not None
        chat = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 4}
        assert text_of(post(found.group(1), chat)) == text_of(post(group.mixed.url, chat))
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0

"""A real publisher's process, heard by a subscriber that knows vLLM's wire format alone."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.config.events import EventsConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.events import Mirror
from fastdeploy_cache.events.names import NameScheme, name_blocks
from fastdeploy_cache.events.questions import AskPiece, AskPrefix, AskSnapshot, AskState
from fastdeploy_cache.ipc.codec import encode
from tests.rigs.event_rig import (
    SIZE,
    PlainSubscriber,
    mirror_of,
    pid_of_publisher,
    prompt,
    publishing,
    serve,
)

pytestmark = pytest.mark.processes
_FIELDS = {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}


def wait_found(mirror: Mirror, tokens: np.ndarray[Any, Any]) -> None:
    """Until a prompt is known to be cached: then its message has been sent."""
    with mirror._lock:
        assert mirror._lock.wait_for(lambda: mirror.find(tokens).num_tokens > 0, 20)


def answer_to(subscriber: PlainSubscriber, question: Any) -> dict[str, Any]:
    subscriber.send(b"", encode(question) if isinstance(question, msgspec.Struct) else question)
    empty, answer = subscriber.frames()
    assert empty == b""
    found: dict[str, Any] = msgspec.msgpack.decode(answer)
    return found


def test_events_as_vllm_publishes_them() -> None:
    """Each field by its name: stored with tokens, with the salt of a namespace on the first block, and cleared."""
    with publishing(topic="kv@me") as cache, PlainSubscriber(cache, "kv@") as subscriber:
        topic, _, (seconds, _, data_parallel_rank) = subscriber.next()
        assert (topic, data_parallel_rank) == (b"kv@me", 0) and seconds > 1.7e9
        tokens = prompt(1)
        serve(cache, "a", tokens, "tenant")
        (stored,) = subscriber.next_events()
        names = name_blocks(scheme := NameScheme(block_size=SIZE), scheme.names(), tokens, "tenant")
        assert set(stored) == {*_FIELDS, "extra_keys"}
        assert stored["block_hashes"] == names
        assert stored["token_ids"] == tokens[:-1].tolist()
        assert stored["extra_keys"] == [["tenant"], None, None, None]
        assert (stored["type"], stored["medium"], stored["block_size"]) == ("BlockStored", "GPU", SIZE)
        assert [stored[name] for name in ("parent_block_hash", "lora_id", "lora_name")] == [None, None, None]
        cache.life.clear()
        assert subscriber.next_events() == [{"type": "AllBlocksCleared"}]


def test_what_continues_a_prompt_names_its_parent() -> None:
    """The second event begins where the first one ends, and has no extra keys."""
    with publishing() as cache, PlainSubscriber(cache) as subscriber:
        subscriber.next()
        serve(cache, "a", prompt(1, 2))
        (first,) = subscriber.next_events()
        serve(cache, "b", prompt(1, 5))
        (second,) = subscriber.next_events()
        assert second["parent_block_hash"] == first["block_hashes"][-1]
        assert len(second["block_hashes"]) == 3 and "extra_keys" not in second


def test_removals_say_from_where() -> None:
    """What is evicted from the GPU goes there, and stays known of the CPU tier that has a copy."""
    with publishing(8, 64) as cache, PlainSubscriber(cache) as subscriber:
        subscriber.next()
        media: dict[bytes, set[str]] = {}
        for number in range(6):
            serve(cache, f"{number}", prompt(number, 3))
        while sum("GPU" in there for there in media.values()) != cache.stats().gpu.num_cached or len(media) < 18:
            for event in subscriber.next_events():
                for name in event["block_hashes"] if event["type"] != "AllBlocksCleared" else ():
                    there = media.setdefault(name, set())
                    assert (event["medium"] in there) == (event["type"] == "BlockRemoved")
                    (there.add if event["type"] == "BlockStored" else there.discard)(event["medium"])
        assert sum("CPU" in there for there in media.values()) == cache.stats().cpu.num_cached > 0


def test_a_replay_as_vllm_answers_it() -> None:
    """Every message from a sequence on, then the end mark; from the future, or from no number, the mark alone."""
    with publishing(num_kept_messages=5, heartbeat_seconds=60.0) as cache, PlainSubscriber(cache) as subscriber:
        with mirror_of(cache) as mirror:
            assert mirror.wait_current(20)
            for number in range(8):
                serve(cache, f"{number}", prompt(number))
                wait_found(mirror, prompt(number))
        last = answer_to(subscriber, AskState(number=1))["sequence"] - 1
        replayed = subscriber.replay((last - 2).to_bytes(8, "big"))
        assert [sequence for _, sequence, _ in replayed] == [last - 2, last - 1, last]
        assert all(msgspec.msgpack.decode(payload)[1] for _, _, payload in replayed)
        assert len(subscriber.replay(bytes(8))) == 5, "no more than are kept"
        for start in ((last + 1).to_bytes(8, "big"), (2**62).to_bytes(8, "big"), b"\xff" * 8):
            assert subscriber.replay(start) == []


def test_nonsense_gets_a_refusal_or_nothing() -> None:
    """And the publisher is the same one behind it."""
    with publishing() as cache:
        before = pid_of_publisher(cache)
        with PlainSubscriber(cache) as subscriber:
            for junk in (b"", b"1234567", b"\xc1" * 9, b"x" * 2000, encode(AskState(number=1))[:-1]):
                assert answer_to(subscriber, junk)["type"] == "refused"
            subscriber.send(b"only one frame")
            subscriber.send(b"", b"a", b"b", b"c")
            subscriber.send(b"not empty", bytes(8))
            assert answer_to(subscriber, AskState(number=7))["number"] == 7
            assert pid_of_publisher(cache) == before


def test_snapshots_are_bounded() -> None:
    """Those who begin to take one and never go on hold 64; who comes then is told to come again. Each piece is given
    once, in its turn."""
    with publishing() as cache, PlainSubscriber(cache) as subscriber:
        serve(cache, "a", prompt(1))
        answers = [answer_to(subscriber, AskSnapshot(number=number)) for number in range(1, 68)]
        assert [answer["type"] for answer in answers] == ["state"] * 64 + ["refused"] * 3
        assert "too many take snapshots" in answers[-1]["reason"]
        for piece, kind in ((1, "refused"), (0, "piece"), (0, "refused")):
            asked = AskPiece(number=1, snapshot=answers[0]["snapshot"], piece=piece)
            assert answer_to(subscriber, asked)["type"] == kind


def test_who_asks_needs_the_token(tmp_path: Path) -> None:
    """A prompt's cached part, by tokens or by names; not without the token, nor where none is set."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    with pytest.raises(ConfigError, match="which others may read"), publishing(query_token_file=str(token)):
        pass
    token.chmod(0o600)
    with publishing(query_token_file=str(tmp_path / "token")) as cache, mirror_of(cache) as mirror:
        tokens = prompt(1)
        with PlainSubscriber(cache) as subscriber:
            assert mirror.wait_current(20)
            serve(cache, "a", tokens)
            wait_found(mirror, tokens)
            asked = {"number": 1, "token": "0123456789abcdef", "namespace": ""}
            found = answer_to(subscriber, AskPrefix(**asked, token_ids=tokens.tolist()))
            assert (found["num_tokens"], found["num_gpu_tokens"], found["num_cpu_tokens"]) == (4 * SIZE, 4 * SIZE, 0)
            names = mirror.names(tokens)
            assert answer_to(subscriber, AskPrefix(**asked, names=names))["num_tokens"] == 4 * SIZE
            elsewhere = AskPrefix(**{**asked, "namespace": "tenant"}, token_ids=tokens.tolist())
            assert answer_to(subscriber, elsewhere)["num_tokens"] == 0
            no_token = msgspec.msgpack.encode({"type": "prefix", "number": 8})
            for wrong, why in (
                (AskPrefix(**{**asked, "token": "no"}, token_ids=[1]), "the token is wrong"),
                (no_token, "no question: Object missing required field `token`"),
                (AskPrefix(**asked), "give either token_ids or names"),
                (AskPrefix(**asked, token_ids=[-1]), "token id -1"),
                (AskPrefix(number=1, token=asked["token"], token_ids=[1]), "give the namespace"),
                (AskPrefix(**asked, token_ids=[100_000] * 300_000), "1048576 are the most"),
            ):
                assert why in answer_to(subscriber, wrong)["reason"]
    with publishing() as cache, PlainSubscriber(cache) as subscriber:
        assert "answers no questions" in answer_to(subscriber, AskPrefix(**asked, token_ids=[1]))["reason"]


def test_a_killed_publisher_is_replaced() -> None:
    """Its successor counts from 0, clears what was told before, and tells all that is cached: who missed the first
    messages asks for them again."""
    with publishing() as cache, PlainSubscriber(cache) as subscriber:
        subscriber.next()
        serve(cache, "a", prompt(1))
        (stored,) = subscriber.next_events()
        before = pid_of_publisher(cache)
        assert before is not None
        os.kill(before, signal.SIGKILL)
        while pid_of_publisher(cache) in (None, before):
            subscriber.next()  # the successor's, once it is there: messages come behind its start alone
        subscriber.next()
        told = [each for _, _, payload in subscriber.replay(bytes(8)) for each in msgspec.msgpack.decode(payload)[1]]
        assert told == [{"type": "AllBlocksCleared"}, stored]
        assert pid_of_publisher(cache) not in (None, before)


def test_lost_arrays_are_told_at_once() -> None:
    """Also where a request holds all that was cached, so that no run goes."""
    with publishing() as cache, PlainSubscriber(cache) as subscriber:
        subscriber.next()
        request = Request(request_id="a", prompt_token_ids=prompt(1))
        cache.match(request)
        cache.allocate(request, 5)
        cache.commit(request, 4 * SIZE)
        assert [event["type"] for event in subscriber.next_events()] == ["BlockStored"]
        cache.ranks.kv_lost(0)
        assert [event["type"] for event in subscriber.next_events()] == ["AllBlocksCleared"]
        cache.release(request)


def test_two_caches_at_one_path(tmp_path: Path) -> None:
    """The second is refused, and the first goes on."""
    endpoint = f"ipc://{tmp_path}/kv"
    with publishing(endpoint=endpoint) as cache, PlainSubscriber(cache) as subscriber:
        with pytest.raises(ConfigError, match="another process listens there"), publishing(endpoint=endpoint):
            pass
        serve(cache, "a", prompt(1))
        assert subscriber.next_events()


def test_what_is_no_socket_stays(tmp_path: Path) -> None:
    """A file at the path is not taken away; and after the end no socket is left."""
    path = tmp_path / "kv"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is there and is no socket"), publishing(endpoint=f"ipc://{path}"):
        pass
    assert path.read_text() == "precious"
    path.unlink()
    with publishing(endpoint=f"ipc://{path}"):
        assert path.is_socket()
    assert not list(tmp_path.iterdir())


def test_a_long_replay_to_one_who_reads_late() -> None:
    """More messages than may lie unread: the rest comes as it reads, and then the end."""
    with publishing(num_kept_messages=5000, heartbeat_seconds=0.1) as cache, PlainSubscriber(cache) as subscriber:
        with mirror_of(cache) as mirror:
            assert mirror.wait_current(20)
            for number in range(400):
                serve(cache, f"{number}", prompt(number))
                wait_found(mirror, prompt(number))
            num_sent = answer_to(subscriber, AskState(number=1))["sequence"]
        replayed = [sequence for _, sequence, _ in subscriber.replay(bytes(8))]
        assert len(replayed) >= num_sent > 256 and replayed == list(range(len(replayed)))


def test_a_port_that_is_taken_is_refused() -> None:
    """At the start, with what to do; and nothing is left behind."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"Address already in use.*choose another address"):
            PrefixCacheManager(
                CacheConfig(
                    block_size=SIZE, num_gpu_blocks=8, transfer_client="inline", events=EventsConfig(endpoint=endpoint)
                )
            )


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"endpoint": "tcp://0.0.0.0:5557"}, "which others may reach, and events carry prompts"),
        ({"endpoint": "tcp://host:5557"}, "which others may reach"),
        ({"endpoint": "tcp://*:5557"}, "which others may reach"),
        ({"endpoint": "5557"}, r"use tcp://ADDRESS:PORT"),
        ({"endpoint": "tcp://127.0.0.1:0"}, r"use tcp://ADDRESS:PORT"),
        ({"endpoint": "ipc://relative"}, r"use tcp://ADDRESS:PORT"),
        ({"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://127.0.0.1:1"}, "give it another one"),
        ({"endpoint": "ipc:///a", "block_names": "md5"}, "use one of own, sha256_cbor"),
        ({"endpoint": "ipc:///a", "name_form": "hex"}, "use one of bytes, int64"),
        ({"endpoint": "ipc:///a", "heartbeat_seconds": 0.0}, "events.heartbeat_seconds is 0.0; use 0.1 to"),
        ({"endpoint": "ipc:///a", "heartbeat_seconds": "a"}, "events.heartbeat_seconds is 'a'; use 0.1 to"),
        ({"endpoint": "ipc:///a", "num_kept_messages": 0}, "events.num_kept_messages is 0; use 1 to"),
        ({"endpoint": "ipc:///a\0b"}, "use tcp://ADDRESS:PORT"),
        ({"endpoint": "ipc:///a", "topic": "\udc80"}, "give a text of at most 256"),
        ({"endpoint": "ipc:///a", "topic": "x" * 257}, "at most 256 characters"),
        ({"endpoint": "ipc:///a", "keys_folder": " "}, "give its path, or leave it out"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], why: str) -> None:
    """Refused before any process starts, with the value and what to do."""
    with pytest.raises(ConfigError, match=why):
        EventsConfig(**settings)


def test_endpoints_of_a_data_parallel_group() -> None:
    """Each cache has ports, or paths, of its own, as in vLLM."""
    assert EventsConfig(endpoint="tcp://127.0.0.1:5557").endpoints(2) == (
        "tcp://127.0.0.1:5559",
        "tcp://127.0.0.1:5659",
    )
    assert EventsConfig(endpoint="ipc:///a/b").endpoints(1) == ("ipc:///a/b_dp1", "ipc:///a/b.replay_dp1")
    with pytest.raises(ConfigError, match="port 65600 beside it is none"):
        EventsConfig(endpoint="tcp://127.0.0.1:65500").endpoints(0)
    with pytest.raises(ConfigError, match="port 65600 beside it is none"), publishing(endpoint="tcp://127.0.0.1:65500"):
        pass

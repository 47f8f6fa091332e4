"""The mirror beside a real cache and a real publisher: late, through deaths, stops, losses, and with keys."""

from __future__ import annotations

import os
import random
import signal
import socket
from pathlib import Path

import pytest

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.errors import ConfigError, IPCError
from fastdeploy_cache.events import Mirror, PrefixFound
from fastdeploy_cache.ipc.peer_channel import load_keys, make_keys
from fastdeploy_cache.launch.faults.listeners import expected_of, known_to
from tests.rigs.event_rig import SIZE, endpoints, mirror_of, pid_of_publisher, prompt, publishing, serve

pytestmark = pytest.mark.processes
_SECONDS = 20.0


def wait_for(mirror: Mirror, cache: PrefixCacheManager) -> None:
    """Until it knows what is in the tree, which does not change meanwhile."""
    with cache._books:
        expected = expected_of(cache._books.tree)
    with mirror._lock:
        mirror._lock.wait_for(lambda: mirror.is_current and known_to(mirror._follower.index) == expected, _SECONDS)
        assert (mirror.is_current, known_to(mirror._follower.index)) == (True, expected), mirror.counts()


def test_a_late_mirror_knows_all() -> None:
    """What was cached before it came, and what comes behind; by tokens and by namespace."""
    with publishing() as cache:
        for number in range(10):
            serve(cache, f"{number}", prompt(number, shared=2), "tenant" if number % 2 else "")
        with mirror_of(cache) as mirror:
            assert mirror.wait_current(_SECONDS)
            wait_for(mirror, cache)
            assert mirror.block_size == SIZE
            assert mirror.find(prompt(3, shared=2), "tenant").num_gpu_tokens == 4 * SIZE
            assert mirror.find(prompt(3, shared=2)).num_tokens == 2 * SIZE
            assert mirror.find(prompt(99)) == PrefixFound()
            serve(cache, "more", prompt(99))
            wait_for(mirror, cache)
            assert mirror.find(prompt(99)).num_tokens == 4 * SIZE
            cache.life.clear()
            wait_for(mirror, cache)
            assert mirror.find(prompt(99)) == PrefixFound()


@pytest.mark.parametrize("block_names", ["own", "sha256_cbor"])
def test_a_prompt_with_an_image(block_names: str) -> None:
    """It is found with its image, up to there without it, and not with another one."""
    images = [(SIZE + 3, SIZE, "identifier")]
    with publishing(block_names=block_names) as cache, mirror_of(cache) as mirror:
        assert mirror.wait_current(_SECONDS)
        request = Request(request_id="a", prompt_token_ids=prompt(1), images=images)
        cache.match(request)
        cache.allocate(request, cache.blocks_for(request.num_tokens))
        cache.commit(request, request.num_tokens)
        cache.release(request)
        with mirror._lock:
            assert mirror._lock.wait_for(lambda: mirror.num_blocks("GPU") == 4, _SECONDS)
        assert mirror.find(prompt(1), images=images).num_tokens == 4 * SIZE
        for others in ((), [(SIZE + 3, SIZE, "another")], [(SIZE + 4, SIZE, "identifier")]):
            assert mirror.find(prompt(1), images=others).num_tokens == SIZE


@pytest.mark.parametrize("block_names", ["own", "sha256_cbor"])
def test_names_as_numbers(block_names: str) -> None:
    """As vLLM publishes them by default: a mirror finds prompts by what the publisher says of its names."""
    with publishing(name_form="int64", block_names=block_names) as cache, mirror_of(cache) as mirror:
        assert mirror.wait_current(_SECONDS)
        serve(cache, "a", prompt(1), "tenant")
        with mirror._lock:
            assert mirror._lock.wait_for(lambda: mirror.find(prompt(1), "tenant").num_tokens == 4 * SIZE, _SECONDS)
        names = mirror.names(prompt(1), "tenant")
        assert names is not None and all(type(name) is int for name in names)
        assert mirror.find(prompt(1)) == PrefixFound() and mirror.find_names(names[:2]).num_tokens == 2 * SIZE


def test_a_killed_publisher_is_followed_by_its_successor() -> None:
    """Until then nothing is said to be cached; afterwards all that is."""
    with publishing() as cache, mirror_of(cache) as mirror:
        serve(cache, "a", prompt(1))
        wait_for(mirror, cache)
        for _ in range(3):
            pid = pid_of_publisher(cache)
            assert pid is not None
            snapshots = mirror.counts()["snapshots"]
            os.kill(pid, signal.SIGKILL)
            with mirror._lock:
                assert mirror._lock.wait_for(lambda: mirror.counts()["snapshots"] > snapshots, _SECONDS)  # noqa: B023
            wait_for(mirror, cache)
            assert mirror.find(prompt(1)).num_tokens == 4 * SIZE


def test_a_publisher_that_hangs_is_not_believed() -> None:
    """A silent one says nothing of what is cached; it is killed and replaced like a rank."""
    with publishing() as cache, mirror_of(cache) as mirror:
        serve(cache, "a", prompt(1))
        wait_for(mirror, cache)
        pid = pid_of_publisher(cache)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with mirror._lock:
            assert mirror._lock.wait_for(lambda: not mirror.is_current, _SECONDS)
        assert mirror.find(prompt(1)) == PrefixFound()
        os.kill(pid, signal.SIGCONT)
        assert mirror.wait_current(_SECONDS)
        wait_for(mirror, cache)
        assert mirror.find(prompt(1)).num_tokens == 4 * SIZE


def test_a_mirror_before_its_cache(tmp_path: Path) -> None:
    """It waits, and is current once somebody publishes there."""
    endpoint = f"ipc://{tmp_path}/kv"
    with Mirror(endpoint) as mirror:
        assert not mirror.wait_current(0.1) and mirror.block_size is None and mirror.names([1]) is None
        with publishing(endpoint=endpoint) as cache:
            serve(cache, "a", prompt(1))
            assert mirror.wait_current(_SECONDS)
            wait_for(mirror, cache)
        with mirror._lock:
            assert mirror._lock.wait_for(lambda: not mirror.is_current, _SECONDS)


def test_what_the_publisher_cannot_take_is_told_anew() -> None:
    """It is stopped while more runs go than may wait: that is dropped and counted, and later all is told."""
    with publishing(400, 0, max_waiting_changes=100) as cache, mirror_of(cache) as mirror:
        for number in range(200):
            serve(cache, f"{number}", prompt(number, 2))
        wait_for(mirror, cache)
        feed, pid = cache._seen.events, pid_of_publisher(cache)
        assert feed is not None and pid is not None
        os.kill(pid, signal.SIGSTOP)
        for number in range(1000, 6000):  # until the messages that may be in flight are taken, and too much waits
            serve(cache, f"{number}", prompt(number, 2))
            if feed.counts().num_dropped:
                break
        os.kill(pid, signal.SIGCONT)
        wait_for(mirror, cache)
        assert feed.counts().num_dropped >= 1 and feed.counts().num_begun >= 2
        assert mirror.find(prompt(number, 2)).num_tokens == 2 * SIZE


def test_random_traffic_with_deaths() -> None:
    """After each quiet moment it knows exactly what the tree has."""
    draw = random.Random(3)
    with publishing(120, 60) as cache, mirror_of(cache) as mirror:
        for number in range(300):
            shared = draw.randrange(3)
            serve(cache, f"{number}", prompt(draw.randrange(40), 1 + draw.randrange(9), shared=shared))
            if draw.random() < 0.02 and (pid := pid_of_publisher(cache)) is not None:
                os.kill(pid, signal.SIGKILL)
            if draw.random() < 0.02:
                cache.life.clear()
            if number % 30 == 29:
                wait_for(mirror, cache)
        wait_for(mirror, cache)
        for number in range(40):
            for shared in range(3):
                tokens = prompt(number, 9, shared=shared)
                found = cache.blocks.lookup(Request(request_id="look", prompt_token_ids=tokens), touch=False)
                assert mirror.find(tokens).num_tokens == found.num_blocks * SIZE, (number, shared)


def test_over_tcp_with_keys(tmp_path: Path) -> None:
    """Who is trusted follows; who has keys that nobody knows hears nothing."""
    folders = [tmp_path / name for name in ("publisher", "friend", "stranger")]
    for folder in folders:
        make_keys(folder)
    publisher, friend, stranger = folders
    (publisher / "trusted" / "friend.key").write_text((friend / "own.key").read_text())
    key = load_keys(publisher).public
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        first, second = (f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (one, two))
    with publishing(endpoint=first, replay_endpoint=second, keys_folder=str(publisher)) as cache:
        serve(cache, "a", prompt(1))
        with mirror_of(cache, keys_folder=friend, publisher_key=key.decode()) as mirror:
            assert mirror.wait_current(_SECONDS)
            wait_for(mirror, cache)
        with mirror_of(cache, keys_folder=str(stranger), publisher_key=key) as mirror:
            assert not mirror.wait_current(1.5)


def test_a_mirror_that_has_ended_knows_nothing() -> None:
    """By `close`, also from its own callback, and by what that raises."""
    with publishing() as cache:
        serve(cache, "a", prompt(1))
        mirror = mirror_of(cache)
        assert mirror.wait_current(_SECONDS)
        mirror.close()
        assert not mirror.is_current and mirror.find(prompt(1)) == PrefixFound() and mirror.failure is None

        def fail(sequence: int, payload: bytes) -> None:
            raise BrokenPipeError(sequence, payload)

        mirrors = [mirror_of(cache, on_message=fail)]
        mirrors.append(mirror_of(cache, on_message=lambda *_: mirrors[1].close()))
        for mirror in mirrors:
            assert mirror.wait_closed(_SECONDS) and not mirror.is_current
            assert isinstance(mirror.failure, BrokenPipeError) == (mirror is mirrors[0])
            mirror.close()


@pytest.mark.parametrize(("topic", "is_heard"), [("kv@me", True), ("kv", True), ("", True), ("xx", False)])
def test_topics(topic: str, is_heard: bool) -> None:
    """The publisher's own, or how it begins; with another one it says that it would hear nothing."""
    with publishing(topic="kv@me") as cache, mirror_of(cache, topic=topic) as mirror:
        if not is_heard:
            assert mirror.wait_closed(_SECONDS) and "the publisher's is 'kv@me'" in str(mirror.failure)
            return
        assert mirror.wait_current(_SECONDS)
        serve(cache, "a", prompt(1))
        wait_for(mirror, cache)
        assert mirror.counts()["replays"] == 0
        with pytest.raises(ConfigError, match="no medium 'gpu'; use one of GPU, CPU, DISK"):
            mirror.num_blocks("gpu")


def test_addresses_that_are_none(tmp_path: Path) -> None:
    """Refused with what to give."""
    with pytest.raises(ConfigError, match="use tcp://ADDRESS:PORT"):
        Mirror("localhost:5557")
    with pytest.raises(IPCError, match="keys of"):
        Mirror("tcp://10.0.0.1:5557", keys_folder="/nowhere")
    make_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match="public key, of 40 characters"):
        Mirror("tcp://10.0.0.1:5557", keys_folder=str(tmp_path / "keys"))


def test_a_hundred_mirrors() -> None:
    """All follow one publisher, which serves a few snapshots at a time."""
    with publishing() as cache:
        serve(cache, "a", prompt(1))
        mirrors = [mirror_of(cache) for _ in range(100)]
        try:
            assert all(mirror.wait_current(_SECONDS) for mirror in mirrors)
            serve(cache, "b", prompt(2))
            for mirror in mirrors:
                wait_for(mirror, cache)
        finally:
            for mirror in mirrors:
                mirror.close()
        assert endpoints(cache)

"""A cache that publishes, requests that fill it, and a subscriber as vLLM's documentation has it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import msgspec
import numpy as np
import zmq

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.config.events import EventsConfig
from fastdeploy_cache.events import Mirror

SIZE = 16
_WAIT_SECONDS = 20.0


@contextmanager
def publishing(num_gpu_blocks: int = 400, num_cpu_blocks: int = 100, **events: Any) -> Iterator[PrefixCacheManager]:
    """A cache whose events are published in a folder of its own, with whole digests where nothing else is said."""
    with tempfile.TemporaryDirectory(prefix="ev") as folder:
        said = {"endpoint": f"ipc://{folder}/kv", "heartbeat_seconds": 0.2, "name_form": "bytes", **events}
        settings = EventsConfig(**said)
        config = CacheConfig(
            block_size=SIZE,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            transfer_client="inline",
            events=settings,
        )
        with PrefixCacheManager(config) as cache:
            yield cache


def endpoints(cache: PrefixCacheManager) -> tuple[str, str]:
    """Where a cache publishes, and where it is asked."""
    assert cache.config.events is not None
    return cache.config.events.endpoints(0)


def mirror_of(cache: PrefixCacheManager, **settings: Any) -> Mirror:
    """Somebody who follows it."""
    return Mirror(*endpoints(cache), **settings)


def prompt(number: int, num_blocks: int = 4, *, shared: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    """A prompt of so many full blocks and one token; its first `shared` blocks are those of every other one."""
    tokens = np.arange(num_blocks * SIZE + 1, dtype=np.int32) + 100_000 * (number + 1)
    shared = min(shared, num_blocks) * SIZE
    tokens[:shared] = np.arange(shared)
    return tokens


def serve(cache: PrefixCacheManager, name: str, tokens: np.ndarray[Any, Any], namespace: str = "") -> None:
    """A request from its match to its release."""
    request = Request(request_id=name, prompt_token_ids=tokens, namespace=namespace)
    match = cache.match(request)
    cache.allocate(request, cache.blocks_for(len(tokens)) - len(match.block_ids))
    cache.commit(request, len(tokens))
    cache.release(request)


def pid_of_publisher(cache: PrefixCacheManager) -> int | None:
    """The process that publishes."""
    (status,) = cache.insight.processes()["events"]
    return status.pid


class PlainSubscriber:
    """Listens with ZeroMQ and msgpack alone: what another project would write."""

    def __init__(self, cache: PrefixCacheManager, topic: str = "") -> None:
        endpoint, replay_endpoint = endpoints(cache)
        self._context: zmq.Context[Any] = zmq.Context()
        self._stream = self._context.socket(zmq.SUB)
        self._stream.subscribe(topic)
        self._stream.connect(endpoint)
        self._asking = self._context.socket(zmq.DEALER)
        self._asking.connect(replay_endpoint)

    def next(self) -> tuple[bytes, int, list[Any]]:
        """The next message: topic, sequence, batch."""
        assert self._stream.poll(_WAIT_SECONDS * 1000), "no message has come"
        topic, sequence, payload = self._stream.recv_multipart()
        return topic, int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)

    def next_events(self) -> list[dict[str, Any]]:
        """Those of the next message that has some."""
        while True:
            if found := self.next()[2][1]:
                return list(found)

    def replay(self, start: bytes) -> list[tuple[bytes, int, bytes]]:
        """What is sent again from a sequence on, up to the end mark."""
        self._asking.send_multipart([b"", start])
        found = []
        while True:
            empty, topic, sequence, payload = self.frames()
            assert empty == b""
            if int.from_bytes(sequence, "big", signed=True) == -1:
                assert (topic, payload) == (b"", b"")
                return found
            found.append((topic, int.from_bytes(sequence, "big"), payload))

    def send(self, *frames: bytes) -> None:
        """Anything at all."""
        self._asking.send_multipart(frames)

    def frames(self) -> list[bytes]:
        """The next answer."""
        assert self._asking.poll(_WAIT_SECONDS * 1000), "no answer has come"
        return list(self._asking.recv_multipart())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._context.destroy(linger=0)

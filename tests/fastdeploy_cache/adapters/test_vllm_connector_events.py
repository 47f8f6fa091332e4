"""Our events beside vLLM's own code: its structs read what we publish, and its hashes are our names. In its lane."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.books.image_keys import image_keys
from fastdeploy_cache.events.journal import Began, RunTold
from fastdeploy_cache.events.names import NameScheme, name_blocks
from fastdeploy_cache.events.publisher.tree import ToldTree
from fastdeploy_cache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, encode_batch
from tests.rigs.event_rig import SIZE, endpoints, pid_of_publisher, prompt, publishing, serve
from tests.rigs.needs import missing

_SECONDS = 30.0
pytest.importorskip("vllm", reason="needs vLLM; CI runs this in vLLM's environment")


def test_its_structs_read_our_events() -> None:
    """Each field, and the batch around it; written again by vLLM it is the same bytes, but for what it leaves out."""
    from vllm.distributed.kv_events import KVEventBatch

    stored = BlockStored(
        block_hashes=[b"a" * 32, b"b" * 32], medium="GPU", parent_block_hash=None, token_ids=[1, 2, 3, 4],
        block_size=2, lora_id=None, lora_name=None, extra_keys=[("tenant",), None], group_idx=1,
        kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=8,
    )  # fmt: skip
    removed = BlockRemoved(block_hashes=[5, 2**64 - 1], medium="CPU")
    batch = msgspec.msgpack.decode(encode_batch(1.5, [stored, removed, AllBlocksCleared()], 3), type=KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank, len(batch.events)) == (1.5, 3, 3)
    for ours, theirs in zip((stored, removed), batch.events, strict=False):
        for field in ours.__struct_fields__:
            assert getattr(theirs, field) == getattr(ours, field), field
        assert type(theirs).__name__ == type(ours).__name__
    assert type(batch.events[2]).__name__ == "AllBlocksCleared"


@pytest.mark.parametrize("has_images", [False, True])
@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("form", ["bytes", "int64"])
def test_its_hashes_are_our_names(salt: str, form: Any, has_images: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of five blocks, through its own hasher; with images, and what events say of these."""
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1" if form == "int64" else "0")
    kv_cache_utils.init_none_hash(sha256_cbor)
    tokens, parent, expected = np.random.default_rng(1).integers(0, 150_000, 80).astype(np.int32), None, []
    images = [(10, 30, "a" * 64), (40, 5, "b" * 64)] if has_images else []
    places = [SimpleNamespace(offset=offset, length=length) for offset, length, _ in images]
    features = [SimpleNamespace(identifier=image[2], mm_position=at) for image, at in zip(images, places, strict=True)]
    request = SimpleNamespace(mm_features=features, lora_request=None, cache_salt=salt or None, prompt_embeds=None)
    keys, at = [], 0
    for block in range(5):
        extra, at = kv_cache_utils.generate_block_hash_extra_keys(request, 16 * block, 16 * block + 16, at)
        keys.append(extra)
        of_block = tokens[block * 16 : (block + 1) * 16].tolist()
        parent = kv_cache_utils.hash_block_tokens(sha256_cbor, parent, of_block, extra)
        expected.append(kv_cache_utils.maybe_convert_block_hash(parent))
    scheme = NameScheme(kind="sha256_cbor", form=form, block_size=16)
    assert [*name_blocks(scheme, scheme.names(), tokens, salt, images)] == expected
    told = ToldTree(scheme)
    told.apply(Began())
    extras = image_keys([(offset, length, name.encode()) for offset, length, name in images], 16)
    told.apply(RunTold(1, 0, salt, 5, 0, tokens.tobytes(), extras, 5, 0, 0, []))
    _, event = told.take()
    assert isinstance(event, BlockStored) and event.block_hashes == expected
    assert event.extra_keys == (kv_cache_utils.to_event_extra_keys(keys) if any(keys) else None)


class Indexer:
    """Dynamo's own indexer of KV events, as a program beside the test."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self._port), "--block-size", str(SIZE)]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        self._pause = threading.Event()

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a GET, or to a POST of this body."""
        data = json.dumps(body).encode() if body is not None else None
        url, kind = f"http://127.0.0.1:{self._port}{path}", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, data, kind), timeout=10) as answer:
            return answer.read()

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + _SECONDS
        while True:
            try:
                self.ask("/health")
            except OSError:
                assert time.monotonic() < deadline, "the indexer does not start"
                self._pause.wait(0.1)
            else:
                return

    def found(self, tokens: np.ndarray[Any, Any]) -> tuple[int, int]:
        """Leading tokens of a prompt on the GPU, and in both tiers."""
        answer = json.loads(self.ask("/query", {"model_name": "m", "token_ids": tokens.tolist()}))
        of_one = answer["instances"].get("7", {"gpu": 0, "longest_matched": 0})
        return of_one["gpu"], of_one["longest_matched"]

    def wait_equal(self, cache: PrefixCacheManager, prompts: list[np.ndarray[Any, Any]]) -> None:
        """Until it knows of each prompt what the cache has."""
        deadline = time.monotonic() + _SECONDS
        while True:
            expected = []
            for tokens in prompts:
                there = cache.blocks.lookup(Request(request_id="look", prompt_token_ids=tokens), touch=False)
                expected.append((len(there.block_ids) * SIZE, there.num_blocks * SIZE))
            found = [self.found(tokens) for tokens in prompts]
            if found == expected:
                return
            assert time.monotonic() < deadline, (found, expected)
            self._pause.wait(0.2)


@pytest.mark.processes
def test_the_indexer_of_dynamo_agrees(tmp_path: Path) -> None:
    """Of each prompt it says what the cache has on the GPU and in the CPU tier: behind evictions, a reset, and a
    publisher that was killed, once it is registered again."""
    if find_spec("dynamo") is None:
        missing("Dynamo's indexer (pip install --no-deps ai-dynamo-runtime)")
    draw, indexer = random.Random(1), Indexer(tmp_path / "log")
    with indexer.process, publishing(60, 100, name_form="int64") as cache:
        try:
            indexer.wait()
            worker = {"instance_id": 7, "model_name": "m", "dp_rank": 0}
            first, second = endpoints(cache)
            told = {**worker, "endpoint": first, "replay_endpoint": second, "block_size": SIZE}
            indexer.ask("/register", told)
            prompts = [prompt(number, draw.randrange(1, 9)) for number in range(20)]
            for number in range(60):
                serve(cache, f"{number}", draw.choice(prompts))
                if number == 20:
                    indexer.wait_equal(cache, prompts)
                if number == 40:
                    cache.life.clear()
            indexer.wait_equal(cache, prompts)
            pid = pid_of_publisher(cache)
            assert pid is not None and any(indexer.found(tokens)[1] for tokens in prompts)
            os.kill(pid, signal.SIGKILL)
            indexer.ask("/unregister", worker)
            indexer.ask("/register", told)
            serve(cache, "more", prompts[0])
            indexer.wait_equal(cache, prompts)
        finally:
            indexer.process.kill()

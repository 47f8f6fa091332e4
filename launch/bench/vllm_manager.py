"""vLLM's own KV-cache manager, driven with the requests that ours serves; all that we rely on of its interface.

It takes the package's folder alone: an unpacked wheel, or a checkout. Of vLLM only the modules of the manager run, and
neither PyTorch nor any other of its libraries has to be installed. For a process of its own (`vllm_process.py`).

The interface, as of version 0.32: a `Request` hashes its full blocks when it is made and whenever tokens are appended.
`KVCacheManager.get_computed_blocks` finds the cached ones, `allocate_slots` takes blocks for what is to be computed and
caches those that the tokens fill, `free` gives a finished request's blocks back. One block of the pool is the
manager's own.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from time import thread_time_ns
from types import SimpleNamespace
from typing import Any, NamedTuple

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.bench.hollow_modules import import_from_now_on
from fastdeploy_cache.launch.bench.serving import PHASES, STEP_TOKENS, serve_in_flight
from fastdeploy_cache.launch.bench.workloads import Tokens, Work

_PARTS = (
    *("envs", "utils", "utils.hashing", "utils.math_utils"),
    *("v1", "v1.core.", "v1.request", "v1.utils"),
    *("v1.kv_cache_interface", "v1.kv_cache_layout", "v1.kv_cache_spec_registry"),
)
_MAX_MODEL_TOKENS = 1 << 18
_ENDLESS = SimpleNamespace(max_tokens=1 << 20, extra_args=None, skip_reading_prefix_cache=False)


class Vllm(NamedTuple):
    """The modules of vLLM that are used."""

    manager: Any
    interface: Any
    hashes: Any
    requests: Any
    hashing: Any


def vllm_version(folder: Path) -> str:
    """The version of the package in `folder`, as its own files name it.

    Raises:
        LaunchError: there is no such package.
    """
    if not (folder / "vllm" / "v1" / "core").is_dir():
        raise LaunchError(f"{folder} holds no vllm/v1/core; give the folder that holds the package vllm")
    own = folder / "vllm" / "_version.py"
    found = re.search(r"""^__version__\b.*["']([^"']+)["']""", own.read_text(), re.MULTILINE) if own.exists() else None
    return found[1] if found else "of unknown version"


def load_vllm(folder: Path) -> Vllm:
    """Import what is needed; from then on other imports of this process may be hollow.

    Raises:
        ImportError, AttributeError: this version is too different.
    """
    import_from_now_on(folder, "vllm", _PARTS)
    names = (
        "v1.core.kv_cache_manager",
        "v1.kv_cache_interface",
        "v1.core.kv_cache_utils",
        "v1.request",
        "utils.hashing",
    )
    vllm = Vllm(*(importlib.import_module(f"vllm.{name}") for name in names))
    vllm.requests.StructuredOutputRequest = SimpleNamespace(from_sampling_params=lambda _: None)
    vllm.hashes.init_none_hash(vllm.hashing.sha256)
    return vllm


class VllmServer:
    """An engine that computes nothing, as `control.Server`, over vLLM's manager.

    `request` contains the hashes of the prompt, `allocate` what our `commit` does.
    """

    def __init__(self, vllm: Vllm, block_size: int, num_gpu_blocks: int, num_in_flight: int) -> None:
        self._vllm, self._num_in_flight = vllm, num_in_flight
        self._hasher = vllm.hashes.get_request_block_hasher(block_size, vllm.hashing.sha256)
        attention = vllm.interface.FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=None)
        config = vllm.interface.KVCacheConfig(
            num_blocks=num_gpu_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[vllm.interface.KVCacheGroupSpec(["layer"], attention)],
        )
        self._manager = vllm.manager.KVCacheManager(
            config, max_model_len=_MAX_MODEL_TOKENS, scheduler_block_size=block_size, hash_block_size=block_size
        )
        self._num_served = 0
        self.num_hit_tokens = 0
        self.nanoseconds = dict.fromkeys(PHASES, 0)

    def serve(self, works: Iterable[Work]) -> None:
        """Serve all of `works`, adding to `nanoseconds`."""
        serve_in_flight(works, self._num_in_flight, self._start, self._finish)

    def _start(self, work: Work) -> tuple[Any, Tokens]:
        request = self.start(work.prompt.tolist())
        return request, work.output

    def start(self, prompt: list[int]) -> Any:
        """A request whose prompt is cached and computed."""
        manager, spent = self._manager, self.nanoseconds
        self._num_served += 1
        started = thread_time_ns()
        request = self._vllm.requests.Request(str(self._num_served), prompt, _ENDLESS, None, block_hasher=self._hasher)
        made = thread_time_ns()
        blocks, num_hit_tokens, *_ = manager.get_computed_blocks(request)
        matched = thread_time_ns()
        self._allocate(request, len(prompt) - num_hit_tokens, num_hit_tokens, blocks)
        request.num_computed_tokens = len(prompt)
        spent["allocate"] += thread_time_ns() - matched
        spent["match"] += matched - made
        spent["request"] += made - started
        self.num_hit_tokens += num_hit_tokens
        return request

    def _finish(self, live: tuple[Any, Tokens]) -> None:
        request, output = live
        steps = [output[first : first + STEP_TOKENS].tolist() for first in range(0, len(output), STEP_TOKENS)]
        started = thread_time_ns()
        for tokens in steps:
            self.decode(request, tokens)
        decoded = thread_time_ns()
        self._manager.free(request)
        self.nanoseconds["release"] += thread_time_ns() - decoded
        self.nanoseconds["decode"] += decoded - started

    def decode(self, request: Any, tokens: list[int]) -> None:
        """The request has sampled these tokens; the step that computes them is done."""
        request.append_output_token_ids(tokens)
        self._allocate(request, len(tokens))
        request.num_computed_tokens += len(tokens)

    def _allocate(self, request: Any, *how_many: Any) -> None:
        if self._manager.allocate_slots(request, *how_many) is None:
            raise LaunchError("vLLM's pool is too small for the requests in flight; give a larger one")

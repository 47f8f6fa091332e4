"""A package that has of vLLM's interface what `bench control` uses, and as little behind it as hits the same tokens."""

from __future__ import annotations

from pathlib import Path

VERSION = "0.32.0.stand.in"

_FILES = {
    "__init__.py": 'raise RuntimeError("it is not to be run")\n',
    "_version.py": f'__version__ = version = "{VERSION}"\n',
    "envs.py": "",
    "utils/__init__.py": "",
    "utils/hashing.py": """
import hashlib
import pickle

def sha256(value):
    return hashlib.sha256(pickle.dumps(value)).digest()
""",
    "v1/__init__.py": "",
    "v1/kv_cache_interface.py": """
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig

@dataclass
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype | None

@dataclass
class KVCacheGroupSpec:
    layer_names: list[str]
    kv_cache_spec: FullAttentionSpec

@dataclass
class KVCacheConfig:
    num_blocks: int
    kv_cache_tensors: list[torch.Tensor]
    kv_cache_groups: list[KVCacheGroupSpec]
""",
    "v1/request.py": """
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.request import StructuredOutputRequest

class Request:
    def __init__(self, request_id, prompt_token_ids, sampling_params: SamplingParams, pooling_params, block_hasher):
        assert not sampling_params.skip_reading_prefix_cache
        assert StructuredOutputRequest.from_sampling_params(sampling_params) is None
        self.request_id, self.tokens = request_id, list(prompt_token_ids)
        self.num_computed_tokens, self.block_hashes, self._hasher = 0, [], block_hasher
        self.block_hashes += block_hasher(self)

    def append_output_token_ids(self, token_ids):
        self.tokens += token_ids
        self.block_hashes += self._hasher(self)
""",
    "v1/core/__init__.py": "",
    "v1/core/kv_cache_utils.py": """
from vllm.logger import init_logger

logger = init_logger(__name__)
logger.info_once("hollow")

def init_none_hash(hash_function):
    global NONE_HASH
    NONE_HASH = hash_function("none")

def get_request_block_hasher(block_size, hash_function):
    def hashes(request):
        found = list(request.block_hashes)
        first = len(found)
        for start in range(first * block_size, len(request.tokens) - block_size + 1, block_size):
            parent = found[-1] if found else NONE_HASH
            found.append(hash_function((parent, tuple(request.tokens[start : start + block_size]))))
        return found[first:]

    return hashes
""",
    "v1/core/kv_cache_manager.py": """
from vllm.distributed.kv_events import KVCacheEvent
from vllm.v1.kv_cache_interface import KVCacheConfig

class KVCacheManager:
    def __init__(self, kv_cache_config: KVCacheConfig, max_model_len, scheduler_block_size, hash_block_size):
        assert scheduler_block_size == hash_block_size
        self._block_size, self._num_blocks = hash_block_size, kv_cache_config.num_blocks - 1
        self._cached, self._held = set(), {}

    def get_computed_blocks(self, request):
        num_hits = 0
        for block_hash in request.block_hashes[: (len(request.tokens) - 1) // self._block_size]:
            if block_hash not in self._cached:
                break
            num_hits += 1
        return ["block"] * num_hits, num_hits * self._block_size, "more"

    def allocate_slots(self, request, num_new_tokens, num_new_computed_tokens=0, new_computed_blocks=None):
        num_tokens = request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
        assert num_tokens == len(request.tokens)
        self._held[request.request_id] = -(-num_tokens // self._block_size)
        if sum(self._held.values()) > self._num_blocks:
            return None
        self._cached.update(request.block_hashes)
        return ["block"]

    def free(self, request):
        del self._held[request.request_id]
""",
}


def write_stand_in(folder: Path, **instead: str) -> Path:
    """Write the package into `folder`; `instead` has other text for modules, by their names without folder."""
    for name, text in _FILES.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(instead.get(path.stem, text))
    return folder

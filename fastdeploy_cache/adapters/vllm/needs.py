"""What the connector needs of vLLM's configuration; what is not met is refused here, by name.

Knows vLLM by duck typing only. vLLM switches chunked prefill and prefix caching off where a model's prefill cannot
start behind a context, but it asks a connector for such a context all the same.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from fastdeploy_cache.adapters.vllm.groups import kind_of
from fastdeploy_cache.errors import ConfigError

_PARALLEL = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")


class Need(NamedTuple):
    """One line of the list: whether it is met, what was seen, and what to do where it is not."""

    is_met: bool
    seen: str
    remedy: str


def check_needs(vllm_config: Any, kv_cache_config: Any) -> None:
    """Look at vLLM's effective configuration, as its platform and its engine have changed it.

    Raises:
        ConfigError: a need is not met, or this vLLM's configuration has other names.
    """
    try:
        for need in chain(_of_engine(vllm_config), _of_model(vllm_config), _of_kv_cache(kv_cache_config)):
            if not need.is_met:
                raise ConfigError(f"{need.seen}; {need.remedy}")
    except AttributeError as error:
        raise ConfigError(
            f"vLLM's configuration cannot be checked ({error}); use a version of vLLM that the connector knows"
        ) from error


def _of_engine(config: Any) -> Iterator[Need]:
    parallel, role = config.parallel_config, config.kv_transfer_config.kv_role
    reads_early = "vLLM gives a producer's blocks away while they are stored, so they could be overwritten"
    yield Need(role != "kv_producer", f'kv_role is "{role}"', f'{reads_early}: use "kv_both"')
    for name in _PARALLEL:
        size = getattr(parallel, name)
        yield Need(size == 1, f"{name} is {size}", "this connector serves tensor and data parallelism: set it to 1")
    speculative = config.speculative_config
    drafts = "this connector cannot store the KV of draft layers: switch it off"
    yield Need(speculative is None, "speculative decoding is on", drafts)


def _of_model(config: Any) -> Iterator[Need]:
    model, is_chunked = config.model_config, bool(config.scheduler_config.enable_chunked_prefill)
    off = "chunked prefill is off (enable_chunked_prefill=False)"
    behind = "a prefill then cannot start behind KV that is loaded, and answers would be wrong"
    no_mla = (
        "set VLLM_MLA_DISABLE=1, switch chunked prefill on where vLLM allows it, or start vLLM without this connector"
    )
    uses_mla = bool(model.use_mla)
    yield Need(is_chunked or not uses_mla, f"the model uses MLA, and {off}", f"{behind}: {no_mla}")
    is_riscv = config.device_config.device_type == "cpu" and platform.machine().startswith("riscv")
    yield Need(is_chunked or not is_riscv, f"this is a RISC-V CPU, and {off}", f"{behind}: leave the connector out")
    # What follows has come with one version or another of vLLM: where a name is missing, so is what it stands for.
    uncached = "vLLM itself caches no prefixes of this model (is_prefix_caching_supported=False)"
    whole = "its answers need tokens that would not be computed then: leave the connector out"
    yield Need(getattr(model, "is_prefix_caching_supported", True), uncached, whole)
    rewrites = "KV of its output follows from tokens behind it, too: leave the connector out"
    yield Need(not getattr(model, "is_diffusion", False), "the model is a diffusion model", rewrites)
    shared = "its memory cannot be shared with another process: start vLLM without it, and without sleep mode"
    yield Need(not getattr(model, "enable_cumem_allocator", False), "enable_cumem_allocator is True", shared)


def _of_kv_cache(config: Any) -> Iterator[Need]:
    groups = config.kv_cache_groups
    kinds, is_one = [kind_of(group.kv_cache_spec) for group in groups], len(groups) == 1
    without = (
        "leave it out" if is_one else "start vLLM with --disable-hybrid-kv-cache-manager, if the model allows that"
    )
    for number, group in enumerate(groups):
        where = "the KV cache" if is_one else f"KV cache group {number}"
        spec, kind = group.kv_cache_spec, kinds[number]
        known = "full attention, and MLA untried" if is_one else "full attention, windows, chunks and aligned states"
        is_known = kind == "full" or (kind is not None and not is_one)
        yield Need(is_known, f"{where} is a {type(spec).__name__}", f"this connector serves {known}: {without}")
        yield from _of_spec(spec, where, is_state=kind == "state")
        if not is_one:
            yield from _of_group(config, group, where, without)
    num_full, many = kinds.count("full"), f"this connector serves one that keeps everything: {without}"
    yield Need(num_full == 1, f"{num_full} of {len(groups)} KV cache groups keep everything", many)


def _of_spec(spec: Any, where: str, *, is_state: bool) -> Iterator[Need]:
    if is_state:
        mode = getattr(spec, "mamba_cache_mode", None)
        aligned = "states are cached where blocks end: give --mamba-cache-mode align"
        yield Need(mode == "align", f"{where} keeps states with mamba_cache_mode {mode!r}", aligned)
        return
    causal = "KV of a prompt then follows from the tokens behind it, too: leave the connector out"
    yield Need(
        not getattr(spec, "non_causal", False), f"the attention of {where} is not causal (non_causal=True)", causal
    )
    dense = "this connector serves blocks without padding: try another block size, or leave it out"
    size = spec.page_size_bytes
    unpadded = getattr(spec, "unpadded_page_size_bytes", size)
    yield Need(size == unpadded, f"a block of {size} bytes in {where} holds {unpadded} bytes of KV", dense)
    each = "this connector serves one state for each token: leave it out"
    num_tokens = getattr(spec, "tokens_per_state", getattr(spec, "compress_ratio", 1))
    yield Need(num_tokens == 1, f"a state of {where} is of {num_tokens} tokens", each)


def _of_group(config: Any, group: Any, where: str, without: str) -> Iterator[Need]:
    """What a group must be beside others."""
    spec, size = group.kv_cache_spec, config.kv_cache_groups[0].kv_cache_spec.block_size
    alike = f"this connector serves groups of one block size: {without}"
    yield Need(spec.block_size == size, f"{where} has blocks of {spec.block_size} tokens, and group 0 of {size}", alike)
    unit = getattr(config, "hash_block_size", None) or size
    below = f"this connector serves hits of whole blocks: leave out what sets the hash's block size, or {without}"
    yield Need(unit == size, f"blocks are of {size} tokens, and hashes of {unit}", below)
    drafts = "this connector cannot store the KV of draft layers: switch speculative decoding off"
    yield Need(not getattr(group, "is_eagle_group", False), f"{where} has draft layers", drafts)
    caches = getattr(group, "enable_kv_transfer", True) and getattr(spec, "prefix_cacheable", True)
    yield Need(caches, f"vLLM itself caches no prefixes of {where}", "leave the connector out")
    on_host = "this connector copies blocks of the device: leave the connector out"
    yield Need(not getattr(group, "host_resident", False), f"{where} lies in the host's memory", on_host)

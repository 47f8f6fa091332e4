"""What the vLLM connector asks of vLLM's configuration, on made-up ones: vLLM is not needed."""

from __future__ import annotations

import platform
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_cache.adapters.vllm.needs import check_needs
from fastdeploy_cache.adapters.vllm.sequences import kv_format_of
from fastdeploy_cache.errors import ConfigError

MLA_REFUSED = r"uses MLA, and chunked prefill is off.*VLLM_MLA_DISABLE=1"


def _spec(kind: str = "FullAttentionSpec", **changed: Any) -> Any:
    """A KV cache's specification, of a class of that name, as the connector looks at it."""
    found = {"non_causal": False, "page_size_bytes": 512, "unpadded_page_size_bytes": 512, "tokens_per_state": 1}
    return type(kind, (), {**found, **changed})()


def _kv_cache(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


def _grouped(*groups: Any, **changed: Any) -> Any:
    """The same of groups, each a specification or one with what its group says beside it."""
    made = [each if isinstance(each, tuple) else (each, {}) for each in groups]
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, **of) for spec, of in made], **changed)


WINDOW = {"block_size": 16, "sliding_window": 64}
STATE = {"block_size": 16, "mamba_cache_mode": "align"}


def _config(**changed: Any) -> Any:
    """vLLM's configuration of a model that is served, with `table__name` changed."""
    tables: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
        },
        "kv_transfer_config": {"kv_role": "kv_both"},
        "scheduler_config": {"enable_chunked_prefill": True},
        "cache_config": {"enable_prefix_caching": True, "cache_dtype": "auto"},
        "device_config": {"device_type": "cpu"},
        "model_config": {
            "use_mla": False, "is_prefix_caching_supported": True, "is_diffusion": False,
            "enable_cumem_allocator": False, "hf_overrides": {}, "quantization": None,
        },
    }  # fmt: skip
    speculative = changed.pop("speculative_config", None)
    for name, value in changed.items():
        table, _, key = name.partition("__")
        tables[table][key] = value
    made = {table: SimpleNamespace(**values) for table, values in tables.items()}
    return SimpleNamespace(**made, speculative_config=speculative)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"cache_config__enable_prefix_caching": False},
        {"scheduler_config__enable_chunked_prefill": False},
        {"scheduler_config__enable_chunked_prefill": False, "cache_config__enable_prefix_caching": False},
        {"model_config__use_mla": True, "cache_config__enable_prefix_caching": False},
        {"kv_transfer_config__kv_role": "kv_consumer"},
    ],
)
def test_what_is_served(changed: dict[str, Any]) -> None:
    """Users may switch prefix caching off, and chunked prefill where their model does not use MLA."""
    spec = _spec("MLAAttentionSpec" if "model_config__use_mla" in changed else "FullAttentionSpec")
    check_needs(_config(**changed), _kv_cache(spec))


@pytest.mark.parametrize("is_caching", [True, False])
def test_mla_without_chunked_prefill_is_refused(is_caching: bool) -> None:
    """As on vLLM's CPU backend: its prefill would not see what was loaded. The message says what to set."""
    config = _config(
        model_config__use_mla=True,
        scheduler_config__enable_chunked_prefill=False,
        cache_config__enable_prefix_caching=is_caching,
    )
    with pytest.raises(ConfigError, match=MLA_REFUSED):
        check_needs(config, _kv_cache(_spec("MLAAttentionSpec")))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv_transfer_config__kv_role": "kv_producer"}, 'kv_role is "kv_producer".*use "kv_both"'),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2.*set it to 1"),
        ({"parallel_config__decode_context_parallel_size": 4}, "decode_context_parallel_size is 4"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
        ({"speculative_config": object()}, "speculative decoding is on.*switch it off"),
        ({"model_config__is_prefix_caching_supported": False}, "vLLM itself caches no prefixes of this model"),
        ({"model_config__is_diffusion": True}, "diffusion model"),
        ({"model_config__enable_cumem_allocator": True}, "enable_cumem_allocator is True.*without sleep mode"),
    ],
)
def test_what_an_engine_is_refused_for(changed: dict[str, Any], message: str) -> None:
    """Each is named, with the value seen and what to do."""
    with pytest.raises(ConfigError, match=message):
        check_needs(_config(**changed), _kv_cache(_spec()))


def test_a_risc_v_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM switches chunked prefill off there for every model, for the same reason."""
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    check_needs(_config(device_config__device_type="cuda"), _kv_cache(_spec()))
    with pytest.raises(ConfigError, match="RISC-V CPU, and chunked prefill is off"):
        check_needs(_config(scheduler_config__enable_chunked_prefill=False), _kv_cache(_spec()))


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((), "0 of 0 KV cache groups keep everything"),
        ((_spec("SlidingWindowSpec"),), "the KV cache is a SlidingWindowSpec; this connector serves full attention"),
        ((_spec("MambaSpec"),), "is a MambaSpec.*serves full attention, and MLA untried"),
        ((_spec("RSWASpec"),), "is a RSWASpec"),
        ((_spec("SinkFullAttentionSpec"),), "is a SinkFullAttentionSpec"),
        ((_spec(non_causal=True),), "not causal"),
        ((_spec(page_size_bytes=576),), "a block of 576 bytes in the KV cache holds 512 bytes"),
        ((_spec("MLAAttentionSpec", tokens_per_state=4),), "of 4 tokens"),
    ],
)
def test_what_a_kv_cache_is_refused_for(specs: tuple[Any, ...], message: str) -> None:
    """Kinds of attention whose blocks vLLM gives away early, or fills with more than a prompt's KV; KV
    that follows from later tokens; blocks with holes."""
    with pytest.raises(ConfigError, match=message):
        check_needs(_config(), _kv_cache(*specs))


@pytest.mark.parametrize("kind", ["SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec"])
def test_groups_are_served(kind: str) -> None:
    """One that keeps everything, beside windows, chunks and states of the same block size."""
    full, window, state = _spec(block_size=16), _spec(kind, **WINDOW), _spec("MambaSpec", **STATE, tokens_per_state=-1)
    check_needs(_config(), _grouped(window, window, full, hash_block_size=16))
    check_needs(_config(), _grouped(state, (full, {"is_eagle_group": False, "enable_kv_transfer": True}), state))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([_spec("RSWASpec", block_size=16)], "KV cache group 1 is a RSWASpec.*--disable-hybrid-kv-cache-manager"),
        ([_spec(block_size=16)], "2 of 2 KV cache groups keep everything.*--disable-hybrid-kv-cache-manager"),
        ([_spec("SlidingWindowSpec", block_size=32)], "KV cache group 1 has blocks of 32 tokens, and group 0 of 16"),
        ([_spec("SlidingWindowSpec", **WINDOW, non_causal=True)], "the attention of KV cache group 1 is not causal"),
        (
            [_spec("MambaSpec", block_size=16, mamba_cache_mode="all")],
            "group 1 keeps states.*'all'; .*--mamba-cache-mode",
        ),
        ([_spec("MambaSpec", block_size=16)], "keeps states with mamba_cache_mode None"),
        ([(_spec("SlidingWindowSpec", **WINDOW), {"is_eagle_group": True})], "KV cache group 1 has draft layers"),
        (
            [(_spec("SlidingWindowSpec", **WINDOW), {"enable_kv_transfer": False})],
            "caches no prefixes of KV cache group 1",
        ),
        ([_spec("SlidingWindowMLASpec", **WINDOW, prefix_cacheable=False)], "caches no prefixes of KV cache group 1"),
        (
            [(_spec("SlidingWindowSpec", **WINDOW), {"host_resident": True})],
            "KV cache group 1 lies in the host's memory",
        ),
    ],
)
def test_what_a_group_is_refused_for(groups: list[Any], message: str) -> None:
    """The group is named, with what was seen of it and the flag to give."""
    with pytest.raises(ConfigError, match=message):
        check_needs(_config(), _grouped(_spec(block_size=16), *groups))


def test_hits_below_a_block_are_refused() -> None:
    """vLLM would promise tokens up to the middle of a block, of which no state is stored."""
    window = _spec("SlidingWindowSpec", **WINDOW)
    with pytest.raises(ConfigError, match="blocks are of 16 tokens, and hashes of 4"):
        check_needs(_config(), _grouped(_spec(block_size=16), window, hash_block_size=4))


@pytest.mark.parametrize(
    "lose", [lambda c: delattr(c.model_config, "use_mla"), lambda c: delattr(c, "scheduler_config")]
)
def test_what_cannot_be_looked_at_is_not_assumed(lose: Callable[[Any], None]) -> None:
    """A vLLM whose configuration has other names is refused, and the missing name is in the message."""
    config = _config()
    lose(config)
    with pytest.raises(ConfigError, match=r"cannot be checked .*'(use_mla|scheduler_config)'"):
        check_needs(config, _kv_cache(_spec()))


def test_names_that_older_versions_lack_are_not_asked_of_them() -> None:
    """What came with a later vLLM cannot be wrong in one that does not have it."""
    config, spec = _config(), _spec()
    for name in ("is_diffusion", "enable_cumem_allocator"):
        delattr(config.model_config, name)
    for name in ("non_causal", "unpadded_page_size_bytes", "tokens_per_state"):
        delattr(type(spec), name)
    check_needs(config, _kv_cache(spec))
    spec.compress_ratio = 4  # as tokens_per_state was called before
    with pytest.raises(ConfigError, match="of 4 tokens"):
        check_needs(config, _kv_cache(spec))


def test_what_changes_the_bytes_of_a_block_is_in_its_name() -> None:
    """Overrides of the model's configuration and quantization give other KV for the same tokens and weights; a model
    without them keeps the name that it had."""
    spec = SimpleNamespace(dtype="torch.float16", kv_quant_mode=SimpleNamespace(name="NONE"))
    plain = kv_format_of(_config(), spec)
    assert plain == "vllm auto torch.float16 NONE"
    changes: list[dict[str, Any]] = [
        {"model_config__hf_overrides": {"rope_parameters": {"factor": 2.0}}},
        {"model_config__hf_overrides": {"rope_parameters": {"factor": 4.0}}},
        {"model_config__hf_overrides": print},
        {"model_config__quantization": "fp8"},
        {"cache_config__cache_dtype": "fp8"},
    ]
    names = [kv_format_of(_config(**changed), spec) for changed in changes]
    assert len({plain, *names}) == len(changes) + 1

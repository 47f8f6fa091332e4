"""What the vLLM connector counts: on vLLM's own page, in its log, and on the manager's."""

from __future__ import annotations

import urllib.request
from collections import Counter as Sum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: see docs/adapters/vllm_connector.md")
pytest.importorskip("torch", reason="needs vLLM with PyTorch")
pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="needs vLLM 0.32 or newer, which has sources of hits")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from fastdeploy_cache.adapters.vllm.connector import FastDeployCacheConnector
from tests.rigs.process_ends import SECONDS
from tests.rigs.vllm_rig import BLOCK_SIZE, Rig

pytestmark = pytest.mark.processes

PROMPT = [100 + i for i in range(6 * BLOCK_SIZE + 3)]
NUM_CACHED = 6 * BLOCK_SIZE
NewRig = Callable[..., Rig]


def counted(rig: Rig) -> Sum[str]:
    """What vLLM was told of the connector, all steps together."""
    total: Sum[str] = Sum()
    for stats in rig.stats:
        total.update(stats.kv_connector_stats or {})
    return total


def sources(rig: Rig) -> Sum[Any]:
    """Hits behind vLLM's own, by where vLLM says that they came from."""
    total: Sum[Any] = Sum()
    for stats in rig.stats:
        if stats.connector_prefix_cache_stats is not None:
            total.update(stats.connector_prefix_cache_stats.hits_by_source)
    return total


@pytest.mark.parametrize("layerwise", [False, True])
def test_hits_of_the_cpu_tier_are_counted(new_rig: NewRig, layerwise: bool) -> None:
    """A prompt is computed, found in vLLM's own blocks, and, in another engine's place, loaded: each tier counts."""
    rig = new_rig(layerwise_load=layerwise)
    rig.serve("first", PROMPT)
    rig.serve("own", PROMPT)
    assert rig.scheduler.reset_prefix_cache()
    rig.serve("again", PROMPT)
    assert rig.cache.metrics.token_counts() == (3 * len(PROMPT), (NUM_CACHED, NUM_CACHED, 0))
    rates = rig.cache.stats().hit_rates
    assert rates["request"] == pytest.approx(2 / 3)
    assert rates["gpu"] == rates["cpu"] == pytest.approx(NUM_CACHED / (3 * len(PROMPT)))
    found = counted(rig)
    assert found["cpu_hit_tokens"] == NUM_CACHED and found["storage_hit_tokens"] == 0
    assert found["loaded_bytes"] == NUM_CACHED // BLOCK_SIZE * rig.cache.config.block_bytes()
    assert found["stored_bytes"] >= found["loaded_bytes"] and found["load_seconds"] > 0
    assert sources(rig) == {CacheHitSource.HOST: NUM_CACHED}


def test_hits_of_storage_are_told_from_those_of_the_cpu_tier(new_rig: NewRig, tmp_path: Path) -> None:
    """What another engine has left on disk is vLLM's DISK; what the CPU tier had already is HOST."""
    storage = {"folder": str(tmp_path / "store"), "weights_id": "arithmetic-1", "admission": "all"}
    first = new_rig(storage=storage, min_prefetch_tokens=1)
    first.serve("first", PROMPT)
    assert first.cache.storage.flush(SECONDS)
    first.close()
    rig = new_rig(storage=storage, min_prefetch_tokens=1, prefetch_policy="wait_complete")
    half = PROMPT[: 3 * BLOCK_SIZE + 1]
    rig.serve("half", half)
    assert sources(rig) == {CacheHitSource.DISK: 3 * BLOCK_SIZE}
    assert rig.scheduler.reset_prefix_cache()
    rig.serve("whole", PROMPT)
    assert sources(rig) == {CacheHitSource.DISK: NUM_CACHED, CacheHitSource.HOST: 3 * BLOCK_SIZE}
    assert rig.cache.metrics.token_counts()[1] == (0, 3 * BLOCK_SIZE, NUM_CACHED)
    assert counted(rig)["storage_hit_tokens"] == NUM_CACHED


def test_a_prompt_of_whole_blocks_is_found_to_its_last_but_one_token(new_rig: NewRig, tmp_path: Path) -> None:
    """The block that ends with the last token is loaded, too, from the CPU tier as from disk; one token is computed."""
    storage = {"folder": str(tmp_path / "store"), "weights_id": "arithmetic-1", "admission": "all"}
    prompt = PROMPT[:NUM_CACHED]
    first = new_rig(storage=storage, min_prefetch_tokens=1)
    first.serve("first", prompt)
    assert first.scheduler.reset_prefix_cache()
    first.serve("again", prompt)
    assert sources(first) == {CacheHitSource.HOST: NUM_CACHED - 1}
    assert first.cache.storage.flush(SECONDS)
    first.close()
    second = new_rig(storage=storage, min_prefetch_tokens=1, prefetch_policy="wait_complete")
    second.serve("from disk", prompt)
    assert sources(second) == {CacheHitSource.DISK: NUM_CACHED - 1}
    assert second.num_computed_tokens == 2  # the last of the prompt, and one of the answer


def test_a_preempted_request_counts_once(new_rig: NewRig) -> None:
    """Requests that are thrown out and come again are queried once."""
    rig = new_rig(num_blocks=14)
    requests = [rig.add(f"r{i}", [50 * i + j for j in range(1, 4 * BLOCK_SIZE)], BLOCK_SIZE + 2) for i in range(3)]
    rig.run()
    assert sum(request.num_preemptions for request in requests) > 0, "the test must be tight"
    assert rig.cache.metrics.token_counts()[0] == sum(request.num_prompt_tokens for request in requests)


def test_the_managers_own_page_is_served(new_rig: NewRig, caplog: pytest.LogCaptureFixture) -> None:
    """With `metrics_port` the manager's own series can be scraped; the log names the address."""
    caplog.set_level("INFO")
    rig = new_rig(metrics_port=0)
    rig.serve("first", PROMPT)
    [url] = [word[4:] for word in caplog.text.split() if word.startswith("url=http")]
    with urllib.request.urlopen(url, timeout=SECONDS) as page:
        text = page.read().decode()
    assert f'fastdeploy_cache_tokens_queried_total{{dp="0"}} {float(len(PROMPT))}' in text


def test_vllms_page_has_the_counts(new_rig: NewRig) -> None:
    """vLLM's own registry gets every counter at zero, and adds what comes from the engine with that number."""
    rig = new_rig()
    rig.serve("first", PROMPT)
    registry = CollectorRegistry()

    def registered(kind: type) -> Callable[..., Any]:
        return lambda **options: kind(**options, registry=registry)

    kinds = {kind: registered(kind) for kind in (Counter, Gauge, Histogram)}
    config = rig.scheduler.vllm_config
    prom = FastDeployCacheConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"], 1: ["1"]})
    name = "vllm:fastdeploy_cache_stored_bytes_total"
    assert registry.get_sample_value(name, {"engine": "1"}) == 0
    for _ in range(2):
        prom.observe(dict(counted(rig)), 1)
    assert registry.get_sample_value(name, {"engine": "1"}) == 2 * counted(rig)["stored_bytes"] > 0
    assert registry.get_sample_value(name, {"engine": "0"}) == 0


def test_intervals_add_up(new_rig: NewRig) -> None:
    """vLLM's log adds intervals of one engine and shows their sum, then begins anew."""
    first = FastDeployCacheConnector.build_kv_connector_stats({"cpu_hit_tokens": 3})
    both = first.aggregate(FastDeployCacheConnector.build_kv_connector_stats({"cpu_hit_tokens": 4, "failed_loads": 1}))
    assert both.reduce() == {"cpu_hit_tokens": 7, "failed_loads": 1} and first.data == {"cpu_hit_tokens": 3}
    both.reset()
    assert both.is_empty()

"""Tenants with shares, one case each: what is refused, what is evicted for whom, and what a message says."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from fastdeploy_cache import CacheConfig, InsightConfig, PrefixCacheManager, Request, StorageConfig
from fastdeploy_cache.books.block_hash import namespace_label, root_hash
from fastdeploy_cache.books.block_pool import REQUEST, BlockPool
from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.books.id_table import new_id_table
from fastdeploy_cache.books.leaves.policy import LeastRecentlyUsed
from fastdeploy_cache.books.run import CPU, GPU
from fastdeploy_cache.books.tenants.labels import LabelledTable
from fastdeploy_cache.config.tenants import MAX_TENANTS, TenantConfig
from fastdeploy_cache.errors import ConfigError, ControlError, OutOfBlocksError, PromptTooLongError
from fastdeploy_cache.transfer_manager.kv.groups import KVGroup
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from tests.rigs.manual_clock import ManualClock

SIZE = 4


def _cache(*tenants: TenantConfig, num_gpu: int = 20, num_cpu: int = 0, **settings: Any) -> PrefixCacheManager:
    return PrefixCacheManager(
        CacheConfig(
            block_size=SIZE,
            num_gpu_blocks=num_gpu,
            num_cpu_blocks=num_cpu,
            transfer_client="inline",
            tenants=tenants,
            **settings,
        ),
        clock=ManualClock(),
    )


def _serve(cache: PrefixCacheManager, namespace: str, first: int, num_blocks: int) -> int:
    """One whole request; how many of its tokens were cached."""
    tokens = [first * 1000 + place for place in range(num_blocks * SIZE)]
    request = Request(request_id=f"{namespace} {first}", prompt_token_ids=[*tokens, 1], namespace=namespace)
    clock = cache._books.clock
    assert isinstance(clock, ManualClock)
    clock.advance(1.0)
    match = cache.match(request).wait(1)
    cache.allocate(request, num_blocks + 1 - len(match.block_ids))
    cache.commit(request, len(tokens))
    cache.release(request)
    return match.num_tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"namespace": 3}, "tenants.namespace is 3; give the text that requests have"),
        ({"guaranteed_gpu_share": 1.5}, "tenants.guaranteed_gpu_share is 1.5; it is a share, use 0 to 1"),
        ({"max_cpu_share": True}, "tenants.max_cpu_share is True; it is a share, use 0 to 1"),
        ({"guaranteed_cpu_share": 0.5, "max_cpu_share": 0.4}, "guarantee no more than it may have"),
        ({"namespace": "\ud800"}, "which is no UTF-8 text"),
        ({"guaranteed_store_share": 2}, "tenants.guaranteed_store_share is 2; it is a share, use 0 to 1"),
        ({"namespace": "", "max_store_share": 0.5}, "tenants of the default namespace, '', have no share of a store"),
        ({"keep_seconds": 10**400}, "use a number above 0, up to 315360000"),
        ({"keep_seconds": 0}, "tenants.keep_seconds is 0; use a number above 0, up to 315360000"),
    ],
)
def test_impossible_tenants_are_refused(settings: dict[str, Any], message: str) -> None:
    """Each impossible value is refused with its name and what to do."""
    with pytest.raises(ConfigError) as refused:
        TenantConfig(**{"namespace": "a", **settings})
    assert message in str(refused.value)


def test_what_tenants_cannot_be_together_is_refused() -> None:
    """Two tables of one namespace, guarantees that leave nothing to others, too many, and a hybrid model."""
    one, half = TenantConfig(namespace="a"), {"guaranteed_gpu_share": 0.5}
    cases: list[tuple[tuple[TenantConfig, ...], str]] = [
        ((one, one), "tenants has 2 tables for the namespace 'a'; give it one"),
        (tuple(TenantConfig(namespace=name, **half) for name in "ab"), "guaranteed_gpu_share is 1 of all together"),
        (tuple(TenantConfig(namespace=str(name)) for name in range(MAX_TENANTS + 1)), f"use {MAX_TENANTS} or fewer"),
    ]
    for tenants, message in cases:
        with pytest.raises(ConfigError) as refused:
            _cache(*tenants)
        assert message in str(refused.value)
    groups = (KVGroup(kind="full", layers=(0,)), KVGroup(kind="chunk", reach_tokens=8, layers=(1,)))
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, groups=groups)
    with pytest.raises(ConfigError, match="which a cache with tenants does not serve"):
        _cache(one, layout=layout)
    _cache(TenantConfig(namespace="a", max_store_share=0.5), layout=layout).close()
    elsewhere = StorageConfig(kind="valkey", weights_id="w")
    with pytest.raises(ConfigError, match=r"storage\.kind is 'valkey': only a file store knows shares"):
        _cache(TenantConfig(namespace="a", guaranteed_store_share=0.5), storage=elsewhere, layout=layout)


def test_settings_of_tenants_come_from_a_file(tmp_path: Any) -> None:
    """A TOML file has a table for each tenant; a wrong key in one is named with the right one."""
    path = tmp_path / "cache.toml"
    text = 'num_gpu_blocks = 20\ntransfer_client = "inline"\n[[tenants]]\nnamespace = "a"\n'
    path.write_text(text + "max_gpu_share = 0.25\n")
    assert CacheConfig.load(path, environment={}).tenants == (TenantConfig(namespace="a", max_gpu_share=0.25),)
    path.write_text(text + "most_gpu_share = 0.25\n")
    with pytest.raises(ConfigError, match=r"unknown key 'tenants\[0\].most_gpu_share'; did you mean"):
        CacheConfig.load(path, environment={})


def test_a_guarantee_is_kept_and_what_is_above_is_lent() -> None:
    """A flood takes what a tenant has above its guarantee, and nothing below; its own need may take its own."""
    with _cache(TenantConfig(namespace="a", guaranteed_gpu_share=0.25)) as cache:
        assert [_serve(cache, "a", number, 5) for number in range(3)] == [0, 0, 0]
        for number in range(10):
            _serve(cache, "", number, 10)
        shares = cache._books.residency.shares
        assert shares is not None
        assert shares.num_used(GPU, 1) == 5
        assert [_serve(cache, "a", number, 5) for number in (2, 0, 1)] == [20, 0, 0]


def test_metrics_tell_use_from_share_and_no_name() -> None:
    """Blocks of each tenant by tier and kind, under the digits by which others know it."""
    tenant = TenantConfig(namespace="a", guaranteed_gpu_share=0.25, max_gpu_share=0.5)
    with _cache(tenant, num_cpu=8) as cache:
        _serve(cache, "a", 0, 6)
        (family,) = [each for each in cache.metrics.collect() if each.name == "fastdeploy_cache_tenant_blocks"]
        found = {(each.labels["tier"], each.labels["kind"]): each.value for each in family.samples}
        assert {each.labels["namespace"] for each in family.samples} == {namespace_label(root_hash("a", SIZE))}
        gpu = {kind: found["gpu", kind] for kind in ("used", "evictable", "guaranteed", "most")}
        assert gpu == {"used": 6, "evictable": 6, "guaranteed": 5, "most": 10}
        assert found["cpu", "guaranteed"] == 0 and found["cpu", "most"] == 8 and len(found) == 8


def test_a_tenant_stays_below_its_most() -> None:
    """A tenant at its most makes room among its own, also while others have nothing; what it can never have is said."""
    with _cache(TenantConfig(namespace="a", max_gpu_share=0.5)) as cache:
        for number in range(5):
            _serve(cache, "a", number, 4)
        assert cache.stats().gpu.num_cached <= 10
        assert _serve(cache, "a", 4, 4) == 16
        request = Request(request_id="r", prompt_token_ids=[1, 2], namespace="a")
        cache.match(request)
        cache.allocate(request, 7)
        with pytest.raises(OutOfBlocksError) as refused:
            cache.allocate(request, 4)
        assert refused.value.missing == 1
        assert "the share of the namespace 'a' is 10, so no wait can help: raise it (tenants)" in str(refused.value)
        cache.release(request)
        with pytest.raises(PromptTooLongError, match=r"shares leave 10 of 20 GPU blocks to its namespace 'a'"):
            cache.match(Request(request_id="s", prompt_token_ids=list(range(41)), namespace="a"))


def test_prompts_of_others_fit_beside_guarantees() -> None:
    """What guarantees leave is what a prompt of another namespace can have for certain; a longer one is refused."""
    with _cache(TenantConfig(namespace="a", guaranteed_gpu_share=0.5)) as cache:
        _serve(cache, "a", 0, 9)
        assert _serve(cache, "", 0, 9) == 0
        with pytest.raises(PromptTooLongError, match="leave 10 of 20 GPU blocks"):
            cache.match(Request(request_id="s", prompt_token_ids=list(range(41))))


def test_copies_of_a_tenant_stay_in_its_share_of_the_cpu_tier() -> None:
    """Copies are made within the most of the CPU tier, and never at the cost of another one's guarantee there."""
    narrow = TenantConfig(namespace="a", max_cpu_share=0.2)
    quiet = TenantConfig(namespace="b", guaranteed_cpu_share=0.4)
    with _cache(narrow, quiet, num_cpu=20, cpu_write_policy="write_through", load_policy="always") as cache:
        _serve(cache, "b", 0, 8)
        for number in range(8):
            _serve(cache, "a", number, 6)
            _serve(cache, "", number, 6)
        shares = cache._books.residency.shares
        assert shares is not None
        assert shares.num_used(CPU, 1) == 4
        assert shares.num_used(CPU, 2) == 8
        assert _serve(cache, "b", 0, 8) == 32


def test_one_policy_for_all_tenants_is_refused() -> None:
    """A policy that the program gives, and a change of the policy while the cache runs: each tenant has its own."""
    tenant = TenantConfig(namespace="a")
    config = CacheConfig(num_gpu_blocks=8, transfer_client="inline", tenants=(tenant,))
    with pytest.raises(ConfigError, match="each of the tenants needs an eviction policy"):
        PrefixCacheManager(config, policy=LeastRecentlyUsed(lambda: 0.0))
    with PrefixCacheManager(config) as cache, pytest.raises(ControlError, match="each tenant has a policy of its own"):
        cache.control.set_policy("lfu")


def test_what_is_not_used_for_its_time_goes() -> None:
    """A tenant's prefixes leave both tiers an eighth of the time to live after it, and the miss says why."""
    tenant = TenantConfig(namespace="a", keep_seconds=80.0)
    with _cache(tenant, num_cpu=20, cpu_write_policy="write_through", load_policy="always") as cache:
        clock = cache._books.clock
        assert isinstance(clock, ManualClock)
        for namespace in ("a", ""):
            _serve(cache, namespace, 0, 4)
            _serve(cache, namespace, 1, 4)
        for _ in range(6):  # one is used again, the other is not
            clock.advance(12.0)
            _serve(cache, "a", 1, 4)
        assert cache.stats().cpu.num_cached == 16
        clock.advance(20.0)
        cache.check_invariants()
        assert [_serve(cache, name, number, 4) for name, number in (("", 0), ("", 1), ("a", 1))] == [16, 16, 16]
        assert _serve(cache, "a", 0, 4) == 0
        assert "was dropped" in str(cache.explain("a 0")) and "keep_seconds" in str(cache.explain("a 0"))
        assert cache.explain("a 0").missed_tokens()[Cause.EXPIRED] == 16


def test_what_is_held_outlives_its_time() -> None:
    """A running request keeps its prefix beyond the time to live; what it has released goes with a later look."""
    with _cache(TenantConfig(namespace="a", keep_seconds=8.0)) as cache:
        clock = cache._books.clock
        assert isinstance(clock, ManualClock)
        _serve(cache, "a", 0, 4)
        request = Request(request_id="r", prompt_token_ids=list(range(9)), namespace="a")
        cache.match(request)
        holding = Request(request_id="h", prompt_token_ids=[*range(16), 1], namespace="a")
        assert cache.match(holding).num_tokens == 16
        clock.advance(30.0)
        cache.check_invariants()
        cache.release(holding)
        assert cache.match(Request(request_id="i", prompt_token_ids=[*range(16), 1], namespace="a")).num_tokens == 16
        cache.release(request)
        clock.advance(10.0)
        assert cache.stats().gpu.num_cached == 4  # the last request holds it


def test_what_a_tenant_retains_is_within_its_share() -> None:
    """It keeps what it has cached; what then is beyond its share it cannot have, and others have their guarantee."""
    greedy = TenantConfig(namespace="a", max_gpu_share=0.5)
    other = TenantConfig(namespace="b", guaranteed_gpu_share=0.4)
    with _cache(greedy, other, insight=InsightConfig(max_pinned_share=1.0)) as cache:
        for first in range(2):
            _serve(cache, "a", first, 4)
            tokens = [first * 1000 + place for place in range(4 * SIZE)]
            cache.sessions.retain(tokens, 60.0, namespace="a")
        with pytest.raises(OutOfBlocksError):
            _serve(cache, "a", 2, 4)
        assert sum(pin.num_blocks for pin in cache.control.pins()) == 8
        assert [_serve(cache, "b", 0, 7), _serve(cache, "b", 0, 7)] == [0, 7 * SIZE]
        cache.check_invariants()


def test_a_look_that_fails_is_followed_by_another() -> None:
    """What it meets is contained, and what is too old goes with the next look."""
    with _cache(TenantConfig(namespace="a", keep_seconds=8.0)) as cache:
        clock, expiry = cache._books.clock, cache._expiry
        assert isinstance(clock, ManualClock)
        _serve(cache, "a", 0, 4)
        look, failures = expiry._look, [MemoryError("no memory")]

        def fail_once() -> None:
            if failures:
                raise failures.pop()
            look()

        expiry._look = fail_once  # type: ignore[method-assign]
        clock.advance(20.0)
        assert not failures and cache.stats().gpu.num_cached == 0


def test_what_is_read_when_it_is_freed_is_nobodys() -> None:
    """A tenant's block that is freed while a store reads it counts for the tenant no more, then and afterwards."""
    tables = list[LabelledTable]()

    def new_table(num_blocks: int) -> LabelledTable:
        tables.append(LabelledTable(new_id_table(num_blocks), 3))
        return tables[0]

    pool = BlockPool("GPU", 8, new_table)
    (table,) = tables
    ids = pool.allocate(4, REQUEST)
    table.label(ids, 1)
    pool.begin_reading(ids[:2])
    pool.free(ids, REQUEST)
    assert table.num_used == table.counted() == [2, 0, 0]
    pool.end_reading(ids[:2])
    assert table.num_used == table.counted() == [0, 0, 0]
    assert pool.num_free == 8


class TurnCounts:
    """An outlet that hears how many runs have ended in each turn."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        self.queued, self.by_turn = deque[object](), list[int]()
        taps = cache._books.residency.taps
        taps.ended = (*taps.ended, lambda run, *_: self.queued.append(run.num_blocks))
        cache._books.add_outlet(self)

    def hand_over(self) -> None:
        self.by_turn.append(len(self.queued))
        self.queued.clear()


def test_a_large_tenant_goes_in_turns() -> None:
    """Thousands of runs go in one look, and no turn of it removes more than a few hundred."""
    with _cache(TenantConfig(namespace="a", keep_seconds=8000.0), num_gpu=4000) as cache:
        for number in range(1500):
            _serve(cache, "a", number, 2)
        counts, clock = TurnCounts(cache), cache._books.clock
        assert isinstance(clock, ManualClock)
        clock.advance(9000.0)
        assert sum(counts.by_turn) == 1500
        assert max(counts.by_turn) <= 256
        assert cache.stats().gpu.num_cached == 0

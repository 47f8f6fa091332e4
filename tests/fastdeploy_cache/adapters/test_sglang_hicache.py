"""SGLang's HiCache over our stores: pages come back as they were, and who shares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache.errors import ConfigError, LayoutError, StorageRefusedError
from tests.rigs import stand_in_sglang
from tests.rigs.sglang_storage import BACKEND, Rank, indices_of, keys_of, starts_of
from tests.rigs.stand_in_sglang import (
    FlatPage,
    HiCacheStorageConfig,
    LogicalPool,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    PoolHitPolicy,
    PoolTransfer,
)

pytestmark = pytest.mark.processes

NewRank = Callable[..., Rank]
SMALL = {"capacity_bytes": "16MiB", "slab_bytes": "1MiB", "staging_bytes": 2**16}


@pytest.fixture
def new_rank(tmp_path: Path) -> Iterator[NewRank]:
    """Makes ranks over one folder that do not outlive the test."""
    ranks: list[Rank] = []

    def new(pool: Any = None, *, by_index: bool = True, config: dict[str, Any] | None = None, **options: Any) -> Rank:
        given = {"folder": str(tmp_path / "store"), "weights_id": "w1", **SMALL, **options}
        ranks.append(Rank(given, pool, by_index=by_index, config=config))
        return ranks[-1]

    yield new
    for rank in ranks:
        rank.backend.close()
    ranks.clear()  # the last to know their memory


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_come_back_as_they_were(new_rank: NewRank, layout: str) -> None:
    """Whatever pieces a page lies in; more pages than staging has, and a last piece that does not fill it."""
    rank = new_rank(MHATokenToKVPoolHost(layout=layout), staging_bytes=5 * 576 + 575)
    keys = keys_of(7)
    assert rank.backend.batch_exists(keys) == 0 and rank.take(keys) == [None] * 7
    pages = rank.put(keys)
    assert rank.backend.batch_exists(keys) == 7 and rank.backend.exists(keys[3])
    assert rank.take(keys) == pages


def test_a_new_process_finds_them(new_rank: NewRank) -> None:
    """What one backend wrote, the next one on the folder reads."""
    first = new_rank()
    pages = first.put(keys_of(5))
    first.backend.close()
    assert new_rank().take(keys_of(6)) == [*pages, None]


def test_flat_pages_come_back_as_they_were(new_rank: NewRank) -> None:
    """Without `interface_v1` SGLang hands over tensors, one for each page."""
    rank, keys = new_rank(by_index=False), keys_of(3)
    pages = rank.pool.fill(starts_of(range(3)))
    assert rank.backend.batch_set(keys[:2], [FlatPage(page) for page in pages[:2]])
    assert rank.backend.set(keys[2], FlatPage(pages[2]))
    targets = [FlatPage(bytes(576)) for _ in range(4)]
    found = rank.backend.batch_get([*keys, "another"], targets)
    assert found[:3] == targets[:3] and found[3] is None
    assert [target.tobytes() for target in targets] == [*pages, bytes(576)]
    assert rank.backend.get(keys[0], FlatPage(bytes(576))).tobytes() == pages[0]
    assert rank.backend.batch_get(keys, targets) == rank.backend.batch_get(keys) == [None] * 3  # not one for each
    assert rank.backend.get(keys[0]) is None and not rank.backend.set(keys[0])


def test_each_way_has_its_own_verbs(new_rank: NewRank) -> None:
    """With `interface_v1` flat tensors are refused, and the other way round: they order a page differently."""
    by_index, flat = new_rank(), new_rank(by_index=False)
    [page] = by_index.put(keys_of(1))
    assert by_index.backend.get(keys_of(1)[0], FlatPage(bytes(576))) is None
    assert not by_index.backend.set("x", FlatPage(page))
    assert flat.backend.batch_exists(keys_of(1)) == 0
    assert flat.backend.batch_get_v1(keys_of(1), indices_of([0])) == [False]


def test_only_a_prefix_counts(new_rank: NewRank) -> None:
    """A page behind a gap is not counted, and not filled."""
    rank, keys = new_rank(), keys_of(5)
    pages = rank.put(keys[:2])
    rank.put(keys[3:], first=8, seed=2)
    assert rank.backend.batch_exists(keys) == 2
    assert rank.take(keys) == [*pages, None, None, None]
    assert rank.backend.batch_exists(keys[3:]) == 2


def test_any_text_is_a_key(new_rank: NewRank) -> None:
    """Keys that are no hashes are told apart, too."""
    rank, keys = new_rank(), ["page.k", "page.v", "", "ab" * 32 + ".suffix", "Ab" * 32]
    assert rank.take(keys) == [None] * 5
    assert rank.put(keys) == rank.take(keys)


@pytest.mark.parametrize(
    ("options", "pool", "config"),
    [
        ({"weights_id": "w2"}, {}, {}),
        ({}, {"layout": "layer_first"}, {}),
        ({}, {"dtype": "torch.float16"}, {}),
        ({}, {"page_size": 2, "token_bytes": 48}, {}),
        ({}, {}, {"tp_rank": 1, "tp_size": 2}),
        ({}, {}, {"pp_rank": 0, "pp_size": 2}),
        ({}, {}, {"attn_cp_rank": 1, "attn_cp_size": 2}),
        ({}, {}, {"dp_rank": 1}),
    ],
    ids=str,
)
def test_others_never_meet(
    new_rank: NewRank, options: dict[str, Any], pool: dict[str, Any], config: dict[str, Any]
) -> None:
    """Other weights, layouts, dtypes, page sizes and ranks have the same keys for other bytes."""
    new_rank().put(keys_of(3))
    rank = new_rank(MHATokenToKVPoolHost(**pool), config=config, **options)
    assert rank.backend.batch_exists(keys_of(3)) == 0


def test_pools_of_another_kind_never_meet(new_rank: NewRank) -> None:
    """Nor do those of another class whose pages have the same size."""
    new_rank().put(keys_of(3))
    assert new_rank(MLATokenToKVPoolHost()).backend.batch_exists(keys_of(3)) == 0


def test_another_precision_of_the_cache_is_another_space(new_rank: NewRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of 8-bit numbers lie in pools of one dtype: what SGLang was told is part of the name."""
    new_rank(MHATokenToKVPoolHost(dtype="torch.uint8")).put(keys_of(2))
    monkeypatch.setattr(stand_in_sglang.MODEL, "kv_cache_dtype", "fp8_e5m2")
    assert new_rank(MHATokenToKVPoolHost(dtype="torch.uint8")).backend.batch_exists(keys_of(2)) == 0


def test_two_ranks_keep_their_own(new_rank: NewRank) -> None:
    """Two ranks over one folder at the same time write under the same keys, and each reads its own."""
    ranks = [new_rank(config={"tp_rank": rank, "tp_size": 2}) for rank in range(2)]
    pages = [rank.put(keys_of(4), seed=seed) for seed, rank in enumerate(ranks)]
    assert pages[0] != pages[1]
    assert [rank.take(keys_of(4)) for rank in ranks] == pages


def test_replicas_of_mla_meet(new_rank: NewRank, tmp_path: Path) -> None:
    """All ranks read what the first has written; the others write nothing."""
    shared = {"kind": "tests.rigs.shared_folder:SharedFolder", "options": {"path": str(tmp_path)}, "folder": None}
    first, second = (
        new_rank(MLATokenToKVPoolHost(), config={"is_mla_model": True, "tp_rank": rank, "tp_size": 2}, **shared)
        for rank in range(2)
    )
    pages = first.put(keys_of(3))
    assert second.take(keys_of(3)) == pages
    assert second.backend.batch_set_v1(keys_of(4, "other"), indices_of(range(4))) == [False] * 4


def test_draft_models_beside_mla(new_rank: NewRank, tmp_path: Path) -> None:
    """Heads of a draft model lie on every rank, and SGLang has the first one write: refused by name, on each rank, with
    no process left. Latents, states, and heads on a single rank are served."""
    shared = {"kind": "tests.rigs.shared_folder:SharedFolder", "options": {"path": str(tmp_path)}, "folder": None}

    def new(rank: int, size: int) -> Rank:
        mla = {"is_mla_model": True, "tp_rank": rank, "tp_size": size}
        return new_rank(MLATokenToKVPoolHost(), config=mla, **shared)

    for rank in (new(0, 2), new(1, 2)):
        rank.backend.register_mem_host_pool_v2(MLATokenToKVPoolHost(), "draft")
        rank.backend.register_mem_host_pool_v2(MambaPoolHost(), "mamba")
        with pytest.raises(ConfigError, match=r"'draft_swa' \(MHATokenToKVPoolHost\) .* each of 2 tensor-parallel"):
            rank.backend.register_mem_host_pool_v2(MHATokenToKVPoolHost(), "draft_swa")
        assert not rank.backend.exists("any") and not rank.pages._client.available
    alone = new(0, 1)
    alone.backend.register_mem_host_pool_v2(MHATokenToKVPoolHost(), "draft")
    assert set(alone.backend._pools) == {"kv", "draft"}


def test_latents_of_a_draft_model_come_back_on_all_ranks(new_rank: NewRank, tmp_path: Path) -> None:
    """The first rank writes them as it writes the model's own, and the others read them."""
    shared = {"kind": "tests.rigs.shared_folder:SharedFolder", "options": {"path": str(tmp_path)}, "folder": None}
    ranks, drafts = [], [MLATokenToKVPoolHost(token_bytes=8) for _ in range(2)]
    for number, draft in enumerate(drafts):
        mla = {"is_mla_model": True, "tp_rank": number, "tp_size": 2}
        ranks.append(new_rank(MLATokenToKVPoolHost(), config=mla, **shared))
        ranks[-1].backend.register_mem_host_pool_v2(draft, "draft")
        assert ranks[-1].backend._pools["draft"].pages._client.wait_ready(30.0)
    ranks[0].put(keys_of(3))
    pages = drafts[0].fill(starts_of(range(3)))
    transfer = PoolTransfer("draft", indices_of(range(3)), keys_of(3))
    assert ranks[0].backend.batch_set_v2([transfer]) == {"draft": [True] * 3}
    assert ranks[1].backend.batch_exists_v2(keys_of(3), [transfer]).kv_hit_pages == 3
    assert ranks[1].backend.batch_get_v2([transfer]) == {"draft": [True] * 3}
    assert [drafts[1].page(start) for start in starts_of(range(3))] == pages


def test_a_full_store_has_room_for_every_pool(new_rank: NewRank) -> None:
    """A pool that comes when the keys and values have filled their capacity holds as many pages as they do."""
    rank = new_rank(capacity_bytes=2**15, slab_bytes=2**12)
    for prompt in range(8):
        rank.put(keys_of(16, f"prompt {prompt}"))
    newest = [keys_of(16, f"prompt {prompt}") for prompt in (7, 0)]
    assert [rank.backend.batch_exists(keys) for keys in newest] == [16, 0]  # it is full
    side = MHATokenToKVPoolHost(token_bytes=8)
    rank.backend.register_mem_host_pool_v2(side, "indexer")
    assert rank.backend._pools["indexer"].pages._client.wait_ready(30.0)
    pages = side.fill(starts_of(range(16)))
    transfer = PoolTransfer("indexer", indices_of(range(16)), newest[0])
    assert rank.backend.batch_set_v2([transfer]) == {"indexer": [True] * 16}
    assert rank.backend.batch_exists_v2(newest[0], [transfer]).kv_hit_pages == 16
    assert rank.backend.batch_get_v2([PoolTransfer("indexer", indices_of(range(16, 32)), newest[0])])["indexer"][-1]
    assert [side.page(start) for start in starts_of(range(16, 32))] == pages


def test_states_and_windows_have_pages_of_their_own(new_rank: NewRank) -> None:
    """A prefix can be restored up to where every pool has what it needs: all pages, or the last one."""
    rank, keys = new_rank(), keys_of(6)
    index_pool, states = MHATokenToKVPoolHost(token_bytes=8), MambaPoolHost(num_layers=2)
    rank.backend.register_mem_host_pool_v2(rank.pool, "kv")
    rank.backend.register_mem_host_pool_v2(index_pool, "indexer")
    rank.backend.register_mem_host_pool_v2(states, "mamba")
    for name in ("indexer", "mamba"):
        assert rank.backend._pools[name].pages._client.wait_ready(30.0)
    rank.put(keys)
    index_pages, state_pages = index_pool.fill(starts_of(range(5))), states.fill([0, 4])
    wanted = [PoolTransfer("indexer"), PoolTransfer("mamba", keys=keys[3:4], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    assert rank.backend.batch_exists_v2(keys, wanted).kv_hit_pages == 0
    written = rank.backend.batch_set_v2([PoolTransfer("indexer", indices_of(range(5)), keys[:5])])
    written |= rank.backend.batch_set_v2([PoolTransfer("mamba", indices_of([0, 1]), [keys[1], keys[3]])])
    assert written == {"indexer": [True] * 5, "mamba": [True] * 2}
    found = rank.backend.batch_exists_v2(keys, wanted)
    # all ends that hold: ranks may have others in common, and SGLang may have room for a shorter one only
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [2, 4])
    assert found.extra_pool_hit_pages == {"kv": 6, "indexer": 5, "mamba": 4}
    found = rank.backend.batch_exists_v2(keys, wanted[:1])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [1, 2, 3, 4, 5])
    got = rank.backend.batch_get_v2(
        [PoolTransfer("indexer", indices_of(range(8, 14)), keys), PoolTransfer("mamba", indices_of([9]), [keys[3]])]
    )
    assert got == {"indexer": [True] * 5 + [False], "mamba": [True]}
    assert [index_pool.page(start) for start in starts_of(range(8, 13))] == index_pages
    assert states.page(36) == state_pages[1]


def test_a_pool_that_cannot_be_served_is_not_there(new_rank: NewRank) -> None:
    """It is never found and never written, and neither is one that nobody has named."""
    rank = new_rank()
    rank.backend.register_mem_host_pool_v2(LogicalPool(), "deepseek_v4_c4")
    rank.put(keys_of(2))
    for name in ("deepseek_v4_c4", "nobody"):
        transfer = PoolTransfer(name, indices_of([0, 1]), keys_of(2))
        assert rank.backend.batch_exists_v2(keys_of(2), [transfer]).kv_hit_pages == 0
        assert rank.backend.batch_get_v2([transfer]) == rank.backend.batch_set_v2([transfer]) == {name: [False] * 2}


def test_clear_forgets_all_pages(new_rank: NewRank) -> None:
    """They are gone, also for who comes later, and new ones can be written."""
    rank = new_rank()
    rank.put(keys_of(4))
    assert rank.backend.clear() and rank.backend.batch_exists(keys_of(4)) == 0
    rank.put(keys_of(1))
    rank.backend.close()
    assert new_rank().backend.batch_exists(keys_of(4)) == 1


def test_it_says_what_it_moved(new_rank: NewRank) -> None:
    """Pages and speeds since it was asked before."""
    rank = new_rank()
    rank.put(keys_of(4))
    rank.take(keys_of(3))
    rank.take(keys_of(3, "other"))
    stats = rank.backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [3])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert min(stats.backup_bandwidth + stats.prefetch_bandwidth) > 0
    assert not rank.backend.get_stats().backup_pgs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights_id": None}, "weights_id is missing"),
        ({"weights_id": "w", "foldr": "/x"}, "did you mean 'folder'"),
        ({"weights_id": "w"}, "storage.folder is missing"),
        ({"weights_id": "w", "folder": "/x", "admission": "some"}, "storage.admission is 'some'"),
        (
            {"weights_id": "w", "folder": "/x", "capacity_bytes": "10 GBit"},
            "capacity_bytes is '10 GBit'; give a number",
        ),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], said: str) -> None:
    """Before anything is started, with what to change."""
    with pytest.raises((ConfigError, LayoutError), match=said):
        BACKEND.FastDeployCacheStorage(HiCacheStorageConfig(extra_config=options), {})


@pytest.mark.parametrize("options", ["{}", "[1]", [1]], ids=repr)
def test_options_that_are_no_mapping_are_refused(options: Any) -> None:
    """JSON that was not parsed, or a list: it is said what is needed, and so it is where there is no configuration."""
    with pytest.raises(ConfigError, match=r"extra_config is .* give a mapping of options"):
        BACKEND.FastDeployCacheStorage(HiCacheStorageConfig(extra_config=options), {})
    with pytest.raises(ConfigError, match="storage_config is None; give SGLang's HiCacheStorageConfig"):
        BACKEND.FastDeployCacheStorage(None, {})


def test_replicas_need_a_store_that_several_can_open() -> None:
    """A file store serves one process: the other ranks of an MLA model could never read it."""
    config = HiCacheStorageConfig(
        is_mla_model=True, tp_size=2, extra_config={"weights_id": "w", "folder": "/x", "interface_v1": True}
    )
    with pytest.raises(ConfigError, match="use kind 'valkey' or 'mooncake'"):
        BACKEND.FastDeployCacheStorage(config, {})


def test_a_pool_without_memory_is_refused(new_rank: NewRank) -> None:
    """Where the keys and values lie in other pools there is nothing to store."""
    with pytest.raises(ConfigError, match="has no pages in memory"):
        new_rank(LogicalPool())


def test_too_little_staging_is_refused(new_rank: NewRank) -> None:
    """It says how much a page takes."""
    with pytest.raises(ConfigError, match="a page takes 576; use at least 1728"):
        new_rank(staging_bytes=1000)


def test_a_folder_that_another_has_is_refused(new_rank: NewRank) -> None:
    """Two engines of the same rank cannot have one folder."""
    new_rank()
    with pytest.raises(StorageRefusedError, match="in use by another engine"):
        new_rank()

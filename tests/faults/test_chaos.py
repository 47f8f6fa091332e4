"""Ranks, workers and storage processes die and hang, by seed, under engines of every habit: no wrong byte, no hang,
no block lost."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache import ranks as rank_access
from fastdeploy_cache.books.generations import Reason
from fastdeploy_cache.books.prefix_tree import PrefixTree
from tests.rigs.chaos_config import SEEDS, chaos_config
from tests.rigs.chaos_drivers import NativeDriver
from tests.rigs.chaos_faults import RankFaults, StorageFaults, Workers
from tests.rigs.chaos_rig import Story, WrongBytesError, moved

pytestmark = pytest.mark.processes


@pytest.fixture
def broken_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that flip a bit of the first block of each copy."""
    (tmp_path / "sitecustomize.py").write_text(_FLIP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


_FLIP = """
from fastdeploy_cache.transfer_manager.device import cpu
copy = cpu.copy_pieces

def copy_wrongly(pairs, route):
    copy(pairs, route)
    if route.blocks:
        pairs.destinations[route.blocks[0][1]].flat[0] ^= 1

cpu.copy_pieces = copy_wrongly
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("owner", ["engine", "worker", "transfer"])
def test_whoever_owns_the_kv_arrays(owner: str, seed: int) -> None:
    """The engine's arrays survive all, a worker's go with it, a rank's with each of its deaths; the CPU tier stays."""
    with contextlib.ExitStack() as cleanup:
        driver = NativeDriver(cleanup.enter_context(PrefixCacheManager(chaos_config(seed, kv_owner=owner))))
        faults = Workers(driver, cleanup) if owner == "worker" else RankFaults(driver)
        story = Story(driver, seed, faults.all())
        story.run()
        assert bool(story.seen["loss"]) == (owner != "engine")
        moved(driver.cache.stats().num_swapped_in_blocks)


@pytest.mark.parametrize(("seed", "owner"), [(0, "engine"), (1, "worker"), (3, "transfer")])
def test_whoever_owns_the_kv_arrays_above_a_store(owner: str, seed: int, tmp_path: Path) -> None:
    """Storage processes die and hang, too, below a CPU tier of a few blocks: what they lose is computed."""
    with contextlib.ExitStack() as cleanup:
        config = chaos_config(seed, tmp_path, kv_owner=owner)
        driver = NativeDriver(cleanup.enter_context(PrefixCacheManager(config)))
        faults = Workers(driver, cleanup) if owner == "worker" else RankFaults(driver)
        Story(driver, seed, {**faults.all(), **StorageFaults(driver.cache).all()}, num_steps=250).run()
        storage = driver.cache.stats().storage
        assert storage is not None
        moved(storage.num_fetched_blocks)
        moved(driver.cache.stats().num_swapped_in_blocks)


def test_a_story_finds_a_flipped_bit(broken_ranks: None) -> None:
    """The rig's own check: ranks that copy one byte wrongly do not get through four stories. In one of them little may
    be loaded in time."""
    with pytest.raises(WrongBytesError, match="wrong bytes on rank"):
        for seed in range(4):
            with PrefixCacheManager(chaos_config(seed)) as cache:
                Story(NativeDriver(cache), seed, {}).run()


def test_a_story_finds_blocks_of_arrays_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rig's own check: a cache that still finds what lay in a dead rank's arrays does not get through a story."""

    def forget_nothing(tree: PrefixTree) -> None:
        tree.generations.begin(Reason.GPU_LOST)

    monkeypatch.setattr(rank_access, "drop_gpu", forget_nothing)
    with PrefixCacheManager(chaos_config(0, kv_owner="transfer")) as cache, pytest.raises(WrongBytesError):
        driver = NativeDriver(cache)
        Story(driver, 0, RankFaults(driver).all()).run()

"""Observed blocks have keys that follow from their prefix alone, however the tree is cut."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_pool import REQUEST, BlockPool
from fastdeploy_cache.books.block_sample import BlockSample
from fastdeploy_cache.books.growing import insert
from fastdeploy_cache.books.leaves.policy import LeastRecentlyUsed
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import GPU, Pin, Run
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.policies.block_sampler import BlockSampler

SIZE = 4  # tokens in a block


class _Tree:
    """A tree of runs whose blocks nobody computes."""

    def __init__(self) -> None:
        self.pools = BlockPool("GPU", 6000), BlockPool("CPU", 0)
        self.tree = PrefixTree(SIZE, self.pools, LeastRecentlyUsed(lambda: 0.0), 0, SYSTEM_CLOCK)

    def add(self, tokens: list[int], namespace: str = "", extras: dict[int, bytes] | None = None) -> list[Run]:
        """Insert a prompt; the runs on its path."""
        keys = BlockKeys(np.array(tokens, np.int32).tobytes(), bytearray(), extras)
        num_blocks = len(tokens) // SIZE
        root = self.tree.root(namespace)
        path, num_found = self.tree.find(namespace, keys, num_blocks)
        at, end = self.tree.place(path, num_found)
        pin = Pin(at or root, end)
        self.tree.pin(pin)
        ids = self.pools[GPU].allocate(num_blocks - num_found, REQUEST)
        done = insert(self.tree, (at or root, end), keys, num_found, ids)
        self.tree.unpin(pin)
        return done.run.path()


def _keys(sampler: BlockSampler, path: list[Run]) -> list[int]:
    return [key for run in path for key in sampler.sample(run).keys]


def test_equal_prefixes_have_equal_keys_however_they_came() -> None:
    """A prompt whole, and the same in a tree where it is cut into runs and came in pieces."""
    prompt = np.random.default_rng(0).integers(0, 150_000, SIZE * 5000).tolist()  # more than are looked at at once
    whole, pieces = BlockSampler(1.0, SIZE), BlockSampler(1.0, SIZE)
    wanted = _keys(whole, _Tree().add(prompt))
    tree = _Tree()
    _keys(pieces, tree.add(prompt[: SIZE * 100]))
    tree.add(prompt[: SIZE * 40] + [7] * SIZE)  # cuts it
    path = tree.add(prompt)
    assert len(path) > 1
    assert _keys(pieces, path) == wanted
    assert len(set(wanted)) == 5000


@pytest.mark.parametrize("place", [0, 1, SIZE * 3 - 1])
def test_a_token_changes_the_keys_from_its_block_on(place: int) -> None:
    """Blocks before it keep their keys; no block behind does, although its own tokens are the same."""
    prompt = list(range(SIZE * 6))
    other = [*prompt[:place], 99_999, *prompt[place + 1 :]]
    sampler, first = BlockSampler(1.0, SIZE), place // SIZE
    ours, theirs = _keys(sampler, _Tree().add(prompt)), _keys(sampler, _Tree().add(other))
    assert ours[:first] == theirs[:first]
    assert not set(ours[first:]) & set(theirs[first:])


def test_namespaces_and_extra_keys_change_them() -> None:
    """Prompts of other users, or with another image in one block, are not taken for one."""
    prompt, sampler = list(range(SIZE * 4)), BlockSampler(1.0, SIZE)
    plain = _keys(sampler, _Tree().add(prompt))
    assert not set(plain) & set(_keys(sampler, _Tree().add(prompt, "tenant")))
    image = _keys(sampler, _Tree().add(prompt, extras={2: b"image"}))
    assert image[:2] == plain[:2]
    assert not set(image[2:]) & set(plain[2:])


def test_a_share_of_the_blocks_is_observed() -> None:
    """Of 5000 blocks with a ratio of a tenth about 500, and those that a larger ratio has, too."""
    path = _Tree().add(np.random.default_rng(1).integers(0, 150_000, SIZE * 5000).tolist())
    tenth = _keys(BlockSampler(0.1, SIZE), path)
    path[0].notes = path[0].notes.with_sample(None)
    half = _keys(BlockSampler(0.5, SIZE), path)
    assert 400 < len(tenth) < 600
    assert set(tenth) < set(half)


def test_the_sampler_counts_what_is_observed_in_the_cache() -> None:
    """Looked at twice it counts once; what is cut off or goes is taken off."""
    tree, sampler = _Tree(), BlockSampler(1.0, SIZE)
    (run,) = tree.add(list(range(SIZE * 10)))
    for _ in range(2):
        sampler.sample(run)
        assert sampler.num_resident == 10
    upper = tree.tree.split(run, 4)
    for part in (run, upper):
        sampler.sample(part)
    assert sampler.num_resident == 10
    sampler.shrink(run, 2)
    assert sampler.num_resident == 6
    sampler.shrink(upper, 0)
    assert sampler.num_resident == 2


def test_samples_follow_cuts_and_joins() -> None:
    """The parts have what lies in them, and together they are the whole again."""
    whole = BlockSample([11, 12, 13], [1, 4, 7], 9, 5)
    for cut in range(1, 10):
        front, behind = whole.front(cut), whole.behind(cut)
        assert front.end == (5 if cut == 9 else None), "what comes behind a cut has to be computed anew"
        if behind is None:
            assert cut == 9
            continue
        joined = front.joined(behind)
        assert (joined.keys, joined.blocks, joined.num_blocks, joined.end) == ([11, 12, 13], [1, 4, 7], 9, 5)
    assert [whole.num_from(block) for block in (0, 1, 2, 7, 8)] == [3, 3, 2, 1, 0]

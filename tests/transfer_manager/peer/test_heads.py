"""Who reads which heads from whom, and where the bytes of these lie on both sides, against a model in NumPy."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_cache.transfer_manager.kv.layout import KVLayout, Places, RankLayout
from fastdeploy_cache.transfer_manager.peer.heads import PieceMaker, Side, num_readers, shares_of
from fastdeploy_cache.transfer_manager.peer.link import Bytes, Pieces, checked, this_process
from tests.rigs.call_counts import counted

Array = np.ndarray[Any, np.dtype[Any]]
TOKENS, NUM_LOCAL, NUM_REMOTE = 4, 7, 9


def heads_of(num_kv_heads: int, tp_size: int, rank: int) -> range:
    """The model's heads on a rank, as tensor parallelism cuts or repeats them."""
    first = rank * num_kv_heads // tp_size
    return range(first, first + max(1, num_kv_heads // tp_size))


def fits(num_kv_heads: int, tp_size: int) -> bool:
    return num_kv_heads % tp_size == 0 or tp_size % num_kv_heads == 0


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Heads, and two numbers of ranks that may talk to each other."""
    heads = draw(st.integers(1, 24))
    mine = draw(st.integers(1, 16).filter(lambda n: fits(heads, n)))
    other = draw(st.integers(1, 16).filter(lambda n: fits(heads, n) and max(n, mine) % min(n, mine) == 0))
    return heads, mine, other


@given(sizes())
def test_every_head_is_read_once_from_a_rank_that_holds_it(case: tuple[int, int, int]) -> None:
    """On each local rank, whether heads are cut further, joined, or repeated on either side."""
    heads, tp_size, peer_tp_size = case
    for rank in range(tp_size):
        mine, read = list(heads_of(heads, tp_size, rank)), []
        for share in shares_of(heads, tp_size, rank, peer_tp_size):
            there = list(heads_of(heads, peer_tp_size, share.rank))
            here = mine[share.first_local : share.first_local + share.num_heads]
            assert len(here) == share.num_heads
            assert there[share.first_remote : share.first_remote + share.num_heads] == here
            read += here
        assert sorted(read) == mine


@given(sizes())
def test_every_rank_of_the_peer_hears_from_as_many_readers_as_are_announced(case: tuple[int, int, int]) -> None:
    """At least from one, and never twice from the same: they are known by their rank."""
    heads, tp_size, peer_tp_size = case
    heard: Counter[int] = Counter()
    for rank in range(tp_size):
        peers = [share.rank for share in shares_of(heads, tp_size, rank, peer_tp_size)]
        assert peers == sorted(set(peers))
        heard.update(peers)
    for peer in range(peer_tp_size):
        assert heard[peer] == num_readers(heads, tp_size, peer_tp_size, peer) >= 1


@given(sizes())
def test_readers_of_one_head_spread_over_its_copies(case: tuple[int, int, int]) -> None:
    """No rank of the peer is read twice as long as another one with the same head is idle."""
    heads, tp_size, peer_tp_size = case
    read: Counter[tuple[int, int]] = Counter()
    for rank in range(tp_size):
        for share in shares_of(heads, tp_size, rank, peer_tp_size):
            first = heads_of(heads, tp_size, rank)[0] + share.first_local
            read.update((head, share.rank) for head in range(first, first + share.num_heads))
    for head in range(heads):
        loads = [read[head, p] for p in range(peer_tp_size) if head in heads_of(heads, peer_tp_size, p)]
        assert max(loads) - min(loads) <= 1


class Memory(NamedTuple):
    """One rank's KV arrays, filled with one byte."""

    layout: RankLayout
    segments: list[Bytes]
    places: Places

    @classmethod
    def new(cls, layout: RankLayout, num_blocks: int, *, fill: int, split: bool) -> Memory:
        """In one segment, or (`split`) with one for each layer, as a worker's own arrays are."""
        places, num_bytes = layout.places(num_blocks), layout.gpu_bytes(num_blocks)
        if not split:
            return cls(layout, [np.full(num_bytes, fill, np.uint8)], places)
        starts = [in_layer[0].offset_bytes for in_layer in places]
        places = tuple(
            tuple(p._replace(segment=layer, offset_bytes=p.offset_bytes - starts[layer]) for p in in_layer)
            for layer, in_layer in enumerate(places)
        )
        ends = [*starts[1:], num_bytes]
        return cls(layout, [np.full(b - a, fill, np.uint8) for a, b in zip(starts, ends, strict=True)], places)

    def views(self) -> list[dict[str, Array]]:
        return self.layout.kv_views(self.segments, self.places)

    def side(self, first_head: int) -> Side:
        return Side(self.layout, self.places, first_head)


def model_of(layout: KVLayout, num_blocks: int, rng: np.random.Generator) -> list[dict[str, Array]]:
    """The whole model's keys and values, as one rank would hold them: [block, token or head, ..., element]."""
    memory = Memory.new(layout.for_rank(1, TOKENS), num_blocks, fill=0, split=False)
    memory.segments[0][:] = rng.integers(0, 255, memory.segments[0].shape, np.uint8)
    return memory.views()


def cut(array: Array, heads: range, *, heads_first: bool) -> Array:
    return array[:, heads.start : heads.stop] if heads_first else array[:, :, heads.start : heads.stop]


def copy(pieces: Pieces, local: Memory, remote: Memory) -> None:
    """What a link does."""
    for mine, start, other, source, size in zip(*(column.tolist() for column in pieces), strict=True):
        local.segments[mine][start : start + size] = remote.segments[other][source : source + size]


ORDERS = st.sampled_from(["layer_first", "block_first"])
PARTS = st.sampled_from(
    [
        {"dtype": "float16", "head_dim": 4},
        {"dtype": "int4", "head_dim": 6},
        {"dtype": "float16", "head_dim": 4, "value_head_dim": 8},
        {"dtype": "int8", "head_dim": 8, "scale_dtype": "float32"},
        {"dtype": "int4", "head_dim": 8, "value_head_dim": 16, "scale_dtype": "bfloat16", "scale_elements": 4},
    ]
)
LATENT = {"dtype": "bfloat16", "head_dim": 6, "value_head_dim": 0}


class Case(NamedTuple):
    """Two instances of one model."""

    mine: KVLayout
    other: KVLayout
    tp_size: int
    peer_tp_size: int
    split: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    heads, tp_size, peer_tp_size = draw(sizes())
    parts = draw(PARTS)
    if draw(st.booleans()) and heads == 1:
        parts = LATENT
    same = {"num_layers": 3, "num_kv_heads": heads, "heads_first": draw(st.booleans()), **parts}
    sides = []
    num_extra = draw(st.integers(0, 1))
    for _ in range(2):
        order = draw(ORDERS)
        ratio = 2.0 if num_extra and order == "layer_first" and draw(st.booleans()) else 1.0
        sides.append(
            KVLayout(**same, device_order=order, num_extra_layers=num_extra, extra_layer_block_ratio=ratio)  # type: ignore[arg-type]
        )
    split = draw(st.booleans()) and sides[1].device_order == "layer_first"
    return Case(sides[0], sides[1], tp_size, peer_tp_size, split)


@given(cases(), st.randoms(use_true_random=False), st.data())
def test_pieces_bring_the_blocks_and_touch_nothing_else(case: Case, random: Any, data: st.DataObject) -> None:
    """Parts of any kind, on either side in either order, some layers first and then the others."""
    rng = np.random.default_rng(random.getrandbits(32))
    rank = data.draw(st.integers(0, case.tp_size - 1))
    num_blocks = data.draw(st.integers(1, 4))
    mine_ids = rng.permutation(NUM_LOCAL)[:num_blocks].astype(np.int32)
    their_ids = rng.permutation(NUM_REMOTE)[:num_blocks].astype(np.int32)
    heads, heads_first = case.mine.num_kv_heads, case.mine.heads_first
    model = model_of(case.other, NUM_REMOTE, rng)
    local = Memory.new(case.mine.for_rank(case.tp_size, TOKENS), NUM_LOCAL, fill=255, split=False)
    expected = Memory.new(local.layout, NUM_LOCAL, fill=255, split=False)
    edge = data.draw(st.integers(0, local.layout.num_layers))
    for first_layer, end_layer in ((0, edge), (edge, local.layout.num_layers)):
        for share in shares_of(heads, case.tp_size, rank, case.peer_tp_size):
            if not share.num_heads:
                continue
            remote = Memory.new(case.other.for_rank(case.peer_tp_size, TOKENS), NUM_REMOTE, fill=0, split=case.split)
            theirs = heads_of(heads, case.peer_tp_size, share.rank)
            for in_layer, whole in zip(remote.views(), model, strict=True):
                for name, view in in_layer.items():
                    view[:] = cut(whole[name], theirs, heads_first=heads_first)
            maker = PieceMaker(local.side(share.first_local), remote.side(share.first_remote), share.num_heads)
            pieces = maker.pieces(mine_ids, their_ids, first_layer, end_layer)
            part_of_all = num_blocks * (end_layer - first_layer) / local.layout.num_layers
            assert pieces.num_bytes.sum() == maker.block_bytes * part_of_all
            copy(pieces, local, remote)
        for layer in range(first_layer, end_layer):
            for name, view in expected.views()[layer].items():
                heads_here = heads_of(heads, case.tp_size, rank)
                view[mine_ids] = cut(model[layer][name], heads_here, heads_first=heads_first)[their_ids]
        assert np.array_equal(local.segments[0], expected.segments[0])


@pytest.mark.parametrize(
    ("orders", "num_pieces"),
    [
        (("block_first", "block_first"), 1),
        (("layer_first", "layer_first"), 3 * 2),  # one for each layer and part
        (("layer_first", "block_first"), 3 * 2 * 5),
    ],
)
def test_neighbours_in_memory_become_one_read(orders: tuple[str, str], num_pieces: int) -> None:
    """Blocks in a row, where both sides hold them alike: the link joins their pieces."""
    layouts = [KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, device_order=order) for order in orders]  # type: ignore[arg-type]
    local, remote = (Memory.new(layout.for_rank(1, TOKENS), 9, fill=0, split=False) for layout in layouts)
    ids = np.arange(2, 7, dtype=np.int32)
    pieces = PieceMaker(local.side(0), remote.side(0), 2).pieces(ids, ids - 1, 0, 3)
    size = local.segments[0].nbytes
    there = this_process("shm", bytes(16), [size], handles=(0,))
    assert len(checked(pieces, [size], there).num_bytes) == num_pieces


def test_lists_that_do_not_match_make_no_pieces_that_a_link_would_read() -> None:
    """A short list of one side is not stretched over the other."""
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4).for_rank(1, TOKENS)
    memory = Memory.new(layout, 4, fill=0, split=False)
    maker = PieceMaker(memory.side(0), memory.side(0), 2)
    pieces = maker.pieces(np.array([1], np.int32), np.array([1, 2], np.int32), 0, 2)
    assert len(pieces.local_offset) != len(pieces.remote_offset)


def test_what_a_layer_costs() -> None:
    """Calls for each of 64 layers with the same parts, when another instance is met; they may fall."""
    layout = KVLayout(num_layers=64, num_kv_heads=8, head_dim=128).for_rank(1, TOKENS)
    memory = Memory.new(layout, 2, fill=0, split=False)
    sides = memory.side(0), memory.side(0)
    maker, num_calls = counted(lambda: PieceMaker(*sides, 8))
    assert maker.block_bytes == layout.block_bytes and num_calls <= 17 * 64

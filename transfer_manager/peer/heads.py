"""Which rank reads which heads of which rank of another instance, and where the pieces of blocks lie on both sides."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastdeploy_cache.ipc.codec import Int32Array
from fastdeploy_cache.transfer_manager.kv.layout import Places, RankLayout
from fastdeploy_cache.transfer_manager.kv.parts import KVPart
from fastdeploy_cache.transfer_manager.peer.link import Int64Array, Pieces


class Share(NamedTuple):
    """Heads that one rank reads from another's: `num_heads` of them, counted within each rank's own. Of none, the rank
    only listens, so that the other hears of the end."""

    rank: int  # of the other instance
    first_remote: int
    first_local: int
    num_heads: int


def head_range(num_kv_heads: int, tp_size: int, rank: int) -> tuple[int, int]:
    """The first head that a rank holds, and how many; see `KVLayout.heads_per_rank`."""
    if num_kv_heads % tp_size == 0:
        num_heads = num_kv_heads // tp_size
        return rank * num_heads, num_heads
    return rank // (tp_size // num_kv_heads), 1


def shares_of(num_kv_heads: int, tp_size: int, rank: int, peer_tp_size: int) -> tuple[Share, ...]:
    """What a rank reads, in the order of the peer's ranks. Every rank of the peer has at least one reader.

    Where several of the peer's ranks hold the same head, readers spread over them; a rank whose heads are read
    elsewhere is only listened to.
    """
    shares = _needed(num_kv_heads, tp_size, rank, peer_tp_size)
    used = {share.rank for r in range(tp_size) for share in _needed(num_kv_heads, tp_size, r, peer_tp_size)}
    idle = [i for i in range(peer_tp_size) if i not in used and i % tp_size == rank]
    return tuple(sorted([*shares, *(Share(i, 0, 0, 0) for i in idle)]))


def num_readers(num_kv_heads: int, tp_size: int, peer_tp_size: int, peer_rank: int) -> int:
    """How many of `tp_size` ranks read from (or listen to) this rank of the peer."""
    all_shares = (shares_of(num_kv_heads, tp_size, rank, peer_tp_size) for rank in range(tp_size))
    return sum(any(share.rank == peer_rank for share in shares) for shares in all_shares)


def _needed(num_kv_heads: int, tp_size: int, rank: int, peer_tp_size: int) -> list[Share]:
    first, num_heads = head_range(num_kv_heads, tp_size, rank)
    shares, head, end = [], first, first + num_heads
    while head < end:
        owner = _owner(num_kv_heads, peer_tp_size, head, rank)
        peer_first, peer_num = head_range(num_kv_heads, peer_tp_size, owner)
        num = min(end, peer_first + peer_num) - head
        shares.append(Share(owner, head - peer_first, head - first, num))
        head += num
    return shares


def _owner(num_kv_heads: int, tp_size: int, head: int, reader: int) -> int:
    if num_kv_heads % tp_size == 0:
        return head // (num_kv_heads // tp_size)
    num_replicas = tp_size // num_kv_heads
    return head * num_replicas + reader % num_replicas


class Side(NamedTuple):
    """One side's KV arrays, and the first of the heads in question within a rank's part."""

    layout: RankLayout
    places: Places
    first_head: int


# Where the rows of some heads begin in a part of one block, here and there, and the bytes of a row.
Cut = tuple[Int64Array, Int64Array, int]


class PieceMaker:
    """Makes the pieces of blocks of one row for one share: a piece for each block, layer of the row and part, or, where
    a rank's heads are cut and the tokens come first, one for each token of these. Of a hybrid model both sides have as
    many ranks, and a piece is a whole part."""

    def __init__(self, local: Side, remote: Side, num_heads: int, *, row: int = 0) -> None:
        self._block_major = {local.layout.device_order, remote.layout.device_order} == {"block_first"}
        layout, is_whole = local.layout, bool(local.layout.rows)
        places, cuts = list[tuple[int, ...]](), list[Cut]()
        known: dict[tuple[int, int], Cut] = {}  # by part, here and there: most layers have the same
        for layer in range(layout.num_layers):
            if layout.row_of(layer) != row:
                continue
            sides = layout.parts_of(layer), remote.layout.parts_of(layer), local.places[layer], remote.places[layer]
            for mine, other, here, there in zip(*sides, strict=True):
                if (cut := known.get((id(mine), id(other)))) is None:
                    whole = _one(0), _one(0), mine.num_bytes
                    cut = whole if is_whole else _rows(mine, other, local.first_head, remote.first_head, num_heads)
                    known[id(mine), id(other)] = cut
                cuts.append(cut)
                places.append((layer, cut[2], *here[:3], *there[:3]))
        # [field, strand]: of a part, what has one piece in each block.
        strands = np.repeat(np.array(places, np.int64).T, [len(in_mine) for in_mine, _, _ in cuts], axis=1)
        for column, offsets in ((3, [cut[0] for cut in cuts]), (6, [cut[1] for cut in cuts])):
            strands[column] += np.concatenate(offsets)
        self._layers, self._num_bytes, self._local, self._remote = strands[0], strands[1], strands[2:5], strands[5:]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return int(self._num_bytes.sum())

    def pieces(self, local_ids: Int32Array, remote_ids: Int32Array, first_layer: int, end_layer: int) -> Pieces:
        """The pieces of these blocks (lists of equal length) in layers [first_layer, end_layer) of the model."""
        within = slice(*np.searchsorted(self._layers, (first_layer, end_layer)))
        sides = []
        for place, ids in ((self._local, local_ids), (self._remote, remote_ids)):
            segment, offset, stride = (column[within, None] for column in place)
            offsets = offset + np.asarray(ids, np.int64)[None, :] * stride  # [strand, block]
            sides += [np.broadcast_to(segment, offsets.shape), offsets]
        sides.append(np.broadcast_to(self._num_bytes[within, None], sides[1].shape))
        return Pieces(*(self._flat(array) for array in sides))

    def _flat(self, array: Int64Array) -> Int64Array:
        # neighbours in memory next to each other: the link joins them
        return np.ascontiguousarray(array.T if self._block_major else array).reshape(-1)


def _rows(local: KVPart, remote: KVPart, first_local: int, first_remote: int, num_heads: int) -> Cut:
    if local.token_axis == 1:  # a head's tokens lie together
        head_bytes = int(local.num_bytes // local.shape[0])
        return _one(first_local * head_bytes), _one(first_remote * head_bytes), num_heads * head_bytes
    num_local, num_remote = local.shape[1], remote.shape[1]
    head_bytes = local.num_bytes // (local.shape[0] * num_local)
    if num_heads == num_local == num_remote:
        return _one(0), _one(0), local.num_bytes
    tokens = np.arange(local.shape[0], dtype=np.int64)
    return (
        (tokens * num_local + first_local) * head_bytes,
        (tokens * num_remote + first_remote) * head_bytes,
        num_heads * head_bytes,
    )


def _one(offset: int) -> Int64Array:
    return np.array([offset], np.int64)

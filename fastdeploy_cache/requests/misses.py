"""Why a match has found no more of a prompt than it has. Under the lock."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from fastdeploy_cache.books.block_hash import root_hash
from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_marks import (
    MARK_BYTES,
    WINDOW_BYTES,
    block_marks,
    num_equal,
    place_key,
    with_extras,
    word_of,
)
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.causes import OTHER_WEIGHTS, ROW_SHORT, Cause
from fastdeploy_cache.books.lost_blocks import Lost
from fastdeploy_cache.books.mishaps import contained
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.computing import Computing
from fastdeploy_cache.requests.trail import MissedBlocks

_MAX_PARTS = 64  # that one prompt's missed blocks are looked up in: some tens of microseconds
_AT_ONCE_SECONDS = 1.0  # blocks in a row that were lost within this time are told of together
_MAX_BACK = 4  # blocks in front of one, among what is lost, from which on it may have been lost
_MAX_LOOKED = 64  # other namespaces, and continuations that may be an image's, that are looked at
_FREED = "it was freed, since no checkpoint was made behind it"
_BY_LOSS = (
    *(Cause.EVICTED, Cause.EVICTED, Cause.RESET, Cause.RANK, Cause.LIMIT, Cause.RESET),
    *(Cause.EVICTED, Cause.EVICTED, Cause.EVICTED, Cause.UNANCHORED, Cause.EXPIRED),
)
_KEPT_OUT = "cache_outputs is off, and an earlier request has computed it as its output"
_DETAILS: dict[Loss | None, str] = {Loss.OUTPUT: _KEPT_OUT, Loss.WEIGHTS: OTHER_WEIGHTS, Loss.TRIMMED: _FREED}
_NEW, _FORGOTTEN = Cause.NEW, Cause.NEW_OR_FORGOTTEN


class Misses:
    """Asks what is remembered, what is being computed, and what is cached under other names."""

    def __init__(self, books: Books) -> None:
        self.mishaps, self._rows = books.mishaps, books.rows
        self._tree, self._lost, self._size = books.tree, books.residency.lost, books.tree.block_bytes
        self.computing = Computing(books.tree.block_bytes)

    def find(self, active: ActiveRequest, path: Sequence[Run], num_found: int) -> None:
        """Note for the request why the blocks from `num_found` on, that its match asked for, are missed, and that it
        computes them. The path is what it has found."""
        tree, keys, lost, computing = self._tree, active.keys, self._lost, self.computing
        cause, num_missed = _FORGOTTEN, active.asked.num_asked - num_found
        try:
            if lost.is_on:
                roots = tree.roots
                root = roots.get(active.request.namespace)
                name = root.hashes if root is not None else root_hash(active.request.namespace, tree.block_size)
                key = self._key(name, keys, num_found)
                lost.look_at(num_found)
                is_known = lost.get(key) is not None or key in computing.by_key
                if lost.forks and not is_known:
                    extra = _extra_of(keys, num_found)
                    is_known = bool(lost.forked(name, num_found, extra, self._mark_before(active, num_found)))
                if is_known or len(roots) != (root is not None) or keys.extras is not None:
                    active.trail.misses = self._parts(active, path, num_found, name)
                    computing.begin(active, key)
                    return
                computing.begin(active, key)  # most are new
                if not lost.num_forgotten and tree.graves.are_empty:
                    cause = _NEW
        except MemoryError:
            self.mishaps.note("metrics")
        active.trail.misses = ((cause, num_missed, None, 0.0, ""),)

    @contained("metrics", None)
    def committed(self, active: ActiveRequest) -> None:
        """The request has committed part of its prompt; it goes on with the block behind that."""
        self.computing.end(active)
        root = self._tree.roots.get(active.request.namespace)
        if root is not None:
            self.computing.begin(active, self._key(root.hashes, active.keys, active.num_committed_blocks))

    @contained("metrics", None)
    def kept_out(self, active: ActiveRequest) -> None:
        """The request goes; what it has computed behind its committed blocks is output, which is not cached."""
        first, end = active.num_committed_blocks, active.num_computed_tokens // self._tree.block_size
        if first < end:
            root = self._tree.roots.get(active.request.namespace)
            name = root.hashes if root is not None else root_hash(active.request.namespace, self._tree.block_size)
            key = self._key(name, active.keys, first)
            has_images = active.keys.extras is not None
            self._lost.note_output(name, first, key, self._marks(active, first, end), has_images=has_images)

    def _key(self, root: bytes | bytearray, keys: BlockKeys, block: int) -> int:
        size, extras = self._size, keys.extras
        start = block * size
        if start + size <= len(keys.prompt) and extras is None:
            return place_key(root, block, keys.prompt, start, size)
        first = start - WINDOW_BYTES if start > WINDOW_BYTES else 0
        tokens, at = keys.buffer(first, start + size)
        key = place_key(root, block, tokens, at + start - first, size)
        if extras is not None:  # other images in front are another place
            key ^= _extra_of(keys, block + 1)
        return key

    def _marks(self, active: ActiveRequest, first: int, end: int) -> bytes:
        """The marks of some blocks of its prompt."""
        keys = active.keys
        tokens, start = keys.buffer(first * self._size, end * self._size)
        marks = block_marks(tokens, start, end - first, self._size)
        return with_extras(marks, keys.extras, first) if keys.extras is not None else marks

    def _mark_before(self, active: ActiveRequest, block: int) -> bytes:
        return self._marks(active, block - 1, block) if block else b""

    def pass_over(self, active: ActiveRequest) -> None:
        """All that the match has asked for was found; the request will commit one more block, which nobody asks for."""
        keys, block = active.keys, active.asked.num_asked
        root = self._tree.roots.get(active.request.namespace)
        if root is not None and self._lost.is_on:
            self._lost_at(self._key(root.hashes, keys, block), root.hashes, active, block, block + 1)

    def _parts(
        self, active: ActiveRequest, path: Sequence[Run], block: int, root: bytes | bytearray
    ) -> list[MissedBlocks]:
        parts: list[MissedBlocks] = []
        keys, end = active.keys, active.asked.num_asked
        num_full = active.request.num_tokens // self._tree.block_size  # of which the last one is not asked for
        for _ in range(_MAX_PARTS):
            if block == end:
                break
            key = self._key(root, keys, block)
            part = self._lost_at(key, root, active, block, num_full)
            for place in range(block - 1, max(active.asked.num_found, block - _MAX_BACK) - 1, -1):
                if part is not None:
                    break
                part = self._lost_over(root, active, place, block, num_full)
            if part is None:
                num_computing = self.computing.num_blocks(active, key, block, end)
                if not num_computing:
                    break
                part = (Cause.UNCOMMITTED, num_computing, None, 0.0, "")
            num_blocks = min(part[1], end - block)
            block += num_blocks
            _add(parts, (part[0], num_blocks, *part[2:4], self._detail(part[2])))
        if not parts and keys.extras is not None and (num_same := self._num_with_other_images(active, path, block)):
            parts.append((Cause.IMAGE, num_same, None, 0.0, ""))
            block += num_same
        if block < end and (num_found := self._num_elsewhere(active, end)) > block:
            parts.append((Cause.NAMESPACE, num_found - block, None, 0.0, ""))
            block = num_found
        if block < end:
            has_forgotten = self._lost.num_forgotten or not self._tree.graves.are_empty
            parts.append((_FORGOTTEN if has_forgotten else _NEW, end - block, None, 0.0, ""))
        return parts

    def _detail(self, kind: Loss | None) -> str:
        if kind is Loss.UNITS and self._rows is not None:
            return f"{ROW_SHORT} {self._rows.shortest_row!r}"
        return _DETAILS.get(kind, "")

    def _lost_at(
        self, key: int, root: bytes | bytearray, active: ActiveRequest, block: int, end: int
    ) -> MissedBlocks | None:
        """The blocks from this one on that were lost together, as far as the prompt goes on with them."""
        memory = self._lost
        memory.look_at(block)
        direct, best = memory.get(key), None
        ways: tuple[Lost, ...] = ()
        if memory.forks:
            ways = memory.forked(root, block, _extra_of(active.keys, block), self._mark_before(active, block))
        if direct is None and not ways:
            return None
        ways = ways if direct is None else (*ways, direct)
        num_most = max([len(lost[0]) for lost in ways]) // MARK_BYTES  # a prompt may go on far behind what was lost
        marks = self._marks(active, block, min(end, block + num_most))
        for lost in ways:
            num_lost = num_equal(lost[0], marks)
            if num_lost and (best is None or num_lost >= best[1]):
                best = (_BY_LOSS[lost[1]], num_lost, Loss(lost[1]), lost[2], "")
            if num_lost and num_lost * MARK_BYTES < len(lost[0]):
                memory.fork(root, block, lost, num_lost, _extra_of(active.keys, block + num_lost))
        return best

    def _lost_over(
        self, root: bytes | bytearray, active: ActiveRequest, place: int, block: int, end: int
    ) -> MissedBlocks | None:
        """What was lost from an earlier place on, as far as it reaches over this block."""
        part = self._lost_at(self._key(root, active.keys, place), root, active, place, end)
        if part is None or part[1] <= block - place:
            return None
        return part[0], part[1] - (block - place), part[2], part[3], ""

    def _num_elsewhere(self, active: ActiveRequest, end: int) -> int:
        """How many of the prompt's first `end` blocks another namespace has; 0: not looked at, or none."""
        own, keys, tree = active.request.namespace, active.keys, self._tree
        key, others = keys.key(0, tree.block_bytes), islice(tree.roots.items(), _MAX_LOOKED)
        some = [name for name, root in others if name != own and root.children.get(key) is not None]
        return max([tree.find(name, keys, end)[1] for name in some], default=0)

    def _num_with_other_images(self, active: ActiveRequest, path: Sequence[Run], block: int) -> int:
        """Blocks from `block` on whose tokens alone continue what was found."""
        size, keys, end = self._size, active.keys, active.asked.num_asked
        run, offset = self._tree.place(list(path), block) if path else (None, 0)
        at = run if run is not None else self._tree.roots.get(active.request.namespace)
        position = block
        while at is not None and position < end:
            if at.parent is not None and offset < at.num_blocks:
                num_blocks = min(at.num_blocks - offset, end - position)
                data, start = keys.buffer(position * size, (position + num_blocks) * size)
                ours = block_marks(at.tokens, offset * size, num_blocks, size)
                num_same = num_equal(ours, block_marks(data, start, num_blocks, size))
                position, offset = position + num_same, offset + num_same
                if offset < at.num_blocks:
                    break
            tokens = keys.part(position * size, (position + 1) * size)
            children = list(islice(at.children.values(), _MAX_LOOKED)) if position < end else []
            at, offset = next((child for child in children if child.tokens.startswith(tokens)), None), 0
        return position - block


def _extra_of(keys: BlockKeys, num_blocks: int) -> int:
    """A hash of what the first so many blocks of a prompt have beside their tokens; 0: nothing."""
    return word_of(*[extra for place, extra in sorted((keys.extras or {}).items()) if place < num_blocks])


def _add(parts: list[MissedBlocks], part: MissedBlocks) -> None:
    """What was lost together with the part in front belongs to that."""
    cause, num_blocks, kind, at, detail = part
    if parts and parts[-1][:3:2] == (cause, kind) and abs(parts[-1][3] - at) < _AT_ONCE_SECONDS:
        num_blocks += parts.pop()[1]
    parts.append((cause, num_blocks, kind, at, detail))

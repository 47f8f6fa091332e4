"""A run as the publisher knows it."""

from __future__ import annotations

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.errors import CodecError
from fastdeploy_cache.events.names import BlockNaming, Extras
from fastdeploy_cache.events.publisher.stretch import Stretch

_NUM_TIERS = 2


class Node:
    """What the blocks of a run are called, and which of them are in which tier.

    Attributes:
        parent: the run above it; None: it begins prompts of a namespace.
        spans: by tier, the blocks [first, end) there.
        anchors: by tier, the boundaries of its checkpoints there, by place in this run.
    """

    __slots__ = ("_block_bytes", "anchors", "children", "digests", "extras", "namespace", "parent", "spans", "tokens")

    def __init__(self, parent: Node | None, namespace: str, block_bytes: int) -> None:
        self.parent, self.namespace, self._block_bytes = parent, namespace, block_bytes
        self.tokens, self.digests = bytearray(), bytearray()
        self.extras: dict[int, bytes] | None = None
        self.spans = [[0, 0] for _ in range(_NUM_TIERS)]
        self.anchors: list[dict[int, int]] = [{} for _ in range(_NUM_TIERS)]
        self.children: dict[int, Node] = {}

    @property
    def num_blocks(self) -> int:
        """How many have a name."""
        return len(self.digests) // HASH_BYTES

    def before(self, block: int) -> bytes:
        """The digest in front of a block; empty where that begins a prompt."""
        if block:
            return bytes(self.digests[(block - 1) * HASH_BYTES : block * HASH_BYTES])
        return bytes(self.parent.digests[-HASH_BYTES:]) if self.parent is not None else b""

    def stretch(self, first: int, end: int) -> Stretch:
        """Blocks [first, end), as they are told."""
        before, extras, size = self.before(first), None, self._block_bytes
        if self.extras is not None:
            extras = {block - first: extra for block, extra in self.extras.items() if first <= block < end} or None
        digests = bytes(self.digests[first * HASH_BYTES : end * HASH_BYTES])
        salt = "" if before else self.namespace
        return Stretch(before, digests, bytes(self.tokens[first * size : end * size]), extras, salt)

    def last(self, place: int, num_blocks: int) -> Stretch:
        """The last so many blocks in front of a place, which may lie in runs above."""
        node, found = self, Stretch(b"", b"", b"", None, "")  # nothing yet
        while num_blocks:
            first = max(0, place - num_blocks)
            part, taken = node.stretch(first, place), place - first
            extras = {**(part.extras or {}), **{b + taken: extra for b, extra in (found.extras or {}).items()}}
            found = Stretch(
                part.before, part.digests + found.digests, part.tokens + found.tokens, extras or None, part.salt
            )
            num_blocks -= taken
            if num_blocks:
                above = node.parent
                if above is None:
                    raise CodecError("a checkpoint reads in front of its prompt")
                node, place = above, above.num_blocks
        return found

    # -- what it has

    def grow(self, first: int, tokens: bytes, extras: Extras | None, naming: BlockNaming) -> None:
        """Name those of these blocks, from `first` on, that it has not had yet. Raises `CodecError`: others are there,
        or some are missing in front of them."""
        size, num_known = self._block_bytes, self.num_blocks
        there = self.tokens[first * size : first * size + len(tokens)]
        if first > num_known or len(tokens) % size or not tokens.startswith(there):
            raise CodecError(f"a run of {num_known} blocks gets other ones from {first} on, or has a gap there")
        start, num_blocks = num_known - first, len(tokens) // size
        if num_blocks <= start:
            return
        new, of_new = tokens[start * size :], None
        if extras:
            of_new = {block - start: extra for block, extra in extras.items() if block >= start}
            self.extras = {**(self.extras or {}), **{block + first: extra for block, extra in extras.items()}}
        before = self.before(num_known)
        parent, salt = before or naming.root(self.namespace), "" if before else self.namespace
        digests = naming.extend(parent, new, of_new, salt)
        self.tokens += new
        self.digests += digests

    def arrive(self, tier: int, first: int, end: int) -> list[tuple[int, int]]:
        """Blocks [first, end) are in a tier; returns those that were not."""
        span = self.spans[tier]
        if first >= end:
            return []
        if span[0] >= span[1]:
            span[:] = first, first
        if first > span[1] or end < span[0] or end > self.num_blocks:
            raise CodecError(f"a run of {self.num_blocks} blocks has {span} in tier {tier}, and {first} to {end} come")
        new = [(first, span[0]), (span[1], end)]
        span[:] = min(first, span[0]), max(end, span[1])
        return [(start, stop) for start, stop in new if start < stop]

    def leave(self, tier: int, first: int, end: int) -> tuple[int, int]:
        """Blocks [first, end) are in a tier no more; returns which of them were."""
        span = self.spans[tier]
        first, end = max(first, span[0]), min(end, span[1])
        if first >= end:
            return 0, 0
        if first > span[0] and end < span[1]:
            raise CodecError(f"a run has blocks {span} in tier {tier}, and {first} to {end} leave")
        if first > span[0]:
            span[1] = first
        else:
            span[0] = end
        return first, end

    def cut(self) -> None:
        """Forget what is behind its last block that is in a tier, unless something hangs there yet: it may go later."""
        ends = [end for first, end in self.spans if first < end]
        length = max([*ends, *[place for there in self.anchors for place in there]], default=0)
        if self.children or length == self.num_blocks:
            return
        del self.tokens[length * self._block_bytes :]
        del self.digests[length * HASH_BYTES :]
        if self.extras is not None:
            self.extras = {block: extra for block, extra in self.extras.items() if block < length} or None

    # -- its shape

    def part(self, cut: int) -> Node:
        """The first blocks as a run of their own, above this one; whose child it is, and who its, is the caller's."""
        if not 0 < cut < self.num_blocks:
            raise CodecError(f"a run of {self.num_blocks} blocks is cut behind {cut}")
        upper, size = Node(self.parent, self.namespace, self._block_bytes), self._block_bytes
        upper.tokens, self.tokens = self.tokens[: cut * size], self.tokens[cut * size :]
        upper.digests, self.digests = self.digests[: cut * HASH_BYTES], self.digests[cut * HASH_BYTES :]
        if (extras := self.extras) is not None:
            upper.extras = {block: extra for block, extra in extras.items() if block < cut} or None
            self.extras = {block - cut: extra for block, extra in extras.items() if block >= cut} or None
        upper.spans = [[min(first, cut), min(end, cut)] for first, end in self.spans]
        self.spans = [[max(0, first - cut), max(0, end - cut)] for first, end in self.spans]
        upper.anchors = [{place: b for place, b in there.items() if place <= cut} for there in self.anchors]
        self.anchors = [{place - cut: b for place, b in there.items() if place > cut} for there in self.anchors]
        self.parent = upper
        return upper

    def join(self, lower: Node) -> None:
        """The reverse: have what its only child has."""
        above = self.num_blocks
        if list(self.children.values()) != [lower]:
            raise CodecError("a run is to join another, and is not its only child")
        self.tokens += lower.tokens
        self.digests += lower.digests
        if lower.extras is not None:
            self.extras = {**(self.extras or {}), **{b + above: extra for b, extra in lower.extras.items()}}
        for span, (first, end) in zip(self.spans, lower.spans, strict=True):
            if first < end:
                span[:] = span[0] if span[0] < span[1] else first + above, end + above
        for mine, theirs in zip(self.anchors, lower.anchors, strict=True):
            mine.update({place + above: boundary for place, boundary in theirs.items()})
        self.children = lower.children
        for child in self.children.values():
            child.parent = self

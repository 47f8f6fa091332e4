"""A run as the publisher knows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fastdeploy_cache.books.block_hash import HASH_BYTES, TOKEN_BYTES
from fastdeploy_cache.errors import CodecError
from fastdeploy_cache.events.names import BlockNaming, Extra, extras_of
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
        self.extras: dict[int, Extra] | None = None
        self.spans = [(0, 0)] * _NUM_TIERS
        self.anchors: list[dict[int, int]] = [{} for _ in range(_NUM_TIERS)]
        self.children: dict[int, Node] = {}

    @property
    def num_blocks(self) -> int:
        """How many have a name."""
        return len(self.digests) // HASH_BYTES

    def _num_in_front(self) -> int:
        node, count = self.parent, 0
        while node is not None:
            count += node.num_blocks
            node = node.parent
        return count

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

    def blocks(self, first: int) -> Iterator[Stretch]:
        """Each block by itself, from this one on."""
        size, before, extras = self._block_bytes, self.before(first), self.extras or {}
        for block in range(first, self.num_blocks):
            digest = bytes(self.digests[block * HASH_BYTES : (block + 1) * HASH_BYTES])
            extra = {0: extras[block]} if block in extras else None
            tokens = bytes(self.tokens[block * size : (block + 1) * size])
            yield Stretch(before, digest, tokens, extra, "" if before else self.namespace)
            before = digest

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

    def num_kept(self, num_blocks: int, first: int, tokens: bytes, extras: Mapping[int, bytes]) -> int:
        """How many of its blocks are still those of a run of so many, whose blocks from `first` on have these tokens,
        and these extra keys.

        Raises `CodecError`: there are some in between that nobody has told of.
        """
        size, num_known = self._block_bytes, self.num_blocks
        if first > num_known or (num_blocks - first) * size != len(tokens):
            raise CodecError(f"a run of {num_blocks} blocks, of which {num_known} are known, is told from {first} on")
        end = min(num_known, num_blocks)
        mine, keys = memoryview(self.tokens), self.extras or {}
        for block in range(first, end):
            told = tokens[(block - first) * size : (block - first + 1) * size]
            if mine[block * size : (block + 1) * size] != told or _key_of(keys, block) != extras.get(block):
                return block
        return end

    def cut(self, num_blocks: int) -> None:
        """Forget what its blocks behind the first so many are called."""
        del self.tokens[num_blocks * self._block_bytes :]
        del self.digests[num_blocks * HASH_BYTES :]
        if self.extras is not None:
            self.extras = {block: extra for block, extra in self.extras.items() if block < num_blocks} or None

    def grow(self, tokens: bytes, extras: Mapping[int, bytes], naming: BlockNaming) -> None:
        """It has these blocks more. `extras`: their keys of images, by block of the run."""
        if not tokens:
            return
        num_known = self.num_blocks
        new = dict[int, Extra]()
        if keys := {block: key for block, key in extras.items() if block >= num_known}:
            new = extras_of(keys, self._num_in_front(), self._block_bytes // TOKEN_BYTES)
            self.extras = {**(self.extras or {}), **new}
        before = self.before(num_known)
        parent, salt = before or naming.root(self.namespace), "" if before else self.namespace
        of_new = {block - num_known: extra for block, extra in new.items()} or None
        self.digests += naming.extend(parent, tokens, of_new, salt)
        self.tokens += tokens

    # -- its shape

    def part(self, cut: int) -> Node:
        """The first blocks, as far as they are known, as a run of their own above this one. Whose child it is, and who
        its, is the caller's."""
        upper, size = Node(self.parent, self.namespace, self._block_bytes), self._block_bytes
        upper.tokens, self.tokens = self.tokens[: cut * size], self.tokens[cut * size :]
        upper.digests, self.digests = self.digests[: cut * HASH_BYTES], self.digests[cut * HASH_BYTES :]
        if (extras := self.extras) is not None:
            upper.extras = {block: extra for block, extra in extras.items() if block < cut} or None
            self.extras = {block - cut: extra for block, extra in extras.items() if block >= cut} or None
        upper.spans = [(min(first, cut), min(end, cut)) for first, end in self.spans]
        self.spans = [(max(0, first - cut), max(0, end - cut)) for first, end in self.spans]
        upper.anchors = [{place: b for place, b in there.items() if place <= cut} for there in self.anchors]
        self.anchors = [{place - cut: b for place, b in there.items() if place > cut} for there in self.anchors]
        self.parent = upper
        return upper

    def meets(self, lower: Node, tier: int) -> bool:
        """Whether what both have in a tier is one interval, or is in one of them alone."""
        (start, stop), (first, end) = self.spans[tier], lower.spans[tier]
        return start >= stop or first >= end or (stop == self.num_blocks and not first)

    def join(self, lower: Node) -> None:
        """The reverse: have what its only child has; in each tier they meet."""
        above = self.num_blocks
        self.tokens += lower.tokens
        self.digests += lower.digests
        if lower.extras is not None:
            self.extras = {**(self.extras or {}), **{b + above: extra for b, extra in lower.extras.items()}}
        for tier, (first, end) in enumerate(lower.spans):
            start, stop = self.spans[tier]
            if first < end:
                self.spans[tier] = start if start < stop else first + above, end + above
        for mine, theirs in zip(self.anchors, lower.anchors, strict=True):
            mine.update({place + above: boundary for place, boundary in theirs.items()})

    def adopt(self, children: dict[int, Node]) -> None:
        """These are its children now, and no others."""
        self.children = children
        for child in children.values():
            child.parent = self


def _key_of(extras: Mapping[int, Extra], block: int) -> bytes | None:
    return extras[block].key if block in extras else None

"""Which tokens lie in which slot: a radix tree of its own, since one prefix may lie in several slots at once."""

from __future__ import annotations

import numpy as np

from fastdeploy_cache.books.block_hash import TOKEN_BYTES


class Claim:
    """`slot` holds, from its first position on, the tokens from the root to the end of `node`."""

    __slots__ = ("node", "num_takes", "slot", "version")

    def __init__(self, slot: int, version: int, num_takes: int) -> None:
        self.slot = slot
        self.version = version
        self.num_takes = num_takes  # how often the slot had been taken when this was said
        self.node: Node | None = None


class Node:
    """Tokens behind its parent's. Claims and pins end only where nodes end; the root has no tokens and none of them."""

    __slots__ = ("children", "holders", "last_used", "num_pins", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: bytes) -> None:
        self.parent = parent
        self.tokens = tokens  # packed int32
        self.children: dict[bytes, Node] = {}  # by their first token
        self.holders: dict[Claim, None] = {}  # what ends here or beneath, the newest last
        self.num_pins = 0  # of those that end here
        self.last_used = 0

    @property
    def key(self) -> bytes:
        """What its parent finds it under."""
        return self.tokens[:TOKEN_BYTES]


class SlotIndex:
    """Claims, one for each slot at most, and pins. One thread at a time; tokens come as packed int32."""

    def __init__(self) -> None:
        self.root = Node(None, b"")
        self.claims: dict[int, Claim] = {}  # by slot
        self.num_tokens = 0
        self._num_uses = 0

    # -- looking

    def match(self, tokens: bytes) -> list[tuple[Node, int]]:
        """The nodes along `tokens`, and how many of the tokens' bytes match up to the end of each."""
        path: list[tuple[Node, int]] = []
        node, position = self.root, 0
        while child := node.children.get(tokens[position : position + TOKEN_BYTES]):
            num_bytes = _num_common_bytes(child.tokens, tokens, position)
            position += num_bytes
            path.append((child, position))
            if num_bytes < len(child.tokens):
                break
            node = child
        return path

    def find(self, tokens: bytes) -> tuple[int, Claim | None]:
        """How many leading tokens lie in a slot, at most, and the newest claim on these; they are used now."""
        path = self.match(tokens)
        while path and not path[-1][0].holders:  # a node's holders hold what is above it, too
            path.pop()
        if not path:
            return 0, None
        self._num_uses += 1
        for node, _ in path:
            node.last_used = self._num_uses
        node, end = path[-1]
        return end // TOKEN_BYTES, next(reversed(node.holders))

    # -- pins

    def pin(self, tokens: bytes) -> Node:
        """Keep the tokens in the tree, which they join where they are not in it, until they are unpinned as often."""
        path = self.match(tokens)
        node, end = path[-1] if path else (self.root, 0)
        start = path[-2][1] if len(path) > 1 else 0
        if end - start < len(node.tokens):
            node = self._split(node, end - start)
        if end < len(tokens):
            leaf = Node(node, tokens[end:])
            node.children[leaf.key] = leaf
            self.num_tokens += len(leaf.tokens) // TOKEN_BYTES
            node = leaf
        node.num_pins += 1
        return node

    def unpin(self, tokens: bytes) -> bool:
        """Take back a pin on just these tokens; False where there is none."""
        path = self.match(tokens)
        if not path:
            return False
        node, end = path[-1]
        start = path[-2][1] if len(path) > 1 else 0
        if end < len(tokens) or end - start < len(node.tokens) or not node.num_pins:
            return False
        node.num_pins -= 1
        self._tidy(node)
        return True

    # -- claims

    def claim(self, claim: Claim, node: Node) -> None:
        """Its slot holds the tokens down to `node`, and nothing else; what was said of the slot before is forgotten."""
        self.drop(self.claims.get(claim.slot))
        self.claims[claim.slot] = claim
        claim.node = node
        self._num_uses += 1
        above: Node | None = node
        while above is not None and above.parent is not None:
            above.holders[claim] = None
            above.last_used = self._num_uses
            above = above.parent

    def drop(self, claim: Claim | None) -> None:
        """Forget a claim, and what nothing keeps then. None stands for none."""
        if claim is None or claim.node is None:
            return
        node, claim.node = claim.node, None
        del self.claims[claim.slot]
        above: Node | None = node
        while above is not None and above.parent is not None:
            del above.holders[claim]
            above = above.parent
        self._tidy(node)

    def evict(self, max_tokens: int) -> None:
        """Cut ends of the leaves that were used longest ago until so many tokens are left, or the rest is pinned."""
        while self.num_tokens > max_tokens:
            ends = [claim.node for claim in self.claims.values() if claim.node is not None]
            leaves = [node for node in ends if not node.children and not node.num_pins]
            if not leaves:
                return
            self._cut(min(leaves, key=lambda node: node.last_used), self.num_tokens - max_tokens)

    def _cut(self, leaf: Node, num_tokens: int) -> None:
        """Take up to `num_tokens` tokens from the end of a leaf. Claims that ended there end further up."""
        num_tokens = min(num_tokens, len(leaf.tokens) // TOKEN_BYTES)
        self.num_tokens -= num_tokens
        kept, parent = leaf.tokens[: len(leaf.tokens) - num_tokens * TOKEN_BYTES], leaf.parent
        assert parent is not None
        if kept:
            leaf.tokens = kept
            return
        del parent.children[leaf.key]
        for claim in leaf.holders:
            claim.node = parent

    # -- shape

    def _split(self, node: Node, num_bytes: int) -> Node:
        """Cut a node in two; returns the upper part, which is new. The lower keeps its identity, claims and pins."""
        parent = node.parent
        assert parent is not None and 0 < num_bytes < len(node.tokens)
        upper = Node(parent, node.tokens[:num_bytes])
        upper.holders, upper.last_used = dict(node.holders), node.last_used
        parent.children[upper.key] = upper
        node.tokens, node.parent = node.tokens[num_bytes:], upper
        upper.children[node.key] = node
        return upper

    def _tidy(self, node: Node) -> None:
        """Remove what nobody holds or pins from here up; join a node with its only child if nothing ends between."""
        while (parent := node.parent) is not None and not node.num_pins:
            if not node.children and not node.holders:
                del parent.children[node.key]
                self.num_tokens -= len(node.tokens) // TOKEN_BYTES
                node = parent
                continue
            if len(node.children) == 1:
                (child,) = node.children.values()
                if len(child.holders) == len(node.holders):  # the same ones
                    child.tokens, child.parent = node.tokens + child.tokens, parent
                    child.last_used = node.last_used
                    parent.children[child.key] = child
            return


def _num_common_bytes(ours: bytes, theirs: bytes, start: int) -> int:
    """How many bytes of `ours` equal those of `theirs` from `start` on, in whole tokens."""
    if theirs.startswith(ours, start):
        return len(ours)
    num_tokens = min(len(ours), len(theirs) - start) // TOKEN_BYTES
    differ = np.frombuffer(ours, np.int32, num_tokens) != np.frombuffer(theirs, np.int32, num_tokens, start)
    return TOKEN_BYTES * (int(differ.argmax()) if differ.any() else num_tokens)

"""What is cached, as values to show: prefixes, and the tree that they make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PrefixView:
    """A run of the tree: blocks in a row with no branch in between, and what leads to them.

    Attributes:
        name: the first 16 hexadecimal digits of the hash of its last block, which names all that leads there.
        namespace: "default", or the first 8 hexadecimal digits of the hash of the namespace: never its own name.
        num_tokens: of the run itself. num_prefix_tokens: from the beginning of the prompt to its end.
        num_blocks: of the run itself, each of which is on the GPU, in the CPU tier, or in both.
        num_gpu_blocks, num_cpu_blocks: of these, in the tier.
        num_held_blocks: of these, kept in place by requests, copies and pins, here or beneath.
        is_pinned: a pin that an operator or an adapter's caller has set ends here.
        num_uses: requests whose prefix it was.
        idle_seconds: since a request that used it has ended, or else since its first blocks came; None: not known.
        checkpoint_tokens: of a hybrid model, after how many tokens of the prompt there are checkpoints in it.
        num_children: runs that go on from here. children: those of them that are shown, the most used first.
    """

    name: str
    namespace: str
    num_tokens: int
    num_prefix_tokens: int
    num_blocks: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    num_held_blocks: int
    is_pinned: bool
    num_uses: int
    idle_seconds: float | None
    num_children: int
    children: tuple[PrefixView, ...] = ()
    checkpoint_tokens: tuple[int, ...] = ()

    @property
    def num_left_out(self) -> int:
        """Children that are not shown."""
        return max(0, self.num_children - len(self.children))

    def with_children(self, children: tuple[PrefixView, ...]) -> PrefixView:
        """The same with these shown below it."""
        return replace(self, children=children, num_children=max(self.num_children, len(children)))

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "children"}
        return {**fields, "num_left_out": self.num_left_out, "children": [child.as_dict() for child in self.children]}


@dataclass(frozen=True, kw_only=True)
class TreeView:
    """The most used part of the prefix tree.

    Attributes:
        block_size: tokens of a block.
        num_namespaces: that have, or lately had, something cached.
        num_shown: prefixes that are shown, of all depths.
        num_children: prefixes that begin a prompt. children: those of them that are shown, the most used first.
    """

    block_size: int
    num_namespaces: int
    num_shown: int
    num_children: int
    children: tuple[PrefixView, ...]

    @property
    def num_left_out(self) -> int:
        """Prefixes that begin a prompt and are not shown."""
        return max(0, self.num_children - len(self.children))

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "children"}
        return {**fields, "num_left_out": self.num_left_out, "children": [child.as_dict() for child in self.children]}

"""Keys and nodes of SGLang's radix cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fastdeploy_cache.books.block_hash import TOKEN_BYTES
from fastdeploy_cache.books.run_view import RunView
from fastdeploy_cache.books.tokens import PackedTokens, pack
from fastdeploy_cache.manager import PrefixCacheManager
from fastdeploy_cache.request import Request

_EXTRA_KEY = "extra_key:"
_NAME = "a key"  # in errors
_Below = dict[bytes, list[RunView]]  # the runs behind a block, by its hash; those of all namespaces behind none


class RadixKey:
    """Tokens, and what parts them from the same tokens of others: a LoRA adapter, a tenant."""

    __slots__ = ("extra_key", "token_ids")

    def __init__(self, token_ids: Sequence[int], extra_key: str | None = None) -> None:
        self.token_ids, self.extra_key = token_ids, extra_key

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)

    def __getitem__(self, index: int | slice) -> RadixKey:
        """The key of a part of the tokens, or of one."""
        part = self.token_ids[index] if isinstance(index, slice) else [self.token_ids[index]]
        return RadixKey(part, self.extra_key)

    def __repr__(self) -> str:
        return f"RadixKey({list(self.token_ids[:8])} of {len(self)} tokens, extra_key={self.extra_key!r})"


def as_key(key: RadixKey | Sequence[int]) -> RadixKey:
    """Plain tokens are a key without an extra one."""
    return key if isinstance(key, RadixKey) else RadixKey(key)


def new_request(key: RadixKey, page_size: int, packed: PackedTokens | None = None) -> Request | None:
    """What names the key's whole pages; None where it has none. `packed`: its tokens, where they are packed already."""
    tokens: Sequence[int] | PackedTokens = key.token_ids
    num_tokens = len(key) // page_size * page_size
    if not num_tokens:
        return None
    if packed is not None:
        tokens = PackedTokens(packed.tokens[: num_tokens * TOKEN_BYTES])
    elif num_tokens < len(key):
        tokens = key.token_ids[:num_tokens]
    return Request(request_id=_NAME, prompt_token_ids=tokens, namespace=_namespace(key.extra_key))


def request_from(node: Node, parts: Sequence[Sequence[int]], extra_key: str | None, page_size: int) -> Request | None:
    """What names the whole pages of tokens that are given in parts, and begin with those of `node`, which are packed
    already. None where there are none."""
    num_tokens, num_known, known, new = sum(map(len, parts)), 0, b"", list[int]()
    if not node.is_root and node.num_tokens <= num_tokens and node.request.namespace == _namespace(extra_key):
        num_known, known = node.num_tokens, node.tokens
    num_skipped = num_known
    for part in parts:
        new.extend(part[num_skipped:])
        num_skipped = max(0, num_skipped - len(part))
    packed = known + pack(_NAME, new[: num_tokens // page_size * page_size - num_known])
    if not packed:
        return None
    return Request(request_id=_NAME, prompt_token_ids=PackedTokens(packed), namespace=_namespace(extra_key))


def _namespace(extra_key: str | None) -> str:
    return "" if extra_key is None else f"{_EXTRA_KEY}{extra_key}"  # an empty extra key is not the same as none


class Node:
    """A place in the prefix tree: the end of the first `num_pages` pages of some tokens. Two are equal where these are:
    the hash of the last page names all of them. What it tells of the tree is so at the moment of the look."""

    __slots__ = ("_above", "_below", "_manager", "_request", "_run", "name", "num_pages")

    def __init__(self, manager: PrefixCacheManager, request: Request | None, num_pages: int, name: bytes) -> None:
        """`request` begins with its tokens, and `name` is its last page's hash; None and b"" for the root."""
        self._manager, self._request, self.num_pages, self.name = manager, request, num_pages, name
        self._above: Node | None = None  # these three of one that was found from the root downwards
        self._run: RunView | None = None
        self._below: _Below | None = None

    @classmethod
    def root(cls, manager: PrefixCacheManager) -> Node:
        """Where nothing has been matched."""
        return cls(manager, None, 0, b"")

    @property
    def is_root(self) -> bool:
        """Whether nothing lies before it."""
        return self.num_pages == 0

    @property
    def num_tokens(self) -> int:
        """Tokens before it."""
        return self.num_pages * self._manager.config.block_size

    @property
    def tokens(self) -> bytes:
        """Its tokens, packed; the root has none."""
        return b"" if self.is_root else self.request.prompt[: self.num_tokens * TOKEN_BYTES]

    @property
    def request(self) -> Request:
        """What begins with its tokens. An assertion for the root, which has none."""
        if self._request is None:
            node, parts = self, list[np.ndarray[Any, Any]]()
            while node._above is not None and node._run is not None:
                parts.append(node._run.token_ids)
                node = node._above
            assert self._run is not None, "the root has no tokens"
            tokens, namespace = np.concatenate(parts[::-1]), self._run.namespace
            self._request = Request(request_id=_NAME, prompt_token_ids=tokens, namespace=namespace)
        return self._request

    # -- the tree

    @property
    def children(self) -> dict[Any, Node]:
        """The nodes right behind it, by their first token, or by the tuple of their first page's; with an extra key, by
        the pair of both. A look walks the whole tree; what it leads to is of that moment, and is looked at for free."""
        below, children = self._below, {}
        if below is None:
            below = _Below()
            for run in self._manager.blocks.view.runs():
                below.setdefault(run.parent_hash if run.first_block else b"", []).append(run)
        for run in below.get(self.name, ()):
            node = Node(self._manager, None, self.num_pages + run.num_blocks, run.last_hash)
            node._above, node._run, node._below = self, run, below
            children[self._child_key(run)] = node
        return children

    def _child_key(self, run: RunView) -> Any:
        size = self._manager.config.block_size
        tokens = run.token_ids[:size].tolist()
        plain = tokens[0] if size == 1 else tuple(tokens)
        return (run.namespace.removeprefix(_EXTRA_KEY), plain) if run.namespace else plain

    @property
    def parent(self) -> Node | None:
        """The node before it, where another prompt parts or an insert has ended; None of the root."""
        if self.is_root or self._above is not None:
            return self._above
        last = self.path()[-1:]
        if not last or not last[0].first_block:
            return Node.root(self._manager)
        return Node(self._manager, self._request, last[0].first_block, last[0].parent_hash)

    def path(self) -> list[RunView]:
        """The runs from the root to it, as far as they are cached. The last one may go on behind it."""
        return [] if self.is_root else self._manager.blocks.view.runs_of(self.request, self.num_pages)

    # -- where it is

    @property
    def backuped(self) -> bool:
        """Whether what lies between the node before it and this one is in the CPU tier; of the root always."""
        run, end = self._last()
        return run is None or (end > 0 and run.cpu_start == 0 and len(run.cpu_block_ids) >= end)

    @property
    def evicted(self) -> bool:
        """Whether it is not on the GPU; of the root never."""
        run, end = self._last()
        return run is not None and not 0 < end <= len(run.block_ids)

    def _last(self) -> tuple[RunView | None, int]:
        """The run in which it ends, and where in it: 0 if it is not cached so far. No run for the root."""
        path = self.path()
        if not path:
            return (None, 0) if self.is_root else (_NOWHERE, 0)
        end = self.num_pages - path[-1].first_block
        return path[-1], end if end <= path[-1].num_blocks else 0

    def get_last_hash_value(self) -> str | None:
        """The hash of its last page; None of the root."""
        return self.name.hex() or None

    def get_prefix_hash_values(self, node: Node | None) -> list[str]:
        """The hashes of all pages up to `node`, as far as they are cached."""
        if node is None:
            return []
        return [page.hex() for run in node.path() for page in run.hashes][: node.num_pages]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


_NOWHERE = RunView("", 0, np.empty(0, np.int32), b"", b"", [], 0, [], 0, 0, 0, 0)

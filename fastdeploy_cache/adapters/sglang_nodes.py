"""Keys and nodes of SGLang's radix cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastdeploy_cache.block_hash import TOKEN_BYTES
from fastdeploy_cache.request import Request


class RadixKey(NamedTuple):
    """Tokens, and what parts them from the same tokens of others: a LoRA adapter, a tenant."""

    token_ids: Sequence[int]
    extra_key: str | None = None


def as_key(key: RadixKey | Sequence[int]) -> RadixKey:
    """Plain tokens are a key without an extra one."""
    return key if isinstance(key, RadixKey) else RadixKey(key)


def new_request(key: RadixKey, page_size: int) -> Request | None:
    """What names the key's whole pages; None where it has none."""
    num_tokens = len(key.token_ids) // page_size * page_size
    if not num_tokens:
        return None
    return Request(request_id="a key", prompt_token_ids=key.token_ids[:num_tokens], namespace=_namespace(key.extra_key))


def _namespace(extra_key: str | None) -> str:
    return "" if extra_key is None else f"extra_key:{extra_key}"  # an empty one is not the same as none


class Node:
    """A place in the prefix tree: the end of the first `num_pages` pages of some tokens. Two are equal where their
    tokens are."""

    __slots__ = ("_name", "_page_size", "num_pages", "request")

    def __init__(self, request: Request, num_pages: int, page_size: int) -> None:
        self.request, self.num_pages, self._page_size = request, num_pages, page_size
        end = num_pages * page_size * TOKEN_BYTES
        self._name = (request.namespace, bytes(request.tokens[:end]))

    @classmethod
    def root(cls) -> Node:
        """Where nothing has been matched."""
        return cls(Request(request_id="root", prompt_token_ids=[0]), 0, 1)

    @property
    def is_root(self) -> bool:
        """Whether nothing lies before it."""
        return self.num_pages == 0

    @property
    def num_tokens(self) -> int:
        """Tokens before it."""
        return self.num_pages * self._page_size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, bytes]:
        return self._name if self.num_pages else ("", b"")

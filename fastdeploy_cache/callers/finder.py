"""What is cached of the tokens that a caller names. Under the lock."""

from __future__ import annotations

from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.path import usable_end
from fastdeploy_cache.books.run import GPU, Run
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.request import Request, no_request


class Finder:
    """Looks a request up that is not matched."""

    def __init__(self, config: CacheConfig, books: Books) -> None:
        self._size, self._books = config.block_size, books

    def keys(self, request: Request) -> BlockKeys:
        """What its blocks are found by."""
        try:
            return request.keys(self._size)
        except AttributeError:
            if isinstance(request, Request):
                raise
            raise no_request(request) from None

    def find(self, request: Request, num_blocks: int | None = None) -> tuple[list[Run], int]:
        """The runs of its longest cached prefix, at most `num_blocks` blocks, and how many blocks that is."""
        self._books.check_open()
        keys = self.keys(request)
        most = request.num_tokens // self._size
        most = most if num_blocks is None else min(most, num_blocks)
        if GPU in self._books.asleep:
            return [], 0
        path, num_found = self._books.tree.find(request.namespace, keys, most)
        return path, usable_end(request, num_found, self._size)

"""Queued requests: what no tier here has of them is fetched from storage before they are matched."""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from fastdeploy_cache.books.block_hash import root_hash
from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.path import gpu_ids, usable_end
from fastdeploy_cache.books.row_books import usable_checkpoints
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.request import Request, no_request
from fastdeploy_cache.requests.listener import RequestListener
from fastdeploy_cache.requests.match import Prefetch
from fastdeploy_cache.storage.access import StorageAccess
from fastdeploy_cache.transfer_manager.storage.keys import BARE_STOP, IMAGE_STOP, NO_STOP


class Borrower(Protocol):
    """Has other instances lend what is not here."""

    def begin(self, request: Request, found: Prefetch) -> Prefetch: ...
    def end(self, request_id: str) -> None: ...


class Prefetches:
    """See `PrefixCacheManager.prefetch`. Any thread; each call is one turn or two."""

    def __init__(self, config: CacheConfig, books: Books, storage: StorageAccess, matched: Container[str]) -> None:
        """`matched`: the ids of the requests that are matched now."""
        self._config, self._books = config, books
        self._storage, self.matched = storage, matched
        self._listener: RequestListener | None = None
        self._borrower: Borrower | None = None

    def borrow_from(self, borrower: Borrower) -> None:
        """What is not here is borrowed by this one from now on."""
        self._borrower = borrower

    def tell(self, listener: RequestListener) -> None:
        """See `Requests.tell`."""
        self._listener = listener

    def begin(self, request: Request, *, with_last_token: bool = False, may_borrow: bool = False) -> Prefetch:
        """Look at what is cached, and fetch the rest where that is worth it; or borrow it, to the GPU."""
        found = self._begin(request, with_last_token=with_last_token)
        return self._borrower.begin(request, found) if may_borrow and self._borrower is not None else found

    def _begin(self, request: Request, *, with_last_token: bool) -> Prefetch:
        if not isinstance(request, Request):
            raise no_request(request)
        size, books = self._config.block_size, self._books
        keys, num_blocks = request.keys(size), (request.num_tokens - (not with_last_token)) // size
        with books:  # it may send a probe
            books.check_open()
            found = self._look(request, keys, num_blocks)
            first = (found.num_gpu_tokens + found.num_cpu_tokens) // size
            num_missing = num_blocks - first
            if self._listener is not None:
                self._listener.looked(request, keys, books.tree.find(request.namespace, keys, first)[0], first)
            reads, epoch = self._storage.reads, books.tree.epoch
            if not (self._config.enable_prefix_caching and reads.wants(num_missing)):
                return found
            if self._storage.is_forgetting(request.namespace):
                return found
            path, _ = books.tree.find(request.namespace, keys, first)
            parent_hash = books.tree.names.at(path, first) or root_hash(request.namespace, size)
        started = books.clock.now()
        prefetch = self._storage.new_prefetch(  # hashes: not under the lock
            request, keys, range(first, num_blocks), parent_hash, epoch
        )
        prefetch.stops = self._stops(request, range(first, num_blocks))
        seconds = books.clock.now() - started
        with books:
            books.tree.names.count(num_missing, seconds)
            if request.request_id in self.matched or self._storage.reads is not reads:  # a match, a detach was faster
                return found
            if self._storage.is_forgetting(request.namespace):
                return found
            reads.start(prefetch)
        return found.with_fetch(prefetch)

    def _stops(self, request: Request, blocks: range) -> bytes:
        """Behind which of these blocks a request of a hybrid model may go on, and by what."""
        rows = self._books.rows
        if rows is None:
            return b""
        size, sizes = self._config.block_size, rows.checkpoints.sizes
        always = any(row.kind == "state" or (row.kind == "window" and row.num_checkpoint_units) for row in sizes.rows)
        if always and not request.images:
            return bytes([IMAGE_STOP]) * len(blocks)
        return bytes(
            [
                NO_STOP
                if usable_end(request, end, size) != end
                else IMAGE_STOP
                if any(row.first_block(end) < end for row in sizes.rows)
                else BARE_STOP
                for end in range(blocks.start + 1, blocks.stop + 1)
            ]
        )

    def _look(self, request: Request, keys: BlockKeys, num_blocks: int) -> Prefetch:
        """What is cached of a request's first blocks, counted as a touch: what is queued is not the coldest."""
        tree, size = self._books.tree, self._config.block_size
        path, num_found = tree.find(request.namespace, keys, num_blocks)
        deepest = None
        if self._books.rows is not None:
            deepest, _ = usable_checkpoints(path, num_found, request, size)
            num_found = deepest.boundary if deepest is not None else 0
        num_found = usable_end(request, num_found, size)
        num_gpu = len(gpu_ids(path, num_found))
        if path:
            tree.policy.touch(path)
            if self._books.rows is not None and deepest is not None:
                self._books.rows.checkpoints.use(deepest, is_first=False)
        return Prefetch(
            num_gpu_tokens=num_gpu * size,
            num_cpu_tokens=(num_found - num_gpu) * size,
            num_missing_tokens=request.num_tokens - num_found * size,
        )

    def end(self, request: Request) -> None:
        """The request has gone without being matched: what has not come yet is not wanted."""
        if not isinstance(request, Request):
            raise no_request(request)
        with self._books:
            self._storage.reads.forget(request.request_id)
        if self._borrower is not None:
            self._borrower.end(request.request_id)

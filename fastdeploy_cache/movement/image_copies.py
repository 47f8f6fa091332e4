"""Which checkpoints are copied from the GPU to the CPU tier, behind the full KV in front of them. Under the lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint, chain_of
from fastdeploy_cache.books.run import CPU, GPU, Run
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.movement.images import ImageMover

_MAX_LOOKED = 256  # checkpoints that one look at the cold end goes over: about a millisecond
_MAX_STARTED = 16  # copies that one call starts: the ranks' queue is asked for room before it has these
_MAX_BYTES_IN_FLIGHT = 256 * 2**20  # of a rank, that looks have started


class ImageCopies:
    """See `CopyDown`, which asks it for the checkpoints of the paths that it copies, and for what units will be taken
    from next."""

    def __init__(self, config: CacheConfig, books: Books, images: ImageMover) -> None:
        rows, layout = books.rows, config.rank_layout()
        assert rows is not None and layout is not None
        self._books, self._rows, self._images = books, rows, images
        self._pool, self._checkpoints = books.pools[CPU], rows.checkpoints
        self._max_in_flight = max(1, _MAX_BYTES_IN_FLIGHT // max(1, layout.checkpoint_bytes))
        share = 1 - config.cpu_write_high_water
        self._reserves = [max(1, int(share * pool.pool.num_blocks)) for pool in rows.checkpoints.pools]

    def store(self, path: Iterable[Run], *, into_free: bool) -> int:
        """Start copying what checkpoints of these runs have no copy; with `into_free` only into free pages. Returns how
        many pages should have been filled and could not be."""
        wanted = [each for run in path for each in chain_of(run) if self._is_uncopied(each)]
        num_started, num_pages = 0, self._checkpoints.sizes.num_pages
        for number, checkpoint in enumerate(wanted):
            if not self._is_uncopied(checkpoint):  # what made room for another one has taken it
                continue
            may_start = num_started < _MAX_STARTED and self._images.can_store
            if not may_start or not self._images.store(checkpoint, self._room(into_free=into_free)):
                return sum([num_pages(each.boundary) for each in wanted[number:]])
            num_started += 1
        return 0

    def _room(self, *, into_free: bool) -> Callable[[int], bool]:
        def has_room(num_pages: int) -> bool:
            return num_pages <= (self._pool.num_free if into_free else self._books.residency.num_available(CPU))

        return has_room

    def _is_uncopied(self, checkpoint: Checkpoint) -> bool:
        is_only_on_gpu = bool(checkpoint.units) and checkpoint.pages is None
        return is_only_on_gpu and self._checkpoints.is_here(checkpoint) and not self._images.is_storing(checkpoint)

    def num_uncopied_pages(self, run: Run) -> int:
        """Pages that copies of a run's checkpoints would take, of those that have none."""
        sizes = self._checkpoints.sizes
        return sum([sizes.num_pages(each.boundary) for each in chain_of(run) if self._is_uncopied(each)])

    def look_ahead(self) -> None:
        """Start copying what would lose its units next. Such a copy takes free pages, or those of something colder."""
        for checkpoint in self._coldest():
            if not self._is_uncopied(checkpoint):  # what made room for another one has taken it
                continue
            has_room = partial(self._rows.make_room_below, checkpoint)
            if not self._images.can_store or not self._images.store(checkpoint, has_room):
                break

    def _coldest(self) -> list[Checkpoint]:
        """Those without a copy that are next to give up their units, as far as each row has fewer free ones than it
        keeps in reserve."""
        found: dict[Checkpoint, None] = {}
        for row, reserve in enumerate(self._reserves):
            num_short = reserve - self._checkpoints.pools[row].pool.num_free
            if num_short > 0:
                found.update(dict.fromkeys(self._coldest_of(row, num_short)))
        return list(found)[: max(0, min(_MAX_STARTED, self._max_in_flight - self._images.num_storing))]

    def _coldest_of(self, row: int, num_units: int) -> list[Checkpoint]:
        found, walk = list[Checkpoint](), self._checkpoints.policy.coldest(GPU)
        for number, each in enumerate(walk):
            checkpoint = cast("Checkpoint", each)
            if num_units <= 0 or number >= _MAX_LOOKED:
                break
            num_units -= self._checkpoints.sizes.counts(checkpoint.boundary)[row]
            if self._is_uncopied(checkpoint):
                found.append(checkpoint)
        walk.close()
        return found

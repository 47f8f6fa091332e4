"""All that moves bytes between the tiers, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.movement.copy_down import CopyDown
from fastdeploy_cache.movement.image_copies import ImageCopies
from fastdeploy_cache.movement.images import ImageMover
from fastdeploy_cache.movement.loader import Loader
from fastdeploy_cache.movement.unit_copies import UnitCopier
from fastdeploy_cache.movement.wiper import Wiper
from fastdeploy_cache.policies.load_or_compute import LoadOrCompute

if TYPE_CHECKING:
    from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient


class Movement:
    """The mover, the policies that start it, and the client whose processes do the work. Under the lock."""

    def __init__(self, config: CacheConfig, books: Books, client: TransferClient) -> None:
        self.client = client
        self.speeds = LoadOrCompute(
            config.load_policy, config.prefill_tokens_per_second, config.block_bytes(), config.block_size
        )
        self.mover = BlockMover(books, client, config.transfer.task_timeout_seconds)
        self.images = ImageMover(books, books.rows, self.mover) if books.rows is not None else None
        self.units = UnitCopier(books, books.rows, self.mover) if books.rows is not None else None
        self.wiper = Wiper(books, self.mover)
        copies = ImageCopies(config, books, self.images) if self.images is not None else None
        self.copy_down = CopyDown(config, books, self.mover, copies)
        self.loader = Loader(config, books, self.mover, self.speeds, images=self.images)

    def stop(self) -> None:
        """The cache is closed: the processes end."""
        self.wiper.stop()
        self.client.stop()

    def be_quiet(self, quiet: bool) -> None:
        """Start nothing from now on, or go on, first of all with what should be copied down."""
        self.mover.be_quiet(quiet)
        if not quiet:
            self.copy_down.go_on()
            self.wiper.go_on()

"""Storage, as an engine attaches it: `cache.storage`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from threading import RLock
from typing import TYPE_CHECKING

from fastdeploy_cache.books.block_hash import TOKEN_BYTES, BlockHasher
from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import StoreDetached, StoreHeard, StoreNewsTaken
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.config.tenants import store_shares
from fastdeploy_cache.errors import ConfigError, NotEnoughMemoryError, StorageError
from fastdeploy_cache.ipc.clock import seconds_to_wait
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.ipc.shortage import is_shortage, limit_of
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.request import Request
from fastdeploy_cache.storage.absent import NoReads, NoTier
from fastdeploy_cache.storage.forget import StorageForget
from fastdeploy_cache.storage.prefetch import Holding, StoragePrefetch
from fastdeploy_cache.transfer_manager.client import RankStatus

if TYPE_CHECKING:
    from fastdeploy_cache.stats import StorageTierStats
    from fastdeploy_cache.storage.news import StoreListening
    from fastdeploy_cache.storage.reads import StorageReads
    from fastdeploy_cache.storage.tier import StorageTier
    from fastdeploy_cache.transfer_manager.storage.client import StorageClient, StorageProcesses
    from fastdeploy_cache.transfer_manager.storage.config import StorageConfig

logger = event_log(__name__)

_FOREVER_SECONDS = 1e9

_NOT_ATTACHED = "none is attached; one that was keeps what it has: attach it, and forget the namespace again"


class StorageAccess:
    """The store below the CPU tier, if there is one. Any thread, but for what is marked as under the lock."""

    def __init__(self, config: CacheConfig, books: Books, movement: Movement) -> None:
        self.renaming = RLock()  # one attach, detach or change of weights at a time; the last does both others
        self._config, self._books, self._movement = config, books, movement
        self._tier: StorageTier | NoTier = NoTier()
        self._beside: list[StorageTier] = []  # that are being opened, or whose last answers are still to come
        self._sums = Counter[str]()  # of those whose last answers have come
        self._given: StorageConfig | None = None  # the settings of a store whose processes we start
        self._had_one = False  # a store that is attached no more
        self._is_attaching = self._has_warned = False
        self._listener = 0
        books.listen(StoreHeard, self._on_heard)
        books.listen(StoreNewsTaken, self._on_taken)
        self.is_attached = False  # whether there is a store, whether or not it works now

    def _on_heard(self, heard: StoreHeard) -> None:
        self._listener = heard.listener
        for news in self._all_news():
            self._books.mishaps.contain("client", functools.partial(news.hear, heard.listener))

    def _on_taken(self, _: StoreNewsTaken) -> None:
        for news in self._all_news():
            self._books.mishaps.contain("client", news.taken)

    def _all_news(self) -> list[StoreListening]:
        return [tier.link.news for tier in (*self._beside, self._tier) if not isinstance(tier, NoTier)]

    # -- verbs

    def attach(self, storage: StorageConfig, *, client: StorageClient | None = None) -> None:
        """Open a store below the CPU tier; one that cannot be reached yet is tried again and again.

        With other weights than those of the store before, everything that is cached is forgotten, as by `reset`.
        `client` replaces the storage processes (tests, simulation).

        Raises:
            ConfigError: there is one already, no layout, or no CPU block to go through; or tenants are to have shares
                of a store that is no file store.
            StorageRefusedError: its settings are wrong.
            StorageError: there are no descriptors, threads or memory for its processes now; try again.
        """
        with self.renaming:  # a detach beside it would find nothing yet, and return before the store is there
            with self._books:
                self._books.check_open()
                if self.is_attached or self._is_attaching:  # by a callback of the store that is opening
                    raise ConfigError("a store is attached; detach it first")
                self._is_attaching = True
            try:
                self._attach(storage, client)
            except NotEnoughMemoryError as error:
                raise StorageError(f"the store cannot be opened now: {error}") from error
            except (OSError, RuntimeError) as error:
                if not is_shortage(error):
                    raise
                raise StorageError(f"the store cannot be opened now: {error}; {limit_of(error)}") from error
            finally:
                self._is_attaching = False

    def _attach(self, storage: StorageConfig, client: StorageClient | None) -> None:
        # late: a cache without a store does without all of these
        from fastdeploy_cache.storage.tier import StorageTier

        config, layout = self._config, self._config.rank_layout()
        store_shares(config.tenants, storage)
        if not config.pool_sizes()[1] or (layout is None and client is None):
            raise ConfigError("storage goes through the CPU tier and needs a layout; give the cache num_cpu_blocks")
        self._given = storage if client is None else None
        client = self._new_client(storage) if client is None else client
        tier = StorageTier(config, storage, self._books, client, self._movement)
        with self._books:
            tier.link.news.listener = self._listener
            self._beside.append(tier)  # its probes own blocks before `start` has come back
        try:
            client.start(tier.on_result, tier.on_ready)
        except BaseException:
            with self._books:
                self._beside.remove(tier)
                tier.link.is_detached, tier.link.news.listener = True, 0
                self._books.note(StoreDetached())
            tier.link.close()
            raise
        try:
            with self._books:
                self._books.check_open()
                self._books.follow_weights(storage.weights_id)
                tier.attach()
                tier.be_quiet(self._movement.mover.is_quiet)
                self._beside.remove(tier)
                self._tier, self.is_attached = tier, True
        except BaseException:
            with self._books:
                tier.detach()  # also what had been told of it, such as what to copy down
            client.stop()
            self._close_idle()
            raise

    def _new_client(self, storage: StorageConfig) -> StorageProcesses:
        from fastdeploy_cache.transfer_manager.storage.client import StorageProcesses
        from fastdeploy_cache.transfer_manager.storage.keys import KeySpace

        config, layout = self._config, self._config.rank_layout()
        assert layout is not None
        num_ranks = config.transfer.tp_size
        return StorageProcesses(
            storage,
            config.transfer,
            spaces=[
                KeySpace.of(storage.weights_id, layout, config.block_size, rank, num_ranks) for rank in range(num_ranks)
            ],
            segments=self._movement.client.cpu_segments(),
            shares=store_shares(config.tenants, storage),
            clock=self._books.clock,
        )

    def detach(self) -> None:
        """End the storage processes; what is on its way is answered as failed. Safe without a store."""
        with self.renaming:
            self._given = None
            self._detach()

    def detach_for(self, storage: StorageConfig) -> None:
        """Detach, to be attached with other settings next. Where that fails, `settings` are these all the same."""
        with self.renaming:
            self._given = storage
            self._detach()

    def _detach(self) -> None:
        with self._books:
            tier, self._tier, self.is_attached = self._tier, NoTier(), False
            if isinstance(tier, NoTier):
                return
            tier.detach()
            self._had_one = True
            self._beside.append(tier)
        tier.link.client.stop()
        self._close_idle()

    def _close_idle(self) -> None:
        with self._books:  # the last answers are in: hand over what they led to
            # But for a store whose thread hangs in a callback, or gets no processor: its blocks are its own until then.
            ended = [each for each in self._beside if each.is_idle]
            self._beside = [each for each in self._beside if each not in ended]
            for each in ended:
                self._sums.update(each.stats().sums)
        for each in ended:
            each.close()

    def flush(self, timeout_seconds: float) -> bool:
        """Write all that is cached to storage and wait for it: before a planned end. True when storage has it all.

        What is on the GPU only goes through the CPU tier, in as many rounds as that takes. An admission filter decides
        as ever. Then storage is asked for every block: it may have dropped what it took, for later blocks or on a full
        disk; what is missing so is written by the next flush. False: one that fails, declines or drops, the time is
        over, or traffic beside it that adds as much as a round writes: flush when requests have stopped. Without a
        store it is False, too, at once, and nothing is raised: the log says so the first time.
        """
        deadline, tier = self._books.clock.now() + seconds_to_wait("flush", timeout_seconds), self._tier
        if isinstance(tier, NoTier):
            if not self._has_warned:
                logger.warning(
                    "event=flush_without_storage remedy=%r", "attach a store: cache.storage.attach, or storage"
                )
            self._has_warned = True
            return False
        from fastdeploy_cache.storage.flush import Flush

        return Flush(self._books, self._movement, tier).run(deadline)

    # -- for the other rooms, under the lock

    @property
    def settings(self) -> StorageConfig | None:
        """The settings of a store whose processes are ours to start again; None without one."""
        return self._given

    @property
    def reads(self) -> StorageReads | NoReads:
        """What is looked up and fetched."""
        return self._tier.reads

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way, and nothing queued."""
        return self._tier.is_idle

    @property
    def held(self) -> Holding:
        """What tasks and prefetches hold, of stores that are opening or were detached, too."""
        tiers = (*self._beside, self._tier)
        return Holding(
            [block_id for tier in tiers for block_id in tier.held_ids],
            [pin for tier in tiers for pin in tier.reads.pins],
            [each for tier in tiers for each in tier.reads.held],
        )

    @property
    def tasks_in_flight(self) -> Mapping[str, int]:
        """Tasks of the attached store that not every rank has answered, by kind."""
        return self._tier.tasks_in_flight

    def write(self, path: Sequence[Run]) -> None:
        """Write these runs now, whatever the policies say; what is on the GPU only is copied down for it."""
        self._tier.write(path)

    def forget_namespace(self, namespace: str, deadline: float) -> StorageForget:
        """Fetch no more of a namespace, and remove what the store has of it."""
        for tier in (*self._beside, self._tier):
            tier.reads.stop(namespace)
        if isinstance(self._tier, NoTier):
            had_one = self._had_one or self._given is not None
            return StorageForget(namespace, self._books.clock.event()).end(_NOT_ATTACHED if had_one else "")
        return self._tier.forgets.start(namespace, deadline)

    def is_forgetting(self, namespace: str) -> bool:
        """Whether the store is removing what it has of a namespace."""
        return not isinstance(self._tier, NoTier) and self._tier.forgets.are_about(namespace)

    def be_quiet(self, quiet: bool) -> None:
        """Start nothing more, and answer who waits; or go on."""
        self._tier.be_quiet(quiet)

    def stats(self) -> tuple[StorageTierStats | None, Counter[str]]:
        """How it goes, None where no store is attached; and what only rises, of this store and of those before it."""
        *before, now = [tier.stats() for tier in (*self._beside, self._tier)]
        return now, sum([each.sums for each in (*before, now) if each is not None], Counter(self._sums))

    def statuses(self) -> list[RankStatus]:
        """One entry for each process that has the store open."""
        return self._tier.statuses()

    def note_admitted(self, num_tokens: int) -> None:
        """A request with so many tokens has its first blocks; once for each."""
        self._tier.note_admitted(num_tokens)

    # -- for the other rooms, not under the lock

    def wait_settled(self, timeout_seconds: float) -> bool:
        """Wait until nothing is on its way, after `be_quiet`; False when the time is over first."""
        return self._tier.wait_settled(timeout_seconds)

    def new_prefetch(
        self, request: Request, keys: BlockKeys, blocks: range, parent_hash: bytes, epoch: int
    ) -> StoragePrefetch:
        """A prefetch of these blocks of the request, as the tree was in `epoch`. Hashes them."""
        first, num_blocks, clock = blocks.start, len(blocks), self._books.clock
        size = self._config.block_size
        tokens = keys.part(0, (first + num_blocks) * size * TOKEN_BYTES)
        hashes = BlockHasher(size).extend(parent_hash, tokens, first, num_blocks, keys.extras)
        return StoragePrefetch(
            request_id=request.request_id,
            namespace=request.namespace,
            keys=keys,
            first=first,
            hashes=hashes,
            epoch=epoch,
            clock=clock,
            done=clock.event(),
            deadline=clock.now() + self._patience(num_blocks),
            priority=request.priority,
        )

    def _patience(self, num_blocks: int) -> float:
        """Seconds that a request may wait for so many blocks from storage."""
        config = self._config
        if config.prefetch_policy == "best_effort":
            return 0.0
        if config.prefetch_policy == "wait_complete":
            return _FOREVER_SECONDS  # every task has a deadline, and after it an answer
        num_tokens = num_blocks * config.block_size
        seconds = config.prefetch_timeout_seconds + config.prefetch_seconds_per_1024_tokens * num_tokens / 1024
        worth = self._movement.speeds.patience_seconds(num_blocks)
        return seconds if worth is None else min(seconds, worth)

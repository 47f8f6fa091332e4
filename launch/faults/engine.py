"""An engine of a story: a process that embeds a manager, and users in it whose every block is compared."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from fastdeploy_cache import (
    CacheConfig,
    CacheStats,
    KVLayout,
    PeerConfig,
    PrefixCacheManager,
    StorageConfig,
    TenantConfig,
    TransferConfig,
)
from fastdeploy_cache.errors import CacheError, LayoutError
from fastdeploy_cache.ipc.shortage import is_shortage
from fastdeploy_cache.launch.faults.free_blocks import FreeBlockWatch
from fastdeploy_cache.launch.faults.kv_bytes import Content, KVBytes
from fastdeploy_cache.launch.faults.kv_workers import KVWorkers
from fastdeploy_cache.launch.faults.listeners import Listeners
from fastdeploy_cache.launch.faults.row_bytes import HYBRID_LAYOUT, NUM_FULL_LAYERS, RowBytes
from fastdeploy_cache.launch.faults.stage import Mail, StoryStage, Watch
from fastdeploy_cache.launch.faults.story import BLOCK_SIZE, Act, Settings
from fastdeploy_cache.launch.faults.user import StoryUser

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float16")
_STEPS_BETWEEN_CHECKS, _LEAST_PAUSE, _LONGEST_PAUSE = 200, 0.002, 0.25
_MOST_STARTS = 300
_REST_SECONDS = 300.0  # for everything to come back after the last fault
_SLOT_BYTES = 128
_FLOAT16_BYTES = 2
TASK_SECONDS = 2.0  # for a task of any kind
_HOME_SECONDS = 60.0
_QUEUE_SECONDS = 0.75  # for the I/O thread to see what was accepted


_TENANT = TenantConfig(
    namespace="tenant",
    guaranteed_gpu_share=0.25,
    max_gpu_share=0.75,
    guaranteed_cpu_share=0.25,
    max_cpu_share=0.5,
    keep_seconds=20.0,
)


class StoryEngine:
    """What outlives the deaths of an engine's process: its folder, what it may find, how far its users are."""

    def __init__(self, world: StoryStage, number: int, settings: Settings, users: Sequence[Sequence[Act]]) -> None:
        self.world, self.number, self.settings = world, number, settings
        self.acts = users
        self.positions = [0] * len(users)
        self.content = Content(LAYOUT.num_layers * 2 * LAYOUT.num_kv_heads * LAYOUT.head_dim * _FLOAT16_BYTES)
        self.committed = world.committed_by(number, settings)
        self.mail: deque[Mail] = deque()  # offers of other engines
        self.num_steps = 0  # of its model
        self.stepping = world.host.new_lock()  # a model takes one step at a time
        self.weights = 0
        self.workers: KVWorkers | None = None
        self._dead: list[KVWorkers] = []  # of lives before: a process that has died closes nothing itself
        self.is_done = False
        self.num_lives = self.num_refused = 0  # lives, and starts since the last one that went well
        self.seen = Counter[str]()
        self.cache: PrefixCacheManager | None = None
        self.users: list[StoryUser] = []
        self.kv: list[KVBytes] = []  # by rank
        self.row_kv: list[RowBytes] = []  # of a hybrid model
        self._last_loss_told = -1  # how far the cache's count of losses was when the model last saw a rank's new arrays
        self._untold = set[int]()  # ranks whose new worker's arrays the model sees already
        self.free_blocks: FreeBlockWatch | None = None
        self._mapping = world.host.new_guard()

    @property
    def weights_id(self) -> str:
        """The name of the model's weights now."""
        return f"weights-{self.weights}"

    def config(self) -> CacheConfig:
        """What the cache is made of, as `Settings` says; ranks start again however often they die."""
        settings = self.settings
        store = StorageConfig(
            weights_id=self.weights_id,
            admission="all",
            breaker_failures=3,
            breaker_seconds=0.5,
            start_timeout_seconds=2.0,
            task_timeout_seconds=TASK_SECONDS,
            **self.world.store_of(self.number, settings.num_store_blocks * _SLOT_BYTES * settings.tp_size, _SLOT_BYTES),
        )
        return CacheConfig(
            block_size=BLOCK_SIZE,
            num_gpu_blocks=settings.num_gpu_blocks,
            num_cpu_blocks=settings.num_cpu_blocks,
            layout=HYBRID_LAYOUT if settings.has_rows else LAYOUT,
            num_gpu_units=settings.num_units,
            state_copy=settings.state_copy,
            load_policy="always",
            min_prefetch_tokens=1,
            cpu_write_policy=settings.cpu_write_policy,
            storage_write_policy=settings.storage_write_policy,
            prefetch_policy=settings.prefetch_policy,
            eviction_policy=settings.eviction_policy,
            recompute_last_token=settings.recompute_last_token,
            storage=store if settings.has_store else None,
            peer=self._peer_config() if settings.has_peers else None,
            tenants=(_TENANT,) if settings.tenants and not settings.has_rows else (),
            transfer=TransferConfig(
                tp_size=settings.tp_size,
                kv_owner=settings.kv_owner,
                max_restarts=1000,
                restart_backoff_seconds=0.01,
                start_timeout_seconds=10.0,
                task_timeout_seconds=TASK_SECONDS,
                heartbeat_seconds=1.0,
                heartbeat_timeout_seconds=6.0,
            ),
        )

    def _peer_config(self) -> PeerConfig:
        return PeerConfig(
            weights_id=self.weights_id,
            name=f"engine{self.number}",
            offer_timeout_seconds=20.0,
            receive_timeout_seconds=10.0,
            silence_timeout_seconds=2.0,
        )

    # -- the process

    def forget(self) -> None:
        """A process that has died gives back its memory. The collector sees no run, so these are cut off by hand."""
        if self.cache is not None:
            for run in list(self.cache._books.tree.runs()):
                run.cut_off()
        self.cache, self.users, self.kv, self.row_kv, self.free_blocks = None, [], [], [], None
        self._last_loss_told = -1
        self._untold.clear()
        if self.workers is not None:
            self._dead.append(self.workers)
            self.workers = None

    def bury(self) -> None:
        """The story is over, and nobody runs whose descriptors this could close."""
        self.forget()
        self._dead.clear()

    def main(self) -> int:
        """One life of the process: until its users have done all, or it dies."""
        self.num_lives += 1
        self.forget()
        self.committed.forget(self.world.host.num_steps)
        self.stepping = self.world.host.new_lock()
        cache = self.cache = self._start()
        if cache is None:
            self._check_home()
            return 1
        if self.settings.has_workers:
            self.workers = KVWorkers(self.world, cache, self.stepping, self._see_new, self._note_told)
            for rank in range(self.settings.tp_size):
                self.workers.replace(rank, self._call, lambda: None)
        self._map(cache)
        deadline = self.world.host.now() + _REST_SECONDS
        while not self.kv:  # a rank has died since: without arrays there is no model, and nothing to compute
            if self.world.host.now() > deadline:
                self.world.find("has no arrays", f"engine {self.number}: {cache.ranks.statuses()}")
                return 1
            cache.ranks.wait_ready(_REST_SECONDS)
            self.world.host.sleep(0.01)
            self._map(cache)
        self.free_blocks = FreeBlockWatch(cache)
        rows = self.config().rank_layout()
        behind = rows.rows[1:] if rows is not None else ()
        listeners = Listeners(cache._books.tree, behind, seed=self.number, num_moments=4)
        watches = [listeners, *[new_watch(cache) for new_watch in self.world.watches]]
        self.users = [StoryUser(self, number, cache) for number in range(len(self.acts))]
        start = self.world.host.start_thread
        threads = [start(f"user{user.number}", user.run, self.acts[user.number]) for user in self.users]
        self._check_until(cache, watches, lambda: not any(thread.is_alive() for thread in threads))
        if cache._books.is_closed:
            self.cache = self.free_blocks = None
            self._check_home()
            return 1
        self._finish(cache, watches)
        self.is_done = True
        return 0

    def _call(self, verb: str, call: Callable[[], None], limit_seconds: float) -> None:
        with self.world.verb(self.number, verb, limit_seconds):
            call()

    def _start(self) -> PrefixCacheManager | None:
        """None: it is refused now, for want of something."""
        try:
            with self.world.verb(self.number, "start", limit_seconds=60.0):
                cache = PrefixCacheManager(self.config(), on_kv_lost=self._map_again)
                self.num_refused = 0
                return cache
        except (CacheError, OSError, RuntimeError) as error:
            if not isinstance(error, CacheError) and not is_shortage(error):
                raise
            self.num_refused += 1
            if self.num_refused > _MOST_STARTS:
                self.world.find("does not start", f"engine {self.number}: {error!r}")
        return None

    def _check_until(self, cache: PrefixCacheManager, watches: Sequence[Watch], is_over: Callable[[], bool]) -> None:
        """Look at the books every so many steps, beside the users."""
        host, num_steps, pause = self.world.host, 0, _LEAST_PAUSE
        while not is_over() and not self.world.findings:
            if host.num_steps >= num_steps + _STEPS_BETWEEN_CHECKS:
                num_steps, pause = host.num_steps, _LEAST_PAUSE
                self.check(cache, watches)
            self._look_for_forgotten(cache)
            pause = min(2 * pause, _LONGEST_PAUSE)  # while little happens there is little to see
            host.sleep(max(pause, host.step_seconds * _STEPS_BETWEEN_CHECKS))

    def check(self, cache: PrefixCacheManager, watches: Sequence[Watch]) -> None:
        """All that must be so at any time."""
        self.seen["checks"] += 1
        if cache._books.is_closed:
            return
        try:
            with self.world.verb(self.number, "check"):
                cache.check_invariants()
                with cache._books:
                    for watch in watches:
                        watch.check()
        except AssertionError as error:
            self.world.find("books do not add up", f"engine {self.number}: {error}")
        self.look_at_free_blocks()

    def look_at_free_blocks(self) -> None:
        """What nobody owns is nobody's to write."""
        if self.free_blocks is not None and (written := self.free_blocks.look(self.kv, self.row_kv)):
            self.world.find("a free block was written", f"engine {self.number}: {written}")

    def _look_for_forgotten(self, cache: PrefixCacheManager) -> None:
        """What was decided on is sent, and does not lie in a box until something else happens."""
        if cache._books.is_closed or self.world.has_stalled:
            return
        for what, seconds in self.world.waiting_tasks(cache):
            if seconds > _QUEUE_SECONDS:
                self.world.find("a task is not sent", f"engine {self.number}: {what} for {seconds:.2f} s")

    def _map(self, cache: PrefixCacheManager) -> None:
        """See the arrays of all ranks, as the model does; as they were where one has none.

        Guarded, as a rank may die while this begins: the thread that is told of its new arrays would map them, and then
        the other one, which has looked before, those of the dead one.
        """
        with self._mapping, suppress(LayoutError):
            ranks = range(self.settings.tp_size)
            views = self.workers.views() if self.workers is not None else map(cache.ranks.kv_views, ranks)
            if self.settings.has_rows:
                all_views = list(views)
                self.row_kv = [RowBytes(each) for each in all_views]
                views = [each[:NUM_FULL_LAYERS] for each in all_views]
            self.kv = [KVBytes(each, BLOCK_SIZE) for each in views]

    def _map_again(self, _: int) -> None:
        """A rank has died with its arrays, or has new ones. By the thread that has taken them, and then all at once: a
        model that sees the new ones before it is told would find nothing in what was computed on the old ones."""
        if self.cache is not None:
            self._last_loss_told = self.cache._books.tree.generations.last_gpu_loss
            self._map(self.cache)

    def _see_new(self, rank: int) -> None:
        """A worker has made arrays; the cache may forget the GPU for another reason before it is told of them."""
        self._untold.add(rank)
        if self.cache is not None:
            self._map(self.cache)

    def _note_told(self, rank: int) -> None:
        self._untold.discard(rank)

    def is_being_told(self, rank: int) -> bool:
        """The model sees new arrays of the rank, and the cache does not know yet that it does."""
        assert self.cache is not None
        return rank in self._untold or self._last_loss_told == self.cache._books.tree.generations.last_gpu_loss

    # -- the end

    def _finish(self, cache: PrefixCacheManager, watches: Sequence[Watch]) -> None:
        """After the last fault everything comes back, and nothing is left behind."""
        world = self.world
        if world.findings:
            return
        with world.verb(self.number, "wait_ready", limit_seconds=_REST_SECONDS + 60.0):
            is_back = cache.ranks.wait_ready(_REST_SECONDS)
        if not is_back:
            world.find("does not come back", f"engine {self.number}: {cache.ranks.statuses()}")
            return
        for user in self.users:
            user.leave_all()
        self._wake(cache)
        deadline = world.host.now() + _REST_SECONDS
        while not self._is_at_rest(cache):
            if world.host.now() > deadline:
                world.find("does not come to rest", f"engine {self.number}: {cache.stats()}")
                return
            world.host.sleep(0.05)
        self.check(cache, watches)
        stats = cache.stats()
        self._look_for_left(stats)
        failed = {step: number for step, number in stats.num_failed_steps.items() if number}
        if sum(failed.values()) > world.host.num_planted:  # each that was planted may have failed one
            world.find("a step failed that no verb tells of", f"engine {self.number}: {failed}")
        with world.verb(self.number, "close", limit_seconds=90.0):
            cache.close()
        self.cache = self.free_blocks = None
        self._check_home()

    def _look_for_left(self, stats: CacheStats) -> None:
        for tier in (stats.gpu, stats.cpu):
            if tier is not None and (tier.num_private or tier.num_protected or tier.num_in_flight):
                self.world.find("blocks left behind", f"engine {self.number}: {tier}")
        for row in stats.rows:
            if row.num_private or row.num_pinned or row.num_in_flight:
                self.world.find("units left behind", f"engine {self.number}: {row}")

    def _wake(self, cache: PrefixCacheManager) -> None:
        """One user may have put it to sleep, or paused it, in the midst of another one's change."""
        status = cache.life.status.value
        if status in ("asleep", "paused"):
            deadline = self.world.host.now() + _REST_SECONDS
            while cache.life.status.value == status:
                try:
                    with self.world.verb(self.number, status, limit_seconds=60.0):
                        (cache.life.wake if status == "asleep" else cache.life.resume)()
                except CacheError as error:  # for want of memory; that ends
                    if self.world.host.now() > deadline:
                        self.world.find("does not wake", f"engine {self.number}: {error!r}")
                        return
                    self.world.host.sleep(1.0)

    @staticmethod
    def _is_at_rest(cache: PrefixCacheManager) -> bool:
        stats = cache.stats()
        is_handing_over = stats.num_open_sends or stats.num_open_receives
        is_copying = stats.num_transfers_in_flight or stats.gpu.num_in_flight
        is_copying = is_copying or (stats.cpu is not None and stats.cpu.num_in_flight)
        is_copying = is_copying or any(row.num_in_flight for row in stats.rows)
        has_own = stats.num_requests > 0  # every user has left: what a hint brings is on its way
        return not is_copying and not is_handing_over and not has_own and cache.storage.is_idle

    def _check_home(self) -> None:
        """Processes, threads and descriptors; a thread that had no processor for a while may come later."""
        if self.workers is not None:
            self.workers.leave()
        deadline = self.world.host.now() + _HOME_SECONDS
        while (left := self.world.host.left_behind()) and self.world.host.now() < deadline:
            self.world.host.sleep(0.5)
        for what, names in left.items():
            self.world.find(f"{what} left behind", f"engine {self.number}: {names}")

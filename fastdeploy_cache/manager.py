"""The manager that an engine embeds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Self

from fastdeploy_cache.books.leaves.policy import EvictionPolicy
from fastdeploy_cache.books.tenants.expiry import Expiry
from fastdeploy_cache.books.tokens import TokenIds
from fastdeploy_cache.books.transfer import wait_done
from fastdeploy_cache.callers.blocks import CallerBlocks
from fastdeploy_cache.callers.sessions import Sessions
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.config.tenants import keep_seconds
from fastdeploy_cache.errors import CacheError, RequestError
from fastdeploy_cache.insight.control.control import Control
from fastdeploy_cache.insight.insight import Insight
from fastdeploy_cache.insight.recorder import Recorder
from fastdeploy_cache.insight.seen import Seen
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Clock, seconds_to_wait
from fastdeploy_cache.life_cycle import CacheLife, LifeCycle
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.movement.new_client import check_given, new_books, new_client
from fastdeploy_cache.peers.peers import Peers
from fastdeploy_cache.ranks import RankAccess
from fastdeploy_cache.request import Request, whole_number
from fastdeploy_cache.requests.accounts import Accounts
from fastdeploy_cache.requests.active_request import SETTLED, VOID, WAITING
from fastdeploy_cache.requests.explanation import Explanation
from fastdeploy_cache.requests.loads import MatchLoads
from fastdeploy_cache.requests.match import Match, Prefetch
from fastdeploy_cache.requests.requests import Requests
from fastdeploy_cache.requests.row_verbs import RowVerbs
from fastdeploy_cache.requests.steps import FullAllocation, Steps
from fastdeploy_cache.storage.access import StorageAccess

if TYPE_CHECKING:
    from fastdeploy_cache.insight.doctor.finding import Finding
    from fastdeploy_cache.metrics.exporter import Collector
    from fastdeploy_cache.stats import CacheStats
    from fastdeploy_cache.transfer_manager.peer.client import PeerClient
    from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient


class PrefixCacheManager:
    """Keeps computed KV blocks findable by prefix, on the GPU and in the CPU tier below it.

    Every verb either happens or leaves no trace (but for an interrupt in its midst), and may be called from any thread;
    calls for one request come one at a time. Nothing but `__init__`, `close` and what is called wait waits for more
    than the lock, which is held for bookkeeping only.

    Attributes:
        storage: the store below the CPU tier: attach, detach, flush.
        peers: other instances: offer and receive.
        blocks: verbs for callers that keep their own requests.
        ranks: KV arrays and the processes that serve them.
        life: pause, sleep, wake, changes of weights. sessions: hints of agents.
        insight: what an operator looks at. control: what an operator does, and the socket for both.
        metrics: a collector for a Prometheus registry.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        client: TransferClient | None = None,
        peer_client: PeerClient | None = None,
        policy: EvictionPolicy | None = None,
        clock: Clock | Callable[[], float] = SYSTEM_CLOCK,
        on_kv_lost: Callable[[int], None] | None = None,
    ) -> None:
        """Make the pools and start the ranks.

        `client`, `peer_client` and `policy` replace the configured ones (tests, simulation). `clock` gives
        the seconds that policies and hit-rate windows go by, and raises nothing; a `Clock` also waits. `on_kv_lost` is
        called with a rank that has died with the KV arrays that it owned (`kv_owner = "transfer"`), and again when it
        has new ones; the GPU is forgotten before and after. It must not block the I/O thread; `close` calls it never.

        Raises:
            RankStartError, DeviceError: a rank did not start within its deadline, or its device cannot be here.
            StorageRefusedError, PeerRefusedError, ConfigError: settings of these are wrong, or `policy` is none.
            NotEnoughMemoryError: the pools do not fit; nothing was taken.
        """
        self.config = config
        clock = clock if isinstance(clock, Clock) else Clock(clock)
        check_given(config, policy)
        client = client if client is not None else new_client(config, clock)  # first: it refuses what does not fit
        self._recorder = Recorder(config, clock.age)
        self.metrics = self._recorder.metrics
        self._books = books = new_books(config, policy, clock)  # each room listens to changes, in this order
        self._movement = movement = Movement(config, books, client)
        self.storage = storage = StorageAccess(config, books, movement)
        self._requests = requests = Requests(config, books, movement, storage, Accounts(config, self.metrics, clock))
        self._steps = Steps(requests, config.block_size, FullAllocation(requests))
        self.rows = RowVerbs(books, requests, config.block_size)
        self.blocks = CallerBlocks(config, books, movement, requests)
        self._recorder.follow(books)
        self.peers = Peers(config, books, requests, self.metrics)
        self.ranks = RankAccess(config, books, movement, self.peers, on_kv_lost)
        self.life = LifeCycle(config, books, movement, requests=requests, storage=storage, peers=self.peers)
        self._expiry = Expiry(books, keep_seconds(config.tenants))
        self._seen = seen = Seen(config, books, movement, requests=requests, storage=storage, peers=self.peers)
        self.insight = Insight(books, movement, requests, seen)
        self.control = self._new_control(seen)
        self._start(client, peer_client)

    def _new_control(self, seen: Seen) -> Control:
        restart, check = self.ranks.restart, self.check_invariants
        rooms = self.config, self._books, self.insight, seen, CacheLife(self.life)
        self.sessions = sessions = Sessions(self.config, self._books, self._movement, self)
        sessions.pinning = control = Control(*rooms, sessions=sessions, restart=restart, check=check)
        return control

    def _start(self, client: TransferClient, peer_client: PeerClient | None) -> None:
        client.start(self._movement.mover.on_result, self.ranks.on_kv_lost)
        try:
            if self.config.storage is not None:
                self.storage.attach(self.config.storage)
            self.peers.open(self._movement, self.storage, peer_client)
            self.control.open_configured()
            self._seen.start()
            self._expiry.start()
        except BaseException:
            self.close()
            raise
        self._recorder.show(lambda: self._seen.picture(self.life.status.value))

    # -- the verbs of a request

    def match(self, request: Request) -> Match:
        """Find and pin the longest cached prefix of the request's tokens and start loading its CPU part.

        At least one token is left to compute. The CPU part is loaded whole or not at all (`num_unloaded_tokens`): not
        where it does not fit beside the rest of the prompt, or is outside the configured limits.

        Raises:
            RequestError: the request is matched already (release it first), or is no `Request`.
            PromptTooLongError: it can never fit.
        """
        requests, called_at = self._requests, self._books.clock.now()
        with self._books:
            if self._books.is_closed:
                self._books.check_open()
            active = requests.begin(request, called_at)
        # A settled match is nobody's to change but its caller's: it is described without the lock. Any other is
        # described in a turn of its own, after the loads that were decided on have been handed over.
        loads = MatchLoads(active, requests, self.config.transfer.task_timeout_seconds)
        try:
            if active.phase is SETTLED:
                return loads.describe()
            with self._books:
                return loads.describe()
        except BaseException:
            with self._books:
                requests.abandon(active)
            raise

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.config.block_size)

    def allocate(
        self, request: Request, num_blocks: int, *, ahead_of_loads: bool = False, wait_seconds: float = 0.0
    ) -> list[int]:
        """Give the request `num_blocks` more GPU blocks behind those that it has; evicts what the policy names.

        A match that still waits for loads is cut to what the caller saw of it last (by `match`, `poll` or `wait`), so
        the request's blocks are the `block_ids` of that `Match` and what this returns, one after the other. What has
        landed since is not used.

        With `ahead_of_loads` the match is not cut: poll it again after this call, and the request's blocks are its
        `block_ids`, its `coming_block_ids` and what this returns. The worker waits for each layer of the coming ones
        (`LayerProgress.wait_layer`) before it computes that layer; after the step ask `confirm`.

        `wait_seconds`, for an engine that has nothing else to run: wait so long for blocks that only copies in flight
        hold. Where none is on its way, or the cache is paused, it waits for nothing. A match of the request that still
        waits for room gives that up.

        Raises:
            OutOfBlocksError: not that many can be had now; nothing was changed.
        """
        if type(num_blocks) is not int:
            num_blocks = whole_number(num_blocks, "num_blocks")
        if wait_seconds != 0:
            seconds = seconds_to_wait("allocate", wait_seconds)
            take = functools.partial(self._allocate, request, num_blocks, ahead_of_loads)
            undo = self._requests.take_back_ids
            return self._requests.wait_for_blocks(request, num_blocks, take, undo, seconds)
        with self._books:
            return self._allocate(request, num_blocks, ahead_of_loads)

    def _allocate(self, request: Request, num_blocks: int, ahead_of_loads: bool) -> list[int]:
        active = self._requests.active(request)
        if self._books.asleep:
            self._books.check_awake()
        if active.rows is not None:
            raise RequestError("allocate gives blocks of one row, and this model has several; use `rows.allocate`")
        if num_blocks < 0:
            raise RequestError(f"allocate of {num_blocks} blocks for {request.request_id!r}; give 0 or more")
        ids = self._requests.allocate(active, num_blocks, ahead_of_loads=ahead_of_loads)
        try:
            return ids.tolist()
        except MemoryError:
            self._requests.take_back(active, num_blocks)
            raise

    def confirm(self, request: Request, timeout_seconds: float | None = None, *, arrived: bool) -> bool:
        """After a step that ran ahead of loads, before sampling: whether it counts, waiting for the loads if need be.

        `arrived`: whether every `wait_layer` of every worker returned True; one that did not has computed on what was
        not there, even if the load came later. Only a confirmed request publishes.

        False, also after `kv_lost`: what was computed for this request is worth nothing; release it and match it again.
        True for a request that runs ahead of nothing.
        """
        seconds = seconds_to_wait("confirm", timeout_seconds, self.config.transfer.task_timeout_seconds)
        with self._books:
            active = self._requests.active(request)
        if active.is_ahead and arrived:
            wait_done(active.ahead, seconds, self._books.clock)
        with self._books:
            self._requests.active(request)
            if active.is_ahead:
                self._requests.ahead.end(active, arrived)
            return active.phase is not VOID and not self._requests.matcher.is_lost(active)

    def commit(self, request: Request, num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` tokens are computed and accepted: their full blocks become findable.

        Call it when the step that computed them is complete: nothing is copied or found before. A request that runs
        ahead of loads publishes nothing before `confirm`. When blocks are copied down is the write policy's.

        Raises:
            CommitError: fewer tokens than before, or more than the request has or its blocks hold; nothing was changed.
        """
        if type(num_computed_tokens) is not int:
            num_computed_tokens = whole_number(num_computed_tokens, "num_computed_tokens")
        requests = self._requests
        with self._books:
            active = requests.active(request)
            if active.phase is WAITING:
                requests.matcher.settle(active)
            num_held = len(active.block_ids) * self.config.block_size
            is_more = active.num_computed_tokens <= num_computed_tokens <= num_held
            if not is_more or num_computed_tokens > request.num_tokens:
                active.refuse_commit(num_computed_tokens, num_held)
            requests.commit(active, num_computed_tokens, self._books.clock.now())

    def step(self, steps: Iterable[tuple[Request, TokenIds, int]]) -> list[list[int] | CacheError | MemoryError]:
        """What one step of the engine means for its requests, in one turn: `append_output`, `allocate` and `commit`.

        Each is (request, tokens sampled since its last step, tokens computed so far): the tokens are appended, blocks
        are allocated until all of its tokens have room, and what is computed is committed. A token that was just
        sampled is not among the computed ones, as its KV comes with the next step: what is computed is mostly
        `request.num_tokens` from before this call. A piece of a prompt is (request, [], computed). For each the answer
        has its new block ids, behind those that it has, or the error for which nothing of its step was done; the others
        go on. A match that is not settled is settled first.

        Errors that are answered and not raised:
            OutOfBlocksError: its tokens do not fit; release another request, and give it again.
            CommitError: fewer computed tokens than before, more than it has, or than its blocks held before.
            RequestError: no token ids from 0 to 2**31 - 1, the same request twice, or one that ran ahead of blocks that
                did not come.
            UnknownRequestError, MemoryError: not matched, or released already; the process has none left.

        Raises:
            ClosedError, LifeCycleError: the cache is closed, or asleep.
            RequestError: something that is no such triple; then nothing is done of any.
        """
        packed = Steps.pack(steps)
        with self._books:
            self._books.check_awake()
            if self._books.rows is not None:
                raise RequestError("step gives blocks of one row, and this model has several; use `rows.step`")
            return self._steps.run(packed)

    def release(self, request: Request) -> None:
        """The engine has finished the last step that reads or writes the request's blocks: unpin, free what is its own.

        Raises:
            UnknownRequestError: never matched, or released already.
        """
        with self._books:
            self._requests.release(self._requests.active(request))
        if request.session_id:
            self.sessions.ended(request)

    def prefetch(self, request: Request, *, with_last_token: bool = False) -> Prefetch:
        """A request has been queued: fetch from storage, to the CPU tier, what no tier here has of it.

        It pins nothing, so requests that wait never block each other; what is cached is not evicted next. A `match`
        meanwhile grows with what comes, but ends what `peers.borrow_from` brings; `release` or `end_prefetch` ends it.

        `with_last_token`: a block that ends with the prompt's last token is wanted, too. A match does not take it, as
        that token is computed; an engine that loads blocks itself (`blocks.copies`) may.
        """
        return self._requests.prefetches.begin(request, with_last_token=with_last_token, may_borrow=True)

    def end_prefetch(self, request: Request) -> None:
        """A queued request has gone without ever being matched: what has not come yet is not wanted."""
        self._requests.prefetches.end(request)

    def write_to_storage(self, request: Request) -> None:
        """Write what of a matched request is committed to storage now, whatever the policies say; returns at once.

        For an engine without a prefix cache (`enable_prefix_caching=False`), such as a decode instance: the blocks are
        cached until the room is needed, though nothing here matches them. `storage_blocks_total` counts what was
        written and what was skipped. Raises `UnknownRequestError` for one that is not matched.
        """
        with self._books:
            active = self._requests.active(request)
            self._requests.matcher.settle(active)
            self._requests.publisher.write(active, self.storage)

    # -- the verbs of the whole

    def reset(self, *, weights_id: str | None = None) -> None:
        """Forget every cached prefix. Running requests keep their blocks; what they commit later is not published.

        What is in storage stays, and is found again: after the weights have changed give the new `weights_id`, under
        which alone this cache reads and writes from then on.

        Raises:
            ConfigError: `weights_id` without a store or peers, or an impossible one; nothing was changed.
            StorageRefusedError, StorageError: it cannot be opened again; the cache goes on without, and the next call
                tries again.
        """
        self.life.reset(weights_id=weights_id)

    def wait_for_transfers(self, timeout_seconds: float) -> bool:
        """Wait until the copies that are in flight now have ended; False when the time is over first."""
        with self._books:
            transfers = list(self._movement.mover.in_flight.values())
        return wait_done(transfers, seconds_to_wait("wait_for_transfers", timeout_seconds), self._books.clock)

    def close(self) -> None:
        """End the ranks and give the memory up; views that the engine holds stay valid. Safe to call twice."""
        self._books.close()
        self._expiry.stop()
        self.storage.detach()
        self.peers.close()
        self._movement.stop()
        self._seen.close()
        self.control.end()
        self._recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- looking in

    def explain(self, request_id: str) -> Explanation:
        """Where the prompt tokens of a matched or recent request came from. Raises `UnknownRequestError`."""
        return self._seen.explain(request_id)

    def explain_last(self, num_requests: int) -> list[Explanation]:
        """The same for the last requests that were admitted, the newest first; fewer where fewer are remembered."""
        return self._seen.explain_last(num_requests)

    def examine(self) -> list[Finding]:
        """What is wrong with this cache as far as its last requests show, the worst first."""
        return self._seen.examine()

    def stats(self) -> CacheStats:
        """Blocks by owner, transfers, hit rates over the window, ranks."""
        return self._seen.stats()

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the books do not add up. Walks the whole tree: for tests and for doubt."""
        from fastdeploy_cache.insight.control.self_check import check_all

        with self._seen.alerting("invariants"):
            check_all(self._books, self._movement, self._requests, self.storage, peers=self.peers, blocks=self.blocks)

    def serve_metrics(
        self, host: str = "127.0.0.1", port: int = 0, *, also: Sequence[Collector] = (), allow_hosts: Sequence[str] = ()
    ) -> str:
        """Start the Prometheus endpoint of this cache, and its page at `/`; returns the endpoint's URL. Port 0 takes a
        free one.

        `also`: further collectors, such as `metrics` of the other caches of a data-parallel group. `allow_hosts`: names
        that it may be asked under, as NAME or NAME:PORT, beside those of loopback and `host`; else it answers 403.

        Raises:
            ConfigError: two caches of one data-parallel id, or a name that is none.
            PortInUseError: the address cannot be listened on.
        """
        with self._books:
            self._books.check_open()
        pages = self._seen.start_page(self.insight, lambda: self.life.status.value)
        return self._recorder.serve(host, port, also, pages, allow_hosts)

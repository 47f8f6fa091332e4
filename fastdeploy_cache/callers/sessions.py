"""What agents say of conversations: `cache.sessions`."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import NamespaceForgotten
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.books.tokens import PackedTokens, TokenIds, pack
from fastdeploy_cache.callers.private_part import forget, leave_gpu
from fastdeploy_cache.callers.remembered_sessions import RememberedSessions
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import CacheError, ControlError, PromptTooLongError, RequestError
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.movement.block_mover import TaskEnded
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.request import Image, Request, session_number, whole_number
from fastdeploy_cache.requests.match import Match, Prefetch
from fastdeploy_cache.transfer_manager.task import TaskKind

logger = event_log(__name__)

MAX_LEAVING = 256  # prefixes whose copies are on their way
MAX_FETCHING = 64  # prefixes that are being fetched from storage
_TRIES = 2  # to end what is our own
Prefix = str | TokenIds  # the id of a session, or token ids


class SessionVerbs(Protocol):
    """The cache's verbs that this is made of: see `PrefixCacheManager`."""

    def match(self, request: Request) -> Match: ...
    def release(self, request: Request) -> None: ...
    def prefetch(self, request: Request, *, with_last_token: bool = ...) -> Prefetch: ...
    def end_prefetch(self, request: Request) -> None: ...


class KeptPrefix(Protocol):
    """See `PinView`."""

    @property
    def name(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def seconds_left(self) -> float: ...


class Pinning(Protocol):
    """See `Control.pin`."""

    def pin(
        self, prefix: str | TokenIds, seconds: float, *, namespace: str = ..., images: Sequence[Image] = ...
    ) -> KeptPrefix: ...


class Brought(NamedTuple):
    """What `prefetch` has found of a prefix, and has begun to bring: tokens."""

    num_gpu_tokens: int
    num_cpu_tokens: int
    num_missing_tokens: int


class Sessions:
    """Hints that act at once. Each may name a session, whose last request is looked up, or give token ids. Any thread.

    A hint that is wrong costs what it says: blocks that have to be computed again, or that were brought for nothing. It
    never changes what a request reads.
    """

    def __init__(self, config: CacheConfig, books: Books, movement: Movement, verbs: SessionVerbs) -> None:
        self._size, self._books, self._movement, self._verbs = config.block_size, books, movement, verbs
        self._remembered = RememberedSessions()  # under the lock
        self._leaving: dict[int, Request] = {}  # by identity, under the lock: one that is asked for again is the same
        self._fetching: deque[tuple[Request, Prefetch]] = deque()  # under the lock
        self._over: deque[tuple[Callable[[Request], None], Request]] = deque()  # what has to be called still
        self._numbers = itertools.count(1)
        self.pinning: Pinning | None = None  # what `retain` pins with
        books.listen(TaskEnded, self._on_task_ended)
        books.listen(NamespaceForgotten, lambda change: self._remembered.forget_namespace(change.namespace))

    def ended(self, request: Request) -> None:
        """A request that names a session is over. A turn of its own; its release has happened, whatever comes here."""
        try:
            with self._books:
                if request.session_ended:
                    self._remembered.forget(request.namespace, request.session_id)
                else:
                    self._remembered.note(request)
        except MemoryError:  # to compare its tokens with those of the session's last request
            self._books.mishaps.note("policy")
        if self._over:
            self._end_over()

    # -- the hints

    def retain(self, prefix: Prefix, seconds: float, *, namespace: str = "") -> KeptPrefix:
        """Keep a prefix in its tiers for so many seconds: a pin, as `cache.control.pin` makes one, within its bounds.

        Raises:
            ControlError: nothing of it is cached, or too much is pinned.
            RequestError: no token ids, or a session that is not known (any more).
        """
        asked = self._asked(prefix, namespace)
        assert self.pinning is not None
        tokens = asked.token_ids(0, asked.num_tokens)
        return self.pinning.pin(tokens, seconds, namespace=namespace, images=asked.images)

    def release_session(self, session_id: str, *, namespace: str = "") -> int:
        """Nobody comes back to it: free what of its last request only this session has used, in all tiers. Returns how
        many blocks.

        What is in storage stays there. Raises `RequestError` as `supersede`.
        """
        if not isinstance(session_id, str):
            raise RequestError(f"session {session_id!r}; give its id, which is a text, or use supersede with token ids")
        num_blocks = self.supersede(session_id, 0, namespace=namespace)
        with self._books:
            self._remembered.forget(namespace, session_id)
        return num_blocks

    def supersede(self, prefix: Prefix, num_tokens: int, *, namespace: str = "") -> int:
        """An old branch is worth nothing: free what lies behind its first `num_tokens`, in all tiers. Returns how many
        blocks.

        Of a session that is what only its own requests have used; of token ids what no other prompt has parted from,
        and no two sessions share. Raises `RequestError` as `retain`.
        """
        if isinstance(num_tokens, bool) or whole_number(num_tokens, "num_tokens") < 0:
            raise RequestError(f"num_tokens is {num_tokens!r}; give how many tokens of the branch are still of use")
        asked = self._asked(prefix, namespace)
        with self._books:
            self._books.check_open()
            path, _ = self._find(asked)
            num_blocks = forget(self._books.tree, path, -(-int(num_tokens) // self._size), self._owner(asked))
        logger.info("event=superseded blocks=%d", num_blocks)
        return num_blocks

    def demote(self, prefix: Prefix, *, namespace: str = "") -> int:
        """Move what only this prefix has from the GPU to the CPU tier, now. Returns how many blocks have left the GPU;
        those that have to be copied first leave it when they have been. Of a hybrid model units go with them. Raises
        `RequestError` as `supersede`."""
        asked = self._asked(prefix, namespace)
        with self._books:
            path, num_found = self._find(asked)
            if path and num_found:
                self._movement.copy_down.store(path)
            num_gone, has_more = self._leave_gpu(asked, path)
            if has_more and len(self._leaving) < MAX_LEAVING:
                self._leaving[id(asked)] = asked
        return num_gone

    def prefetch(self, prefix: Prefix, *, namespace: str = "", tier: Literal["cpu", "gpu"] = "gpu") -> Brought:
        """Bring a prefix to a tier before it is asked for, such as when a tool is about to answer; returns at once.

        With `gpu` it is loaded there as a match loads, into the room that a match would be given, and counts as touched
        when all has come; with `cpu` what storage has is fetched to the CPU tier.

        Raises:
            RequestError: as `retain`, or no such tier.
            ControlError: no thread could be started now.
            PromptTooLongError: it can never fit.
        """
        if tier not in ("cpu", "gpu"):
            raise RequestError(f"prefetch to {tier!r}; use 'cpu' or 'gpu'")
        asked = self._asked(prefix, namespace)
        try:
            found = self._bring(asked, pack("behind", [0]), tier)  # a match leaves the last token to compute
        except PromptTooLongError:  # it fills the whole pool: then all but its last block
            found = self._bring(asked, b"", tier)
        return Brought(found.num_gpu_tokens, found.num_cpu_tokens, max(0, found.num_missing_tokens - 1))

    # -- how

    def _bring(self, asked: Request, behind: bytes, tier: str) -> Prefetch:
        request = Request(
            request_id=f"prefetch of a session {next(self._numbers)}",
            prompt_token_ids=PackedTokens(asked.tokens + behind),
            namespace=asked.namespace,
            images=asked.images,
            match_inside_images=asked.match_inside_images,
        )
        if self._over:
            self._end_over()
        request.counted = request.used = True  # no request of anybody's: neither hit rates nor policies hear of it
        found = self._verbs.prefetch(request)
        if tier == "cpu":
            self._note_fetching(request, found)
            return found
        try:
            match = self._verbs.match(request)
        except BaseException:
            self._end(self._verbs.end_prefetch, request)
            raise
        try:
            match.on_ready(lambda: self._end(self._verbs.release, request))
        except BaseException as error:  # nobody would be called
            self._end(self._verbs.release, request)
            if isinstance(error, RuntimeError):
                why = f"what storage is late with is ended by a thread of its own, and {error}"
                raise ControlError(f"nothing was prefetched: {why}") from error
            raise
        return found

    @staticmethod
    def _owner(asked: Request) -> int:
        """Whose blocks have to be that are freed: the session's, where one was named."""
        return session_number(asked.namespace, asked.session_id) if asked.session_id else 0

    def _asked(self, prefix: Prefix, namespace: str) -> Request:
        """The request whose prefix it is. Raises `RequestError`."""
        with self._books:
            self._books.check_open()
        if not isinstance(prefix, str) or not isinstance(namespace, str):
            tokens = () if isinstance(prefix, str) else prefix
            return Request(request_id="of a session", prompt_token_ids=tokens, namespace=namespace)
        with self._books:
            found = self._remembered.find(namespace, prefix)
        if found is None:
            raise RequestError(
                f"session {prefix!r} is not known in namespace {namespace!r}: no request of it has ended, or it is too "
                "long ago; give its token ids"
            )
        return found

    def _find(self, asked: Request) -> tuple[list[Run], int]:
        keys, num_blocks = asked.keys(self._size), asked.num_tokens // self._size
        return self._books.tree.find(asked.namespace, keys, num_blocks)

    def _end(self, verb: Callable[[Request], None], request: Request) -> None:
        """Release a request of our own, or end its prefetch: nobody else would. A verb that fails for want of memory
        has given back what it had taken, so it is called again at once, and after that with the next one to end."""
        for _ in range(_TRIES):
            try:
                verb(request)
                return
            except CacheError as error:  # the cache is closed, or was reset
                logger.info("event=prefetch_not_ended error=%r", error)
                return
            except MemoryError:
                self._books.mishaps.note("prefetch")
        self._over.append((verb, request))

    def _end_over(self) -> None:
        """Those of which that has failed. Threads beside each other take different ones."""
        for _ in range(len(self._over)):
            with contextlib.suppress(IndexError):
                self._end(*self._over.popleft())

    def _note_fetching(self, request: Request, found: Prefetch) -> None:
        """Fetches end by themselves; what is known of them is given up when others follow."""
        with self._books:
            over = [each for each in self._fetching if each[1].ready]
            if len(self._fetching) - len(over) >= MAX_FETCHING:
                over.append(self._fetching[0])
            for each in over:
                self._fetching.remove(each)
            self._fetching.append((request, found))
        for ended, _ in over:
            self._end(self._verbs.end_prefetch, ended)

    def _on_task_ended(self, ended: TaskEnded) -> None:
        """A copy down has ended: what waits for one may leave the GPU."""
        if not self._leaving or ended.result.task.kind is not TaskKind.SWAP_OUT:
            return
        for key, asked in list(self._leaving.items()):
            path, num_found = self._find(asked)
            if not (path and num_found and self._leave_gpu(asked, path)[1]):
                del self._leaving[key]

    def _leave_gpu(self, asked: Request, path: Sequence[Run]) -> tuple[int, bool]:
        images = self._movement.images
        is_storing = images.is_storing if images is not None else lambda _: False
        return leave_gpu(self._books.tree, path, self._owner(asked), is_storing)

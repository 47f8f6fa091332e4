"""The tasks that were matched and not released, and what of them the cache has, and shows to others."""

from __future__ import annotations

from contextlib import suppress

from fastdeploy_cache.adapters.fastdeploy.current_cache import CurrentCache
from fastdeploy_cache.adapters.fastdeploy.task import HeldTask, Task, UnknownTaskError
from fastdeploy_cache.errors import ConfigError, RequestError, UnknownRequestError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.requests.match import Match


class HeldTasks:
    """Any thread; calls for one task come one at a time.

    Schedulers hand blocks over before a worker has computed them. They become visible by what the task says: see
    `PrefixCacheManager`.
    """

    def __init__(self, current: CurrentCache, *, load_timeout_seconds: float, schedules_ahead: bool) -> None:
        self._current, self.schedules_ahead = current, schedules_ahead
        self._load_timeout_seconds = load_timeout_seconds
        self._tasks: dict[str, HeldTask] = {}

    def __contains__(self, task: Task) -> bool:
        return str(task.request_id) in self._tasks

    def items(self) -> list[tuple[str, HeldTask]]:
        """Each by its request's name, at the moment of the call."""
        return list(self._tasks.items())

    def get(self, task: Task) -> HeldTask:
        """What is held of a task, which may be another object than at its match.

        Raises:
            UnknownTaskError: it holds nothing.
        """
        held = self._tasks.get(str(task.request_id))
        if held is None:
            raise UnknownTaskError(f"request {task.request_id!r} holds nothing here; match it first, release it once")
        held.task = task
        return held

    def check_nothing_is_held(self) -> None:
        """Nothing is held by tasks, and no block is the caller's.

        Raises:
            ConfigError: something is.
        """
        gpu = self._current.cache.blocks.view.tier_stats()
        num_held = gpu.num_private + gpu.num_callers
        if self._tasks or num_held:
            raise ConfigError(
                f"{len(self._tasks)} tasks hold something, {num_held} blocks are held; release them first"
            )

    def match(self, held: HeldTask) -> tuple[Match, float]:
        """The task's match, once its loads have ended or are late, and the seconds that this took. All that others have
        computed by now is found."""
        started, cache = SYSTEM_CLOCK.now(), self._current.cache
        for other in list(self._tasks.values()):
            self.show_proven(other)
        if cache.config.storage is not None:
            cache.prefetch(held.request)
        try:
            return cache.match(held.request).wait(self._load_timeout_seconds), SYSTEM_CLOCK.now() - started
        except RequestError:
            cache.end_prefetch(held.request)
            raise

    def add(self, held: HeldTask) -> None:
        """The task holds what was found, from here on; where it does not take that in, nothing does."""
        try:
            held.task.num_cached_blocks = held.num_handed_blocks  # type: ignore[attr-defined]
        except BaseException:
            self._current.cache.release(held.request)
            raise
        self._tasks[held.request.request_id] = held

    def remove(self, held: HeldTask) -> None:
        """The task is over: what it holds of the cache is unpinned."""
        del self._tasks[held.request.request_id]
        self._current.cache.release(held.request)

    def commit(self, held: HeldTask, num_computed_tokens: int, *, visible: bool = True) -> None:
        """So many tokens are computed: their full blocks are the cache's, and findable where they are `visible`.

        Raises:
            RequestError: more tokens than it has, or than its block table holds.
        """
        request = held.request
        if num_computed_tokens <= 0:  # not admitted: no use, and no hit
            return
        if num_computed_tokens > request.num_tokens:
            raise RequestError(
                f"{num_computed_tokens} tokens of {request.request_id!r} computed; it has {request.num_tokens}"
            )
        num_blocks = self.hand_over(held, num_computed_tokens)
        if visible:
            with held.lock:
                self._publish(held, num_blocks)

    def _publish(self, held: HeldTask, num_blocks: int) -> None:
        """A scheduler may say less than it did before: then nothing changes. Under the task's lock, as another thread's
        match may find more of it computed between the question and the commit."""
        if num_blocks >= held.num_committed_blocks:
            self._current.cache.commit(held.request, num_blocks * self._current.block_size)
            held.num_committed_blocks = num_blocks

    def hand_over(self, held: HeldTask, num_tokens: int) -> int:
        """The full blocks of its first tokens are the cache's, of output only where that is cached; how many."""
        num_blocks, num_handed = self._num_cacheable_blocks(held, num_tokens), held.num_handed_blocks
        if not held.with_path:
            num_new = max(0, num_blocks - num_handed)
            table = list(held.task.block_tables[num_handed:num_blocks]) if num_new else []  # type: ignore[attr-defined]
            if len(table) < num_new:
                raise RequestError(
                    f"{num_blocks} full blocks of {held.request.request_id!r} are computed, but its block_tables "
                    f"has {num_handed + len(table)}"
                )
            self._current.cache.blocks.hand_over(held.request, table)  # also none: the request counts as admitted
        held.num_handed_blocks = max(num_handed, num_blocks)
        held.task.num_cached_blocks = held.num_handed_blocks  # type: ignore[attr-defined]
        return num_blocks

    def show_proven(self, held: HeldTask) -> None:
        """What the cache has of a task, and is computed by what the task has said, is findable from now on.

        Also of a task that is in another thread's call: then it is released meanwhile, at worst.
        """
        told = held.request.num_tokens if held.with_path else held.num_updated_tokens
        if told <= held.num_shown_tokens:  # most tasks: one after another is looked at in every match
            return
        if not self.speaks_by_output(held):
            return
        if (num_tokens := min(told, held.num_proven_tokens)) > held.num_shown_tokens:
            num_blocks = self._num_cacheable_blocks(held, num_tokens)
            with held.lock, suppress(UnknownRequestError):
                self._publish(held, num_blocks)
            held.num_shown_tokens = num_tokens

    def speaks_by_output(self, held: HeldTask) -> bool:
        """Whether only a token that the task says proves what is computed: nobody has marked it, or will."""
        return held.num_marked_tokens is None and (held.with_path or self.schedules_ahead)

    def _num_cacheable_blocks(self, held: HeldTask, num_tokens: int) -> int:
        # under the v0 scheduler the first token that a decode instance is sent is not among its task's outputs
        misses_one = held.with_path and self._current.splitwise_role == "decode"
        if misses_one or not self._current.cache.config.cache_outputs:
            num_tokens = min(num_tokens, held.request.num_prompt_tokens)
        return min(num_tokens // self._current.block_size, held.num_path_blocks)

"""The calls of FastDeploy's two schedulers for one request, from its match to its release."""

from __future__ import annotations

import operator
from concurrent.futures import Future
from typing import Any

from fastdeploy_cache.adapters.fastdeploy.blocks import done, num_blocks_of
from fastdeploy_cache.adapters.fastdeploy.current_cache import CurrentCache
from fastdeploy_cache.adapters.fastdeploy.held_tasks import HeldTasks
from fastdeploy_cache.adapters.fastdeploy.task import HeldTask, NotEnoughBlocksError, Task, new_request
from fastdeploy_cache.adapters.repeated_lists import RepeatedLists
from fastdeploy_cache.errors import CacheError, ConfigError, OutOfBlocksError, RequestError
from fastdeploy_cache.requests.match import Match


class CallSequences:
    """The part of the adapter that serves tasks; which calls follow each other is in `PrefixCacheManager`."""

    def __init__(self, current: CurrentCache, tasks: HeldTasks) -> None:
        self._current, self._tasks = current, tasks
        self._repeated = RepeatedLists()  # a task for which there is no room is matched and released in each step
        self._refused: set[str] = set()  # matches that failed, which the v1 scheduler releases all the same

    # -- v1

    def request_match_blocks(
        self,
        task: Task,
        block_size: int,
        *_: object,  # theirs takes more, and does not look at it
    ) -> tuple[list[int], int, dict[str, Any]]:
        """The task's cached blocks, pinned until it is released; their tokens; where they came from.

        Waits for what is below the GPU, at most `load_timeout_seconds`. At least one token is left to compute, so a
        prompt that is cached whole gives back one block less. Sets `task.num_cached_blocks`.

        Raises:
            RequestError: an empty prompt, or the task is held already. PromptTooLongError: it never fits. In each case
            nothing is held, and one release of the task does nothing.
        """
        self._check_block_size(block_size)
        name = str(task.request_id)
        is_new = task not in self._tasks
        try:
            held = HeldTask(task, new_request(task, self._repeated), with_path=False)
            match, seconds = self._tasks.match(held)
        except CacheError:
            if is_new:  # noted behind the failure: a release while the match waits is an error, as ever
                self._refused.add(name)
            raise
        self._refused.discard(name)
        held.num_handed_blocks = len(match.block_ids)
        self._tasks.add(held)
        return match.block_ids, match.num_tokens, self._metrics_of(match, seconds)

    def _metrics_of(self, match: Match, seconds: float) -> dict[str, Any]:
        size = self._current.block_size
        num_gpu = match.num_gpu_tokens // size
        num_cpu = match.num_cpu_tokens // size
        ids = match.block_ids
        return {
            "gpu_match_token_num": match.num_gpu_tokens,
            "cpu_match_token_num": match.num_cpu_tokens,
            "storage_match_token_num": match.num_storage_tokens,
            "match_gpu_block_ids": ids[:num_gpu],
            "gpu_recv_block_ids": ids[num_gpu : num_gpu + num_cpu],
            "match_storage_block_ids": ids[num_gpu + num_cpu :],
            "cpu_cache_prepare_time": seconds if num_cpu else 0.0,
            "storage_cache_prepare_time": seconds if match.num_storage_tokens else 0.0,
        }

    def update_cache_blocks(self, task: Task, block_size: int, num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` tokens are computed: their full blocks, from `task.block_tables`, are the
        cache's from now on, and findable. Sets `task.num_cached_blocks`.

        Raises:
            UnknownTaskError: not matched, or released. BlockOwnerError: its table has a block that is not its own.
        """
        self._check_block_size(block_size)
        held = self._tasks.get(task)
        held.follow_outputs()
        self._tasks.commit(held, num_computed_tokens, visible=not self._tasks.schedules_ahead)
        held.num_updated_tokens = max(held.num_updated_tokens, num_computed_tokens)

    def cache_output_blocks(self, task: Task, block_size: int) -> None:
        """The task ends: what it has said is computed, but for the last token, whose keys nobody has computed. Where it
        has said nothing since its match, no more than is visible already.

        With `enable_output_caching` off only the prompt's blocks are kept.
        """
        self._check_block_size(block_size)
        held = self._tasks.get(task)
        held.follow_outputs()
        proven = min(held.num_proven_tokens, held.request.num_tokens)  # the task may have said more since
        self._tasks.commit(held, proven or (0 if self._tasks.schedules_ahead else held.num_updated_tokens))

    def release_block_ids(self, task: Task) -> None:
        """The task is over: what it holds of the cache is unpinned. Ids behind `num_cached_blocks` stay the caller's
        (v1), or go home with it (v0). What it has computed for certain is visible from now on, if not before.

        Nothing happens where its match has failed: the v1 scheduler releases it then, in the midst of a step whose
        other tasks would be lost by an error.

        Raises:
            UnknownTaskError: it holds nothing.
        """
        if str(task.request_id) in self._refused:
            self._refused.discard(str(task.request_id))
            return
        held = self._tasks.get(task)
        try:
            if self._tasks.speaks_by_output(held):
                if held.with_path:
                    held.follow_outputs()
                told = held.request.num_tokens if held.with_path else held.num_updated_tokens
                self._tasks.commit(held, min(told, held.num_proven_tokens))
        finally:
            self._tasks.remove(held)

    def release_block_ids_async(self, task: Task) -> Future[None]:
        """`release_block_ids`, which never waits: the future is done."""
        return done(lambda: self.release_block_ids(task))

    # -- v0

    def request_block_ids(
        self, task: Task, block_size: int, dec_token_num: int = 0, *_: object
    ) -> tuple[list[int], list[int], dict[str, int]]:
        """The task's cached blocks, blocks of its own for the rest of the prompt and `dec_token_num` tokens more, and
        how many of the first were in which tier.

        Raises:
            NotEnoughBlocksError: no room; nothing is held.
        """
        self._check_block_size(block_size)
        held = HeldTask(task, new_request(task, self._repeated), with_path=True)
        num_reserved = operator.index(dec_token_num)
        if num_reserved < 0:
            raise RequestError(f"dec_token_num is {dec_token_num}; give 0 or more")
        num_blocks = num_blocks_of(held.request.num_tokens + num_reserved, block_size)
        match = self._tasks.match(held)[0]
        cache = self._current.cache
        try:
            own = cache.allocate(held.request, num_blocks - len(match.block_ids))
        except BaseException as error:
            cache.release(held.request)
            if isinstance(error, OutOfBlocksError):
                raise NotEnoughBlocksError(error.missing, error.coming) from error
            raise
        held.num_handed_blocks, held.num_path_blocks = len(match.block_ids), len(match.block_ids) + len(own)
        num_full = held.request.num_tokens // block_size - len(match.block_ids)
        held.unfilled_ids = tuple(own[num_full:])
        self._tasks.add(held)
        num_gpu = match.num_gpu_tokens // block_size
        return match.block_ids, own, {"gpu_cache_blocks": num_gpu, "cpu_cache_blocks": len(match.block_ids) - num_gpu}

    # -- both

    def mark_computed(self, task: Task, num_computed_tokens: int) -> None:
        """So many tokens of the task are computed by now: they are findable at once, and no more at its release.

        `num_computed_tokens` counts from the first token of the prompt as it was matched. For an engine that knows when
        a step has ended: others find the blocks then, not when the task says its first token.
        """
        held = self._tasks.get(task)
        held.follow_outputs()
        self._tasks.commit(held, num_computed_tokens)
        held.num_marked_tokens = num_computed_tokens

    def _check_block_size(self, block_size: int) -> None:
        if block_size != self._current.block_size:
            raise ConfigError(f"block_size {block_size}; this cache has {self._current.block_size}")

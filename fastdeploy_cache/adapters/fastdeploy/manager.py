"""FastDeploy's `PrefixCacheManager`, by its constructor, method names, arguments and returns, over ours.

Source: behaviour of PaddlePaddle FastDeploy's cache manager of spring 2026. docs/adapters/fastdeploy.md goes through it
call by call.
"""

from __future__ import annotations

import operator
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from fastdeploy_cache.adapters.fastdeploy.blocks import BlockCalls, done
from fastdeploy_cache.adapters.fastdeploy.config import cache_config, num_gpu_blocks
from fastdeploy_cache.adapters.fastdeploy.launching import Launching
from fastdeploy_cache.adapters.fastdeploy.peers import PeerCalls
from fastdeploy_cache.adapters.fastdeploy.storage import StorageCalls
from fastdeploy_cache.adapters.fastdeploy.task import (
    HeldTask,
    NotEnoughBlocksError,
    Task,
    UnknownTaskError,
    block_hash_extra_keys,
    is_inside_image,
    new_request,
)
from fastdeploy_cache.adapters.fastdeploy.views import Views
from fastdeploy_cache.errors import ConfigError, OutOfBlocksError, RequestError, UnknownRequestError
from fastdeploy_cache.manager import PrefixCacheManager as NativeManager
from fastdeploy_cache.match import Match

__all__ = ["NotEnoughBlocksError", "PrefixCacheManager"]


class PrefixCacheManager(BlockCalls, Views, StorageCalls, PeerCalls, Launching):
    """Two call sequences, any thread; calls for one request come one at a time.

    v0: `request_block_ids`, compute, `release_block_ids`.

    v1: `can_allocate_gpu_blocks`, `request_match_blocks`, `allocate_gpu_blocks` and `update_cache_blocks` for each
    chunk, `cache_output_blocks`, `write_cache_to_storage`, `release_block_ids`, `recycle_gpu_blocks` of what is behind
    `task.num_cached_blocks`. Ids from `allocate_gpu_blocks` are the caller's until they are recycled, or until
    `update_cache_blocks` hands them to the cache; one that is given back by a non-owner is refused.

    Both schedulers hand blocks over before a worker has computed them. They become visible once the task's
    `output_token_ids` have grown since its match, which says that all before its last token is computed; or by
    `mark_computed`. Of a task that has said nothing, nothing becomes visible, not at its release either.
    """

    def __init__(
        self,
        config: Any,
        tensor_parallel_size: int,
        splitwise_role: str = "mixed",
        local_data_parallel_id: int = 0,
        *,
        load_timeout_seconds: float = 5.0,
        schedules_ahead: bool = True,
    ) -> None:
        """Make the pools; `launch_cache_manager` starts the ranks. Until then there is a GPU tier and no other.

        `load_timeout_seconds`: how long a match waits for blocks from below the GPU; what is late is computed.
        `schedules_ahead`: the engine calls `update_cache_blocks` as it schedules a step, as FastDeploy's does. With
        False it calls that when the step has ended, and the blocks are visible from then on.

        Raises:
            ConfigError: an impossible setting.
        """
        self.splitwise_role = splitwise_role
        self._their_config, self._tp_size, self._dp_id = config, tensor_parallel_size, local_data_parallel_id
        self._num_blocks = num_gpu_blocks(config, splitwise_role)
        self._load_timeout_seconds, self._schedules_ahead = load_timeout_seconds, schedules_ahead
        self._tasks: dict[str, HeldTask] = {}
        self._signals = None
        self._show_signals()
        self._begin_calls()
        ours = cache_config(
            config, tp_size=tensor_parallel_size, num_blocks=self._num_blocks, data_parallel_id=local_data_parallel_id
        )
        self.cache = NativeManager(ours)

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
            nothing is held.
        """
        self._check_block_size(block_size)
        held = HeldTask(task, new_request(task), with_path=False)
        match, seconds = self._match(held)
        held.num_handed_blocks = len(match.block_ids)
        self._hold(held)
        return match.block_ids, match.num_tokens, self._metrics_of(match, seconds)

    def _hold(self, held: HeldTask) -> None:
        """From here on the task holds what was found; where it does not take that in, nothing does."""
        try:
            held.task.num_cached_blocks = held.num_handed_blocks  # type: ignore[attr-defined]
        except BaseException:
            self.cache.release(held.request)
            raise
        self._tasks[held.request.request_id] = held

    def _match(self, held: HeldTask) -> tuple[Match, float]:
        started = time.monotonic()
        for other in list(self._tasks.values()):
            self._show_proven(other)
        if self.cache.config.storage is not None:
            self.cache.prefetch(held.request)
        try:
            return self.cache.match(held.request).wait(self._load_timeout_seconds), time.monotonic() - started
        except RequestError:
            self.cache.end_prefetch(held.request)
            raise

    def _metrics_of(self, match: Match, seconds: float) -> dict[str, Any]:
        size = self.cache.config.block_size
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
        held = self._held(task)
        held.follow_outputs()
        self._commit(held, num_computed_tokens, visible=not self._schedules_ahead)
        held.num_updated_tokens = max(held.num_updated_tokens, num_computed_tokens)

    def cache_output_blocks(self, task: Task, block_size: int) -> None:
        """At its end: what the task has said is computed, but for the last token, whose keys nobody has computed. Where
        it has said nothing since its match, no more than is visible already.

        With `enable_output_caching` off only the prompt's blocks are kept.
        """
        self._check_block_size(block_size)
        held = self._held(task)
        held.follow_outputs()
        proven = min(held.num_proven_tokens, held.num_tokens)  # the task may have said more since
        self._commit(held, proven or (0 if self._schedules_ahead else held.num_updated_tokens))

    def _commit(self, held: HeldTask, num_computed_tokens: int, *, visible: bool = True) -> None:
        request, size = held.request, self.cache.config.block_size
        if num_computed_tokens <= 0:  # not admitted: no use, and no hit
            return
        if num_computed_tokens > request.num_tokens:
            raise RequestError(
                f"{num_computed_tokens} tokens of {request.request_id!r} computed; it has {request.num_tokens}"
            )
        num_blocks = self._hand_over(held, num_computed_tokens)
        if visible:
            self.cache.commit(request, num_blocks * size)

    def _hand_over(self, held: HeldTask, num_tokens: int) -> int:
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
            self.cache.blocks.hand_over(held.request, table)  # also none: the request counts as admitted
        held.num_handed_blocks = max(num_handed, num_blocks)
        held.task.num_cached_blocks = held.num_handed_blocks  # type: ignore[attr-defined]
        return num_blocks

    def _num_cacheable_blocks(self, held: HeldTask, num_tokens: int) -> int:
        # under the v0 scheduler the first token that a decode instance is sent is not among its task's outputs
        misses_one = held.with_path and self.splitwise_role == "decode"
        if misses_one or not self.cache.config.cache_outputs:
            num_tokens = min(num_tokens, held.request.num_prompt_tokens)
        return min(num_tokens // self.cache.config.block_size, held.num_path_blocks)

    def _show_proven(self, held: HeldTask) -> None:
        """What the cache has of a task, and is computed by what the task has said, is findable from now on.

        Also of a task that is in another thread's call: then it is released meanwhile, at worst.
        """
        told = held.num_tokens if held.with_path else held.num_updated_tokens
        if told <= held.num_shown_tokens:  # most tasks: one after another is looked at in every match
            return
        if held.num_marked_tokens is not None or not (held.with_path or self._schedules_ahead):
            return
        if (num_tokens := min(told, held.num_proven_tokens)) > held.num_shown_tokens:
            num_blocks = self._num_cacheable_blocks(held, num_tokens)
            with held.lock, suppress(UnknownRequestError):
                self.cache.commit(held.request, num_blocks * self.cache.config.block_size)
            held.num_shown_tokens = num_tokens

    def release_block_ids(self, task: Task) -> None:
        """The task is over: what it holds of the cache is unpinned. Ids behind `num_cached_blocks` stay the caller's
        (v1), or go home with it (v0). What it has computed for certain is visible from now on, if not before.

        Raises:
            UnknownTaskError: it holds nothing.
        """
        held = self._held(task)
        try:
            if held.num_marked_tokens is None and (held.with_path or self._schedules_ahead):
                if held.with_path:
                    held.follow_outputs()
                told = held.num_tokens if held.with_path else held.num_updated_tokens
                self._commit(held, min(told, held.num_proven_tokens))
        finally:
            del self._tasks[held.request.request_id]
            self.cache.release(held.request)

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
        held = HeldTask(task, new_request(task), with_path=True)
        num_reserved = operator.index(dec_token_num)
        if num_reserved < 0:
            raise RequestError(f"dec_token_num is {dec_token_num}; give 0 or more")
        num_blocks = self.get_required_block_num(held.num_tokens + num_reserved, block_size)
        match = self._match(held)[0]
        try:
            own = self.cache.allocate(held.request, num_blocks - len(match.block_ids))
        except BaseException as error:
            self.cache.release(held.request)
            if isinstance(error, OutOfBlocksError):
                raise NotEnoughBlocksError(error.missing, error.coming) from error
            raise
        held.num_handed_blocks, held.num_path_blocks = len(match.block_ids), len(match.block_ids) + len(own)
        num_full = held.num_tokens // block_size - len(match.block_ids)
        held.unfilled_ids = tuple(own[num_full:])
        self._hold(held)
        num_gpu = match.num_gpu_tokens // block_size
        return match.block_ids, own, {"gpu_cache_blocks": num_gpu, "cpu_cache_blocks": len(match.block_ids) - num_gpu}

    def mark_computed(self, task: Task, num_computed_tokens: int) -> None:
        """So many tokens of the task are computed by now: they are findable at once, and no more at its release.

        `num_computed_tokens` counts from the first token of the prompt as it was matched. For an engine that knows when
        a step has ended: others find the blocks then, not when the task says its first token.
        """
        held = self._held(task)
        held.follow_outputs()
        self._commit(held, num_computed_tokens)
        held.num_marked_tokens = num_computed_tokens

    # -- images

    @staticmethod
    def get_block_hash_extra_keys(request: Task, start_idx: int, end_idx: int, mm_idx: int) -> tuple[int, list[str]]:
        """The index of the image to look from next, and the hashes of the images that overlap tokens
        [start_idx, end_idx), looking from image `mm_idx` on. The index is never behind the last image."""
        return block_hash_extra_keys(request, start_idx, end_idx, mm_idx)

    @staticmethod
    def is_chunked_mm_input(mm_inputs: Any, matched_token_num: int) -> tuple[bool, int]:
        """Whether so many tokens end inside an image, and the index of that image; 0 where they do not."""
        return is_inside_image(mm_inputs, matched_token_num)

    # -- all of it

    def reset(self, wait_for_tasks_done: bool = False) -> None:
        """Forget every prefix. Running tasks keep their blocks until they give them back."""
        if wait_for_tasks_done:
            self.cache.life.clear()
        else:
            self.cache.reset()

    def close(self) -> None:
        """End the ranks, remove the signals."""
        self._close_signals()
        self.cache.close()

    def _held(self, task: Task) -> HeldTask:
        held = self._tasks.get(str(task.request_id))
        if held is None:
            raise UnknownTaskError(f"request {task.request_id!r} holds nothing here; match it first, release it once")
        held.task = task
        return held

    def _check_block_size(self, block_size: int) -> None:
        if block_size != self.cache.config.block_size:
            raise ConfigError(f"block_size {block_size}; this cache has {self.cache.config.block_size}")

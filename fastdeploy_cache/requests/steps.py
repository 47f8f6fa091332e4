"""One step of an engine for many requests at once. Under the lock, but for packing their tokens."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from fastdeploy_cache.books.block_hash import TOKEN_BYTES
from fastdeploy_cache.books.tokens import TokenIds, pack
from fastdeploy_cache.errors import CacheError, CommitError, RequestError, counted
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.active_request import VOID, WAITING, ActiveRequest
from fastdeploy_cache.requests.requests import Requests

Packed = tuple[Request, bytes, int]
T = TypeVar("T")


def _no_step(step: object) -> RequestError:
    what = (
        f"has {counted(len(step), 'entry')}" if isinstance(step, tuple | list) else f"is of type {type(step).__name__}"
    )
    return RequestError(
        f"a step {what}: {reprlib.repr(step)}; give each as (request, token ids sampled since its last step, number of "
        "tokens computed so far), such as (request, [17], 130)"
    )


class Allocation(Protocol[T]):
    """How a step gives blocks to a request: of the full row, or of all rows. Under the lock."""

    def allocate(self, active: ActiveRequest, num_blocks: int) -> T:
        """So many more, or `OutOfBlocksError`."""
        ...

    def take_back(self, active: ActiveRequest, num_blocks: int, taken: T) -> None:
        """The reverse, for what was given last."""
        ...

    def none(self, active: ActiveRequest) -> T:
        """No blocks."""
        ...


class FullAllocation:
    """Blocks of a model whose layers all keep everything."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def allocate(self, active: ActiveRequest, num_blocks: int) -> list[int]:
        """See `Allocation`."""
        ids = self._requests.allocate(active, num_blocks, ahead_of_loads=False, is_told=False)
        try:
            return ids.tolist()
        except BaseException:
            self._requests.take_back(active, num_blocks)
            raise

    def take_back(self, active: ActiveRequest, num_blocks: int, taken: list[int]) -> None:  # noqa: ARG002
        """See `Allocation`."""
        self._requests.take_back(active, num_blocks)

    def none(self, active: ActiveRequest) -> list[int]:  # noqa: ARG002
        """See `Allocation`."""
        return []


class Steps(Generic[T]):
    """Appends, allocates and commits for each request of a step, all of it or, for that request, nothing."""

    def __init__(self, requests: Requests, block_size: int, allocation: Allocation[T]) -> None:
        self._requests, self._size, self._allocation = requests, block_size, allocation
        self._num_steps = 0

    @staticmethod
    def pack(steps: Iterable[tuple[Request, TokenIds, int]]) -> list[Packed | CacheError]:
        """Check and pack what does not need the lock. Raises `RequestError` for what is no step."""
        packed: list[Packed | CacheError] = []
        for step in steps:
            try:
                request, token_ids, num_computed_tokens = step
                tokens = pack(request.request_id, token_ids)
                is_plain = type(num_computed_tokens) is int
                packed.append(
                    (request, tokens, num_computed_tokens if is_plain else operator.index(num_computed_tokens))
                )
            except CacheError as error:
                packed.append(error)
            except (AttributeError, TypeError, ValueError) as error:
                raise _no_step(step) from error
        return packed

    def run(self, packed: Sequence[Packed | CacheError]) -> list[T | CacheError | MemoryError]:
        """For each request its new blocks, or why nothing of its step was done."""
        self._num_steps += 1
        now = self._requests.books.clock.now()
        done: list[T | CacheError | MemoryError] = []
        listener = self._requests.listener if len(packed) > 1 else None
        if listener is not None:
            listener.begin_step()
        for step in packed:
            try:
                done.append(step if isinstance(step, CacheError) else self._step(step, now))
            except (CacheError, MemoryError) as error:
                done.append(error)
        if listener is not None:
            listener.end_step()
        return done

    def _step(self, step: Packed, now: float) -> T:
        request, tokens, num_computed_tokens = step
        requests = self._requests
        active = requests.active(request)
        if active.step == self._num_steps or active.phase is VOID:
            self._refuse(active)
        active.step = self._num_steps
        if active.phase is WAITING:
            requests.matcher.settle(active)
        num_before = request.num_tokens
        num_tokens, num_room = num_before + len(tokens) // TOKEN_BYTES, len(active.block_ids) * self._size
        least, most = active.num_computed_tokens, min(num_tokens, num_room)
        if not least <= num_computed_tokens <= most:
            raise CommitError(
                f"step of request {request.request_id!r} with {num_computed_tokens} computed tokens; {least} are "
                f"committed, it has {num_tokens}, and its blocks hold {num_room}: give {least} to {most}"
            )
        new, num_new, began = None, 0, active.trail.stepped_at
        if num_tokens > num_room:
            num_new = -(-(num_tokens - num_room) // self._size)
            new = self._allocation.allocate(active, num_new)
            active.trail.stepped_at = began  # what is committed below took from there, not from the new blocks on
        try:
            request.append_packed(tokens)
            if not requests.commit(active, num_computed_tokens, now) and num_new:
                requests.tell_allocated(active, num_new)
            return self._allocation.none(active) if new is None else new
        except BaseException:  # no memory: the request is as it was
            request.cut_output(num_before)
            if new is not None:
                self._allocation.take_back(active, num_new, new)
            raise

    def _refuse(self, active: ActiveRequest) -> None:
        name = active.request.request_id
        if active.phase is VOID:
            raise RequestError(
                f"step of request {name!r}, which ran ahead of blocks that did not come; release it and match it again"
            )
        raise RequestError(f"request {name!r} is twice in one step; give each request once")

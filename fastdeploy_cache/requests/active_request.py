"""What the cache keeps of a request between match and release."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import NoReturn

import msgspec

from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_pool import REQUEST, BlockPool
from fastdeploy_cache.books.changes import Change
from fastdeploy_cache.books.leaves.policy import Asked
from fastdeploy_cache.books.run import Pin
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.errors import CommitError
from fastdeploy_cache.movement.cargo import OneBlock
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.room_queue import RoomWait
from fastdeploy_cache.requests.tables import RequestRows
from fastdeploy_cache.requests.trail import Trail
from fastdeploy_cache.storage.prefetch import StoragePrefetch


class RequestPhase(Enum):
    """Where a request is in its life::

        match ──► WAITING ──────────────► SETTLED ──► release
                     │                      ▲
                     └──────► AHEAD ────────┤
                                └─────────► VOID ───► release

    In WAITING loads, or storage, may still bring more of its prefix. The caller's next verb settles it at what the
    caller saw last. In AHEAD it uses blocks that are still on their way, and publishes nothing before `confirm`. In
    VOID one of these has not come: what was computed on it is worth nothing.
    """

    WAITING = "waiting"
    AHEAD = "ahead"
    SETTLED = "settled"
    VOID = "void"
    __hash__ = object.__hash__  # by identity: the enumeration's own is a call of Python


WAITING, AHEAD, SETTLED, VOID = RequestPhase  # looking a member up in its class costs as much as a dictionary
_NEXT: dict[RequestPhase, tuple[RequestPhase, ...]] = {
    WAITING: (AHEAD, SETTLED),
    AHEAD: (SETTLED, VOID),
    SETTLED: (),
    VOID: (),
}

_NONE, _NOTHING = array("i"), Asked(0, 0)  # never changed


@dataclass(slots=True, eq=False, kw_only=True)
class Committed(Change):
    """A request that is offered to another instance has committed a step."""

    active: ActiveRequest


class ActiveRequest(msgspec.Struct, eq=False):
    """Blocks of the request::

        block_ids   [ matched | committed, in the tree or duplicates | private ]
                              ^ num_matched_blocks                   ^ num_committed_blocks

    Until the match is settled, `pin` may lie deeper than what is readable, for what is coming. The match settles at
    what its caller was shown last, never at more.
    """

    request: Request
    keys: BlockKeys
    generation: int  # of the cache, when it was matched
    trail: Trail
    block_ids: array[int]  # of a settled one, or of one that runs ahead: see above
    phase: RequestPhase = WAITING
    is_admitted: bool = False  # it got blocks, or committed some: else its release is no use
    is_detached: bool = False  # its blocks continue nothing that is cached: it publishes nothing
    # -- the match
    pin: Pin | None = None
    num_pinned_blocks: int = 0
    asked: Asked = _NOTHING  # that the match looked for, and of these what is cached in any tier
    num_gpu_blocks: int = 0  # found on the GPU by the match
    room: RoomWait | None = None  # for a load, which lacks blocks that copies in flight will give back
    num_unloaded_blocks: int = 0  # in the CPU tier, not loaded for want of room
    loads: Sequence[Transfer] = ()  # that it waits for
    prefetch: StoragePrefetch | None = None  # from storage: what may still come, and what came
    copy: OneBlock | None = None  # of the last block of a whole-prompt hit, while the match is not settled
    num_readable_blocks: int = 0  # in the `Match` that its caller saw last; of one that runs ahead: that are there
    # -- its blocks, once it is settled or runs ahead
    duplicates: array[int] = _NONE
    num_matched_blocks: int = 0
    num_committed_blocks: int = 0
    num_computed_tokens: int = 0  # of the last commit
    num_copied_tokens: int = 0  # in the private block that the copy of the last block has filled
    step: int = 0  # the last step that it took part in
    ahead: Sequence[Transfer] = ()  # loads whose destinations it uses before they have ended
    rows: RequestRows | None = None  # of a hybrid model, what it holds of the rows behind the full one

    def __repr__(self) -> str:
        """The request and its phase: tokens would be a page."""
        return f"ActiveRequest({self.request!r}, {self.phase.value})"

    def enter(self, phase: RequestPhase) -> None:
        """Go on to another phase. The only place where it changes."""
        assert phase in _NEXT[self.phase], f"a request that is {self.phase.value} cannot become {phase.value}"
        self.phase = phase

    @property
    def is_settled(self) -> bool:
        """Whether its blocks are fixed, for good or bad."""
        return self.phase is SETTLED or self.phase is VOID

    @property
    def is_ahead(self) -> bool:
        """Whether it runs on blocks that are not confirmed."""
        return self.phase is AHEAD

    @property
    def is_fetching(self) -> bool:
        """Whether more may come from storage for its match, which is not settled."""
        return self.prefetch is not None and not self.is_settled and self.prefetch.is_pending

    def num_storage_blocks(self, num_gpu_blocks: int, num_blocks: int) -> int:
        """How many of the matched blocks [num_gpu_blocks, num_blocks) its prefetch has brought from storage."""
        if self.prefetch is None:
            return 0
        end = self.prefetch.first + self.prefetch.num_landed
        return max(0, min(num_blocks, end) - max(num_gpu_blocks, self.prefetch.first))

    def private_ids(self) -> array[int]:
        """Blocks that are the request's own: duplicates of cached ones, and those not committed yet."""
        own = self.duplicates + self.block_ids[self.num_committed_blocks :]
        return own + self.copy.block_ids if self.copy is not None and self.copy.has_landed else own

    def free_private(self, pool: BlockPool) -> None:
        """Give these back, one by one where there is no memory for a list of them."""
        if self.duplicates:
            pool.free(self.duplicates, REQUEST)
        try:
            ids = self.block_ids[self.num_committed_blocks :]
        except MemoryError:
            pool.free_each(islice(self.block_ids, self.num_committed_blocks, None), REQUEST)
        else:
            if ids:
                pool.free(ids, REQUEST)
        if self.copy is not None and self.copy.has_landed:
            pool.free(self.copy.block_ids, REQUEST)

    def refuse_commit(self, num_computed_tokens: int, num_held_tokens: int) -> NoReturn:
        """Say why so many tokens cannot be committed, where the request's blocks hold `num_held_tokens`."""
        request = self.request
        if num_computed_tokens < self.num_computed_tokens:
            raise CommitError(
                f"commit of {num_computed_tokens} tokens for request {request.request_id!r}, of which "
                f"{self.num_computed_tokens} are committed; commit the same or more, and only what is accepted"
            )
        if not 0 <= num_computed_tokens <= request.num_tokens:
            raise CommitError(
                f"commit of {num_computed_tokens} tokens for request {request.request_id!r} of {request.num_tokens}; "
                "commit 0 or more, and append_output before committing what was computed for it"
            )
        raise CommitError(
            f"commit of {num_computed_tokens} tokens for request {request.request_id!r}, whose "
            f"{len(self.block_ids)} blocks hold {num_held_tokens}; allocate first"
        )

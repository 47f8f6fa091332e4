"""The flight recorder: what the cache was asked, decided and suffered last, in a ring of bounded size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final, NamedTuple

from fastdeploy_cache.books.block_hash import TOKEN_BYTES
from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_marks import block_marks
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.run import Pin, Run
from fastdeploy_cache.insight.flight.records import RecordKind
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.active_request import VOID, ActiveRequest

_NUM_PARTS: Final = 2  # of a full ring
_NOTE_BYTES, _REQUEST_BYTES = 128, 384  # that a small tuple takes in memory with its numbers, and a large one more
_MATCHED, _LOOKED, _RELEASED = (int(kind) for kind in (RecordKind.MATCHED, RecordKind.LOOKED, RecordKind.RELEASED))
_STEPPED, _MARKED, _ANCHORED = (int(kind) for kind in (RecordKind.STEPPED, RecordKind.MARKED, RecordKind.ANCHORED))
Note = tuple[Any, ...]  # its kind, and what `records` says of that


class RingPart(NamedTuple):
    """A part of the ring that can be read without those before it: their requests are not referred to. `policy`: the
    eviction policy when it begins."""

    serial: int
    notes: Iterable[Note]
    policy: str


class FlightRecorder:
    """Notes each verb of a request in a tuple; packed it is when it is written.

    The tokens that a match has found are not looked at again: another request that was recorded has the same ones, and
    the run that they lie in knows which (`Run.author`). So a resent conversation costs the marks of what is new in it.
    References do not reach back over the begin of a part, so that the oldest part can be dropped at any time.

    See `RequestListener`. Under the lock, but for `parts`.
    """

    def __init__(
        self,
        books: Books,
        block_size: int,
        max_bytes: int,
        *,
        has_hints: bool,
        has_rest: bool,
        policy: str,
        clock: Callable[[], float],
    ) -> None:
        """`max_bytes`: of the ring. `has_hints`: the eviction policy goes by
        priorities, or by how long something is to be kept. `has_rest`: likewise, by what is known at the end
        of a request; or last blocks are copied. `policy`: the eviction policy.
        """
        self._policy = policy
        self._has_hints, self._has_rest = has_hints, has_rest
        self._gpu_evicted, self._cpu_evicted = books.residency.ages.num_evicted
        self._clock = clock
        self._block_size, self._block_bytes = block_size, block_size * TOKEN_BYTES
        self._part_bytes = max_bytes // _NUM_PARTS
        self._most_notes = self._part_bytes // _NOTE_BYTES  # also where no request comes or goes for long
        self._sealed: deque[tuple[RingPart, int]] = deque()  # with the bytes of each
        self._num_sealed_bytes = self._num_dropped = self._number = self._serial = self._num_before_step = 0
        self._begin_part()

    def _begin_part(self) -> None:
        self._notes: deque[Note] = deque(maxlen=self._most_notes)
        self.note = self._notes.append
        self._num_large_bytes = 0  # what large tuples take beyond that of small ones, with their marks
        self._serial += 1
        self._first_policy = self._policy
        self._first = self._number + 1  # of the requests that may be referred to

    def matched(self, active: ActiveRequest) -> None:
        """See `RequestListener`."""
        request, pin, keys, author, num_known = active.request, active.pin, active.keys, 0, 0
        self._number = active.trail.number = number = self._number + 1
        if pin is not None:
            author = pin.run.author
            if author >= self._first:
                num_known = active.num_pinned_blocks
            else:
                author = 0
                _claim(pin, number)
        num_tokens, size, rest = request.num_tokens, self._block_bytes, None
        num_full = num_tokens // self._block_size
        if num_full * size <= len(keys.prompt):
            marks = block_marks(keys.prompt, num_known * size, num_full - num_known, size)
        else:
            marks = self._marks(keys, num_known, num_full)
        if self._has_hints or request.counted or request.images or request.is_hinted:  # a later policy may go by it
            rest = self._rest_of(request)
        note, clock = self.note, self._clock
        note(
            (
                _MATCHED,
                clock(),
                number,
                num_tokens,
                request.num_prompt_tokens,
                request.namespace,
                author,
                num_known,
                marks,
                active.asked.num_found,
                active.num_gpu_blocks,
                active.num_unloaded_blocks,
                active.trail.refused_for,
                rest,
            )
        )
        if active.rows is not None:
            note((_ANCHORED, number, active.trail.num_whole_blocks))
        self._num_large_bytes = num_bytes = self._num_large_bytes + _REQUEST_BYTES + len(marks)
        if num_bytes + len(self._notes) * _NOTE_BYTES >= self._part_bytes:
            self.roll()

    def looked(self, request: Request, keys: BlockKeys, path: list[Run], num_found: int) -> None:
        """See `RequestListener`."""
        self._number = number = self._number + 1
        author = path[-1].author if path else 0
        num_known = num_found if author >= self._first else 0
        num_full = request.num_tokens // self._block_size
        marks = self._marks(keys, num_known, num_full)
        self.note(
            (
                _LOOKED,
                self._clock(),
                number,
                request.num_tokens,
                request.num_prompt_tokens,
                request.namespace,
                author if num_known else 0,
                num_known,
                marks,
                num_found,
                self._rest_of(request),
            )
        )
        self._num_large_bytes += _REQUEST_BYTES + len(marks)

    def begin_step(self) -> None:
        """See `RequestListener`."""
        self._num_before_step = len(self._notes)

    def end_step(self) -> None:
        """See `RequestListener`. A full ring, to which no request comes, does not tell."""
        num_notes = len(self._notes) - self._num_before_step
        if num_notes > 1:
            note = self.note
            note((_STEPPED, num_notes))

    def released(self, active: ActiveRequest) -> None:
        """See `RequestListener`."""
        request, pin, gpu, cpu = active.request, active.pin, self._gpu_evicted, self._cpu_evicted
        num_matched, num_gpu = active.num_matched_blocks, active.num_gpu_blocks
        is_hinted = request.session_id or request.will_go_on is not None  # a later policy may go by it
        rest = self._end_of(active) if is_hinted or num_gpu != num_matched or self._has_rest else None
        first, marks = request.num_prompt_tokens // self._block_size, b""  # what is in front was marked by its match
        if pin is not None:
            run, end, size = pin.run, active.num_committed_blocks, self._block_bytes
            if end > first:
                if pin.end >= end - first and active.num_pinned_blocks == end:  # it is there in one piece
                    marks = block_marks(run.tokens, (pin.end + first - end) * size, end - first, size)
                else:
                    marks = self._marks(active.keys, first, end)
            if pin.end == run.num_blocks:
                run.author = active.trail.number
        note, clock = self.note, self._clock
        note(
            (
                _RELEASED,
                clock(),
                active.trail.number,
                request.num_tokens,
                active.num_computed_tokens,
                num_matched,
                num_gpu,
                gpu[0] + gpu[1],
                cpu[0] + cpu[1],
                first,
                marks,
                rest,
            )
        )
        self._num_large_bytes += _REQUEST_BYTES + len(marks)

    def marked(self, actives: Iterable[ActiveRequest]) -> list[Note]:
        """What their release will tell of the blocks behind their prompts, for a file that is written before it."""
        notes = list[Note]()
        for active in actives:
            first, end = active.request.num_prompt_tokens // self._block_size, active.num_committed_blocks
            if active.trail.number and end > first:
                notes.append((_MARKED, active.trail.number, first, self._marks(active.keys, first, end)))
        return notes

    def parts(self, after: tuple[int, int] = (0, 0)) -> list[RingPart]:
        """What the ring has: copies of its parts, the oldest first.

        `after` is the serial of a part and how many of its notes are known already: only what came behind these. Where
        that part has been dropped, the first serial that is returned is not the next one.
        """
        serial, num_known = after
        found = list[RingPart]()
        for part in (*[part for part, _ in self._sealed], self._part()):
            if part.serial > serial:
                found.append(part._replace(notes=list(part.notes)))
            elif part.serial == serial:
                found.append(part._replace(notes=list(islice(part.notes, num_known, None))))
        return found

    def _part(self) -> RingPart:
        return RingPart(self._serial, self._notes, self._first_policy)

    def follow(self, policy: str, *, has_rest: bool) -> None:
        """Another eviction policy is in force: see the arguments of the constructor."""
        self._policy, self._has_rest = policy, self._has_rest or has_rest

    @property
    def num_bytes(self) -> int:
        """What the ring takes now, about."""
        return self._num_sealed_bytes + self._num_large_bytes + len(self._notes) * _NOTE_BYTES

    @property
    def is_full(self) -> bool:
        """Whether the part takes no note more without dropping one: no request has come for long."""
        return len(self._notes) == self._most_notes

    @property
    def is_half_full(self) -> bool:
        """Whether it is time for another part, although no request comes."""
        return 2 * len(self._notes) >= self._most_notes

    @property
    def num_dropped(self) -> int:
        """How many parts have lost notes, or all of them, to newer ones."""
        return self._num_dropped + self.is_full

    def roll(self) -> None:
        """The part is full: begin another, and drop the oldest where the ring is full with it."""
        num_bytes = self._num_large_bytes + len(self._notes) * _NOTE_BYTES
        self._num_dropped += self.is_full
        self._sealed.append((self._part(), num_bytes))
        self._num_sealed_bytes += num_bytes
        while len(self._sealed) >= _NUM_PARTS:
            self._num_sealed_bytes -= self._sealed.popleft()[1]
            self._num_dropped += 1
        self._begin_part()

    def _marks(self, keys: BlockKeys, first: int, end: int) -> bytes:
        size = self._block_bytes
        tokens, at = keys.buffer(first * size, end * size)
        return block_marks(tokens, at, end - first, size)

    @staticmethod
    def _end_of(active: ActiveRequest) -> tuple[object, ...]:
        """What came of few requests, and hints."""
        request, num_gpu, trail = active.request, active.num_gpu_blocks, active.trail
        num_storage = active.num_storage_blocks(num_gpu, active.num_matched_blocks)
        loads = num_storage, active.num_copied_tokens, trail.load_seconds, active.phase is VOID, trail.has_failed_load
        return *loads, request.session_ended, request.tool_call_pending, request.session_hint

    @staticmethod
    def _rest_of(request: Request) -> tuple[object, ...]:
        """What few requests have: a past before a preemption, hints, images."""
        images = request.images
        return (
            request.counted,
            request.used,
            request.match_inside_images,
            request.priority,
            request.keep_seconds,
            images,
        )


def _claim(pin: Pin, number: int) -> None:
    """The tokens of this request go through all of these runs, but for the last one where the pin ends inside it."""
    for run in pin.run.path():
        if run is not pin.run or pin.end == run.num_blocks:
            run.author = number

"""Hears of every block that comes or goes, and notes it for the publisher. Under the lock."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from fastdeploy_cache.books.block_hash import TOKEN_BYTES
from fastdeploy_cache.books.checkpoint import Checkpoint, chain_of
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import CPU, GPU, Run, Tier
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.events.journal import Note, RecordTag

_BEGAN, _CLEARED, _WHOLE = (int(RecordTag[name]) for name in ("BEGAN", "CLEARED", "WHOLE"))
_CAME, _LEFT, _GONE, _PARTED = (int(RecordTag[name]) for name in ("CAME", "LEFT", "GONE", "PARTED"))
_JOINED, _ANCHORED, _LIFTED = (int(RecordTag[name]) for name in ("JOINED", "ANCHORED", "LIFTED"))
_NOBODY = sys.maxsize  # as the last number that is known no more: none is


class EventTap:
    """Notes records of `journal`, in their order, until the feed takes them.

    A run is *told* when the publisher knows it, and is told with its parent at the latest. What happens to a run that
    is not told needs no note: it will be told as it is then. After `begin` none is, and `walk` tells one after the
    other, while verbs go on.

    A note of blocks that have come refers to the run's tokens and copies nothing: only their end is ever cut off in
    place, behind a call of `ended`. There, what was noted of that run's tokens is copied first.

    Attributes:
        num_notes: of all times.
        num_begun: how often all was told anew.
    """

    def __init__(self, tree: PrefixTree, wake: Callable[[], None]) -> None:
        """`wake` is called when there is a note where there was none; it must not wait, or take the lock."""
        self._tree, self._wake = tree, wake
        self._block_bytes = tree.block_size * TOKEN_BYTES
        self._notes: deque[Note] = deque()
        self._note = self._notes.append
        self._unsettled: set[int] = set()  # runs whose noted tokens may still be cut off
        self._last = 0  # number given to a run
        self._base = _NOBODY  # runs up to this number are not told
        self._is_on = self._is_woken = False
        self._epoch = -1
        self._to_tell: list[Iterator[Run]] = []
        self.num_notes = self.num_begun = 0

    def hang(self) -> None:
        """Hear of everything from now on. In a turn."""
        taps = self._tree.residency.taps
        taps.came += (self.came,)
        taps.left += (self.left,)
        taps.ended += (self.ended,)
        taps.parted += (self.parted,)
        taps.joined += (self.joined,)
        if (checkpoints := self._tree.residency.checkpoints) is not None:
            checkpoints.taps.anchored += (self.anchored,)
            checkpoints.taps.lifted += (self.lifted,)

    def begin(self) -> None:
        """Forget what was noted and tell all anew: the publisher has lost something, or is another one. In a turn."""
        self.deafen()
        self._base, self._is_on, self._epoch = self._last, True, self._tree.epoch
        self.num_begun += 1
        self._put((_BEGAN,))
        self._to_tell = [iter(list(self._tree.roots.values()))]

    def deafen(self) -> None:
        """Note nothing any more, until `begin`. In a turn."""
        self._base, self._is_on = _NOBODY, False
        self._notes.clear()
        self._unsettled.clear()
        self._to_tell.clear()

    @property
    def num_noted(self) -> int:
        """How many notes there were so far, also those that nobody has taken yet."""
        return self.num_notes + len(self._notes)

    @property
    def is_on(self) -> bool:
        """Whether anything is noted."""
        return self._is_on

    @property
    def is_walking(self) -> bool:
        """Whether runs are left that have not been told."""
        return bool(self._to_tell)

    def walk(self, num_runs: int, num_token_bytes: int) -> None:
        """Tell so many runs more, or a few less where they have more tokens than that. In a turn."""
        while self._to_tell and num_runs > 0 and num_token_bytes > 0:
            run = next(self._to_tell[-1], None)
            if run is None:
                self._to_tell.pop()
                continue
            num_runs -= 1
            if run.parent is None:
                if self._tree.roots.get(run.namespace) is run:  # else it has gone meanwhile
                    self._tell_later(run.children.values())
            elif run.number <= self._base:
                for each in run.path():  # it may have been cut since its parent was told: then upper parts are new
                    if each.number <= self._base and self._can_tell(each):
                        num_token_bytes -= len(each.tokens)
                        self._tell(each)

    def take(self, num_token_bytes: int) -> list[Note]:
        """The next notes, with so many bytes of tokens or a little more; none are left where it returns none.

        In a turn, as it copies the tokens.
        """
        notes, taken = self._notes, list[Note]()
        while notes and num_token_bytes > 0:
            note = self._settled(notes.popleft())
            if note[0] in (_CAME, _WHOLE):
                num_token_bytes -= len(note[2])
            taken.append(note)
        if not notes:
            self._unsettled.clear()
            self._is_woken = False
        self.num_notes += len(taken)
        return taken

    # -- taps

    def came(self, run: Run, tier: Tier, first: int, num_blocks: int) -> None:
        """See `Taps`."""
        if (number := run.number) > self._base:
            tokens, extras = run.tokens, run.extras
            if extras is not None:
                extras = {b - first: extra for b, extra in extras.items() if first <= b < first + num_blocks} or None
            self._note((_CAME, number, tokens, num_blocks, first, tier, extras))
            if type(tokens) is bytearray:
                self._unsettled.add(number)
            if not self._is_woken:
                self._wake_up()
        elif self._is_on:
            self._meet(run)

    def left(self, run: Run, tier: Tier, first: int, num_blocks: int, why: Loss) -> None:  # noqa: ARG002 (a tap)
        """See `Taps`."""
        if (number := run.number) > self._base:
            self._note((_LEFT, number, tier, first, num_blocks))
            if not self._is_woken:
                self._wake_up()

    def ended(self, run: Run, first: int, why: Loss) -> None:  # noqa: ARG002 (a tap)
        """See `Taps`."""
        number = run.number
        if number in self._unsettled:  # also of an epoch that is over: it was noted before that
            self._settle()
        if number > self._base and not first:
            self.note_forgotten()  # a reset removes runs before its turn is over
            if number > self._base:
                run.number = 0
                self._put((_GONE, number))

    def parted(self, upper: Run, lower: Run) -> None:
        """See `Taps`."""
        if lower.number > self._base:
            self._last += 1
            upper.number = self._last
            self._put((_PARTED, upper.number, lower.number, upper.num_blocks))

    def joined(self, upper: Run, lower: Run) -> None:
        """See `Taps`."""
        if upper.number > self._base:
            if lower.number > self._base:
                self._put((_JOINED, upper.number, lower.number))
            else:
                self._tell(upper, upper.number)

    def anchored(self, checkpoint: Checkpoint, tier: Tier) -> None:
        """See `Taps`."""
        if checkpoint.run.number > self._base:
            self._put((_ANCHORED, checkpoint.run.number, checkpoint.end, checkpoint.boundary, int(tier)))

    def lifted(self, checkpoint: Checkpoint, tier: Tier, why: Loss) -> None:  # noqa: ARG002 (a tap)
        """See `Taps`."""
        if checkpoint.run.number > self._base:
            self._put((_LIFTED, checkpoint.run.number, checkpoint.end, checkpoint.boundary, int(tier)))

    def note_forgotten(self) -> None:
        """The tree may have been reset: what is told now is of another epoch. In a turn."""
        if self._is_on and self._tree.epoch != self._epoch:
            self._epoch, self._base = self._tree.epoch, self._last
            self._to_tell = [iter(list(self._tree.roots.values()))]
            self._put((_CLEARED,))

    # -- telling

    def _meet(self, run: Run) -> None:
        """A run that is not told has got blocks. It is told now, unless it is of an earlier epoch, or its parent is not
        told yet: then the walk will come by it."""
        self.note_forgotten()
        if self._can_tell(run):
            self._tell(run)

    def _can_tell(self, run: Run) -> bool:
        parent = run.parent
        if parent is None or run.epoch != self._epoch:
            return False
        return parent.number > self._base or parent.parent is None

    def _tell(self, run: Run, number: int = 0) -> None:
        parent, tokens = run.parent, run.tokens
        assert parent is not None
        if not number:
            self._last += 1
            number = run.number = self._last
        extras = dict(run.extras) if run.extras is not None else None
        num_cpu, above = run.num_in(CPU, run.num_blocks), (parent.number, parent.namespace)
        self._put((_WHOLE, number, tokens, run.num_blocks, *above, extras, run.num_gpu, run.cpu_start, num_cpu))
        if type(tokens) is bytearray:
            self._unsettled.add(number)
        for checkpoint in chain_of(run):
            for tier, is_there in ((GPU, checkpoint.units is not None), (CPU, checkpoint.pages is not None)):
                if is_there:
                    self._put((_ANCHORED, number, checkpoint.end, checkpoint.boundary, int(tier)))
        if run.children:
            self._tell_later(run.children.values())

    def _tell_later(self, runs: Iterable[Run]) -> None:
        """A copy: they come and go before it is their turn."""
        if some := [run for run in runs if run.number <= self._base]:
            self._to_tell.append(iter(some))

    # -- notes

    def _put(self, note: Note) -> None:
        self._note(note)
        if not self._is_woken:
            self._wake_up()

    def _wake_up(self) -> None:
        self._is_woken = True
        self._wake()

    def _settle(self) -> None:
        """Copy what notes refer to, before it is cut off."""
        settled = [self._settled(note) for note in self._notes]
        self._notes.clear()
        self._notes.extend(settled)
        self._unsettled.clear()

    def _settled(self, note: Note) -> Note:
        tag = note[0]
        if tag not in (_CAME, _WHOLE):
            return note
        tokens, num_bytes = note[2], note[3] * self._block_bytes
        if len(tokens) != num_bytes:  # it refers to all of its run, which has not been cut since
            first = note[4] * self._block_bytes if tag == _CAME else 0
            tokens = bytes(memoryview(tokens)[first : first + num_bytes])
        return note if type(tokens) is bytes and tokens is note[2] else (*note[:2], bytes(tokens), *note[3:])

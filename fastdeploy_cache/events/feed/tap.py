"""Hears of every block that comes or goes, and remembers of which runs the publisher must be told. Under the lock."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from fastdeploy_cache.books.block_hash import TOKEN_BYTES
from fastdeploy_cache.books.checkpoint import Checkpoint, chain_of
from fastdeploy_cache.books.large_dict import pieces
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import CPU, Run, Tier
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.events.journal import Note, RecordTag

_BEGAN, _CLEARED, _RUN = (int(RecordTag[name]) for name in ("BEGAN", "CLEARED", "RUN"))
_GONE, _PARTED, _JOINED = (int(RecordTag[name]) for name in ("GONE", "PARTED", "JOINED"))
_NOBODY = sys.maxsize  # as the last number that is known no more: none is
_NO_TOKENS = sys.maxsize
_STEPS_A_RUN = 16


class EventTap:
    """Gives records of `journal` to whoever takes them.

    A run is *told* when the publisher knows it, and none is told before its parent. Of a told run that gets or loses
    blocks, only the first block is remembered whose tokens the publisher may lack: what the run has is looked up when
    the records are taken. So many changes of one run are one record, and a change costs an entry in a dictionary.
    After `begin` no run is told, and `take` tells one after the other, while verbs go on.

    Attributes:
        num_records: that were taken.
        num_begun: how often all was told anew.
        num_dropped: how often too much was waiting.
    """

    def __init__(self, tree: PrefixTree, wake: Callable[[], None], most_waiting: int) -> None:
        """`wake` is called when there is a record where there was none; it must not wait, or take the lock. Changes of
        shape wait one by one: when there are more than `most_waiting`, all is dropped until `begin`."""
        self._most_waiting = most_waiting
        self._tree, self._residency, self._wake = tree, tree.residency, wake
        self._block_bytes = tree.block_size * TOKEN_BYTES
        self._dirty: dict[Run, int] = {}
        self._shapes: list[Note] = []
        self._last = 0  # number given to a run
        self._base = _NOBODY  # runs up to this number are not told
        self._is_on = self._is_woken = False
        self._epoch = -1
        self._to_tell: list[Iterator[Run | None]] = []
        self.num_records = self.num_begun = self.num_dropped = 0

    def hang(self) -> None:
        """Hear of everything from now on. In a turn."""
        taps = self._tree.residency.taps
        taps.came += (self.came,)
        taps.left += (self.left,)
        taps.ended += (self.ended,)
        taps.hidden += (self.hidden,)
        taps.parted += (self.parted,)
        taps.joined += (self.joined,)
        if (checkpoints := self._tree.residency.checkpoints) is not None:
            checkpoints.taps.anchored += (self.anchored,)
            checkpoints.taps.lifted += (self.lifted,)

    def begin(self) -> None:
        """Tell all anew: the publisher has lost something, or is another one. In a turn."""
        self.deafen()
        self._base, self._is_on, self._epoch = self._last, True, self._tree.epoch
        self.num_begun += 1
        self._note((_BEGAN,))
        self._to_tell = [self._untold_roots()]

    def deafen(self) -> None:
        """Remember nothing any more, until `begin`. In a turn."""
        self._base, self._is_on = _NOBODY, False
        self._dirty, self._shapes, self._to_tell = {}, [], []

    @property
    def is_on(self) -> bool:
        """Whether anything is remembered."""
        return self._is_on

    @property
    def is_behind(self) -> bool:
        """Whether there is something to take."""
        return self._is_on and bool(self._shapes or self._dirty or self._to_tell)

    # -- taking

    def take(self, num_runs: int, num_token_bytes: int) -> list[Note]:
        """The next records: about so many, with so many bytes of tokens or one run more. None: nothing is left.

        In a turn. Changes of shape come first, as the runs are as they are behind these.
        """
        self.note_forgotten()  # also where nobody has said so
        if not self._is_on:
            return []
        notes, self._shapes = self._shapes, []
        num_steps = _STEPS_A_RUN * num_runs  # past runs that are told already, or have gone
        while num_steps > 0 and num_token_bytes > 0 and len(notes) < num_runs and (self._dirty or self._to_tell):
            num_steps -= 1
            run = next(iter(self._dirty)) if self._dirty else self._step()
            if run is not None:
                num_token_bytes -= self._tell_with_above(run, notes)
        if not self.is_behind:
            self._is_woken = False
        self.num_records += len(notes)
        return notes

    def _step(self) -> Run | None:
        """Look at the next run of those that were there at `begin`: it, where it is not told yet."""
        try:
            run = next(self._to_tell[-1])
        except StopIteration:
            self._to_tell.pop()
            return None
        if run is None or run.parent is None or run.number > self._base:
            return None
        return run if run.epoch == self._epoch else None

    def _untold_roots(self) -> Iterator[Run | None]:
        """The runs that begin prompts, a piece of the roots at a time; None: a step without one."""
        for piece in pieces(lambda: self._tree.roots):
            yield None
            for root in piece:
                yield from self._untold_below(root)

    @staticmethod
    def _untold_below(run: Run) -> Iterator[Run | None]:
        """The runs below one, a piece at a time."""
        for piece in pieces(lambda: run.children):
            yield None
            yield from piece

    def _tell_with_above(self, run: Run, notes: list[Note]) -> int:
        """Note what runs above it have, as far as that is not told, and what it has itself; returns the token bytes.

        A run that was cut since its parent was told has new ones above it.
        """
        above, num_bytes = [run], 0
        while (parent := above[-1].parent) is not None and parent.parent is not None:
            if parent.number > self._base and parent not in self._dirty:
                break
            above.append(parent)
        for each in reversed(above):
            if each.number <= self._base or each in self._dirty:
                notes.append(self._record(each))
                num_bytes += len(notes[-1][6])
        return num_bytes

    def _record(self, run: Run) -> Note:
        parent, first, size = run.parent, self._dirty.pop(run, _NO_TOKENS), self._block_bytes
        assert parent is not None
        if run.number <= self._base:
            self._last += 1
            run.number, first = self._last, 0
            if run.children:
                self._to_tell.append(self._untold_below(run))
        tokens = bytes(memoryview(run.tokens)[first * size : run.num_blocks * size]) if first < run.num_blocks else b""
        extras = {b: extra for b, extra in run.extras.items() if b >= first} if run.extras is not None else None
        anchors = [(c.end, c.boundary, (c.units is not None) + 2 * (c.pages is not None)) for c in chain_of(run)]
        return (
            *(_RUN, run.number, parent.number if parent.parent is not None else 0, parent.namespace, run.num_blocks),
            *(min(first, run.num_blocks), tokens, extras),
            *(run.num_gpu, run.cpu_start, run.num_in(CPU, run.num_blocks), anchors),
        )

    # -- taps

    def came(self, run: Run, tier: Tier, first: int, num_blocks: int) -> None:  # noqa: ARG002 (a tap)
        """See `Taps`."""
        if (known := self._dirty.get(run)) is not None:
            if first < known:
                self._dirty[run] = first
        elif run.number > self._base:
            self._dirty[run] = first
            if not self._is_woken:
                self._wake_up()
        elif self._is_on:  # it will be told, unless it is of an earlier epoch
            if self._residency.epoch != self._epoch:
                self.note_forgotten()
            if run.epoch == self._epoch and self._is_on:
                self._dirty[run] = 0
                if not self._is_woken:
                    self._wake_up()

    def left(self, run: Run, tier: Tier, first: int, num_blocks: int, why: Loss) -> None:  # noqa: ARG002 (a tap)
        """See `Taps`."""
        if run not in self._dirty and run.number > self._base:
            self._dirty[run] = _NO_TOKENS
            if not self._is_woken:
                self._wake_up()

    def ended(self, run: Run, first: int, why: Loss) -> None:  # noqa: ARG002 (a tap)
        """See `Taps`. A run that loses its end has left a tier there, or will: that is told."""
        if first:
            return
        self._dirty.pop(run, None)
        if run.number > self._base:
            if self._residency.epoch != self._epoch:  # a reset removes runs before its turn is over
                self.note_forgotten()
            else:
                self._note((_GONE, run.number))
            run.number = 0

    def hidden(self, run: Run) -> None:
        """See `Taps`. Of what it has yet nothing is told: another run may get the same blocks meanwhile."""
        if run.epoch == self._epoch:
            self.ended(run, 0, Loss.RESET)

    def parted(self, upper: Run, lower: Run) -> None:
        """See `Taps`."""
        first = self._dirty.get(lower)
        if lower.number > self._base:
            self._last += 1
            upper.number = self._last
            self._note((_PARTED, upper.number, lower.number, upper.num_blocks))
        elif first is None and self._is_on:
            self._to_tell.append(iter((upper,)))  # nobody else comes by it, where the lower part goes first
        if not self._is_on:  # or too much was waiting just now
            return
        if first is not None:  # what was not told of it is not told of its parts
            self._dirty[upper] = first
            self._dirty[lower] = first if first == _NO_TOKENS else max(0, first - upper.num_blocks)

    def joined(self, upper: Run, lower: Run) -> None:
        """See `Taps`."""
        num_above, of_lower = upper.num_blocks - lower.num_blocks, self._dirty.pop(lower, None)
        if upper.number > self._base:
            if lower.number > self._base:
                self._note((_JOINED, upper.number, lower.number, num_above))
                if not self._is_on:
                    return
            else:
                of_lower = 0
                self._to_tell.append(self._untold_below(upper))
            if of_lower is not None or upper in self._dirty:
                self._dirty[upper] = min(self._dirty.get(upper, _NO_TOKENS), num_above)
        elif of_lower is not None:
            self._dirty[upper] = 0

    def anchored(self, checkpoint: Checkpoint, tier: Tier) -> None:  # noqa: ARG002 (a tap)
        """See `Taps`."""
        run: Run = checkpoint.run
        if run not in self._dirty and run.number > self._base:
            self._dirty[run] = _NO_TOKENS
            if not self._is_woken:
                self._wake_up()

    def lifted(self, checkpoint: Checkpoint, tier: Tier, why: Loss) -> None:  # noqa: ARG002 (a tap)
        """See `Taps`."""
        self.anchored(checkpoint, tier)

    def note_forgotten(self) -> None:
        """The tree may have been reset: what is told now is of another epoch. In a turn."""
        if self._is_on and self._tree.epoch != self._epoch:
            self._epoch, self._base = self._tree.epoch, self._last
            self._dirty, self._to_tell = {}, [self._untold_roots()]
            self._note((_CLEARED,))

    def _note(self, note: Note) -> None:
        shapes = self._shapes
        shapes.append(note)
        if len(shapes) > self._most_waiting:
            self.num_dropped += 1
            self.deafen()
            self._wake()
        if not self._is_woken:
            self._wake_up()

    def _wake_up(self) -> None:
        self._is_woken = True
        self._wake()

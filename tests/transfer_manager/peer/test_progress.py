"""How far a reading is: each block and layer once, never early, whatever becomes of the owner's messages."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_cache.transfer_manager.peer.messages import Chunk
from fastdeploy_cache.transfer_manager.peer.progress import Progress, ReadStep


class State(NamedTuple):
    """What an owner says at one moment."""

    num_complete: int
    chunks: tuple[Chunk, ...]

    def ready(self, block: int, num_layers: int) -> int:
        """How many layers of a block are there, by this message alone."""
        if block < self.num_complete:
            return num_layers
        return min(num_layers, next((chunk.num_layers for chunk in self.chunks if chunk.end > block), 0))


@st.composite
def histories(draw: st.DrawFn, num_blocks: int, num_layers: int) -> list[State]:
    """An owner's states in order: steps compute one piece of the prompt after the other, some announced ahead."""
    edges = sorted({*draw(st.lists(st.integers(1, num_blocks), max_size=5)), num_blocks})
    states, done = [State(0, ())], 0
    for index, edge in enumerate(edges):
        ahead = edges[index : index + draw(st.integers(1, 3))]
        for layers in sorted(draw(st.sets(st.integers(0, num_layers), max_size=4))):
            has_failed = draw(st.integers(0, 9)) == 0  # another step does it again
            chunk = Chunk(edge, 0 if has_failed else layers)
            states.append(State(done, (chunk, *(Chunk(end, 0) for end in ahead[1:]))))
        if draw(st.booleans()) and edge - done > 1:  # part of a piece is complete: a step did less than it was to
            part = draw(st.integers(done + 1, edge - 1))
            states.append(State(part, (Chunk(edge, 0),)))
        done = edge
        states.append(State(done, tuple(Chunk(end, 0) for end in ahead[1:])))
    return states


class Reader:
    """Reads what `Progress` says, and compares with what was said to it."""

    def __init__(self, first_block: int, num_blocks: int, num_layers: int) -> None:
        self.progress = Progress(first_block, num_blocks, num_layers)
        self.first_block, self.num_blocks, self.num_layers = first_block, num_blocks, num_layers
        self.ready = [0] * num_blocks
        self.read: set[tuple[int, int]] = set()

    def hear(self, state: State) -> None:
        self.progress.note(state.num_complete, state.chunks)
        self.ready = [max(n, state.ready(b, self.num_layers)) for b, n in enumerate(self.ready)]

    def open(self) -> set[tuple[int, int]]:
        """Ready and not read."""
        blocks = range(self.first_block, self.num_blocks)
        return {(block, layer) for block in blocks for layer in range(self.ready[block])} - self.read

    def step(self, limit: int) -> bool:
        """One step; False where there is none."""
        todo = self.open()
        assert bool(self.progress.num_layers_in_flight) == bool(todo)
        step = self.progress.next_step(limit)
        if step is None:
            assert not todo, "something is ready and is not read"
            return False
        assert step.first == min(todo)[0], "the oldest blocks come first"
        layers = range(step.first_layer, step.end_layer)
        blocks = range(step.first, step.end)
        assert layers and blocks and len(blocks) <= max(1, limit // len(layers))
        cells = {(block, layer) for block in blocks for layer in layers}
        assert cells <= todo, "read twice, or before it is ready"
        self.progress.note_read(step)
        self.read |= cells
        return True


@given(st.data())
def test_everything_is_read_once_and_nothing_early(data: st.DataObject) -> None:
    """States are lost, doubled and come out of order; steps are of any size; the last state comes in the end."""
    num_blocks, num_layers = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    reader = Reader(data.draw(st.integers(0, num_blocks)), num_blocks, num_layers)
    states = data.draw(histories(num_blocks, num_layers))
    limit = st.integers(0, num_blocks * num_layers + 2)
    for index in data.draw(st.lists(st.integers(0, len(states) - 1), max_size=20)):
        reader.hear(states[index])
        for _ in range(data.draw(st.integers(0, 3))):
            reader.step(data.draw(limit))
    reader.hear(states[-1])
    while reader.step(data.draw(limit)):
        assert not reader.progress.is_done or not reader.open()
    cells = {(b, layer) for b in range(reader.first_block, num_blocks) for layer in range(num_layers)}
    assert reader.read == cells
    assert reader.progress.is_done


@given(st.data())
def test_states_in_order_are_followed_one_by_one(data: st.DataObject) -> None:
    """After each state all that it calls ready is read; it is done with the last one and not before."""
    num_blocks, num_layers = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    reader = Reader(0, num_blocks, num_layers)
    for state in data.draw(histories(num_blocks, num_layers)):
        reader.hear(state)
        while reader.step(data.draw(st.integers(1, 9))):
            pass
        assert reader.progress.is_done == (len(reader.read) == num_blocks * num_layers)


def test_nothing_wanted_is_done_at_once() -> None:
    """All blocks are there already: states change nothing."""
    progress = Progress(4, 4, 3)
    assert progress.is_done
    progress.note(4, ())
    assert progress.is_done and progress.next_step(9) is None


def test_layers_follow_the_step_that_computes_them() -> None:
    """Two of five layers of the second piece are read as soon as they are there, the rest when it is complete."""
    progress = Progress(1, 6, 5)
    progress.note(2, [Chunk(6, 2)])
    steps = []
    while (step := progress.next_step(1000)) is not None:
        steps.append(step)
        progress.note_read(step)
    assert steps == [ReadStep(1, 2, 0, 5), ReadStep(2, 6, 0, 2)]
    assert not progress.is_done and progress.num_layers_in_flight == 0
    progress.note(6, ())
    assert progress.num_layers_in_flight == 3
    assert progress.next_step(1000) == ReadStep(2, 6, 2, 5)


@pytest.mark.parametrize(("limit", "num_blocks"), [(0, 1), (4, 1), (8, 2), (11, 2), (1000, 6)])
def test_a_step_is_as_large_as_the_limit_allows(limit: int, num_blocks: int) -> None:
    """Blocks times layers, and one block at least."""
    progress = Progress(0, 6, 4)
    progress.note(6, ())
    assert progress.next_step(limit) == ReadStep(0, num_blocks, 0, 4)

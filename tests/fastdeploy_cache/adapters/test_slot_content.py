"""Random verbs against the true content of every position of every slot."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastdeploy_cache.adapters.slots.prefix_cache import SlotAllocator, SlotPrefixCache


def num_common(ours: list[int], theirs: list[int]) -> int:
    """How many leading tokens are the same."""
    differ = [i for i, (our, their) in enumerate(zip(ours, theirs, strict=False)) if our != their]
    return differ[0] if differ else min(len(ours), len(theirs))


class SlotMachine(RuleBasedStateMachine):
    """Every owner writes what it likes where it may; the arrays that are copied hold the tokens themselves."""

    NUM_SLOTS, NUM_POSITIONS = 3, 10
    TOKENS = st.lists(st.integers(1, 2), max_size=4)

    @initialize(capacity=st.sampled_from([1000, 1000, 6, 2, 0]))
    def start(self, capacity: int) -> None:
        self.slots = SlotAllocator(self.NUM_SLOTS)
        self.cache = SlotPrefixCache(capacity, self.slots)
        self.k = np.zeros((self.NUM_SLOTS, self.NUM_POSITIONS, 1), np.int32)
        self.v = self.k.copy()
        self.owned: dict[int, list[int]] = {}  # what the owner of a slot has in it
        self.held: dict[int, list[int]] = {}  # what was inserted last, and stands; the newest last
        self.pins: list[list[int]] = []

    def write(self, slot: int, tokens: list[int]) -> None:
        sequence = self.owned[slot]
        for token in tokens[: self.NUM_POSITIONS - len(sequence)]:
            self.k[slot, len(sequence)] = self.v[slot, len(sequence)] = token
            sequence.append(token)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.owned)))

    @rule(tokens=TOKENS)
    def alloc(self, tokens: list[int]) -> None:
        """A new sequence."""
        slot = self.slots.alloc()
        if slot >= 0:
            self.owned[slot] = []
            self.held.pop(slot, None)
            self.write(slot, tokens)

    @rule(start=TOKENS, tokens=TOKENS)
    def reuse(self, start: list[int], tokens: list[int]) -> None:
        """A sequence goes on where the slot that is found ends, if it is free."""
        length, slot, _ = self.cache.find(start + tokens)
        if slot >= 0 and self.slots.is_free(slot):
            self.slots.occupy(slot)
            self.held.pop(slot)
            self.owned[slot] = (start + tokens)[:length]
            self.write(slot, (start + tokens)[length:])

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), tokens=TOKENS)
    def decode(self, data: st.DataObject, tokens: list[int]) -> None:
        """An owner writes on."""
        self.write(self.pick(data), tokens)

    @precondition(lambda self: any(self.owned.values()))
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        """An owner says what it has, or goes back first."""
        slot = data.draw(st.sampled_from([slot for slot, sequence in self.owned.items() if sequence]))
        end = data.draw(st.integers(1, len(self.owned[slot])))
        kept = self.owned[slot][: end if data.draw(st.booleans()) else None]
        self.cache.insert(kept, slot, self.slots.version(slot))
        self.owned[slot] = list(kept)
        self.held.pop(slot, None)
        self.held[slot] = kept
        self.pins.append(kept)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A slot goes home; what was inserted stays."""
        slot = self.pick(data)
        del self.owned[slot]
        self.slots.free(slot)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), tokens=st.lists(st.integers(1, 2), max_size=8))
    def copy(self, data: st.DataObject, tokens: list[int]) -> None:
        """A prefix comes to an owner's slot."""
        target = self.pick(data)
        _, source, _ = self.cache.find(tokens)
        length = self.cache.copy_kv(tokens, target, (self.k, self.v), 1)
        assert self.k[target, :length, 0].tolist() == self.v[target, :length, 0].tolist() == tokens[:length]
        if length and source != target:
            self.held.pop(target, None)
            self.owned[target] = tokens[:length]

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A pin goes."""
        self.cache.release(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @rule(tokens=st.lists(st.integers(1, 2), min_size=1, max_size=6))
    def pin(self, tokens: list[int]) -> None:
        """Something is pinned, also inside a path."""
        length, _, _ = self.cache.find(tokens)
        assert self.cache.pin(tokens) == (length == len(tokens))
        if length == len(tokens):
            self.pins.append(tokens)

    @invariant()
    def every_match_is_true(self) -> None:
        """To the content; and, where there is room for all, the longest and newest there is."""
        ends = list(self.held.values()) + list(self.owned.values())
        for tokens in [*map(list, product((1, 2), repeat=3)), *ends]:
            length, slot, version = self.cache.find(tokens)
            if length:
                assert version == self.slots.version(slot)
                assert self.k[slot, :length, 0].tolist() == self.v[slot, :length, 0].tolist() == tokens[:length]
            if self.cache.max_capacity == 1000:
                common = {s: num_common(held, tokens) for s, held in self.held.items()}
                best = max(common.values(), default=0)
                assert length == best
                assert slot == next((s for s in reversed(common) if best and common[s] == best), -1)

    @invariant()
    def the_index_adds_up(self) -> None:
        """Nothing is kept that nobody holds or pins, above the capacity only what is pinned; no node is for nothing."""
        index, num_tokens, num_pins, leaves = self.cache._index, 0, 0, []
        stack = list(index.root.children.items())
        while stack:
            key, node = stack.pop()
            stack.extend(node.children.items())
            assert key == node.tokens[:4] and all(child.parent is node for child in node.children.values())
            assert all(child.holders.keys() <= node.holders.keys() for child in node.children.values())
            num_tokens, num_pins = num_tokens + len(node.tokens) // 4, num_pins + node.num_pins
            ending = {claim for claim in index.claims.values() if claim.node is node}
            below = {claim for child in node.children.values() for claim in child.holders}
            assert node.holders.keys() == ending | below
            assert node.num_pins or ending or len(node.children) > 1
            if not node.children and not node.num_pins:
                leaves.append(node)
        assert num_tokens == index.num_tokens and num_pins == len(self.pins)
        assert num_tokens <= self.cache.max_capacity or not leaves


class TestSlots(SlotMachine.TestCase):
    """Many short lives."""

    settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

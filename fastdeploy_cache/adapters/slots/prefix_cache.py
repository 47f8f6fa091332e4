"""A prefix cache for engines without paging: a sequence's KV lies in one contiguous slot. Which prefix is in which?

A slot is *taken* by `alloc` or `occupy`, and its content belongs to who has taken it. `insert` says what it holds now,
exactly; that stands until the slot is taken again. So what is being overwritten is never found.
"""

from __future__ import annotations

import operator
import threading
from typing import NamedTuple

from fastdeploy_cache.adapters.slots.copies import Array, ArraySlots, CopiesSlots
from fastdeploy_cache.adapters.slots.index import Claim, SlotIndex
from fastdeploy_cache.books.block_hash import TOKEN_BYTES
from fastdeploy_cache.books.tokens import TokenIds, pack
from fastdeploy_cache.errors import BlockOwnerError, ConfigError, RequestError


class SlotMatch(NamedTuple):
    """The first `length` tokens lie in `slot`, at this version of it."""

    length: int
    slot: int
    version: int


_NO_MATCH = SlotMatch(0, -1, 0)


class SlotAllocator:
    """Hands out slots 0..max_slots-1, lowest first. Any thread."""

    def __init__(self, max_slots: int) -> None:
        """Raises `ConfigError` unless `max_slots` is an integer of 1 or more."""
        self.max_slots = _number("max_slots", max_slots, 1)
        self._free = (1 << self.max_slots) - 1  # a bit for each slot
        self._versions = [0] * self.max_slots
        self._num_takes = [0] * self.max_slots
        self._lock = threading.Lock()

    def alloc(self) -> int:
        """Take the lowest free slot for other content: its version rises by one. -1 when none is free."""
        with self._lock:
            if not self._free:
                return -1
            slot = (self._free & -self._free).bit_length() - 1
            self._versions[slot] += 1
            self._take(slot)
            return slot

    def occupy(self, idx: int) -> None:
        """Take a free slot for what it holds: its version stays.

        Raises:
            BlockOwnerError: it is taken, or there is no such slot; nothing was changed.
        """
        with self._lock:
            if not self.is_free(idx):
                raise BlockOwnerError(f"slot {idx} is taken; occupy a free one, or copy what it holds")
            self._take(idx)

    def free(self, idx: int) -> None:
        """Give a slot back. What it holds stays there until it is taken again.

        Raises:
            BlockOwnerError: it is free already, or there is no such slot; nothing was changed.
        """
        with self._lock:
            if self.is_free(idx):
                raise BlockOwnerError(f"slot {idx} is free already; give each back once, by who has taken it")
            self._free |= 1 << operator.index(idx)

    def is_free(self, idx: int) -> bool:
        """Whether nobody has taken it. Raises `BlockOwnerError` where there is no such slot."""
        return bool(self._free >> self._checked(idx) & 1)

    def version(self, idx: int) -> int:
        """How often `alloc` has given it out. Raises `BlockOwnerError` where there is no such slot."""
        return self._versions[self._checked(idx)]

    def num_takes(self, slot: int) -> int:
        """How often it has been taken, by `alloc` or `occupy`. Raises `BlockOwnerError` where there is no such slot."""
        return self._num_takes[self._checked(slot)]

    @property
    def free_count(self) -> int:
        """Slots that are free."""
        return self._free.bit_count()

    def _take(self, slot: int) -> None:
        self._free &= ~(1 << operator.index(slot))
        self._num_takes[slot] += 1

    def _checked(self, slot: int) -> int:
        slot = operator.index(slot)
        if not 0 <= slot < self.max_slots:
            raise BlockOwnerError(f"there is no slot {slot}; slots are 0 to {self.max_slots - 1}")
        return slot


class SlotPrefixCache:
    """Finds the slot that holds the longest prefix of a sequence.

    Any thread, but `find` and the `occupy` of what it found belong together: hold a lock of your own around both where
    several threads take slots. Else another one occupies the slot in between, fills it and frees it: same version,
    other content.
    """

    def __init__(self, max_capacity: int = 1000, allocator: SlotAllocator | None = None) -> None:
        """Keep up to `max_capacity` tokens in the index (prefixes that sequences share count once), and what is pinned.

        `allocator` tells which slots have been taken since they were inserted. Without it, only what is inserted tells
        that a slot's content has changed, and the caller compares versions.

        Raises:
            ConfigError: `max_capacity` is no integer of 0 or more.
        """
        self.max_capacity = _number("max_capacity", max_capacity, 0)
        self._allocator = allocator
        self._index = SlotIndex()
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """Tokens in the index."""
        return self._index.num_tokens

    def insert(self, token_ids: TokenIds, slot: int, slot_ver: int) -> None:
        """The slot holds the KV of these tokens from position 0 on, and nothing else that may be found.

        Its owner calls this, and again as the sequence grows; before it writes over positions that it has inserted,
        it inserts what it keeps. Each call pins the sequence once: `release` as often.

        Raises:
            RequestError: no tokens, or a token id or slot that cannot be.
            BlockOwnerError: the slot is free or has another version. Nothing was changed.
        """
        tokens = _packed(token_ids)
        with self._lock:
            slot = self._taken(slot, slot_ver)
            num_takes = self._allocator.num_takes(slot) if self._allocator is not None else 0
            self._index.claim(Claim(slot, slot_ver, num_takes), self._index.pin(tokens))
            self._evict()

    def find(self, token_ids: TokenIds) -> SlotMatch:
        """(length, slot, version): the longest prefix that lies in a slot, the one inserted last; or (0, -1, 0).

        The slot may be taken: then copy it; if it is free, it may be occupied. Counts as a use.

        Raises:
            RequestError: a token id that cannot be.
        """
        tokens = _packed(token_ids, may_be_empty=True)
        with self._lock:
            length, claim = self._find(tokens)
        return _NO_MATCH if claim is None else SlotMatch(length, claim.slot, claim.version)

    def pin(self, token_ids: TokenIds) -> bool:
        """Keep a sequence that `find` would find whole from being evicted; False, and nothing is pinned, else.

        A pin keeps what is known of a slot, not the slot: its owner may free it, and others take it.
        """
        tokens = _packed(token_ids)
        with self._lock:
            length, _ = self._find(tokens)
            is_whole = length == len(tokens) // TOKEN_BYTES
            if is_whole:
                self._index.pin(tokens)
        return is_whole

    def release(self, token_ids: TokenIds) -> None:
        """Take back one `insert`'s or `pin`'s pin on just these tokens. What is not pinned stays until it is evicted.

        Raises:
            BlockOwnerError: they are not pinned; nothing was changed.
        """
        tokens = _packed(token_ids)
        with self._lock:
            if not self._index.unpin(tokens):
                raise BlockOwnerError(
                    f"a sequence of {len(tokens) // TOKEN_BYTES} tokens is not pinned; release each insert and pin once"
                )
            self._evict()

    def reset(self) -> None:
        """Forget what the slots hold, for example since their memory is gone. Pins are to be released all the same."""
        with self._lock:
            for claim in list(self._index.claims.values()):
                self._index.drop(claim)

    # -- copying

    def copy_kv(self, token_ids: TokenIds, target_slot: int, kv_cache: tuple[Array, Array], n_layers: int) -> int:
        """Copy the longest prefix that lies in a slot to the caller's slot, in arrays [slot, position, layer, ...].

        Copies the first `n_layers` layers of both arrays. Returns how many positions `target_slot` holds of these
        tokens now: 0 where nothing is found, or where the source was taken or inserted anew meanwhile. What was known
        of the target is forgotten; insert what it becomes.

        Raises:
            RequestError: the arrays have no such slots, positions or layers.
            BlockOwnerError: the target is free. Nothing was copied.
        """
        return self.copy_slot(token_ids, target_slot, ArraySlots(kv_cache, n_layers))

    def copy_slot(self, token_ids: TokenIds, target_slot: int, slots: CopiesSlots) -> int:
        """Do what `copy_kv` does, through `slots`: `RankSlots` copies in each rank's GPU memory. 0 if that fails."""
        tokens = _packed(token_ids, may_be_empty=True)
        with self._lock:
            target_slot = self._taken(target_slot)
            length, source = self._find(tokens)
            if source is None or source.slot == target_slot:
                return length
            slots.check(max(source.slot, target_slot), length)
            self._index.drop(self._index.claims.get(target_slot))
        if not slots.copy(source.slot, target_slot, length):
            return 0
        with self._lock:  # the source may have been freed and taken by another thread while it was read
            return length if self._index.claims.get(source.slot) is source and self._is_true(source) else 0

    # -- under the lock

    def _find(self, tokens: bytes) -> tuple[int, Claim | None]:
        length, claim = self._index.find(tokens)
        while claim is not None and not self._is_true(claim):
            self._index.drop(claim)
            length, claim = self._index.find(tokens)
        return length, claim

    def _is_true(self, claim: Claim) -> bool:
        """Whether the slot has not been taken since; its version is the same then."""
        return self._allocator is None or self._allocator.num_takes(claim.slot) == claim.num_takes

    def _evict(self) -> None:
        if self._index.num_tokens > self.max_capacity:
            for claim in list(self._index.claims.values()):
                if not self._is_true(claim):
                    self._index.drop(claim)
            self._index.evict(self.max_capacity)

    def _taken(self, slot: int, version: int | None = None) -> int:
        """The slot, which someone has taken."""
        slot = operator.index(slot)
        if slot < 0:
            raise RequestError(f"there is no slot {slot}; `alloc` gives -1 when all are taken")
        if self._allocator is None:
            return slot
        if self._allocator.is_free(slot):
            raise BlockOwnerError(f"slot {slot} is free; fill and insert it while it is taken, then free it")
        if version is not None and version != self._allocator.version(slot):
            now = self._allocator.version(slot)
            raise BlockOwnerError(f"slot {slot} has version {now}, not {version}: it was given out again since")
        return slot


def _packed(token_ids: TokenIds, *, may_be_empty: bool = False) -> bytes:
    """Tokens as packed int32."""
    if may_be_empty and not len(token_ids):
        return b""
    tokens = pack("of a slot", token_ids)
    if not tokens:
        raise RequestError("request 'of a slot' has an empty prompt; give it at least one token")
    return tokens


def _number(name: str, value: int, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise ConfigError(f"{name} is {value!r}; give an integer, {least} or more")
    return number

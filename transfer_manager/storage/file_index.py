"""Which object is in which slot of the file store, which was used last, and which slots may be written to. Pure.

A slot is free, or holds an object, or is retired: its object was forgotten, but the journal on the disk still names it.
Written to now, it would after a crash be taken for the old object; so it waits for the record of its end to be durable.
An object that no commit has taken up yet is `fresh`; its slot is free again at once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter

from fastdeploy_cache.transfer_manager.storage.base import News
from fastdeploy_cache.transfer_manager.storage.file_journal import Put
from fastdeploy_cache.transfer_manager.storage.file_shares import SlotShares
from fastdeploy_cache.transfer_manager.storage.keys import is_owned
from fastdeploy_cache.transfer_manager.storage.news import NewsLog


class Index:
    """Objects by hash, the least recently used first. Any thread may call."""

    def __init__(self, shares: SlotShares | None = None) -> None:
        """`shares`: of its slots, where namespaces have some."""
        self._shares = shares
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, Put] = OrderedDict()
        self._fresh: dict[int, Put] = {}
        self._free: list[int] = []
        self._retired: list[int] = []
        self._news: NewsLog | None = None  # since somebody listens
        self.was_touched = False  # the order of use is another than that of the journal

    def restore(self, puts: Sequence[Put], free: Iterable[int]) -> None:
        """Begin with what the journal says, oldest first. Of a hash in two slots, which no sound journal says, the
        last counts; the other slot is left alone."""
        self._entries = OrderedDict(zip(map(itemgetter(2), puts), puts, strict=True))
        if self._shares is not None:
            for block_hash in self._entries:
                self._shares.touch(block_hash)
        self.add_slots(free)

    def add_slots(self, slots: Iterable[int]) -> None:
        """Slots that may be written to: new ones, or those that a failed write gives back."""
        with self._lock:
            self._free.extend(sorted(slots, reverse=True))  # taken from the end: the first slot first

    @property
    def num_free(self) -> int:
        """Slots that may be written to."""
        return len(self._free)

    @property
    def num_retired(self) -> int:
        """Slots that may after the next commit."""
        return len(self._retired)

    def __len__(self) -> int:
        return len(self._entries)

    def find_leading(self, hashes: Sequence[bytes]) -> list[Put]:
        """The objects up to the first that is not there."""
        found = []
        with self._lock:
            for block_hash in hashes:
                put = self._entries.get(block_hash)
                if put is None:
                    break
                found.append(put)
        return found

    def missing(self, hashes: Sequence[bytes]) -> list[int]:
        """Positions of the hashes that are not there, each hash once."""
        with self._lock:
            seen: dict[bytes, int] = {}
            for i, block_hash in enumerate(hashes):
                if block_hash not in self._entries:
                    seen.setdefault(block_hash, i)
            return list(seen.values())

    def touch(self, hashes: Sequence[bytes]) -> set[bytes]:
        """A chain was used; returns what is there of it. Its end goes first later on: without its beginning it is worth
        nothing."""
        with self._lock:
            there = {block_hash for block_hash in hashes if block_hash in self._entries}
            for block_hash in reversed(hashes):
                if block_hash in there:
                    self._used(block_hash)
                    self.was_touched = True
            return there

    def _used(self, block_hash: bytes) -> None:
        self._entries.move_to_end(block_hash)
        if self._shares is not None:
            self._shares.touch(block_hash)

    def take(self, num: int) -> list[int]:
        """Slots to write to, as many as there are; in order, so that neighbours are written in one go."""
        with self._lock:
            taken = self._free[len(self._free) - min(num, len(self._free)) :]
            del self._free[len(self._free) - len(taken) :]
            return sorted(taken)

    def add(self, hashes: Sequence[bytes], new: Mapping[bytes, Put]) -> None:
        """A chain was written: `new` of its objects are in their slots now."""
        with self._lock:
            for block_hash in reversed(hashes):
                put = new.get(block_hash)
                if put is not None:
                    self._entries[block_hash] = self._fresh[put.slot] = put
                if block_hash in self._entries:
                    self._used(block_hash)
            if self._news is not None:
                for block_hash in new:
                    self._news.note(block_hash, is_there=True)

    def remove(self, hashes: Iterable[bytes]) -> int:
        """Forget objects; returns how many were there."""
        with self._lock:
            found = [put for put in map(self._entries.get, dict.fromkeys(hashes)) if put is not None]
            for put in found:
                self._forget(put)
            return len(found)

    def remove_all(self) -> int:
        """Forget everything; returns how many there were."""
        with self._lock:
            found = list(self._entries.values())
            for put in found:
                self._forget(put)
            return len(found)

    def owned_by(self, owner: bytes) -> list[Put]:
        """The objects that have this mark in their names."""
        with self._lock:
            return [put for put in self._entries.values() if is_owned(put.block_hash, owner)]

    def drop(self, puts: Iterable[Put]) -> int:
        """Forget objects that proved bad, unless they have gone or been written anew meanwhile."""
        with self._lock:
            found = [put for put in puts if self._entries.get(put.block_hash) is put]
            for put in found:
                self._forget(put)
            return len(found)

    def evict(self, num: int, num_needed: int, kept: Collection[bytes], owner: bytes) -> int:
        """Forget up to so many that may make room for an owner, the least recently used: of its own no more than are
        needed, and not what is kept, which was used just now. Returns how many."""
        with self._lock:
            num = max(min(num, len(self._entries) - len(kept)), 0)
            if self._shares is not None:
                return self._forget_each(self._shares.victims(num, min(num, num_needed), kept, owner))
            for _ in range(num):
                self._forget(next(iter(self._entries.values())))
            return num

    def keep_to_share(
        self, num: int, kept: Collection[bytes], owner: bytes, *, is_whole: bool, num_slots: int
    ) -> tuple[int, int]:
        """How many of so many objects more an owner may have, of a store with so many slots. Where they are too many,
        its own least recently used go, but not what is kept; how many those are comes second. `is_whole`: all, or
        none."""
        if self._shares is None:
            return num, 0
        with self._lock:
            self._shares.fit(num_slots)
            num_room, gone = self._shares.room(num, kept, owner)
            if is_whole and num_room < num:
                return 0, 0
            return num_room, self._forget_each(gone)

    def _forget_each(self, names: Sequence[bytes]) -> int:
        for name in names:
            self._forget(self._entries[name])
        return len(names)

    def _forget(self, put: Put) -> None:
        del self._entries[put.block_hash]
        if self._shares is not None:
            self._shares.remove(put.block_hash)
        if self._fresh.pop(put.slot, None) is not None:
            self._free.append(put.slot)
        else:
            self._retired.append(put.slot)
        if self._news is not None:
            self._news.note(put.block_hash, is_there=False)

    def news(self, listener: int) -> News | None:
        """See `Storage.news`."""
        with self._lock:
            if self._news is None or listener > self._news.listener:
                self._news = NewsLog(listener, self._entries)
            return self._news.take() if listener == self._news.listener else None

    def fresh(self) -> list[Put]:
        """What no commit has taken up yet."""
        with self._lock:
            return list(self._fresh.values())

    def begin_commit(self, synced: Iterable[Put]) -> tuple[list[Put], list[int]]:
        """What the journal has to be told: which of the objects whose bytes are durable still stand, and which slots
        are retired. From here on these objects count as known to the journal."""
        with self._lock:
            standing = [put for put in synced if self._fresh.get(put.slot) is put]
            for put in standing:
                del self._fresh[put.slot]
            retired, self._retired = self._retired, []
            return standing, retired

    def end_commit(self, retired: Sequence[int], *, is_durable: bool) -> None:
        """What came of it: the retired slots are free, or go on waiting."""
        if is_durable:
            self.add_slots(retired)
        else:
            with self._lock:
                self._retired.extend(retired)

    def journaled(self) -> list[Put]:
        """What a journal has to say that is written anew; in the order of use."""
        with self._lock:
            self.was_touched = False
            return [put for put in self._entries.values() if put.slot not in self._fresh]

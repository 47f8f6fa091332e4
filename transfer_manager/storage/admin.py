"""What an operator does with a store from outside, also while engines have it open: one protocol for every kind."""

from __future__ import annotations

import importlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fastdeploy_cache.errors import StorageRefusedError
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace, ObjectKey, is_page

_CLASSES = {
    "file": "fastdeploy_cache.transfer_manager.storage.file_admin:FileAdmin",
    "mooncake": "fastdeploy_cache.transfer_manager.storage.mooncake_admin:MooncakeAdmin",
    "valkey": "fastdeploy_cache.transfer_manager.storage.valkey_admin:ValkeyAdmin",
}
Outcome = Literal["whole", "damaged", "gone"]
WRONG_BYTES = "its bytes are not those that were written"


@dataclass(frozen=True, kw_only=True)
class Space:
    """One rank's corner of a store.

    Attributes:
        where: its folder, or what the keys of its objects begin with.
        weights_digest: `KeySpace.weights_digest`.
        key_space: what it is for; None where the store has its digest alone.
    """

    where: str
    weights_digest: str
    key_space: KeySpace | None

    @property
    def weights_id(self) -> str | None:
        """The weights' id, or None where it is not known."""
        return self.key_space.weights_id if self.key_space else None


@dataclass(frozen=True, kw_only=True)
class SpaceSummary:
    """What is in a space.

    Attributes:
        num_objects: as far as they are durable.
        num_bytes: of them, without checksums; None: the store could not tell.
        num_pages: of the objects, pages of a hybrid model's checkpoints; the others are blocks.
        allocated_bytes: what its files take on the disk; None: it has no files.
        last_written_seconds: since the epoch; None: not known.
        is_open: whether a living engine has it; None: the store cannot tell.
    """

    space: Space
    num_objects: int
    num_bytes: int | None
    num_pages: int = 0
    allocated_bytes: int | None = None
    last_written_seconds: float | None = None
    is_open: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Damage:
    """An object that is not what was written.

    Attributes:
        where: the slot and its file, or the key.
        block_hash: of the block, in hexadecimal digits; of a page of a checkpoint, its name.
        reason: why that is thought.
    """

    where: str
    block_hash: str
    reason: str

    @property
    def is_page(self) -> bool:
        """Whether it is a page of a checkpoint."""
        return is_page(bytes.fromhex(self.block_hash))


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What came of reading every object of a space.

    Attributes:
        num_objects: that there were when it began.
        damage: of them, those that are not what was written.
        num_gone: of them, that could not be looked at: evicted meanwhile, or their memory's owner does not answer.
        is_listed: the list of objects was whole; else there were more, and nobody can tell which.
        is_mended: what was damaged has been removed, and the list is whole again.
    """

    space: Space
    num_objects: int
    damage: tuple[Damage, ...]
    num_gone: int
    is_listed: bool = True
    is_mended: bool = False

    @property
    def num_damaged(self) -> int:
        """How many objects are not what was written."""
        return len(self.damage)

    @property
    def is_well(self) -> bool:
        """Whether nothing damaged is there any more."""
        return self.is_mended or (self.is_listed and not self.damage)


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """What was removed, or would be.

    Attributes:
        removed: spaces that are gone, as far as the store knew them.
        kept: spaces that should have gone, but engines have them open.
        kept_nameless: likewise, of what nobody can tell any more what it is for; see `StorageAdmin.damaged`.
        freed_bytes: of the disk; None: the store has no files.
    """

    num_objects: int
    removed: tuple[Space, ...] = ()
    kept: tuple[Space, ...] = ()
    kept_nameless: tuple[str, ...] = ()
    freed_bytes: int | None = None


class Tally:
    """What came of each object of a store of keys, space by space."""

    def __init__(self, spaces: Iterable[Space] = ()) -> None:
        self._outcomes = {space: Counter[Outcome]() for space in spaces}
        self._damage = defaultdict[Space, list[Damage]](list)

    def note(self, space: Space, name: ObjectKey, key: str, outcome: Outcome) -> None:
        """One object has been looked at."""
        self._outcomes.setdefault(space, Counter())[outcome] += 1
        if outcome == "damaged":
            damage = Damage(where=f"key {key}", block_hash=name.block_hash.hex(), reason=WRONG_BYTES)
            self._damage[space].append(damage)

    def checked(self, *, is_mended: bool) -> list[Checked]:
        """The sums; `is_mended`: what is damaged has been removed."""
        return [
            Checked(
                space=space,
                num_objects=outcomes.total(),
                damage=tuple(self._damage[space]),
                num_gone=outcomes["gone"],
                is_mended=is_mended and bool(self._damage[space]),
            )
            for space, outcomes in sorted(self._outcomes.items(), key=lambda item: item[0].where)
        ]


def unheard() -> None:
    """What is called of each object where nobody listens."""


class StorageAdmin(Protocol):
    """Looks after one store. It holds nothing open between calls. One thread at a time.

    Every call may raise `StorageRefusedError` for what the user has to change, and `StorageError` for what may pass.
    What has a body here is so of a server, which has no files: its keys themselves say what they are for.
    """

    where: str  # the store, for messages

    def spaces(self) -> list[SpaceSummary]:
        """Every space."""
        ...

    def weights_ids(self) -> set[str]:
        """The ids of all weights of which there are spaces, as far as the store knows them. Cheap."""
        ...

    def free_bytes(self) -> int | None:
        """What the store's file system has free for this user; None: it has no files."""
        return None

    def damaged(self) -> list[str]:
        """What has a space's objects and does not say any more what they are for: no space is counted for it. The
        engine that it belongs to names it anew when it starts."""
        return []

    def unreadable(self) -> list[str]:
        """What others have put in the place of the store's files, and why it is not used: a text for each space. Such a
        space is left alone, and nothing of it is checked, counted or removed that cannot be."""
        return []

    def verify(
        self, weights_id: str | None = None, *, remove: bool = False, on_object: Callable[[], object] = unheard
    ) -> list[Checked]:
        """Read every object of these weights, or of all, and compare it with its checksum. Calls `on_object` after
        each. With `remove` what is damaged is removed, but for what an engine has open; else nothing changes."""
        ...

    def clear(self, weights_id: str, *, dry_run: bool = False) -> Cleared:
        """Remove all objects of these weights that no engine is known to have open. A dry run changes nothing, and says
        what would be removed."""
        ...

    def gc(self, capacity_bytes: int, *, dry_run: bool = False) -> Cleared:
        """Remove what crashes left, then whole spaces that no engine has open until the rest takes no more than this,
        those first that were written to the longest time ago. Servers evict by themselves and refuse. A dry run as
        for `clear`."""
        ...


def open_admin(kind: str, options: Mapping[str, Any]) -> StorageAdmin:
    """Look after a built-in store; options are `StorageConfig.store_options`, and `metrics_url` of a Mooncake master.

    Raises:
        StorageRefusedError: there is none of that kind, or not there, or a setting is wrong.
    """
    if kind not in _CLASSES:
        raise StorageRefusedError(f"storage.kind is {kind!r}; {', '.join(_CLASSES)} are what can be looked after here")
    module, _, name = _CLASSES[kind].partition(":")
    admin: StorageAdmin = getattr(importlib.import_module(module), name)(options)
    return admin

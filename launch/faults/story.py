"""A story: what the users of each engine do, which faults come when, and the seed that decides who goes when."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from fastdeploy_cache.errors import LaunchError

STORY_VERSION: Final = 3
WritePolicy = Literal["write_back", "write_through", "write_through_selective"]
WRITE_POLICIES: Final[tuple[WritePolicy, ...]] = ("write_back", "write_through", "write_through_selective")
BLOCK_SIZE, NUM_TEXTS, LONGEST, MAX_RUNNING = 4, 6, 36, 2
# how often each comes
ACTS: Final = {
    "admit": 150, "advance": 110, "look": 6, "end": 80, "reset": 1, "clear": 1, "pause": 3, "sleep": 1, "weights": 1,
    "detach": 1, "flush": 3, "check": 2, "see": 5, "pin": 6, "rest": 30, "worker": 8,
    "offer": 60, "receive": 60, "close": 1, "drop": 24,
    "find": 12, "insert": 12, "load": 10, "swap_in": 8, "swap_out": 8, "copy": 4, "evict": 3,
}  # fmt: skip
# what a fault may wait for: the beginnings of what `World.phases` says
AFTER_START: Final = (
    "", "", "", "transfer: swap_in", "transfer: swap_out", "transfer: copy", "storage: prefetch", "storage: write",
    "storage: lookup", "peer: receive", "peer: send", "request: wait", "request: confirm", "request: flush",
    "request: pause", "request: sleep", "request: wake", "request: update_weights", "request: attach",
    "request: kv_lost",
)  # fmt: skip
AT_START: Final = "start: peer"  # an engine has started its peer processes, and is not up yet
PHASES: Final = (*AFTER_START, "start: rank", "start: storage", AT_START)
NEEDS: Final = {
    "flush": "has_store", "detach": "has_store", "offer": "has_peers", "receive": "has_peers", "worker": "has_workers",
}  # fmt: skip
# what knows blocks of the full row alone, or moves them to where rows do not go yet
NOT_WITH_ROWS: Final = frozenset(
    ["insert", "load", "swap_in", "swap_out", "copy", "evict", "offer", "receive", "flush", "detach", "worker"]
)
# Bounds of what a file of a story may say: wider than what is drawn, and small enough to run.
_NUM_ROWS: Final = 2
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Few = Annotated[int, msgspec.Meta(ge=1, le=16)]
_Blocks = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What the engines of a story are made of."""

    num_engines: _Few = 1
    num_users: _Few = 1
    tp_size: _Few = 2
    num_gpu_blocks: _Blocks = 24
    num_cpu_blocks: _Blocks = 48
    has_store: bool = True
    kv_owner: Literal["engine", "transfer", "worker"] = "engine"
    cpu_write_policy: WritePolicy = "write_through"
    storage_write_policy: WritePolicy = "write_through"
    prefetch_policy: Literal["timeout", "best_effort", "wait_complete"] = "timeout"
    eviction_policy: Literal["lru", "fifo", "lfu", "slru", "priority", "reuse"] = "lru"
    recompute_last_token: bool = False
    num_store_blocks: _Blocks = 64
    has_peers: bool = False  # engines hand blocks to each other
    num_units: tuple[_Number, ...] = ()  # of a hybrid model: slots of its state, and units of its window
    state_copy: bool = False  # its kernels write states in place
    agents: bool = False  # who give hints; and engines lend what they have
    tenants: bool = False  # the namespace of some requests has a share of the tiers, and a time to live
    memory_error_share: _Share = 0.0  # all the time, as the fault does for a while
    outside_error_share: _Share = 0.0

    @property
    def has_rows(self) -> bool:
        """Whether the model's layers do not all keep everything."""
        return bool(self.num_units)

    @property
    def has_workers(self) -> bool:
        """Whether others make the KV arrays."""
        return self.kv_owner == "worker"

    @property
    def ranks_own_kv(self) -> bool:
        """Whether they go with a rank that dies."""
        return self.kv_owner == "transfer"


class Act(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One thing that a user does; what the numbers mean is the verb's."""

    verb: str
    first: _Number = 0
    second: _Number = 0
    third: _Number = 0


Users = tuple[tuple[tuple[Act, ...], ...], ...]  # by engine and user


class Fault(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """It happens when the scheduler has come to that step."""

    at_step: _Number
    name: str
    target: _Number = 0
    seconds: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)] = 0.0
    phase: str = ""  # it waits for this phase of a request, a transfer or a job, though not for ever


class Story(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a run follows from. `users`: by engine and user what each does."""

    seed: _Number
    settings: Settings
    users: Users
    faults: tuple[Fault, ...] = ()
    version: int = STORY_VERSION


def to_json(story: Story) -> bytes:
    """The story as a file."""
    return msgspec.json.format(msgspec.json.encode(story), indent=1)


def from_json(data: bytes, name: str) -> Story:
    """Read such a file, or what a search has written: then it is the first story in which something was found.

    Raises:
        LaunchError: it is none, or of another version.
    """
    try:
        found = msgspec.json.decode(data, type=_Report).found
        if found is not None and not found:
            raise LaunchError(f"{name} is of a search that has found nothing; there is no story in it")
        data = found[0].story if found else data
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != STORY_VERSION:
            raise LaunchError(f"{name} is a story of version {version}; this program knows version {STORY_VERSION}")
        return _whole(msgspec.json.decode(data, type=Story))
    except (msgspec.MsgspecError, ValueError) as error:
        raise LaunchError(f"{name} is no story, or is cut short: {error}") from error


def _whole(story: Story) -> Story:
    """It can be run, as far as its parts tell.

    Raises:
        ValueError: it has a verb that there is not, or users who are none of its engines'.
    """
    settings = story.settings
    if settings.has_peers and settings.num_engines < 2:
        raise ValueError("engines that hand blocks to each other are two or more")
    if settings.has_rows and (len(settings.num_units) != _NUM_ROWS or settings.has_peers):
        raise ValueError(f"num_units of a hybrid model are {_NUM_ROWS}, and it has no peers")
    if [len(users) for users in story.users] != [settings.num_users] * settings.num_engines:
        raise ValueError(f"it has to have {settings.num_users} users for each of {settings.num_engines} engines")
    for act in (act for users in story.users for acts in users for act in acts):
        if act.verb not in ACTS:
            raise ValueError(f"{act.verb!r} is no verb; known: {', '.join(ACTS)}")
        if settings.has_rows and act.verb in NOT_WITH_ROWS:
            raise ValueError(f"{act.verb!r} does not go with num_units")
        if not getattr(settings, need := NEEDS.get(act.verb, "num_users")):
            raise ValueError(f"{act.verb!r} needs {need}, which its settings have not")
    for fault in story.faults:
        if fault.phase not in PHASES:
            raise ValueError(f"{fault.phase!r} is no phase; known: {', '.join(filter(None, PHASES))}")
    return story


class _Versioned(msgspec.Struct):
    version: int


class _Found(msgspec.Struct):
    story: msgspec.Raw


class _Report(msgspec.Struct):
    found: list[_Found] | None = None

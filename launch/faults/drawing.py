"""How the stories of a search are drawn: each from its seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from fastdeploy_cache.launch.faults.story import (
    ACTS,
    AFTER_START,
    AT_START,
    NEEDS,
    NOT_WITH_ROWS,
    NUM_TEXTS,
    WRITE_POLICIES,
    Act,
    Fault,
    Settings,
    Story,
    Users,
)

# faults that go together, and what a story needs for them
_THEMES: Final = (
    ("num_users", ("endless copies",)),
    ("num_users", ("endless copies", "slow copies")),
    ("num_users", ("slow copies", "endless copies", "kill rank", "kill all ranks", "stop rank")),
    ("num_users", ("no threads", "no processes", "no descriptors", "no memory")),
    ("num_users", ("kill engine", "stop engine", "clock jump")),
    ("num_users", ("failing copies", "slow copies")),
    ("num_users", ("memory errors", "outside errors")),
    ("ranks_own_kv", ("kill rank", "slow copies")),
    ("ranks_own_kv", ("kill all ranks", "kill rank", "no processes")),
    ("has_store", ("slow disk", "slow copies", "stop storage", "kill storage")),
    ("has_store", ("flipped bits", "disk errors", "disk broken", "full disk")),
    ("has_store", ("flipped bits",)),
    ("has_store", ("lying disk", "power loss", "kill engine")),
    ("has_peers", ("lost messages", "slow copies")),
    ("has_peers", ("lost messages", "very late messages", "slow copies")),
    ("has_peers", ("late messages", "kill peer", "stop peer", "stop engine")),
)
# what a fault with such a word in its name is about
_LIKELY: Final = {
    "rank": ("transfer: swap_in", "transfer: swap_out", "transfer: copy", "storage: prefetch"),
    "copies": ("transfer: swap_in", "transfer: swap_out", "peer: receive"),
    "disk": ("storage: prefetch", "storage: write", "storage: lookup", "request: attach"),
    "bits": ("storage: prefetch", "storage: lookup"),
    "storage": ("storage: prefetch", "storage: write", "storage: lookup"),
    "peer": ("peer: receive", "peer: send"),
    "messages": ("peer: receive", "peer: send"),
}
_LASTING: Final = ("messages", "slow", "endless", "bits", "lying", "full", "failing", "memory errors", "outside errors")
_NEVER: Final = (0.0, 0.0, 0.0, 0.0, 0.0)  # as many to draw from as where something fails all along
_OFTEN = 0.15  # of lines that may lack memory
_LONG_SECONDS: Final = (1.0, 15.0, 40.0)
_RARE: Final = (
    "reset", "clear", "pause", "sleep", "weights", "detach", "flush", "check", "pin", "close", "drop", "worker",
)  # fmt: skip
_OF_CALLERS: Final = ("find", "insert", "load", "swap_in", "swap_out", "copy", "evict")
_PEER_SHARE = 0.4
_ALONE_SHARE = 0.7
_NEW_WEIGHTS_SHARE = 0.8  # of hand-overs by one user alone
_WORKERS_SHARE = 0.6  # of the others: workers make the KV arrays, and die
_HAND_OVER_SHARE = 0.4  # of these: one engine computes and offers, and takes back; the other one receives
_BOTH_SHARE, _START_SHARE = 0.6, 0.75  # up to here the same, and processes die at a start; or these with ordinary users
_MOST_STARTS, _STEPS_OF_START, _START_SECONDS = 2, 200, (1.0, 4.0)
_FEW_BLOCKS = 6  # of the CPU tier: fewer than a prompt may need
_SOME_WEIGHTS_SHARE = 0.3  # of stories in which something comes back
_COME_BACK_SHARE = 0.5  # of the others with a store
# what is chosen from in each round: a store may also go while it is being written
_COME_BACK: Final = (
    ("admit",), ("admit",), ("end",), ("end",), ("flush", "flush", "flush", "detach"), ("reset", "sleep", "weights"),
)  # fmt: skip
_OF_STORES: Final = (
    ("flipped bits",), ("flipped bits", "kill storage"), ("flipped bits", "slow disk"), ("disk errors", "slow disk"),
    ("power loss", "kill storage"), ("endless copies",), ("slow copies",), ("kill rank", "slow disk"),
    ("slow disk", "stop storage"),
)  # fmt: skip
_OWN_BLOCKS_SHARE = 0.5  # of what is left without peers
# what is chosen from in each round by callers that keep their requests themselves
_OWN_BLOCKS: Final = (
    ("swap_out",), ("swap_out", "insert"), ("swap_in", "load"), ("find", "admit"), ("evict", "end", "reset"),
)  # fmt: skip
_OF_COPIES: Final = (("slow copies",), ("endless copies", "slow copies"), ("failing copies", "kill rank"), ())
_OF_LINKS: Final = ("late messages", "very late messages", "lost messages", "slow copies")
_NUM_FAULTS: Final = (0, 4, 10, 20, 40)  # one of the last two where a search has one kind of fault alone
_NUM_ACTS = (40, 80, 150)  # of a user
# as many at once as in a soak, where prefixes are long and shared by many
CROWD: Final[dict[str, Any]] = {"num_users": 4, "num_gpu_blocks": 96, "num_cpu_blocks": 192, "num_store_blocks": 512}
_CROWD_EVERY, _MOST_CROWD_ACTS = 20, 100
_ROWS_EVERY, _ROWS_AT = 10, 4
SECONDS: Final = (0.01, 0.2, 1.0, 4.0, 15.0, 40.0)


def new_story(seed: int, fault_names: tuple[str, ...], most_acts: int = _NUM_ACTS[-1]) -> Story:
    """Draw one. Stories differ in what they are made of more than in length, as most faults need one setting.
    `most_acts`: of each user."""
    choose, by_itself = random.Random(seed), random.Random(~seed)  # noqa: S311 (nothing is kept secret)
    num_acts = min(choose.choice(_NUM_ACTS), most_acts)
    settings = _settings(choose, fault_names)
    users: Users = ()
    likely: Sequence[str] = ()
    early: tuple[Fault, ...] = ()
    if seed % _CROWD_EVERY == _CROWD_EVERY - 1:
        settings, num_acts = msgspec.structs.replace(settings, **CROWD), min(num_acts, _MOST_CROWD_ACTS)
    elif seed % _ROWS_EVERY == _ROWS_AT:
        settings = _with_rows(by_itself, settings)
    elif settings.has_peers and (share := by_itself.random()) < _START_SHARE:
        if share >= _HAND_OVER_SHARE:
            early = _starts(by_itself, fault_names)
        if share < _BOTH_SHARE:
            settings, users, likely = _hand_overs(by_itself, settings, num_acts)
        if early:
            settings = msgspec.structs.replace(settings, kv_owner="transfer")
    elif settings.has_store and by_itself.random() < _COME_BACK_SHARE:
        settings, users, likely = _come_backs(by_itself, settings, num_acts)
    elif not settings.has_peers and by_itself.random() < _OWN_BLOCKS_SHARE:
        settings, users, likely = _own_blocks(by_itself, settings, num_acts)
    users = users or tuple(
        tuple(tuple(acts_for(choose, settings, num_acts)) for _ in range(settings.num_users))
        for _ in range(settings.num_engines)
    )
    steps_per_act = 40 * settings.num_users * settings.num_engines
    num_faults = choose.choice(_NUM_FAULTS if len(fault_names) > 1 else _NUM_FAULTS[-2:]) if fault_names else 0
    steps = sorted(choose.randrange(1, num_acts * steps_per_act) for _ in range(num_faults))
    few = [name for name in likely if name in fault_names] or _some(choose, fault_names, settings)
    faults = (*early, *(_fault(choose, step, few) for step in steps))
    return Story(seed=seed, settings=settings, users=users, faults=faults)


def _with_rows(choose: random.Random, settings: Settings) -> Settings:
    """Settings for a hybrid model, which has no peers yet."""
    return msgspec.structs.replace(
        settings,
        num_engines=1,
        has_peers=False,
        kv_owner=choose.choice(("engine", "engine", "transfer")),
        recompute_last_token=False,
        num_units=choose.choice(((6, 14), (8, 20), (24, 60))),
        state_copy=choose.random() < 0.25,
    )


def _starts(choose: random.Random, fault_names: Sequence[str]) -> tuple[Fault, ...]:
    """Ranks that die with their KV arrays while peers that have no processor hold up the start of an engine: they are
    up again before it is."""
    holds = [name for name in ("stop peer", "stop peer", "stop peer", "slow thread") if name in fault_names]
    kills = [name for name in ("kill all ranks", "kill rank") if name in fault_names]
    faults = list[Fault]()
    for _ in range(choose.choice((1, _MOST_STARTS))):
        step = choose.randrange(1, _STEPS_OF_START)
        for after, names in ((0, holds), (choose.randrange(100), kills), (choose.randrange(100), kills)):
            if names:
                name, target, seconds = choose.choice(names), choose.randrange(64), choose.choice(_START_SECONDS)
                faults.append(Fault(step + after, name, target, seconds, AT_START))
    faults.sort(key=lambda fault: fault.at_step)
    return tuple(faults)


def _hand_overs(choose: random.Random, settings: Settings, num_acts: int) -> tuple[Settings, Users, list[str]]:
    """Prompts that are offered and taken back while another engine reads them: that takes more acts in a row than are
    drawn one by one. Also the faults that they are likely to have."""
    if choose.random() < _ALONE_SHARE:  # else a reset of one takes back what the others have offered
        settings = msgspec.structs.replace(settings, num_users=1)
    num_rounds = max(1, num_acts // 4)
    if settings.memory_error_share:
        settings = msgspec.structs.replace(settings, memory_error_share=_OFTEN)
    has_new_weights = settings.num_users == 1 and choose.random() < _NEW_WEIGHTS_SHARE
    if not has_new_weights and choose.random() < _WORKERS_SHARE:
        settings = msgspec.structs.replace(settings, kv_owner="worker")
    roles = ("admit", "offer", "rest" if has_new_weights else "reset", "end"), ("receive", "rest", "end", "end")
    owners_weights = choose.randrange(1 + num_rounds // 2) if has_new_weights else num_rounds
    # the receiver's come in the same round, in one of the next, or never: until then it is refused what is offered
    new_weights = owners_weights, owners_weights + choose.choice((0, 1, 2, num_rounds))

    def acts(role: tuple[str, ...], new_weights: int) -> Iterator[Act]:
        for number in range(num_rounds):
            for verb in (*role, "weights") if number == new_weights else role:
                first = number if verb == "admit" else int(verb in ("offer", "receive"))  # the newest; waits for one
                yield Act(verb, first, choose.randrange(64), choose.randrange(4))

    users = tuple(
        tuple(tuple(acts(role, at)) for _ in range(settings.num_users))
        for role, at in zip(roles, new_weights, strict=True)
    )
    links = ("late messages", "slow copies") if has_new_weights else _OF_LINKS  # something comes while weights differ
    return settings, users, [name for name in links if choose.random() < 0.5]


def _come_backs(choose: random.Random, settings: Settings, num_acts: int) -> tuple[Settings, Users, Sequence[str]]:
    """Prompts that are written, forgotten on the GPU or everywhere above the store, and asked for again. Also the
    faults that they are likely to have."""
    settings = msgspec.structs.replace(
        settings,
        num_users=choose.choice((1, 2)),  # one may forget what another one reads
        num_cpu_blocks=choose.choice((_FEW_BLOCKS, _FEW_BLOCKS, 24, 60)),
        prefetch_policy=choose.choice(("timeout", "wait_complete", "wait_complete")),
    )
    num_texts = 2 if settings.num_cpu_blocks > _FEW_BLOCKS else NUM_TEXTS  # some find room, others evict each other
    has_new_weights = choose.random() < _SOME_WEIGHTS_SHARE  # though several users have none

    def acts() -> Iterator[Act]:
        for verbs in _COME_BACK * max(1, num_acts // len(_COME_BACK)):
            verb = choose.choice(verbs)
            if verb == "weights" and not has_new_weights:  # after which nothing comes back
                verb = "reset"
            first = {"flush": 2, "sleep": 0}.get(verb, choose.randrange(num_texts))  # with patience; the GPU alone
            yield Act(verb, first, choose.randrange(64), choose.randrange(64))

    users = tuple(tuple(tuple(acts()) for _ in range(settings.num_users)) for _ in range(settings.num_engines))
    return settings, users, choose.choice(_OF_STORES)


def _own_blocks(choose: random.Random, settings: Settings, num_acts: int) -> tuple[Settings, Users, Sequence[str]]:
    """Callers with blocks of their own, which are filled from a small CPU tier, and forgotten while they are copied.
    Also the faults that they are likely to have."""
    settings = msgspec.structs.replace(
        settings,
        num_users=choose.choice((1, 2, 2)),
        num_cpu_blocks=choose.choice((_FEW_BLOCKS, 12, 24)),
        has_store=settings.has_store and choose.random() < 0.5,  # which forgets nothing
    )
    num_texts = choose.choice((1, 2, NUM_TEXTS))

    def acts() -> Iterator[Act]:
        for verbs in _OWN_BLOCKS * max(1, num_acts // len(_OWN_BLOCKS)):
            yield Act(choose.choice(verbs), choose.randrange(num_texts), choose.randrange(64), choose.randrange(64))

    users = tuple(tuple(tuple(acts()) for _ in range(settings.num_users)) for _ in range(settings.num_engines))
    return settings, users, choose.choice(_OF_COPIES)


def _some(choose: random.Random, names: Sequence[str], settings: Settings) -> Sequence[str]:
    """Faults that go together, or any; some stories are about one alone."""
    needs = ["num_users", *(need for need in ("ranks_own_kv", "has_store", "has_peers") if getattr(settings, need))]
    need = choose.choice(needs)
    themes = [theme for needed, theme in _THEMES if needed == need]
    theme = [name for name in choose.choice(themes) if name in names]
    if theme and choose.random() < 0.6:
        return theme
    return names and choose.sample(names, min(len(names), choose.choice((1, 2, 4, len(names)))))


def _fault(choose: random.Random, step: int, names: Sequence[str]) -> Fault:
    name = choose.choice(names)
    phases = next((phases for word, phases in _LIKELY.items() if word in name), AFTER_START)
    phase = choose.choice(choose.choice((AFTER_START, phases)))
    seconds = choose.choice(_LONG_SECONDS if any(word in name for word in _LASTING) else SECONDS)
    return Fault(step, name, choose.randrange(64), seconds, phase)


def _settings(choose: random.Random, fault_names: tuple[str, ...]) -> Settings:
    has_peers = choose.random() < _PEER_SHARE
    return Settings(
        num_engines=2 if has_peers else choose.choice((1, 1, 1, 2)),
        has_peers=has_peers,
        num_users=choose.choice((1, 1, 2)),
        tp_size=choose.choice((1, 2, 2, 3)),
        num_gpu_blocks=choose.choice((16, 24, 32)),
        num_cpu_blocks=choose.choice((6, 24, 60)),
        has_store=choose.random() < 0.7,
        kv_owner=choose.choice(("engine", "transfer", "worker")),
        cpu_write_policy=choose.choice(WRITE_POLICIES),
        storage_write_policy=choose.choice(WRITE_POLICIES),
        prefetch_policy=choose.choice(("timeout", "best_effort", "wait_complete")),
        eviction_policy=choose.choice(("lru", "lru", "fifo", "lfu", "slru", "priority", "reuse")),
        recompute_last_token=choose.random() < 0.3,
        num_store_blocks=choose.choice((24, 128)),
        memory_error_share=choose.choice((0.0, 0.0, 0.0, 0.03, _OFTEN) if "memory errors" in fault_names else _NEVER),
        outside_error_share=choose.choice((0.0, 0.0, 0.0, 0.003, 0.03) if "outside errors" in fault_names else _NEVER),
    )


def acts_for(choose: random.Random, settings: Settings, num_acts: int) -> list[Act]:
    """Draw what one user does with a cache of these settings."""
    weights = {verb: weight for verb, weight in ACTS.items() if getattr(settings, NEEDS.get(verb, "num_users"))}
    if settings.has_rows:
        weights = {verb: weight for verb, weight in weights.items() if verb not in NOT_WITH_ROWS}
    for verb in _RARE:  # some stories are full of what others lack
        if verb in weights:
            weights[verb] *= choose.choice((0, 1, 1, 8))
    share = choose.choice((0, 0, 0, 1, 4))  # likewise of those that keep their requests themselves
    weights |= {verb: share * weights[verb] for verb in _OF_CALLERS if verb in weights}
    verbs = choose.choices(list(weights), list(weights.values()), k=num_acts)
    return [Act(verb, choose.randrange(64), choose.randrange(64), choose.randrange(64)) for verb in verbs]

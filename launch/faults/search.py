"""Looking for what is wrong: story after story, each from its own seed; what is found is made short."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.launch.faults.drawing import new_story
from fastdeploy_cache.launch.faults.fault_kinds import FAULTS
from fastdeploy_cache.launch.faults.simulation import on_one_core
from fastdeploy_cache.launch.faults.stage import Watch
from fastdeploy_cache.launch.faults.story import Act, Story
from fastdeploy_cache.launch.faults.world import Outcome, StoryFinding, World

NewWatch = Callable[[PrefixCacheManager], Watch]
_MOST_TRIES = 400  # of shorter stories
ALL_FAULTS: Final = tuple(FAULTS)


@dataclass
class FoundStory:
    """A story in which something was wrong."""

    story: Story
    finding: StoryFinding
    num_steps: int  # of the whole search, up to it
    lines: list[str]


@dataclass
class Search:
    """What a search has seen so far."""

    num_stories: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    met: Counter[tuple[str, str]] = field(default_factory=Counter)
    found: list[FoundStory] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        """Faults that have happened."""
        return sum(number for name, number in self.counts.items() if name.startswith("fault: "))


def run_story(story: Story, watches: Sequence[NewWatch] = ()) -> Outcome:
    """All of it, in this process. One at a time."""
    with on_one_core():
        return World(story, watches).run()


def search(
    seeds: Iterator[int] | None = None,
    *,
    watches: Sequence[NewWatch] = (),
    fault_names: Sequence[str] = ALL_FAULTS,
    first_seed: int = 0,
    has_agents: bool = False,
) -> Iterator[Search]:
    """Run one story after the other; yields what has been seen up to then, after each. `has_agents`: these give hints,
    and engines lend. In every second story one namespace is a tenant then."""
    so_far, started = Search(), SYSTEM_CLOCK.now()
    for seed in seeds if seeds is not None else itertools.count(first_seed):
        story = new_story(seed, tuple(fault_names))
        if has_agents:
            settings = msgspec.structs.replace(story.settings, agents=True, tenants=not seed % 2)
            story = msgspec.structs.replace(story, settings=settings)
        outcome = run_story(story, watches)
        so_far.num_stories += 1
        so_far.num_steps += outcome.num_steps
        so_far.counts += outcome.counts
        so_far.met += outcome.met
        so_far.seconds = SYSTEM_CLOCK.now() - started
        if outcome.findings:
            so_far.found.append(FoundStory(story, outcome.findings[0], so_far.num_steps, outcome.lines))
        yield so_far


def shortest(
    story: Story,
    kind: str,
    watches: Sequence[NewWatch] = (),
    *,
    most_tries: int = _MOST_TRIES,
    before_each: Callable[[], None] = lambda: None,
) -> Story:
    """A story with the same kind of finding, from which nothing more can be left out, as far as so many tries tell."""
    tries = itertools.count()

    def is_found(shorter: Story) -> bool:
        before_each()
        if next(tries) >= most_tries:
            return False
        return any(finding.kind == kind for finding in run_story(shorter, watches).findings)

    while True:
        before = story
        story = _with_fewer_faults(story, is_found)
        story = _with_fewer_acts(story, is_found)
        if story == before:
            return story


def _with_fewer_faults(story: Story, is_found: Callable[[Story], bool]) -> Story:
    for fault in story.faults:
        shorter = msgspec.structs.replace(story, faults=tuple(each for each in story.faults if each is not fault))
        if is_found(shorter):
            story = shorter
    return story


def _with_fewer_acts(story: Story, is_found: Callable[[Story], bool]) -> Story:
    """Leave out pieces of what each user does: halves first, at last single acts."""
    for engine, user in [(e, u) for e, users in enumerate(story.users) for u in range(len(users))]:
        size = max(1, len(story.users[engine][user]) // 2)
        while size:
            start = len(story.users[engine][user]) - size
            while start >= 0:
                acts = story.users[engine][user]
                shorter = _with_acts(story, engine, user, acts[:start] + acts[start + size :])
                if is_found(shorter):
                    story = shorter
                start -= size
            size //= 2
    return story


def _with_acts(story: Story, engine: int, user: int, acts: tuple[Act, ...]) -> Story:
    users = [list(each) for each in story.users]
    users[engine][user] = acts
    return msgspec.structs.replace(story, users=tuple(map(tuple, users)))


def as_test(found: FoundStory) -> str:
    """The story as a test that fails now."""
    story, finding = found.story, found.finding
    settings = ", ".join(
        f"{name}={getattr(story.settings, name)!r}"
        for name in story.settings.__struct_fields__
        if getattr(story.settings, name) != getattr(type(story.settings)(), name)
    )
    users = ",\n".join(
        "        ("
        + "".join(f"\n            ({', '.join(map(_act, acts))}{',' * (len(acts) == 1)})," for acts in each)
        + "\n        )"
        for each in story.users
    )
    faults = "".join(f"\n            {_fault(each)}," for each in story.faults)
    return (
        "from fastdeploy_cache.launch.faults.search import run_story\n"
        "from fastdeploy_cache.launch.faults.story import Act, Fault, Settings, Story\n\n\n"
        f"def test_{finding.kind.replace(' ', '_').replace(':', '')}_{story.seed}() -> None:\n"
        f'    """{finding.kind}: {finding.text[:80]}"""\n'
        f"    story = Story(\n        seed={story.seed},\n        settings=Settings({settings}),\n"
        f"        users=(\n{users},\n        ),\n        faults=({faults}\n        ),\n    )\n"
        "    assert not run_story(story).findings\n"
    )


def _act(act: Act) -> str:
    numbers = [act.first, act.second, act.third]
    while numbers and not numbers[-1]:
        numbers.pop()
    return f"Act({', '.join([repr(act.verb), *map(str, numbers)])})"


def _fault(fault: object) -> str:
    return repr(fault)

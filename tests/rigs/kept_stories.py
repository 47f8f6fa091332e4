"""Stories that are kept as text, so that no change of the drawing touches them; a change of what a verb does may."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fastdeploy_cache.launch.faults.story import Act, Fault, Settings, Story


class KeptStory(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a file: a story in which something was found, and mended."""

    why: str
    seed: int
    settings: Settings
    faults: tuple[tuple[int, str, int, float, str], ...]
    users: tuple[tuple[tuple[tuple[str, int, int, int], ...], ...], ...]

    def story(self) -> Story:
        """It can be run."""
        users = tuple(tuple(tuple(Act(*act) for act in acts) for acts in engine) for engine in self.users)
        return Story(
            seed=self.seed, settings=self.settings, users=users, faults=tuple(Fault(*each) for each in self.faults)
        )


def kept_stories(path: Path) -> list[KeptStory]:
    """All of a file."""
    return [msgspec.json.decode(line, type=KeptStory) for line in path.read_bytes().splitlines()]

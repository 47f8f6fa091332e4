"""What stories are about: the page says how many of each kind there are."""

from __future__ import annotations

from collections import Counter

from fastdeploy_cache.launch.faults.drawing import CROWD, new_story
from fastdeploy_cache.launch.faults.search import ALL_FAULTS
from fastdeploy_cache.launch.faults.story import Story

NUM_STORIES = 2000
OF_COME_BACKS = {"admit", "end", "flush", "detach", "reset", "sleep", "weights"}
OF_CALLERS = {"swap_out", "insert", "swap_in", "load", "find", "admit", "evict", "end", "reset"}
OF_RECEIVERS = {"receive", "rest", "end", "weights"}


def kinds(story: Story) -> set[str]:
    """Those of the page's list."""
    settings, verbs = story.settings, [{act.verb for user in users for act in user} for users in story.users]
    is_come_back = all(each <= OF_COME_BACKS for each in verbs)
    is_of_callers = all(each <= OF_CALLERS and "swap_out" in each for each in verbs)
    is_hand_over = len(verbs) == 2 and "offer" in verbs[0] and verbs[1] <= OF_RECEIVERS
    is_of = {
        "workers": settings.has_workers,
        "rows": settings.has_rows,
        "crowd": settings.num_users == CROWD["num_users"],
        "come back": is_come_back,
        "come back, few blocks": is_come_back and settings.num_cpu_blocks < 24,
        "own blocks": is_of_callers,
        "hand-over": is_hand_over,
        "hand-over, new weights": is_hand_over and "weights" in verbs[0],
        "start": any(fault.phase == "start: peer" for fault in story.faults),
        "memory errors": settings.memory_error_share > 0,
        "outside errors": settings.outside_error_share > 0,
    }
    return {name for name, is_it in is_of.items() if is_it}


def test_there_are_as_many_of_each_kind_as_the_page_says() -> None:
    """Counted in 2,000 stories: from three in ten to one in twenty, and two in five."""
    found = Counter(name for seed in range(NUM_STORIES) for name in kinds(new_story(seed, ALL_FAULTS)))
    shares = {name: number / NUM_STORIES for name, number in found.items()}
    assert 0.27 < shares["workers"] < 0.33
    assert shares["crowd"] == 0.05
    assert shares["rows"] == 0.1
    assert 0.2 < shares["come back"] < 0.26
    assert 0.16 < shares["own blocks"] < 0.22
    assert 0.4 < shares["come back, few blocks"] / shares["come back"] < 0.6
    assert 0.2 < shares["hand-over"] < 0.26
    assert 0.11 < shares["start"] < 0.16
    assert 0.6 < shares["hand-over, new weights"] / shares["hand-over"] < 0.85
    assert 0.37 < shares["memory errors"] < 0.43 and 0.37 < shares["outside errors"] < 0.43

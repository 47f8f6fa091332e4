"""Workers of stories: the model computes on new arrays only when the cache knows that those of before are gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fastdeploy_cache.launch.faults.search import run_story
from fastdeploy_cache.launch.faults.story import Act, Settings, Story
from fastdeploy_cache.launch.faults.user import StoryUser


def test_nothing_is_computed_between_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the cache is being told, a rank still moves bytes between the CPU tier and the arrays of before. What
    another user loads or computes then must not come from one worker's arrays and go to another one's, nor be found
    later; two soaks saw wrong bytes of the model's own."""
    call, seen = StoryUser.call, list[str]()

    def slowly_told(user: StoryUser, verb: str, asked: Callable[[], Any], *limits: float, **more: Any) -> Any:
        host = user.world.host
        if verb == "kv_lost" and "kv_lost" not in seen:
            seen.append("is told")
            host.sleep(5.0)
        elif verb == "sleep":
            while not seen or seen[-1] != "is told":
                host.sleep(0.01)
        result = call(user, verb, asked, *limits, **more)
        if seen or verb == "kv_lost":
            seen.append(verb)
        return result

    monkeypatch.setattr(StoryUser, "call", slowly_told)
    first = Act("admit", 0, 1, 1), Act("rest", 2, 0, 1), Act("end"), Act("worker")
    loads = Act("sleep"), Act("admit", 0, 0, 2)
    computes = Act("rest", 2, 0, 2), Act("admit", 0, 1, 7), Act("rest", 2, 0, 1), Act("end")
    finds = Act("rest", 2, 0, 6), Act("admit", 0, 1, 7)
    settings = Settings(kv_owner="worker", has_store=False, tp_size=1, num_users=3)
    outcome = run_story(Story(seed=1, settings=settings, users=((first, loads, (*computes, *finds)),)))
    assert not outcome.findings and outcome.counts["CPU tokens"] >= 32
    assert seen.index("is told") < seen.index("wake") < seen.index("kv_lost")

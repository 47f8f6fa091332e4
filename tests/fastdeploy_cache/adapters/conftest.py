"""What the tests of an adapter share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from tests.rigs.fastdeploy_engine import new_config


@pytest.fixture
def manager() -> Iterator[PrefixCacheManager]:
    made = PrefixCacheManager(new_config(), 1, schedules_ahead=False)
    yield made
    made.cache.check_invariants()
    gpu = made.cache.stats().gpu
    assert gpu.num_private == gpu.num_callers == made.cache.stats().num_requests == 0, "something was left behind"
    made.close()


@pytest.fixture
def new_rig(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes engines of vLLM's, `tests.rigs.vllm_rig.Rig`, that do not outlive the test."""
    from tests.rigs.vllm_rig import Rig  # needs vLLM

    rigs: list[Rig] = []

    def new(**settings: Any) -> Rig:
        rigs.append(Rig(tmp_path, **settings))
        return rigs[-1]

    yield new
    for rig in rigs:
        rig.close()


@pytest.fixture
def new_linked() -> Iterator[Callable[..., Any]]:
    """Makes linkers for SGLang, `tests.rigs.linked_engine.Linked`, that do not outlive the test."""
    from tests.rigs.linked_engine import Linked  # puts a stand-in for SGLang in its place

    made: list[Linked] = []

    def new(*arguments: Any, **options: Any) -> Linked:
        made.append(Linked(*arguments, **options))
        return made[-1]

    yield new
    for each in made:
        each.check()
        each.linker.close()
    made.clear()

"""What a chat costs in vLLM's scheduler process, in calls: with several groups hardly more than with one."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from fastdeploy_cache.books.tokens import IS_NATIVE
from tests.rigs.call_counts import counted
from tests.rigs.connector_half import ConnectorHalf

_PROMPT = [*range(600)]
_OUTPUT = [*range(120)]
_NEXT = [*_PROMPT, *_OUTPUT, *range(80)]
CALLS = {False: 4_719, True: 5_715}  # of a turn behind the one before, by whether there is a window; they may fall
_MOST_RATIO = 1.3


def calls_of_a_turn(monkeypatch: pytest.MonkeyPatch, *, has_window: bool) -> tuple[int, int]:
    """Tokens that are loaded, and calls of Python and of C, of all that vLLM calls for the second turn of a chat."""
    rig, calls = ConnectorHalf(monkeypatch, has_window=has_window), 0
    rig.serve(_PROMPT, _OUTPUT)

    def call(verb: Any, *given: Any) -> Any:
        nonlocal calls
        found, num_calls = counted(lambda: verb(*given))
        calls += num_calls - 1
        return found

    rig.call = call
    num_loaded = rig.serve(_NEXT, _OUTPUT)
    rig.half.close()
    return num_loaded, calls


@pytest.mark.skipif(not IS_NATIVE, reason="calls are counted with the native part, which was not built here")
def test_calls_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than before; and with a window beside full attention at most 1.3 times those of one group."""
    (one_loaded, one), (two_loaded, two) = (calls_of_a_turn(monkeypatch, has_window=each) for each in (False, True))
    assert one_loaded == two_loaded == 720, "the second turn goes on behind the first"
    assert two <= _MOST_RATIO * one, (one, two)
    if sys.version_info < (3, 12):
        assert one <= CALLS[False] and two <= CALLS[True], (one, two)

"""The checked models: every order of steps, to its end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.model.checker import BLOCK, BUDGETS, HANDOVER, ONE, RESTART, TWO, check, check_ends

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not (shutil.which("spin") and shutil.which("gcc")), reason="needs spin and gcc"),
    pytest.mark.timeout(900),
]
_IS_NIGHT = os.environ.get("FASTDEPLOY_CACHE_NIGHT") == "1"  # all that may happen in one search, which takes minutes
# Short enough for every change: as many tasks with a death, as many with a reset, and fewer tasks with both.
DEATH = ("MAX_TAKES=2", "MAX_PUTS=3", "MAX_DEATHS=1", "MAX_FORGETS=0")
RESET = ("MAX_TAKES=2", "MAX_PUTS=3", "MAX_DEATHS=0", "MAX_FORGETS=1")
BOTH = ("MAX_TAKES=1", "MAX_PUTS=2", "MAX_DEATHS=1", "MAX_FORGETS=1")
SEARCHES = {
    "block-death": (BLOCK, DEATH, 5 * 10**6),
    "block-reset": (BLOCK, RESET, 9 * 10**5),
    "block-both": (BLOCK, BOTH, 5 * 10**6),
    **({"block": (BLOCK, BUDGETS, 2 * 10**7)} if _IS_NIGHT else {}),
    "handover": (HANDOVER, TWO, 10**7),
    "handover-deaths": (HANDOVER, RESTART, 10**6),
    "handover-repeats": (HANDOVER, (*ONE, "NUM_ASKS=2"), 5 * 10**5),  # so that an answer may be lost, and given again
}
ENDS = {
    "block": (BLOCK, ("MAX_TAKES=2", f"MAX_PUTS={2 if _IS_NIGHT else 1}", "MAX_DEATHS=1", "MAX_FORGETS=0")),
    "handover": (HANDOVER, ONE),
    "handover-deaths": (HANDOVER, RESTART),
}


@pytest.mark.parametrize(("model", "macros", "at_least"), SEARCHES.values(), ids=SEARCHES)
def test_no_order_of_steps_breaks_an_invariant(model: Path, macros: tuple[str, ...], at_least: int) -> None:
    """All states within the budgets: no wrong byte, no foreign write, nothing left behind at any end."""
    checked = check(model, macros, is_large=at_least >= 10**7)
    assert checked.violated == "" and checked.num_states >= at_least


@pytest.mark.parametrize(("model", "macros"), ENDS.values(), ids=ENDS)
def test_every_run_comes_to_an_end(model: Path, macros: tuple[str, ...]) -> None:
    """No state can be reached from itself, so nothing goes on for ever; and at each end nothing is left behind."""
    checked = check_ends(model, macros)
    assert checked.violated == "" and checked.num_states > 50_000

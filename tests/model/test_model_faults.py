"""Each class of fault is one that the search of a model would not miss."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.model.checker import BLOCK, BUDGETS, HANDOVER, ONE, RESTART, TWO, check

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not (shutil.which("spin") and shutil.which("gcc")), reason="needs spin and gcc"),
    pytest.mark.timeout(900),
]
FEW, READS = BUDGETS, ("MAX_TAKES=2", "MAX_PUTS=1", "MAX_DEATHS=0", "MAX_FORGETS=0")
LOSSES = ("MAX_TAKES=1", "MAX_PUTS=0", "MAX_DEATHS=1", "MAX_FORGETS=0")
# fault: the model, the invariant that it breaks, how much may happen
FAULTS = {
    "SWITCH_EARLY": (BLOCK, "wrong_byte", FEW),  # a task ends with the first rank that has answered
    "FREE_AT_KILL": (BLOCK, "foreign_write", FEW),  # ids go home when a rank is killed, before it is reaped
    "FAIL_AS_OK": (BLOCK, "wrong_byte", FEW),  # a failed load counts as loaded
    "LAND_OLD": (BLOCK, "wrong_byte", FEW),  # what was on its way lands after a reset
    "COMMIT_OLD": (BLOCK, "wrong_byte", FEW),  # a request publishes what a reset has forgotten
    "NO_PIN": (BLOCK, "read_of_another", READS),  # what a task reads may be evicted
    "NO_DEFER": (BLOCK, "read_of_another", READS),  # what storage reads is given out again
    "CANCEL_ENDS": (BLOCK, "foreign_write", FEW),  # a cancelled task ends at once
    "COUNT_TWICE": (BLOCK, "foreign_write", FEW),  # a rank answers, dies, and is counted again
    "ONE_FORGET": (BLOCK, "wrong_byte", LOSSES),  # what is computed on a dead rank's arrays counts
    "ACCEPT_TORN": (BLOCK, "wrong_byte", FEW),  # half an object of a store is taken for a whole one
    "FORGET_AT_REAP": (BLOCK, "left_behind", FEW),  # nobody answers for a rank that has died
    "KEEP_QUEUE": (BLOCK, "foreign_write", FEW),  # a new process does what the old one was asked
    "NO_LAST_WORD": (HANDOVER, "wrong_byte", ONE),  # a receive joins without its owner's last word
    "CONFIRM_GONE": (HANDOVER, "wrong_byte", ONE),  # an owner confirms what it does not hold any more
    "READ_AHEAD": (HANDOVER, "wrong_byte", ONE),  # blocks are read before they are computed
    "FREE_AT_FIRST": (HANDOVER, "wrong_byte", ONE),  # a send's blocks go with the first rank that has ended
    "FREE_AT_RELEASE": (HANDOVER, "wrong_byte", ONE),  # a send does not hold its blocks
    "JOIN_SOME": (HANDOVER, "wrong_byte", ONE),  # a receive joins when one rank has it
    "SAME_INSTANCE": (HANDOVER, "wrong_byte", RESTART),  # offers of an engine's earlier run are taken for new ones
    "ANY_READER": (HANDOVER, "word_of_another", TWO),  # a receive that was given up ends the send of the next
    "NO_DEADLINE": (HANDOVER, "left_behind", ONE),  # a send waits for ever for its reader
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_known_fault_is_rejected_by_the_name_of_what_it_breaks(fault: str) -> None:
    """One check is taken out of the model, and the search says which promise is broken."""
    model, invariant, macros = FAULTS[fault]
    assert check(model, (fault, *macros)).violated == invariant


def test_the_models_name_their_faults() -> None:
    """What the head of a model lists is what is tried here."""
    for model in (BLOCK, HANDOVER):
        head = re.search(r"\* FAULTS: (.*?)\*/", model.read_text(), re.DOTALL)
        assert head is not None
        names = set(re.findall(r"[A-Z_]{3,}", head[1]))
        assert names == {fault for fault, (of, _, _) in FAULTS.items() if of == model}

"""What another instance has cached is borrowed: every byte is compared, over every link, and when the lender dies."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.rigs.instance import BLOCK_SIZE, Instance
from tests.rigs.needs import need_mooncake, need_nixl
from tests.rigs.peer_instances import NONE_HELD, NUM_BLOCKS, TOKENS, Rig

pytestmark = pytest.mark.processes
BEHIND = [7, 8, 9]


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as opened:
        yield Rig(opened)


def computed(instance: Instance, name: str) -> None:
    """The prompt is computed there, and goes; nobody reads its offer."""
    instance.offer(name, TOKENS)
    instance.compute(name, len(TOKENS))
    instance.cache.peers.cancel_send(instance.sends[name])
    instance.release(name)


@pytest.mark.parametrize("link", ["shm", "nixl", "mooncake"])
def test_three_instances_lend_from_one_to_the_next(rig: Rig, link: str) -> None:
    """From the CPU tier of the first to the second, and from that one on to the third, which has another number of
    ranks; a prompt that goes on behind it finds all of it."""
    if link == "nixl":
        need_nixl()
    if link == "mooncake":
        need_mooncake()
    settings: dict[str, Any] = {"link": link, "silence_timeout_seconds": 10.0, "num_cpu": 64}
    first, second = rig.here("mixed", **settings), rig.here("mixed", **settings)
    third = rig.here("mixed", tp_size=2, **settings)
    computed(first, "a")
    for lender, borrower in ((first, second), (second, third)):
        offer = lender.lend("lent", [*TOKENS, *BEHIND])
        assert borrower.receive("b", [*TOKENS, *BEHIND], offer, is_lent=True) == NUM_BLOCKS
        assert borrower.wait_receive("b") == [True, None, None]
        assert borrower.serve("b") == NUM_BLOCKS * BLOCK_SIZE
        assert lender.wait_send("lent") == [True, None, None]
    assert first.check() == second.check() == third.check() == NONE_HELD


def test_a_lender_that_is_killed(rig: Rig) -> None:
    """Before anything was read, nothing comes, and nothing wrong is found; another one lends the same."""
    settings: dict[str, Any] = {"num_cpu": 64}
    doomed, other, borrower = rig.apart("mixed", **settings), rig.here("mixed", **settings), rig.here("mixed")
    for verb, given in (("offer", ["a", TOKENS]), ("compute", ["a", len(TOKENS)]), ("release", ["a"])):
        doomed.do(verb, *given)
    offer = base64.b64decode(doomed.do("lend", "lent", TOKENS + BEHIND))
    doomed.kill()
    borrower.receive("b", TOKENS + BEHIND, offer, is_lent=True)
    assert borrower.wait_receive("b")[:2] == [False, "gone"]
    assert borrower.serve("b") == 0
    computed(other, "a")
    borrower.receive("c", TOKENS + BEHIND, other.lend("lent", TOKENS + BEHIND), is_lent=True)
    assert borrower.wait_receive("c") == [True, None, None]
    assert borrower.serve("c") == NUM_BLOCKS * BLOCK_SIZE
    assert other.check() == borrower.check() == NONE_HELD


def test_what_the_lender_forgets_while_it_is_read(rig: Rig) -> None:
    """A reset ends the loan: the borrower has nothing of it, whatever has been copied."""
    lender, borrower = rig.here("mixed", num_cpu=64), rig.here("mixed")
    computed(lender, "a")
    offer = lender.lend("lent", TOKENS + BEHIND)
    lender.cache.reset()
    borrower.receive("b", TOKENS + BEHIND, offer, is_lent=True)
    assert borrower.wait_receive("b")[0] is False
    assert borrower.serve("b") == 0
    assert lender.check() == borrower.check() == NONE_HELD

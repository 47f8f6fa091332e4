"""Hand-overs of a hybrid model that do not come to their end, or not at once: what is short, late or left out."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.books.checkpoint import chain_of
from fastdeploy_cache.books.checkpoints import Checkpoints
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.peers import receives
from tests.rigs.held_tasks import Held
from tests.rigs.hybrid_requests import TEXT, computed, picture, started
from tests.rigs.linked_caches import END, Linked
from tests.rigs.stored_rows import no_memory

TIERS = {"num_cpu_blocks": 90, "cpu_write_policy": "write_through", "max_load_share": 1.0}


def in_cpu_alone(cache: PrefixCacheManager, tokens: list[int] = TEXT) -> None:
    """These are computed there, copied down, and leave the GPU."""
    cache.release(computed(cache, "first", tokens))
    for number in range(6):
        cache.release(computed(cache, f"other {number}", [100 + number] * 18))


def test_a_checkpoint_in_front_of_which_a_load_is_on_its_way_is_not_offered_yet() -> None:
    """It has come, full KV has not, and then does not: nobody hears of it, and what is held ends in the right order."""
    pair = Linked(**TIERS)
    in_cpu_alone(pair.prefill)
    held = Held(pair.prefill)
    request = Request(request_id="again", prompt_token_ids=TEXT)
    pair.prefill.match(request)
    pair.prefill.rows.allocate(request, 1, ahead_of_loads=True)
    full, (image,) = [t for t in held.tasks if not t.units], [t for t in held.tasks if t.units]
    held.tasks = [image]
    held.go()
    send = pair.prefill.peers.offer(request)
    pair.check()
    assert not list(pair.prefill.peers.road.sends.checkpoints)
    held.tasks = full
    held.go(lambda _: True)
    pair.prefill.release(request)
    pair.check()
    pair.go_on()
    assert send.reason == "failed"
    pair.check_nothing_kept()
    pair.close()


def test_a_row_that_is_short_starts_no_load() -> None:
    """The same with full KV in the CPU tier: nothing leaves the GPU for a load whose receive is refused."""
    pair = Linked(**TIERS)
    in_cpu_alone(pair.decode, TEXT[:12])
    send = pair.handed()
    fillers = [started(pair.decode, f"filler {n}", [40 + n] * 22)[0] for n in range(2)]
    held, before = Held(pair.decode), picture(pair.decode)
    with pytest.raises(OutOfBlocksError, match="units of the row"):
        pair.receive(send.offer)
    assert not held.tasks and picture(pair.decode) == before
    for filler in fillers:
        pair.decode.release(filler)
    request, receive = pair.receive(send.offer)
    assert held.num_loads == 1, "full KV alone: the checkpoint comes over the link"
    held.go()
    pair.go_on()
    assert receive.succeeded and pair.decode.match(request).num_tokens == END
    pair.decode.release(request)
    pair.check_nothing_kept()
    pair.close()


def test_checkpoints_that_come_are_as_few_as_those_that_are_computed() -> None:
    """A conversation that is handed over turn by turn: of its path, `checkpoints_per_path` stay beside the last."""
    pair = Linked(num_gpu_blocks=40, num_gpu_units=(20, 40), checkpoints_per_path=2)
    for turn in range(1, 8):
        tokens = list(range(8 * turn + 2))
        send = pair.handed(tokens, f"turn {turn}")
        request, receive = pair.receive(send.offer, tokens)
        pair.go_on()
        assert receive.succeeded and pair.decode.match(request).num_tokens == 8 * turn
        pair.decode.release(request)
        for cache in (pair.prefill, pair.decode):
            run = cache._books.tree.find("", request.keys(4), 2 * turn)[0][-1]
            assert len(list(chain_of(run))) == min(turn, 3)
    pair.check_nothing_kept()
    pair.close()


def test_a_send_whose_checkpoint_can_come_no_more_fails_at_once(linked_pair: Linked) -> None:
    """The next commit is beyond its end, and nobody has taken a snapshot there."""
    request, _, send = linked_pair.offered()
    linked_pair.prefill.commit(request, END)
    linked_pair.go_on()
    assert not send.done
    linked_pair.prefill.commit(request, len(TEXT))
    linked_pair.go_on()
    assert send.reason == "failed" and "no checkpoint was made behind its 4 blocks" in str(send.error)
    linked_pair.prefill.release(request)
    linked_pair.check_nothing_kept()


def test_a_receive_that_comes_when_nobody_waits_says_so(linked_pair: Linked) -> None:
    """All was read when its request was cancelled: it is not kept, and it has not succeeded."""
    send = linked_pair.handed()
    request, receive = linked_pair.receive(send.offer)
    linked_pair.network[1].read(linked_pair.going[0], 100)
    linked_pair.decode.peers.cancel_receive(request)
    linked_pair.go_on()
    assert receive.reason == "cancelled" and "before it had come" in str(receive.error)
    linked_pair.check_nothing_kept()


def test_half_of_the_blocks_are_inserted(linked_pair: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    """There was no memory for the others: the checkpoint, which would lie behind them, does not come."""
    send = linked_pair.handed()
    _, receive = linked_pair.receive(send.offer)
    insert = receives.insert

    def half(tree: Any, at: Any, keys: Any, first: int, ids: Any, **fields: Any) -> Any:
        return insert(tree, at, keys, first, ids[:2], **fields)

    monkeypatch.setattr(receives, "insert", half)
    linked_pair.go_on()
    assert receive.reason == "failed"
    linked_pair.check_nothing_kept()
    assert linked_pair.decode.stats().gpu.num_free == 16


@pytest.mark.parametrize(
    ("where", "name"), [(Checkpoints, "publish"), (Checkpoints, "_take_units"), (receives, "insert")]
)
def test_books_without_memory_fail_the_receive(
    linked_pair: Linked, where: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full blocks without their checkpoint serve nobody: none stays."""
    send = linked_pair.handed()
    request, receive = linked_pair.receive(send.offer)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, no_memory)
        linked_pair.go_on()
    assert receive.reason == "failed" and "could not take what had come" in str(receive.error)
    linked_pair.check_nothing_kept()
    assert linked_pair.decode.stats().gpu.num_free == 16
    assert linked_pair.decode.match(request).num_tokens == 0


@pytest.mark.parametrize("name", ["pin", "bytes of it", "task"])
def test_a_checkpoint_of_which_nobody_could_be_told(
    linked_pair: Linked, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory: the next commit tells."""
    request, new, send = linked_pair.offered()
    theirs, receive = linked_pair.receive(send.offer)
    linked_pair.prefill.commit(request, 12)
    linked_pair.prefill.rows.snapshot(request, END, new.tables[0].block_ids)
    sends = linked_pair.prefill.peers.road.sends
    with monkeypatch.context() as patch:
        outbox = linked_pair.prefill.peers.road._outbox
        verbs = {"pin": (sends, "_keep_checkpoint"), "bytes of it": (sends, "_update"), "task": (outbox, "put")}
        patch.setattr(*verbs[name], no_memory)
        linked_pair.prefill.commit(request, END)
    linked_pair.check()
    assert not list(sends.checkpoints)
    linked_pair.prefill.commit(request, len(TEXT))
    linked_pair.go_on()
    assert receive.succeeded and send.succeeded
    linked_pair.prefill.release(request)
    assert linked_pair.decode.match(theirs).num_tokens == END
    linked_pair.decode.release(theirs)
    linked_pair.check_nothing_kept()

"""Blocks and units of callers of a hybrid model: copies of both, all or nothing, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books.run import CPU
from fastdeploy_cache.callers.transfers import CallerTransfer
from fastdeploy_cache.errors import BlockOwnerError, OutOfBlocksError, RequestError
from fastdeploy_cache.transfer_manager.kv.groups import KVGroup
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.task import LEFT_OUT
from tests.rigs.hybrid_requests import BOTH, FULL, TEXT, UNIFORM, computed, manager, picture, started
from tests.rigs.scarce_memory import no_memory
from tests.rigs.simulated_client import SimulatedClient

NUM_CPU = 12
CHUNK = KVGroup(kind="chunk", reach_tokens=8, layers=(1,))
CHUNKS = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, groups=(FULL, CHUNK))
FOUR = Request(request_id="four blocks", prompt_token_ids=TEXT)


class Caller:
    """A manager over simulated memory, and a caller with ids of its own."""

    def __init__(self, layout: KVLayout = BOTH, num_rows: int = 2, **fields: object) -> None:
        self.client = SimulatedClient(16, NUM_CPU, num_rows)
        settings: dict[str, object] = {
            "block_size": 4, "num_gpu_blocks": 16, "num_cpu_blocks": NUM_CPU, "layout": layout,
            "transfer_client": "inline", "max_running": 3, **fields,
        }  # fmt: skip
        self.cache = PrefixCacheManager(CacheConfig(**settings), client=self.client)  # type: ignore[arg-type]
        self.blocks = self.cache.blocks

    def own(self, num_blocks: int, boundary: int) -> tuple[list[int], list[list[int]]]:
        """Fresh ids, each of which holds its own name."""
        ids = self.blocks.allocate(num_blocks)
        wanted = map(len, self.blocks.units.positions(boundary))
        units = [self.blocks.units.allocate(row, number) for row, number in enumerate(wanted)]
        for block_id in ids:
            self.client.gpu[block_id] = ("block", block_id)
        for row, each in enumerate(units):
            self.client.units[row].update({unit: (row, unit) for unit in each})
        return ids, units

    def store(self, request: Request = FOUR) -> tuple[CallerTransfer, list[int], list[list[int]]]:
        ids, units = self.own(request.num_tokens // 4, request.num_tokens // 4)
        return self.blocks.copies.swap_out(request, ids, units=units), ids, units

    def boundary(self, request: Request = FOUR) -> int | None:
        return self.blocks.lookup(request, touch=False).num_checkpoint_blocks


@pytest.fixture
def caller() -> Iterator[Caller]:
    made = Caller()
    yield made
    made.client.land_all()
    made.cache.check_invariants()
    made.cache.close()


def test_what_goes_down_comes_up_in_other_ids(caller: Caller) -> None:
    """Full blocks, the state and the window; of what is left out not a byte is written; a use is counted."""
    transfer, ids, units = caller.store()
    assert transfer.num_checkpoint_blocks == 4 == transfer.num_blocks and caller.boundary() == 0
    caller.client.land_all()
    assert transfer.succeeded and caller.boundary() == 4
    assert caller.blocks.note_use(FOUR, num_found_blocks=0) == 4
    others, more = caller.own(2, 4)
    more[1][0], spared = LEFT_OUT, more[1][0]
    up = caller.blocks.copies.swap_in(FOUR, others, first_block=2, units=more)
    assert up.num_blocks == 2 and up.num_checkpoint_blocks == 4
    caller.client.land_all()
    assert up.succeeded and [caller.client.gpu[i] for i in others] == [("block", i) for i in ids[2:]]
    assert caller.client.units[0][more[0][0]] == (0, units[0][0])
    assert caller.client.units[1][more[1][1]] == (1, units[1][1]) and caller.client.units[1][spared] == (1, spared)
    caller.blocks.units.free(1, [spared])


@pytest.mark.parametrize("failing", [0, 1])
def test_one_of_two_copies_that_fails_fails_both(caller: Caller, failing: int) -> None:
    """Full KV without a checkpoint serves nobody, and a checkpoint none without it: nothing of either is kept."""
    transfer, _, _ = caller.store()
    for number in range(2):
        caller.client.land("rank died" if number == failing else None)
        caller.cache.check_invariants()
    assert transfer.done and not transfer.succeeded and caller.boundary() == 0
    assert caller.blocks.lookup(FOUR).num_blocks == 0 and caller.cache.stats().cpu.num_free == NUM_CPU


def test_blocks_go_where_their_checkpoint_gets_no_memory(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have joined the tree by then, and would serve nobody."""
    assert caller.cache._books.rows is not None
    monkeypatch.setattr(caller.cache._books.rows.checkpoints, "restore", no_memory)
    caller.store()
    caller.client.land_all()
    caller.cache.check_invariants()
    assert caller.blocks.lookup(FOUR).num_blocks == 0 and caller.cache.stats().cpu.num_free == NUM_CPU


def test_blocks_go_where_nobody_can_look_for_them(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where memory runs out behind the last block that has joined."""
    tree, calls = caller.cache._books.tree, list[int]()
    find = tree.find

    def find_once(*given: object) -> object:
        calls.append(1)
        return find(*given) if len(calls) == 1 else no_memory()  # type: ignore[arg-type]

    caller.store()
    monkeypatch.setattr(tree, "find", find_once)
    caller.client.land_all()
    monkeypatch.undo()
    caller.cache.check_invariants()
    assert len(calls) == 2 and caller.cache.stats().cpu.num_free == NUM_CPU


def test_a_reset_on_the_way_keeps_what_was_old_out(caller: Caller) -> None:
    """It may be of other weights: nobody finds it. What was taken before a reset is not stored after it, either."""
    transfer, ids, units = caller.store()
    caller.client.land()
    caller.cache.reset()
    caller.client.land_all()
    assert transfer.succeeded and caller.boundary() == 0 and caller.cache.stats().cpu.num_free == NUM_CPU
    assert caller.blocks.copies.swap_out(FOUR, ids, units=units).num_checkpoint_blocks is None
    fresh = caller.blocks.allocate(4)
    assert caller.blocks.copies.swap_out(FOUR, fresh, units=units).num_checkpoint_blocks is None
    kept = caller.blocks.copies.swap_out(FOUR, fresh, units=units, generation=caller.blocks.generation)
    assert kept.num_checkpoint_blocks == 4


def test_pages_that_a_load_reads_are_given_to_nobody(caller: Caller) -> None:
    """The checkpoint and its blocks may be evicted meanwhile: their room comes free when the load has ended."""
    caller.store()
    caller.client.land_all()
    others, more = caller.own(0, 4)
    up = caller.blocks.copies.swap_in(FOUR, others, first_block=4, units=more)
    assert up.num_blocks == 0 and up.num_checkpoint_blocks == 4
    caller.blocks.evict(NUM_CPU, CPU)
    taken = caller.blocks.allocate(caller.cache._books.residency.num_available(CPU), CPU)
    for block_id in taken:
        caller.client.cpu[block_id] = "another's"
    caller.client.land_all()
    assert up.succeeded and caller.client.units[0][more[0][0]] != "garbage"
    caller.blocks.free(taken, CPU)


def test_nothing_is_begun_where_not_all_fits() -> None:
    """Neither blocks nor a checkpoint, of which a part would serve nobody; and what is there is not copied again."""
    caller = Caller()
    held = caller.blocks.allocate(NUM_CPU - 5, CPU)
    needed = 4 + caller.cache._books.rows.checkpoints.sizes.num_pages(4)  # type: ignore[union-attr]
    assert needed > 5
    before = picture(caller.cache)
    transfer, ids, units = caller.store()
    assert transfer.num_checkpoint_blocks is None and transfer.succeeded and not caller.client.tasks
    caller.blocks.free(held, CPU)
    assert caller.blocks.copies.swap_out(FOUR, ids, units=units).num_checkpoint_blocks == 4
    caller.client.land_all()
    assert caller.blocks.copies.swap_out(FOUR, ids, units=units).num_checkpoint_blocks is None
    caller.blocks.free(ids)
    for row, each in enumerate(units):
        caller.blocks.units.free(row, each)
    assert picture(caller.cache)[0] == before[0]
    caller.cache.check_invariants()
    caller.cache.close()


def test_a_checkpoint_behind_blocks_that_are_there(caller: Caller) -> None:
    """A longer prompt brought the blocks, and its own checkpoint: a shorter one adds its own, and no block."""
    caller.store()
    caller.client.land_all()
    short = Request(request_id="two blocks", prompt_token_ids=TEXT[:9])
    ids, units = caller.own(2, 2)
    transfer = caller.blocks.copies.swap_out(short, ids, units=units)
    assert transfer.num_blocks == 0 and transfer.num_checkpoint_blocks == 2
    caller.client.land_all()
    assert caller.boundary(short) == 2 and caller.boundary() == 4


def test_a_checkpoint_without_units_has_nothing_to_copy() -> None:
    """Behind a whole chunk nothing but full KV is read: it is there as soon as the blocks are."""
    caller = Caller(CHUNKS, num_rows=1)
    transfer, _, units = caller.store()
    assert units == [[]] and len(caller.client.tasks) == 1
    caller.client.land_all()
    assert transfer.succeeded and caller.boundary() == 4
    short = Request(request_id="two blocks", prompt_token_ids=TEXT[:9])
    again = caller.blocks.copies.swap_out(short, caller.blocks.allocate(2), units=[[]])
    assert again.num_checkpoint_blocks == 2 and again.succeeded and caller.boundary(short) == 2
    up = caller.blocks.copies.swap_in(short, [], first_block=2, units=[[]])
    assert up.num_checkpoint_blocks == 2 and up.succeeded and not caller.client.tasks
    caller.cache.check_invariants()
    caller.cache.close()


def test_more_blocks_than_the_tokens_fill_are_refused(caller: Caller) -> None:
    """Blocks without tokens of their own would be any continuation's. Uniform models likewise."""
    ids, units = caller.own(5, 5)
    with pytest.raises(RequestError, match="swap_out of 5 blocks for 18 tokens; only full ones count"):
        caller.blocks.copies.swap_out(FOUR, ids, units=units)
    plain = Caller(UNIFORM, num_rows=0)
    with pytest.raises(RequestError, match="swap_out of 5 blocks for 18 tokens"):
        plain.blocks.copies.swap_out(FOUR, plain.blocks.allocate(2), first_block=3)
    assert plain.blocks.lookup(FOUR).num_blocks == 0
    plain.cache.close()


def test_a_checkpoint_alone_is_that_of_its_prompt(caller: Caller) -> None:
    """Another prompt shares the first block, and nobody has its fourth: no unit is filled, also without blocks."""
    caller.store()
    caller.client.land_all()
    other = Request(request_id="other", prompt_token_ids=[*TEXT[:4], *range(60, 74)])
    _, units = caller.own(0, 4)
    assert caller.blocks.copies.swap_in(other, [], first_block=4, units=units).num_checkpoint_blocks is None
    assert caller.blocks.copies.swap_in(FOUR, [], first_block=4, units=units).num_checkpoint_blocks == 4


@pytest.mark.parametrize("first", [0, 1])
def test_what_makes_room_does_not_take_what_is_gone_on_from(first: int) -> None:
    """Room for the second copy comes from the checkpoint behind the first: full KV in front of it stays, and both are
    found, though nothing but the copy holds that on its way."""
    caller = Caller(num_cpu_blocks=6)
    ids, units = caller.own(1, 1)
    assert caller.blocks.copies.swap_out(FOUR, ids, units=units).num_checkpoint_blocks == 1
    caller.client.land_all()
    assert caller.boundary() == 1
    ids, units = caller.own(3 - first, 3)
    longer = caller.blocks.copies.swap_out(FOUR, ids, first_block=first, units=units)
    assert longer.num_checkpoint_blocks == 3 and caller.boundary() == 0
    caller.client.land_all()
    assert longer.succeeded and caller.boundary() == 3
    caller.cache.check_invariants()
    caller.cache.close()


def test_a_checkpoint_that_requests_have_made_gets_its_image() -> None:
    """It is on the GPU alone, and so is its full KV: the caller's copy gives it pages, and nothing stays behind."""
    caller = Caller(cpu_write_policy="write_through_selective")
    caller.cache.release(computed(caller.cache, "made", TEXT))
    assert caller.boundary() == 4
    transfer, _, units = caller.store()
    assert transfer.num_blocks == 0 and transfer.num_checkpoint_blocks == 4
    caller.client.land_all()
    assert transfer.succeeded and not any(caller.cache.stats().num_failed_steps.values())
    assert caller.blocks.copies.swap_in(FOUR, [], first_block=4, units=units).num_checkpoint_blocks == 4
    caller.client.land_all()
    caller.cache.check_invariants()
    caller.cache.reset()
    assert caller.cache.stats().cpu.num_free == NUM_CPU
    caller.cache.close()


def test_a_request_that_makes_the_same_meanwhile() -> None:
    """It has its checkpoint on the GPU when the caller's copies have come, and has left: nobody keeps that, and its
    image is what has come."""
    caller = Caller(cpu_write_policy="write_through_selective")
    transfer, _, _ = caller.store()
    caller.cache.release(computed(caller.cache, "made", TEXT))
    caller.client.land_all()
    assert transfer.succeeded and not any(caller.cache.stats().num_failed_steps.values())
    ids, units = caller.own(0, 4)
    assert caller.blocks.copies.swap_in(FOUR, ids, first_block=4, units=units).num_checkpoint_blocks == 4
    caller.client.land_all()
    caller.cache.check_invariants()
    caller.cache.close()


def test_a_checkpoint_without_units_from_below_is_hit_on_the_gpu() -> None:
    """Behind a whole chunk there is nothing to load, so a match goes on there as soon as the full KV is on the GPU."""
    caller = Caller(CHUNKS, num_rows=1)
    request, _ = started(caller.cache, "long", list(range(24)))
    caller.cache.commit(request, 18)
    short = Request(request_id="two blocks", prompt_token_ids=[*range(8), 91, 92, 93])
    assert caller.blocks.copies.swap_out(short, [], first_block=2, units=[[]]).num_checkpoint_blocks == 2
    match = caller.cache.match(short)
    assert match.num_tokens == 8 and not match.num_coming_tokens
    caller.cache.release(short)
    caller.cache.release(request)
    caller.client.land_all()
    caller.cache.check_invariants()
    caller.cache.close()


def test_a_checkpoint_without_units_that_a_request_has_made_is_loaded() -> None:
    """It has no image, and needs none: the full KV in front of it is all that a caller loads."""
    caller = Caller(CHUNKS, num_rows=1, cpu_write_policy="write_through")
    request, _ = started(caller.cache, "made", TEXT[:9])
    caller.cache.commit(request, 9)
    caller.cache.release(request)
    caller.client.land_all()
    up = caller.blocks.copies.swap_in(request, caller.blocks.allocate(2), units=[[]])
    assert up.num_checkpoint_blocks == 2 == up.num_blocks
    caller.client.land_all()
    assert up.succeeded
    caller.cache.check_invariants()
    caller.cache.close()


def test_a_lookup_asks_for_what_a_load_can_have(caller: Caller) -> None:
    """A boundary without a checkpoint, or blocks that have gone: nothing is begun, and nothing is an error."""
    ids, units = caller.own(3, 3)
    assert caller.blocks.copies.swap_in(FOUR, ids, units=units).num_checkpoint_blocks is None
    caller.store()
    caller.client.land_all()
    assert caller.blocks.copies.swap_in(FOUR, ids, units=units).num_checkpoint_blocks is None
    caller.blocks.evict(NUM_CPU, CPU)
    assert caller.boundary() == 0


def test_what_is_given_back_on_the_way_is_free_behind_it(caller: Caller) -> None:
    """Units and blocks that are read or written by a task are nobody else's until that has ended."""
    _, ids, units = caller.store()
    before = caller.cache.stats().gpu.num_free
    caller.blocks.free(ids)
    caller.blocks.units.free(1, units[1])
    assert caller.cache.stats().gpu.num_free == before
    assert not set(caller.blocks.units.allocate(1, 2)) & set(units[1])
    caller.client.land_all()
    assert caller.cache.stats().gpu.num_free == before + 4
    _, more = caller.own(0, 4)
    caller.blocks.copies.swap_in(FOUR, [], first_block=4, units=more)
    caller.blocks.units.free(0, more[0])
    with pytest.raises(BlockOwnerError):
        caller.blocks.units.free(0, more[0])
    caller.client.land_all()
    assert more[0][0] in caller.blocks.units.allocate(0, 2)


def test_units_that_cannot_be_of_the_boundary_are_refused(caller: Caller) -> None:
    """One error that says what was given and what is asked for; nothing has changed, and nothing was started."""
    ids, units = caller.own(4, 4)
    foreign = caller.blocks.units.allocate(1, 1)
    caller.blocks.units.free(1, foreign)
    before, out, into = picture(caller.cache), caller.blocks.copies.swap_out, caller.blocks.copies.swap_in
    for verb in (out, into):
        with pytest.raises(RequestError, match="no units are given, and this model has several rows"):
            verb(FOUR, ids)
        with pytest.raises(RequestError, match="units of 1 rows; the model has 2 behind the full one"):
            verb(FOUR, ids, units=units[:1])
        with pytest.raises(RequestError, match="1 units of the row 'window 6'; a checkpoint behind 4 blocks has 2"):
            verb(FOUR, ids, units=[units[0], units[1][:1]])
        with pytest.raises(RequestError, match="units of a row are"):
            verb(FOUR, ids, units=[units[0], ["a", "b"]])  # type: ignore[list-item]
        with pytest.raises(BlockOwnerError, match="is given twice"):
            verb(FOUR, ids, units=[units[0], units[1][:1] * 2])
        with pytest.raises(BlockOwnerError, match=r"GPU window 6 block \d is free"):
            verb(FOUR, ids, units=[units[0], [units[1][0], *foreign]])
    with pytest.raises(BlockOwnerError, match="GPU state has no block -1"):
        out(FOUR, ids, units=[[LEFT_OUT], units[1]])
    with pytest.raises(RequestError, match="swap_out behind block 2, and only 0 before it are cached"):
        out(FOUR, ids[2:], first_block=2, units=units)
    assert picture(caller.cache) == before and not caller.client.tasks


def test_rows_and_their_units_are_named_where_they_are_refused(caller: Caller) -> None:
    """A row that is not there, too many units, and a model of one row."""
    with pytest.raises(RequestError, match="rows behind the full one are 0 to 1"):
        caller.blocks.units.allocate(2, 1)
    with pytest.raises(RequestError, match="allocate of -1 units"):
        caller.blocks.units.allocate(0, -1)
    with pytest.raises(OutOfBlocksError) as refused:
        caller.blocks.units.allocate(1, 999)
    assert refused.value.row == "window 6"
    with manager(UNIFORM) as cache:
        for call in (lambda: cache.blocks.units.allocate(0, 1), lambda: cache.blocks.units.positions(1)):
            with pytest.raises(RequestError, match="all layers of this model keep everything"):
                call()
        ids = cache.blocks.allocate(4)
        for verb in (cache.blocks.copies.swap_out, cache.blocks.copies.swap_in):
            with pytest.raises(RequestError, match="units are given, and all layers of this model keep everything"):
                verb(FOUR, ids, units=[[0]])
        cache.blocks.free(ids)


def test_what_is_no_number_or_no_request_is_named(caller: Caller) -> None:
    """As an error of ours, whatever was given, and nothing is changed."""
    units, copies, before = caller.blocks.units, caller.blocks.copies, picture(caller.cache)
    for call, words in (
        (lambda: units.positions(-1), "positions behind -1 blocks; give 0 or more"),
        (lambda: units.positions("x"), "num_blocks is 'x'; give a whole number"),
        (lambda: units.allocate(0, 1.5), "num_units is 1.5; give a whole number"),
        (lambda: units.allocate("x", 1), "row is 'x'; give a whole number"),
        (lambda: copies.swap_in(FOUR, [], first_block=1.5, units=[[], []]), "first_block is 1.5; give a whole number"),
        (lambda: copies.swap_in(FOUR, [], units=5), "units are 5; give a list of ids for each row"),
        (lambda: copies.swap_in(None, [], units=[[], []]), "a NoneType was given in the place of a request"),
    ):
        with pytest.raises(RequestError, match=words):
            call()  # type: ignore[no-untyped-call]
    assert picture(caller.cache) == before

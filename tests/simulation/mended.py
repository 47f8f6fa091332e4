"""Mends that a test holds: what each rewrite takes back, and the test that fails then.

`python -m tests.simulation.mended` takes them back, one after the other, and prints a line of each whose test does not
fail.

Most need memory to run out at one line, at one moment: a search over stories seldom meets them. See "Holes" in
`docs/trust.md`.
"""

from __future__ import annotations

import contextlib
import io
import sys

import pytest

from tests.simulation.planting import Planted, Rewrite, in_place

_UNIT = "tests/fastdeploy_cache/"
_BOOKS, _COPIES = f"{_UNIT}test_mends.py::", f"{_UNIT}test_mends_of_copies.py::"
_NO_MEMORY, _TIER = f"{_UNIT}test_no_memory.py::", f"{_UNIT}test_storage_tier.py::"
_TAKE_IDS = 'gone.ids.frombytes(b"".join([run.cpu if tier else run.gpu for run in runs]))'


def _mend(name: str, test: str, *rewrites: tuple[str, str, str, str]) -> tuple[Planted, str]:
    return Planted(name, tuple(Rewrite(*each) for each in rewrites)), test


MENDED: tuple[tuple[Planted, str], ...] = (
    # -- evicting
    _mend(
        "a replaced policy keeps the rank of a run that has left",
        f"{_BOOKS}test_a_policy_may_raise_of_a_run_that_has_left_the_tree",
        ("books.leaves.guarded", "GuardedPolicy.replace", "for run in concerned:", "for run in ():"),
    ),
    _mend(
        "an eviction frees a copy of the ids that have gone",
        f"{_BOOKS}test_an_eviction_without_memory_is_what_has_gone",
        (
            "books.evicting",
            "evict",
            "del gone.ids[gone.num_blocks :]\n            pool.free(gone.ids, RUN)",
            "pool.free(gone.ids[: gone.num_blocks], RUN)\n",
        ),
    ),
    _mend(
        "an eviction tells of a run before it has its ids",
        f"{_BOOKS}test_an_eviction_without_memory_is_what_has_gone",
        (
            "books.evicting",
            "_remove_leaf",
            "gone.ids.frombytes(run.cpu if tier else run.gpu)  # first",
            "pass  # first",
        ),
        (
            "books.evicting",
            "_remove_leaf",
            "_unlink(residency, tier, run, gone)",
            "gone.ids.frombytes(run.cpu if tier else run.gpu); _unlink(residency, tier, run, gone)",
        ),
    ),
    _mend(
        "an eviction tells of many runs before it has their ids",
        f"{_BOOKS}test_an_eviction_without_memory_is_what_has_gone",
        ("books.evicting", "_remove_leaves", _TAKE_IDS, "pass"),
        (
            "books.evicting",
            "_remove_leaves",
            "residency.ages.evicted_together(tier, runs)",
            f"residency.ages.evicted_together(tier, runs); {_TAKE_IDS}",
        ),
    ),
    _mend(
        "evicted runs are a caller's before what is being read is told apart",
        f"{_BOOKS}test_runs_that_cannot_become_a_callers_stay",
        (
            "books.evicting",
            "evict_run",
            'read = array("i")\n',
            'read = array("i"); evicted.extend(unread); pool.hand_over(unread, RUN, CALLER)\n',
        ),
        (
            "books.evicting",
            "evict_run",
            (
                "evicted.extend(unread)  # the last that may need memory, and before anything has changed\n"
                "    pool.hand_over(unread, RUN, CALLER)\n"
            ),
            "\n\n",
        ),
    ),
    _mend(
        "a run that is shortened needs memory for its names",
        f"{_BOOKS}test_a_run_is_shortened_though_its_names_get_no_memory",
        ("books.run", "Run.cut", "except MemoryError:", "except ZeroDivisionError:"),
    ),
    _mend(
        "the end of a long run is listed to be freed",
        f"{_BOOKS}test_a_long_run_is_shortened_though_no_memory_is_left",
        ("books.run", "Run.free_ids", "pool.free(gone, RUN)", 'pool.free(array("i", gone), RUN)'),
    ),
    # -- what is forgotten, cut or freed
    _mend(
        "a load is cut in two when its run has been cut",
        f"{_BOOKS}test_a_load_that_cannot_be_cut_in_two_stays_whole",
        ("books.prefix_tree", "PrefixTree.split", "ids = halves(run, num_blocks) if run.pins else {}", "pass"),
        (
            "books.prefix_tree",
            "PrefixTree.split",
            "split_pins(run, upper, ids)",
            "split_pins(run, upper, halves(run, num_blocks))",
        ),
    ),
    _mend(
        "what a reset had forgotten is lost where it could not be freed",
        f"{_BOOKS}test_what_a_reset_had_forgotten_goes_home_later",
        ("books.graves", "Graves.clear", 'below[cast("Any", key)] = child', "pass"),
    ),
    _mend(
        "a block that is being read needs memory to wait for its reader",
        f"{_BOOKS}test_blocks_that_are_being_read_wait_for_their_reader_without_memory",
        (
            "books.block_pool",
            "BlockPool.free",
            "self.free_each(ids, giver)",
            "self.hand_over(ids, giver, TASK); self.free_each(set(ids), TASK)",
        ),
    ),
    _mend(
        "half an insertion is pinned below its end",
        f"{_NO_MEMORY}test_half_an_insertion_is_pinned_at_its_end",
        ("books.growing", "insert", "done = run, *done[1:]", "pass"),
    ),
    _mend(
        "the model is told of new arrays after the cache",
        f"{_COPIES}test_what_the_model_computes_until_it_is_told_of_new_arrays_is_nowhere",
        (
            "ranks",
            "RankAccess.on_kv_lost",
            "self._forget_gpu(rank, has_kv=True)",
            "self._mover.note_kv(rank, is_there=True)",
        ),
    ),
    _mend(
        "what was on lost arrays is found until the model is told",
        f"{_COPIES}test_what_the_model_computes_until_it_is_told_of_new_arrays_is_nowhere",
        (
            "ranks",
            "RankAccess.on_kv_lost",
            "self._forget_gpu(rank, has_kv=False)",
            "self._mover.note_kv(rank, is_there=False)",
        ),
    ),
    _mend(
        "blocks are moved until the model is told of new arrays",
        f"{_COPIES}test_what_the_model_computes_until_it_is_told_of_new_arrays_is_nowhere",
        ("ranks", "RankAccess.on_kv_lost", "has_kv=False", "has_kv=None"),
    ),
    # -- callers
    _mend(
        "another prompt's blocks count as before an insert",
        f"{_UNIT}test_insert_behind.py::test_another_prompts_blocks_are_not_before_it",
        ("callers.blocks", "CallerBlocks.insert", "num_gpu(path, num_found)", "num_gpu(path, first_block)"),
    ),
    _mend(
        "a caller's load that got no memory keeps its pin",
        f"{_NO_MEMORY}test_a_load_that_gets_no_memory_keeps_no_pin",
        (
            "callers.copies",
            "BlockCopies._start_load",
            "try:\n        return self._loader.start(parts, sum(n for _, _, n in parts))\n    finally:\n    ",
            "starts = self._loader.start(parts, sum(n for _, _, n in parts))\n",
        ),
        (
            "callers.copies",
            "BlockCopies._start_load",
            "self._tree.move_pin(pin, None, 0)",
            "self._tree.move_pin(pin, None, 0)\n    return starts",
        ),
    ),
    _mend(
        "copies are given out while a caller's load reads them",
        f"{_NO_MEMORY}test_a_copy_that_is_read_is_not_spare",
        ("callers.copies", "BlockCopies.swap_in", "Reading((self._books.pools[CPU], sources))", "Reading()"),
    ),
    _mend(
        "a caller's copies are listed to go home",
        f"{_COPIES}test_a_callers_copies_go_home_without_memory",
        (
            "callers.copies",
            "BlockCopies._copy_down",
            "free_left(self._books.pools[CPU], destinations)",
            (
                "pool = self._books.pools[CPU]; "
                'pool.free(array("i", [i for i in destinations if pool.owner(i) is TASK]), TASK)'
            ),
        ),
    ),
    _mend(
        "a caller's copies that cannot be told of never end",
        f"{_COPIES}test_copies_that_cannot_be_told_of_have_come",
        (
            "callers.copies",
            "BlockCopies._end_copies",
            "except MemoryError:  # what",
            "except ZeroDivisionError:  # what",
        ),
    ),
    _mend(
        "a swap out of before a reset joins",
        f"{_COPIES}test_what_was_copied_before_a_reset_is_not_found",
        ("callers.copies", "BlockCopies._copy_down", "succeeded and began == self._tree.generation", "succeeded"),
    ),
    # -- storage
    _mend(
        "what goes home of a piece is listed",
        f"{_COPIES}test_a_piece_that_comes_in_part_gives_the_rest_back_without_memory",
        (
            "storage.reads",
            "StorageReads._end_piece",
            "del ids[num_good - num_joined : num_good]",
            "ids = ids[: num_good - num_joined] + ids[num_good:]",
        ),
    ),
    _mend(
        "the answer to a piece is judged before its blocks go home",
        f"{_COPIES}test_the_blocks_of_a_piece_go_home_whatever_else_fails",
        (
            "storage.reads",
            "StorageReads.finish",
            "(self._end_image if piece.is_image else self._end_piece)(piece, result)\n",
            "self._link.judge(result)\n",
        ),
        (
            "storage.reads",
            "StorageReads.finish",
            "        self._link.judge(result)\n        if piece is not None:\n",
            "        if piece is not None:\n            self._end_piece(piece, result)\n",
        ),
    ),
    _mend(
        "a prefetch whose answer cannot be judged never ends",
        f"{_COPIES}test_an_answer_that_cannot_be_judged_ends_its_prefetch",
        (
            "storage.reads",
            "StorageReads.finish",
            "finally:  # whatever",
            "except ZeroDivisionError:\n        raise\n    else:  #",
        ),
    ),
    _mend(
        "a piece of an older epoch joins",
        f"{_TIER}test_what_comes_late_from_the_store_of_other_weights_is_not_found",
        (
            "storage.reads",
            "StorageReads._end_piece",
            "== piece.first and prefetch.epoch == self._tree.epoch",
            "== piece.first",
        ),
    ),
    _mend(
        "what has come and was not noted is missed, too",
        f"{_COPIES}test_what_has_come_and_could_not_be_noted_is_a_hit",
        (
            "requests.accounts",
            "Accounts._missed",
            "num_found = max(active.asked.num_found, num_hit_blocks)",
            "num_found = active.asked.num_found",
        ),
        (
            "requests.accounts",
            "Accounts._missed",
            "skip = max(num_found, end_late)",
            "skip = max(num_hit_blocks, num_found, end_late)",
        ),
    ),
    _mend(
        "a detached store is closed with something on its way",
        f"{_COPIES}test_a_store_that_still_has_something_on_its_way_is_kept",
        (
            "storage.access",
            "StorageAccess._close_idle",
            "ended = [each for each in self._beside if each.is_idle]",
            "ended = list(self._beside)",
        ),
    ),
    _mend(
        "a store that was detached is probed",
        f"{_TIER}test_a_store_that_opens_after_its_detach_is_lent_nothing",
        ("storage.link", "StorageLink.probe", " or self.is_detached", ""),
    ),
    # -- other instances
    _mend(
        "metrics that raise fail a receive",
        f"{_UNIT}test_peers.py::test_a_metric_that_raises_loses_no_transfer",
        ("peers.peers", "Peers._count_refused", 'self._books.mishaps.contain("metrics", record)', "record()"),
    ),
    _mend(
        "a receive of before a reset joins",
        f"{_COPIES}test_what_was_received_before_a_reset_is_not_found",
        ("peers.receives", "PeerReceives._why_not", "if mine.generation != self._tree.generation:", "if False:"),
        ("peers.receives", "PeerReceives._why_not", "if not mine.is_wanted:", "if False:"),  # as it is by then, too
    ),
)


def main() -> int:
    """The number of those whose test does not fail, or cannot be run."""
    num_wrong = 0
    for planted, test in MENDED:
        with in_place(planted), contextlib.redirect_stdout(io.StringIO()) as said:
            status = pytest.main(["-q", "-n", "0", "--no-header", "-p", "no:cacheprovider", test])
        if status is not pytest.ExitCode.TESTS_FAILED:
            num_wrong += 1
            print(f"{planted.name}: {test} ends with {status!r}\n{said.getvalue()}", flush=True)
    print(f"{len(MENDED)} were taken back, and no test failed for {num_wrong}")
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())

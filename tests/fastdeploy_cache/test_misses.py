"""Each missed token has a cause: every cause once, told of the right tokens, and their sums."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.books import lost_blocks
from fastdeploy_cache.books.causes import TEXTS, Cause
from fastdeploy_cache.errors import ConfigError, OutOfBlocksError, UnknownRequestError
from fastdeploy_cache.metrics.picture import CAUSES
from fastdeploy_cache.requests.accounts import Account
from fastdeploy_cache.requests.explanation import Hop
from fastdeploy_cache.requests.trail import Trail
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.asker import Asker

A, B, C = ([base + i for i in range(400)] for base in (1000, 2000, 3000))
TAIL = {Cause.PARTIAL: 1, Cause.LAST: 1}  # of a prompt with two tokens behind its full blocks


def test_each_cause_has_a_text_and_a_label() -> None:
    """The closed set is the same in metrics, texts and the enumeration, each at its place."""
    assert tuple(cause.value for cause in Cause) == CAUSES and set(TEXTS) == set(Cause)
    assert [cause.place for cause in Cause] == list(range(len(Cause)))


def test_what_was_never_cached_is_new_and_the_tail_has_causes_of_its_own() -> None:
    """A first prompt; one that fills its last block; one of a single token; and one that is known but for its last
    block."""
    asker = Asker()
    assert asker.serve(A[:42]) == {Cause.NEW: 40, **TAIL}
    assert asker.serve(B[:40]) == {Cause.NEW: 36, Cause.PARTIAL: 3, Cause.LAST: 1}
    assert asker.serve(C[:1]) == {Cause.LAST: 1}
    assert asker.serve(A[:42]) == TAIL
    assert asker.serve(B[:40]) == {Cause.PARTIAL: 3, Cause.LAST: 1}


def test_evicted_blocks_are_told_with_their_tier() -> None:
    """What made room on the GPU, what then made room in the CPU tier, and what goes on behind either."""
    asker = Asker(num_gpu=14)
    asker.serve(A[:42])
    asker.serve(B[:56])
    request, match = asker.match([*A[:40], *C[:10]])
    assert asker.admit(request, match) == {Cause.EVICTED: 40, Cause.NEW: 8, **TAIL}
    (first, *_) = match.explain().misses
    assert (first.tier, first.policy) == ("gpu", "lru") and first.seconds_ago is not None
    assert "evicted from the GPU" in str(match.explain())

    tiers = Asker(num_gpu=12, num_cpu=12, cpu_write_policy="write_through")
    for tokens in (A, B, C):
        tiers.serve(tokens[:42])
    request, match = tiers.match(A[:42])
    assert tiers.admit(request, match) == {Cause.EVICTED: 40, **TAIL}
    assert {miss.tier for miss in match.explain().misses if miss.cause is Cause.EVICTED} == {"cpu"}


def test_a_prompt_that_goes_another_way_leaves_the_rest_to_be_recognised() -> None:
    """Half of an evicted prompt is computed again, with another end; the first one's end is still known as evicted."""
    asker = Asker(num_gpu=24)
    asker.serve(A[:82])
    asker.serve(B[:94])
    assert asker.serve([*A[:40], *C[:42]]) == {Cause.EVICTED: 40, Cause.NEW: 40, **TAIL}
    assert asker.serve(A[:82]) == {Cause.EVICTED: 40, **TAIL}


@pytest.mark.parametrize("most_pieces", [512, 3])
@pytest.mark.parametrize("images", [(), [(4, 8, b"an image"), (60, 8, b"another")]])
def test_blocks_that_went_one_by_one_are_told_of_together(
    most_pieces: int, images: list[tuple[int, int, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long answer of another request takes them from the end, in few pieces and in many. What another prompt asks for
    meanwhile does not part them."""
    monkeypatch.setattr(lost_blocks, "_MOST_PIECES", most_pieces)
    asker = Asker(num_gpu=24)
    asker.serve(A[:82], images=images)
    request, match = asker.match(B[:6])
    asker.admit(request, match)
    for num_blocks in range(21):
        asker.cache.allocate(request, 1)
        asker.cache.release(asker.match([*C[:6], num_blocks])[0])
        asker.cache.check_invariants()
    asker.cache.release(request)
    request, match = asker.match(A[:82], images=images)
    missed = asker.admit(request, match)
    assert missed[Cause.EVICTED] >= 72 and Cause.NEW not in missed
    assert len([miss for miss in match.explain().misses if miss.cause is Cause.EVICTED]) == 1


def test_a_reset_is_told_at_once_and_while_it_is_being_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was cached before it; and where it is not known yet whether something was, that is said."""
    asker = Asker()
    asker.serve(A[:42])
    asker.cache.reset()
    assert asker.serve(A[:42]) == {Cause.RESET: 40, **TAIL}
    monkeypatch.setattr("fastdeploy_cache.books.prefix_tree.AT_ONCE", 0)
    monkeypatch.setattr("fastdeploy_cache.books.books.A_TURN", 0)
    asker.serve(B[:42])
    asker.cache.reset()
    assert asker.serve(B[:42]) == {Cause.NEW_OR_FORGOTTEN: 40, **TAIL}


def test_what_a_reset_has_left_to_a_request_is_not_called_new() -> None:
    """While the request runs nobody knows; when it has gone, the reset is the cause."""
    asker = Asker(num_gpu=60)
    request, match = asker.match(A[:42])
    asker.admit(request, match)
    asker.cache.commit(request, 42)
    asker.cache.reset()
    asked, match = asker.match(A[:42])
    assert asker.admit(asked, match) == {Cause.NEW_OR_FORGOTTEN: 40, **TAIL}
    asker.cache.release(asked)
    asker.cache.release(request)
    assert asker.serve(A[:42]) == {Cause.RESET: 40, **TAIL}
    assert asker.serve(B[:42]) == {Cause.NEW: 40, **TAIL}


def test_a_lost_gpu_is_a_rank_s_fault() -> None:
    """The bytes went with the rank's memory."""
    asker = Asker()
    asker.serve(A[:42])
    asker.cache.ranks.kv_lost(0)
    assert asker.serve(A[:42]) == {Cause.RANK: 40, **TAIL}


def test_what_another_request_computes_is_uncommitted() -> None:
    """Also when it has committed a part of it; and not any more when it has gone."""
    asker = Asker(num_gpu=80)
    first, match = asker.match(A[:82])
    asker.admit(first, match)
    second, match = asker.match([*A[:60], *B[:22]])
    assert asker.admit(second, match) == {Cause.UNCOMMITTED: 60, Cause.NEW: 20, **TAIL}
    asker.cache.release(second)
    asker.cache.commit(first, 40)
    third, match = asker.match(A[:82])
    assert asker.admit(third, match) == {Cause.UNCOMMITTED: 40, **TAIL}
    asker.cache.release(third)
    asker.cache.release(first)
    fourth, match = asker.match(A[:82])
    assert asker.admit(fourth, match) == {Cause.NEW: 40, **TAIL}


def test_the_same_tokens_elsewhere_are_told_without_the_place() -> None:
    """Under another namespace, and with another image; neither name is in the explanation."""
    asker = Asker()
    asker.serve(A[:42], namespace="tenant one")
    request, match = asker.match([*A[:40], *B[:6]], namespace="tenant two")
    assert asker.admit(request, match) == {Cause.NAMESPACE: 40, Cause.NEW: 4, **TAIL}
    assert "tenant" not in str(match.explain())
    asker.serve(B[:42], images=[(9, 4, b"one")])
    request, match = asker.match(B[:42], images=[(9, 4, b"two")])
    assert asker.admit(request, match) == {Cause.IMAGE: 32, **TAIL}
    assert "one" not in str(match.explain()).split("(image)")[1]


def test_what_was_lost_with_another_image_was_not_lost_of_this_prompt() -> None:
    """Equal tokens stand for two images: what lies in front of them was evicted, the rest was never cached. So it is
    where the other image lies far in front of what was lost."""
    asker = Asker(num_gpu=14)
    asker.serve(A[:42], images=[(8, 8, b"one")])
    asker.serve(B[:56])
    assert asker.serve(A[:42], images=[(8, 8, b"two")]) == {Cause.EVICTED: 8, Cause.NEW: 32, **TAIL}

    far = Asker(num_gpu=75)
    far.serve(A[:162], images=[(8, 8, b"one")])
    far.serve(A[:122], images=[(8, 8, b"two")])
    far.serve(B[:68])  # takes ten blocks, from the place on at which the second prompt ends
    assert far.serve(A[:162], images=[(8, 8, b"two")]) == {Cause.NEW: 40, **TAIL}


def test_an_image_that_is_not_cached_whole_is_partial() -> None:
    """A match ends before an image: what is cached of it is not used."""
    asker = Asker()
    images = [(10, 20, b"one")]
    asker.serve(A[:26], images=[(10, 16, b"one")])
    asker.serve(B[:14])
    longer = asker.serve([*A[:40], 5, 6], images=images)
    assert longer[Cause.PARTIAL] + longer.get(Cause.NEW, 0) + longer.get(Cause.IMAGE, 0) == 40 - 8 + 1


def test_a_load_that_is_not_waited_for_is_late() -> None:
    """The engine allocates while it is on its way; and an explanation before that calls what is coming late, so far."""
    asker = Asker(num_gpu=24, num_cpu=60, cpu_write_policy="write_through")
    asker.only_in_cpu(A[:42], B[:94])
    request, match = asker.match(A[:42])
    assert match.num_coming_tokens == 40
    so_far = match.explain()
    assert not so_far.is_final and so_far.missed_tokens() == {Cause.LATE: 40, **TAIL} and "so far" in str(so_far)
    assert asker.admit(request, match) == {Cause.LATE: 40, **TAIL}
    (late, *_) = asker.cache.explain(request.request_id).misses
    assert late.detail is not None and re.fullmatch(r"blocks were taken \d+\.\d{3} s after the match, .*", late.detail)


def test_a_load_that_fails_is_a_rank_s_fault() -> None:
    """It has ended, without its blocks."""
    asker = Asker(num_gpu=24, num_cpu=60, cpu_write_policy="write_through")
    asker.only_in_cpu(A[:42], B[:94])
    request, match = asker.match(A[:42])
    asker.client.land("broken")
    assert asker.admit(request, match) == {Cause.RANK: 40, **TAIL}


@pytest.mark.parametrize(
    ("config", "cause", "evidence"),
    [
        ({"load_policy": "never"}, Cause.LIMIT, "load_policy is 'never'"),
        ({"min_load_tokens": 100}, Cause.LIMIT, "min_load_tokens is 100, and it has 40"),
        ({"max_load_share": 0.1}, Cause.LIMIT, "max_load_share allows 2 blocks, and it has 10"),
        ({"load_policy": "auto", "prefill_tokens_per_second": 1e12}, Cause.SLOWER, "loading was expected to take 10"),
    ],
)
def test_what_is_not_loaded_on_purpose_says_why(config: dict[str, Any], cause: Cause, evidence: str) -> None:
    """A configured bound, or a load that is expected to be slower than computing."""
    asker = Asker(num_gpu=24, num_cpu=60, cpu_write_policy="write_through", **config)
    asker.only_in_cpu(A[:42], B[:94])
    asker.cache._movement.speeds._block_bytes = 1  # blocks without a layout have none, and so take no time
    asker.cache._movement.speeds.cpu.note(1.0, 1.0)
    assert asker.serve(A[:42]) == {cause: 40, **TAIL}
    (miss,) = [each for each in asker.cache.explain("r3").misses if each.cause is cause]
    assert miss.detail is not None and evidence in miss.detail


def test_no_room_and_no_rank_are_told_apart() -> None:
    """A full queue of loads, a pool that others hold, and a rank that is down."""
    asker = Asker(num_gpu=24, num_cpu=60, cpu_write_policy="write_through")
    asker.only_in_cpu(A[:42], B[:94])
    asker.client.max_tasks[TaskKind.SWAP_IN] = 0
    request, match = asker.match(A[:42])
    assert asker.admit(request, match) == {Cause.ROOM: 40, **TAIL}
    asker.cache.release(request)
    asker.client.up = False
    request, match = asker.match(A[:42])
    assert asker.admit(request, match) == {Cause.RANK: 40, **TAIL}
    asker.cache.release(request)

    held = Asker(num_gpu=24, num_cpu=60, cpu_write_policy="write_through")
    held.only_in_cpu(A[:42], B[:94])
    other, match = held.match(C[:82])
    held.admit(other, match)
    request, match = held.match(A[:42])
    with pytest.raises(OutOfBlocksError):
        held.cache.allocate(request, 11)
    assert match.explain().missed_tokens() == {Cause.ROOM: 40, **TAIL}
    assert "the prompt needs 11 blocks, and" in str(match.explain())


def test_a_request_that_its_caller_has_matched_is_explained_likewise() -> None:
    """By the hits that the caller tells of, and what is remembered here of the rest; it computes nothing here."""
    asker = Asker(num_gpu=14)
    asker.serve(A[:42])
    asker.serve(B[:56])
    for name in ("first", "second"):
        request = Request(request_id=name, prompt_token_ids=[*A[:40], *C[:10]])
        asker.cache.blocks.count_request(request, (4, 0, 0))
        asker.cache.check_invariants()
        explanation = asker.cache.explain(name)
        assert explanation.missed_tokens() == {Cause.EVICTED: 36, Cause.NEW: 8, **TAIL}
        assert [(hit.tier, hit.num_tokens) for hit in explanation.hits] == [("gpu", 4)]
    whole = Request(request_id="whole", prompt_token_ids=C[:8])
    asker.cache.blocks.count_request(whole, (4, 4, 0))
    assert asker.cache.explain("whole").missed_tokens() == {}


def test_without_prefix_caching_a_setting_is_the_cause() -> None:
    """All but the tail."""
    asker = Asker(enable_prefix_caching=False)
    assert asker.serve(A[:42]) == {Cause.LIMIT: 40, **TAIL}


@pytest.mark.parametrize("config", [{"lost_blocks_bytes": 0}, {"lost_blocks_bytes": 2000}])
def test_what_is_not_remembered_is_not_called_new(config: dict[str, Any]) -> None:
    """Without a memory, or with one that is full: nobody knows."""
    asker = Asker(num_gpu=12, **config)
    for start in range(0, 4000, 100):
        asker.serve([start + i for i in range(42)])
    missed = asker.serve(range(42))
    assert missed[Cause.NEW_OR_FORGOTTEN] == 40


def test_a_large_eviction_forgets_rather_than_holding_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many losses are noted at a time; the others make `new` unsure."""
    monkeypatch.setattr(lost_blocks, "_BURST", 2)
    monkeypatch.setattr(lost_blocks, "_BURST_SECONDS", 1000.0)
    asker = Asker(num_gpu=12)
    for start in range(0, 1000, 100):
        asker.serve([start + i for i in range(42)])
    assert asker.serve([300 + i for i in range(42)])[Cause.NEW_OR_FORGOTTEN] == 40


def test_accounts_are_kept_for_so_many_requests() -> None:
    """An older one is unknown, and the error names the setting; impossible settings are refused."""
    asker = Asker(num_explained_requests=3)
    for start in range(0, 500, 100):
        asker.serve([start + i for i in range(42)])
    assert asker.cache.explain("r3").num_tokens == 42
    with pytest.raises(UnknownRequestError, match="num_explained_requests"):
        asker.cache.explain("r2")
    for name in ("num_explained_requests", "lost_blocks_bytes"):
        with pytest.raises(ConfigError, match=name):
            Asker(**{name: -1})


def test_hits_have_a_worth() -> None:
    """Bytes and seconds of what was moved, and the seconds that computing takes at the speed seen."""
    asker = Asker(num_gpu=24, num_cpu=60, cpu_write_policy="write_through", prefill_tokens_per_second=1000.0)
    asker.only_in_cpu(A[:42], B[:94])
    asker.serve(A[:42])
    asker.serve(A[:42])
    (cpu,), (gpu,) = asker.cache.explain("r3").hits, asker.cache.explain("r4").hits
    assert (cpu.tier, cpu.num_tokens, gpu.tier, gpu.num_tokens) == ("cpu", 40, "gpu", 40)
    assert cpu.saved_seconds == gpu.saved_seconds == pytest.approx(0.04)
    (hop,) = cpu.hops
    assert (hop.source, hop.target) == ("cpu", "gpu") and gpu.hops == () and str(hop) in str(cpu)
    accounts = asker.cache._requests.accounts
    missed, saved = accounts.missed_by_cause(), accounts.saved_by_tier()
    assert saved == pytest.approx({"gpu": 0.04, "cpu": 0.04, "storage": 0.0})
    assert sum(missed.values()) == sum(asker.cache.explain(f"r{i}").num_tokens for i in range(1, 5)) - 80


def test_what_came_from_storage_took_two_hops() -> None:
    """Each with its own time; together they are what the request waited for."""
    account = Account("a", 9, 0.0, True, (0, 4, 4), Trail(load_seconds=0.25), 0.5, None, ())
    explanation = Asker().cache._requests.accounts.explained([account])[0]
    cpu, storage = explanation.hits
    assert [(hop.source, hop.target, hop.seconds) for hop in storage.hops] == [
        ("storage", "cpu", 0.5),
        ("cpu", "gpu", 0.25),
    ]
    assert cpu.hops == storage.hops[1:]
    assert "from storage to the CPU tier in 500.0 ms, then" in str(explanation)


def test_few_bytes_are_not_called_none() -> None:
    """A hop of small blocks is told in KiB."""
    assert str(Hop(source="cpu", target="gpu", num_bytes=3 * 2**10, seconds=0.001)).startswith("3.0 KiB from the CPU")
    assert str(Hop(source="cpu", target="gpu", num_bytes=3 * 2**20, seconds=0.001)).startswith("3.0 MiB from the CPU")


def walk(seed: int, num_gpu: int, num_cpu: int) -> tuple[int, int]:
    """Random prompts with common beginnings, against a set of all that was ever committed: how many blocks that had
    been cached were missed, and how many of these were called new. `evicted` is never said of anything else."""
    choose, committed = random.Random(seed), set[tuple[int, ...]]()
    asker = Asker(num_gpu, num_cpu, cpu_write_policy=choose.choice(("write_back", "write_through")))
    num_known = num_wrong = 0
    for _ in range(60):
        text = choose.choice((A, B, C))
        end = [choose.randint(0, 3) for _ in range(choose.choice((0, 4, 9)))]
        tokens = [*text[: choose.randint(1, 28)], *end]
        request, match = asker.match(tokens)
        asker.client.land_all()
        try:
            missed = asker.admit(request, match)
        except OutOfBlocksError:
            asker.cache.release(request)
            asker.client.land_all()
            continue
        hit = asker.cache.explain(request.request_id).num_hit_tokens // 4
        blocks = [tuple(tokens[: 4 * (block + 1)]) for block in range(hit, (len(tokens) - 1) // 4)]
        known = sum(block in committed for block in blocks)
        told = (missed.get(Cause.EVICTED, 0) + missed.get(Cause.ROOM, 0)) // 4
        assert told <= known and told + missed.get(Cause.NEW, 0) // 4 == len(blocks)
        num_known, num_wrong = num_known + known, num_wrong + known - told
        asker.cache.commit(request, len(tokens))
        asker.cache.release(request)
        asker.client.land_all()
        committed |= {tuple(tokens[: 4 * (block + 1)]) for block in range(len(tokens) // 4)}
    return num_known, num_wrong


@pytest.mark.parametrize("pools", [(10, 0), (16, 0), (12, 20), (24, 24)])
def test_what_was_cached_is_seldom_called_new(pools: tuple[int, int]) -> None:
    """At most one block of a hundred, though prompts part and go on from each other everywhere."""
    found = [walk(seed, *pools) for seed in range(40)]
    num_known, num_wrong = (sum(numbers) for numbers in zip(*found, strict=True))
    assert num_known > 400 and num_wrong <= num_known / 100, (num_known, num_wrong)

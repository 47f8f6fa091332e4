"""What an operator does with a running cache: pins, another eviction policy, a check, a socket."""

from __future__ import annotations

import random
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.errors import ClosedError, ConfigError, ControlError, IPCError, RequestError
from fastdeploy_cache.insight.control.client import ask, look
from fastdeploy_cache.insight.looks import pieces
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Alarm
from fastdeploy_cache.policies import EVICTION_POLICIES
from fastdeploy_cache.policies.whole_runs import whole_runs
from tests.rigs.asker import Asker

HOT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def asker() -> Asker:
    """Ten blocks, of which a quarter may be pinned, and a prompt of two."""
    asker = Asker(num_gpu=10)
    asker.serve(HOT)
    return asker


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Every step of a long walk is a turn of its own, and these are called after each."""
    calls: list[Callable[[], object]] = []
    monkeypatch.setattr(pieces, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(SYSTEM_CLOCK, "sleep", lambda _: [call() for call in calls])
    return calls


def push_out(asker: Asker, num_prompts: int = 12) -> None:
    """Prompts enough to evict whatever may be."""
    for number in range(num_prompts):
        asker.serve([100 * (number + 1) + i for i in range(8)])


def is_cached(asker: Asker, tokens: list[int] = HOT) -> bool:
    request = Request(request_id="looks", prompt_token_ids=tokens)
    return asker.cache.blocks.lookup(request).num_blocks == len(tokens) // asker.size


# -- pins


def test_a_pinned_prefix_stays_until_it_is_unpinned(asker: Asker) -> None:
    """By the name that `top` shows: evictions go round it, and go on with it when the pin has gone."""
    control, (hot,) = asker.cache.control, asker.cache.insight.top()
    pinned = control.pin(hot.name, 1000)
    assert (pinned.name, pinned.num_tokens, pinned.num_blocks, pinned.num_gpu_blocks) == (hot.name, 8, 2, 2)
    push_out(asker)
    assert is_cached(asker) and asker.cache.stats().gpu.num_protected == 2
    assert [each.is_pinned for each in asker.cache.insight.top() if each.name == hot.name] == [True]
    assert [each.name for each in control.pins()] == [hot.name] and control.status()["pins"] == 1
    assert control.unpin(hot.name) == 2 and control.pins() == []
    push_out(asker)
    assert not is_cached(asker)
    with pytest.raises(ControlError, match="there is no pin"):
        control.unpin(hot.name)


def test_tokens_pin_what_is_cached_of_them(asker: Asker) -> None:
    """The longest cached prefix, in its own namespace; a part of a block, or nothing cached, pins nothing."""
    control = asker.cache.control
    assert control.pin([*HOT[:4], 99, 98, 97, 96, 95], 1000).num_blocks == 1
    for tokens, namespace in (([9, 9, 9, 9], ""), (HOT[:3], ""), (HOT, "other")):
        with pytest.raises(ControlError, match="none of these tokens"):
            control.pin(tokens, 10, namespace=namespace)
    with pytest.raises(RequestError):
        control.pin([], 10)
    asker.cache.check_invariants()


def test_a_pin_ends_at_its_time(asker: Asker) -> None:
    """By a timer of its own; pinned again before that, it stays for the longer time. NumPy's numbers are numbers."""
    control = asker.cache.control
    (hot,) = asker.cache.insight.top()
    control.pin(hot.name, 0.01)
    assert type(control.pin(hot.name, np.int64(9)).seconds_left) is float
    control.pin(hot.name, 1000)
    (pin,) = control.pins()
    assert 900 < pin.seconds_left <= 1000
    control.pin(hot.name, 0.01)
    alarm = control._pins._alarm if control._pins is not None else None
    assert alarm is not None
    alarm.join(30)
    assert control.pins() == [] and asker.cache.stats().gpu.num_protected == 0
    asker.cache.check_invariants()


def test_pins_are_bounded(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the share of the GPU's blocks, by number, and by time; what is refused changes nothing."""
    control = asker.cache.control
    asker.serve([50, 51, 52, 53])
    control.pin(HOT, 1000)
    with pytest.raises(ControlError, match=r"1 blocks beside 2 pinned ones; together at most 2"):
        control.pin([50, 51, 52, 53], 10)
    monkeypatch.setattr("fastdeploy_cache.insight.control.pins.MAX_PINS", 1)
    with pytest.raises(ControlError, match="there are 1 pins already"):
        control.pin([50, 51, 52, 53], 10)
    for seconds in (0, -1, 1e9, float("nan"), True, np.int64(0), np.float32("nan")):
        with pytest.raises(ControlError, match="use more than 0"):
            control.pin(HOT, seconds)
    assert len(control.pins()) == 1 and asker.cache.stats().gpu.num_protected == 2


@pytest.mark.parametrize(
    "name", ["", "zz", "0123456789abcde", "0123456789abcdeg", "0123456789abcdef0", "ab cd ef gh ij kl"]
)
def test_what_is_no_name_is_refused(asker: Asker, name: str) -> None:
    """One line that says what names look like; and a name of nothing cached is not found."""
    with pytest.raises(ControlError, match="is no name of a prefix"):
        asker.cache.control.pin(name, 10)
    with pytest.raises(ControlError, match="no prefix '0123456789abcdef' is cached now"):
        asker.cache.control.pin("0123456789abcdef", 10)


@pytest.mark.parametrize("verb", ["reset", "sleep gpu", "sleep cpu", "sleep", "clear", "update_weights"])
def test_what_forgets_ends_pins(verb: str) -> None:
    """All blocks are free at once, and nothing waits for the pin's time."""
    config = CacheConfig(block_size=4, num_gpu_blocks=10, num_cpu_blocks=10, transfer_client="inline")
    with PrefixCacheManager(config) as cache:
        request = Request(request_id="r", prompt_token_ids=HOT)
        cache.match(request)
        cache.allocate(request, 2)
        cache.commit(request, 8)
        cache.release(request)
        assert cache.control.pin(HOT, 1000).num_gpu_blocks == 2
        name, _, tier = verb.partition(" ")
        if name == "reset":
            cache.reset()
        elif name == "sleep":
            cache.life.sleep(10, tiers=[tier] if tier else ["gpu", "cpu"])  # type: ignore[list-item]
        else:
            getattr(cache.life, name)()
        assert cache.control.pins() == [] and cache.stats().gpu.num_protected == 0
        cache.check_invariants()
        assert cache.stats().gpu.num_available == 10


def test_names_last_while_runs_part_and_join(asker: Asker, between: list[Callable[[], object]]) -> None:
    """A name is of a block with all before it: it is found when its run has grown, or was cut, while others look."""
    (hot,) = asker.cache.insight.top()
    asker.serve([*HOT, 9, 9, 9, 9])
    asker.serve([*HOT[:4], 7, 7, 7, 7])
    asker.cache.insight.top()
    between.append(lambda: asker.serve([*HOT[:4], 7, 7, 7, 7]))
    assert asker.cache.control.pin(hot.name, 1000).num_tokens == 8
    asker.cache.check_invariants()


def test_where_no_thread_can_be_started_nothing_is_pinned(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin ends by a thread; one that has none for the pins behind it goes on by itself, and all of them end."""
    control, (hot,), call_at = asker.cache.control, asker.cache.insight.top(), SYSTEM_CLOCK.call_at
    alarms: list[Callable[[], object]] = []

    def refuse(when: float, call: Callable[[], object]) -> Alarm:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(SYSTEM_CLOCK, "call_at", refuse)
    with pytest.raises(ControlError, match=r"nothing was pinned.*can't start new thread"):
        control.pin(hot.name, 1000)
    assert control.pins() == [] and asker.cache.stats().gpu.num_protected == 0

    def keep(when: float, call: Callable[[], object]) -> Alarm:
        alarms.append(call)
        return call_at(when + 1e6, call)

    monkeypatch.setattr(SYSTEM_CLOCK, "call_at", keep)
    control.pin(hot.name, 1000)
    monkeypatch.setattr(SYSTEM_CLOCK, "call_at", refuse)
    with pytest.raises(ControlError):
        control.pin(hot.name, 2000)
    assert 900 < control.pins()[0].seconds_left <= 1000
    began = SYSTEM_CLOCK.now()
    monkeypatch.setattr(SYSTEM_CLOCK, "sleep", lambda _: monkeypatch.setattr(SYSTEM_CLOCK, "now", lambda: began + 3000))
    alarms[0]()
    assert control.pins() == [] and asker.cache.stats().gpu.num_protected == 0


def test_a_closed_cache_pins_nothing(asker: Asker) -> None:
    """And its pins have no timer any more."""
    asker.cache.control.pin(HOT, 1000)
    asker.cache.close()
    assert asker.cache.control._pins is not None and asker.cache.control._pins._alarm is None
    with pytest.raises(ClosedError):
        asker.cache.control.pin(HOT, 1000)
    with pytest.raises(ClosedError):
        asker.cache.control.set_policy("lfu")
    with pytest.raises(ClosedError):
        asker.cache.control.open("/nowhere/at/all.sock")


# -- the eviction policy


def test_another_policy_decides_from_then_on(asker: Asker) -> None:
    """What was used often stays under lfu, though others were used since; explanations name the policy that evicted."""
    for _ in range(3):
        asker.serve(HOT)
    assert asker.cache.control.policy().name == "lru"
    view = asker.cache.control.set_policy("lfu")
    assert (view.name, view.configured, view.known) == ("lfu", "lru", EVICTION_POLICIES)
    push_out(asker)
    assert is_cached(asker) and asker.cache.control.status()["eviction_policy"] == "lfu"
    asker.serve([101, 102, 103, 104])
    push_out(asker, 5)
    assert "by the policy lfu" in "".join(str(each) for each in asker.cache.explain_last(3))
    asker.cache.control.set_policy("lru")  # that evicts from now on: what is explained happened before
    assert "by the policy lfu" in "".join(str(each) for each in asker.cache.explain_last(3))
    push_out(asker)
    assert not is_cached(asker)


@pytest.mark.parametrize("first", EVICTION_POLICIES)
def test_policies_follow_each_other_in_the_midst_of_all(first: str, between: list[Callable[[], object]]) -> None:
    """From any policy to any other, with requests between any two steps of the change: the books add up after each,
    every leaf can be evicted, and in the end as many blocks can be had as there are."""
    rng = random.Random(first)
    asker = Asker(num_gpu=24, num_cpu=30, eviction_policy=first)

    def serve() -> None:
        tokens = [rng.randrange(3) for _ in range(4)] + [rng.randrange(40)] * 8 + [7] * 4 * rng.randrange(3)
        asker.serve(tokens)

    for _ in range(60):
        serve()
    between.append(serve)
    names = [name for name in EVICTION_POLICIES if name != first]
    for name in rng.sample(names, len(names)):
        assert asker.cache.control.set_policy(name).name == name
        for _ in range(5):
            serve()
    assert not asker.cache.stats().num_failed_steps.get("policy")
    whole = Request(request_id="whole", prompt_token_ids=list(range(1000, 1096)))
    asker.cache.match(whole)
    assert len(asker.cache.allocate(whole, 24, wait_seconds=5)) == 24
    asker.cache.check_invariants()


def test_a_reset_in_the_midst_of_a_change_leaves_nothing_behind(between: list[Callable[[], object]]) -> None:
    """Nor does a change that is broken off: the next one finishes it."""
    asker = Asker(num_gpu=200, size=1)
    for number in range(150):
        asker.serve([number])

    def stop() -> None:
        raise KeyboardInterrupt

    between[:] = [stop]
    with pytest.raises(KeyboardInterrupt):
        asker.cache.control.set_policy("fifo")
    asker.cache.check_invariants()
    between[:] = [asker.cache.reset]
    asker.cache.control.set_policy("slru")
    between.clear()
    for number in range(250):
        asker.serve([number])
    assert asker.cache.control.policy().name == "slru"


def test_policies_that_cannot_follow_are_refused(asker: Asker) -> None:
    """Unknown ones, reuse a second time, and any after one that a program gave: the present one stays."""
    control = asker.cache.control
    with pytest.raises(ControlError, match="there is no eviction policy 'best'"):
        control.set_policy("best")
    for name in ("reuse", "reuse", "lru"):
        control.set_policy(name)
    with pytest.raises(ControlError, match="reuse was in force before"):
        control.set_policy("reuse")
    assert control.policy().name == "lru"
    config = CacheConfig(block_size=4, num_gpu_blocks=8, transfer_client="inline")
    cache = PrefixCacheManager(config, policy=whole_runs("lru", lambda: 0.0))
    with cache, pytest.raises(ControlError, match="whole nodes"):
        cache.control.set_policy("lfu")


# -- a check


def test_a_check_says_what_it_has_looked_at_and_what_not(asker: Asker) -> None:
    """Sound books have no problem; a wrong count is named; of bytes it claims nothing."""
    found = asker.cache.control.verify(checksums=True)
    assert found.problem is None and found.seconds >= 0 and len(found.not_checked) == 2
    assert "no checksums are kept" in found.not_checked[0]
    asker.cache._books.residency.num_protected[0] += 1
    problem = asker.cache.control.verify().problem
    assert problem is not None and "protected" in problem
    asker.cache._books.residency.num_protected[0] -= 1


# -- the socket


def config_with(path: Path) -> CacheConfig:
    return CacheConfig(
        block_size=4, num_gpu_blocks=10, transfer_client="inline", insight=InsightConfig(control_socket=str(path))
    )


def test_any_manager_can_be_asked_over_a_socket(tmp_path: Path) -> None:
    """That the setting names: for this user alone, for looks, pins, policies and the life cycle."""
    path = tmp_path / "private" / "cache.sock"
    with PrefixCacheManager(config_with(path)) as cache:
        request = Request(request_id="r", prompt_token_ids=HOT)
        cache.match(request)
        cache.allocate(request, 2)
        cache.commit(request, 8)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        (hot,) = look(path, "top", 5, num_prefixes=3)
        assert look(path, "tree", 5)["children"][0]["name"] == hot["name"]
        assert look(path, "requests", 5)["running"][0]["request_id"] == "r" and look(path, "ranks", 5)["ranks"] == []
        assert look(path, "pin", 5, name=hot["name"], seconds=100)["num_tokens"] == 8
        assert [each["name"] for each in look(path, "pins", 5)] == [hot["name"]]
        assert look(path, "unpin", 5, name=hot["name"]) == {"num_blocks": 2}
        assert look(path, "set-policy", 5, name="lfu")["name"] == look(path, "policy", 5)["name"] == "lfu"
        assert look(path, "verify", 5)["problem"] is None
        status = look(path, "status", 5)
        assert (status["requests"], status["life_cycle"], status["eviction_policy"]) == (1, "running", "lfu")
        cache.release(request)
        for verb, state in (("pause", "paused"), ("resume", "running"), ("sleep", "asleep"), ("wake", "running")):
            assert ask(path, verb, 5) == state == cache.life.status.value
        assert ask(path, "clear", 5) == ask(path, "update-weights", 5) == "running"
        assert look(path, "top", 5) == []
        with pytest.raises(ControlError, match="no prefix"):
            look(path, "pin", 5, name=hot["name"], seconds=5)
    assert not path.exists()


def test_a_socket_opens_and_closes_while_the_cache_runs(tmp_path: Path) -> None:
    """One at a time; after `close` there may be another."""
    with PrefixCacheManager(CacheConfig(block_size=4, num_gpu_blocks=10, transfer_client="inline")) as cache:
        for name in ("a.sock", "b.sock"):
            path = tmp_path / "private" / name
            cache.control.open(path)
            with pytest.raises(ControlError, match="open already"):
                cache.control.open(path)
            assert look(path, "policy", 5)["name"] == "lru"
            cache.control.close()
            cache.control.close()
            assert not path.exists()


def test_a_manager_whose_socket_is_taken_does_not_start(tmp_path: Path) -> None:
    """It ends what it has started, and the one that listens goes on."""
    path = tmp_path / "private" / "cache.sock"
    with PrefixCacheManager(config_with(path)):
        with pytest.raises(IPCError, match="a server listens on"):
            PrefixCacheManager(config_with(path))
        assert look(path, "policy", 5)["name"] == "lru"


@pytest.mark.parametrize(
    "settings", [{"control_socket": ""}, {"control_socket": 5}, {"max_pinned_share": 2}, {"max_pinned_share": True}]
)
def test_impossible_settings_are_refused(settings: dict[str, object]) -> None:
    """With the value seen and what to give."""
    with pytest.raises(ConfigError, match=next(iter(settings))):
        InsightConfig(**settings)  # type: ignore[arg-type]

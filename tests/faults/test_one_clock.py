"""A whole life of an engine on a clock that only the test moves: no wait of it ever sleeps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastdeploy_cache import Match, PrefixCacheManager, Request
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.errors import LifeCycleError
from tests.rigs.faulty_engine import BLOCK_SIZE, Engine
from tests.rigs.manual_clock import ManualClock
from tests.rigs.stand_in_child import StandIns
from tests.rigs.storage_engine import file_storage, storage_config

# Children are threads of this process, so what they hold is seen as ours, and one may end a moment behind the test.
pytestmark = pytest.mark.leaks_allowed
A, B, C, D = (list(range(start, start + 4 * BLOCK_SIZE + 1)) for start in (100, 200, 300, 400))
NUM_TOKENS = 4 * BLOCK_SIZE  # of each, in full blocks


class Life:
    """An engine of two ranks with 12 blocks on the GPU and 32 below, over a store; threads stand in for its processes.

    A task may take ten seconds and a prefetch four. The engine has served four prompts, of which the last three are on
    the GPU, and all in the CPU tier and in the store.
    """

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        config = storage_config(
            2,
            file_storage(folder),
            32,
            prefetch_policy="timeout",
            prefetch_timeout_seconds=4.0,
            prefetch_seconds_per_1024_tokens=0.0,
            insight=InsightConfig(what_if=False, max_pinned_share=0.5),
        )
        self.clock = stack.enter_context(contextlib.closing(ManualClock()))
        self.children = StandIns(self.clock)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for room in ("rank", "storage"):
            patch.setattr(f"fastdeploy_cache.transfer_manager.{room}.owner.ChildProcess", self.children.new)
        stack.callback(self.children.join)
        self.cache = stack.enter_context(PrefixCacheManager(config, clock=self.clock))
        self.engine = Engine(self.cache, 2)
        for tokens in (A, B, C, D):
            assert self.engine.serve(tokens).num_tokens == 0
        assert self.cache.storage.flush(30)

    @property
    def num_restarts(self) -> list[int]:
        return [status.num_restarts for status in self.cache.stats().ranks]

    def loading(self, tokens: list[int]) -> tuple[Request, Match]:
        """A request whose blocks are on their way from the CPU tier."""
        request = Request(request_id=f"loads {tokens[0]}", prompt_token_ids=tokens)
        match = self.cache.match(request)
        assert match.num_coming_tokens == NUM_TOKENS
        return request, match


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    with contextlib.ExitStack() as stack:
        life = Life(tmp_path, stack)
        yield life
    vars(life).clear()  # the test still holds it, and it holds memory


class Beside:
    """A call in a thread of its own, which waits by the clock once this is made."""

    def __init__(self, clock: ManualClock, call: Callable[[], object]) -> None:
        self._found: list[object] = []
        self._thread = threading.Thread(target=lambda: self._found.append(call()))
        self._thread.start()
        clock.wait_for_waiters(1)

    def answer(self) -> object:
        self._thread.join(60)
        return self._found[0]


def test_every_tier_answers(life: Life) -> None:
    """From the CPU tier, and after all is forgotten from the store: with the right bytes, and no time has passed."""
    before = life.clock.now()
    assert life.engine.serve(A).num_cpu_tokens == NUM_TOKENS
    life.cache.reset()
    request = Request(request_id="stored", prompt_token_ids=A)
    assert life.cache.prefetch(request).wait()
    match = life.cache.match(request).wait()
    life.engine.check(A, match.block_ids)
    assert match.num_storage_tokens == NUM_TOKENS
    assert life.clock.now() == before
    life.cache.check_invariants()


def test_a_load_that_is_late_is_a_miss(life: Life) -> None:
    """At the very moment to which the engine waits, and not before; what lands later is there for the next one."""
    with life.children.held():
        request, match = life.loading(A)
        waiting = Beside(life.clock, lambda: match.wait(2.0).num_tokens)
        life.clock.advance(1.9)
        assert match.poll().num_coming_tokens == NUM_TOKENS
        life.clock.advance(0.1)
        assert waiting.answer() == 0
    life.cache.release(request)
    assert life.cache.wait_for_transfers(30)
    assert life.engine.serve(A).num_gpu_tokens == NUM_TOKENS


def test_a_prefetch_waits_as_long_as_its_policy_says(life: Life) -> None:
    """Four seconds by the clock, while the store does not answer."""
    life.cache.reset()
    with life.children.held():
        prefetch = life.cache.prefetch(Request(request_id="waits", prompt_token_ids=A))
        waiting = Beside(life.clock, prefetch.wait)
        life.clock.advance(3.9)
        assert not prefetch.ready
        life.clock.advance(0.1)
        assert waiting.answer() is True and prefetch.num_fetched_blocks == 0


def test_a_dead_rank_comes_back_after_its_pause(life: Life) -> None:
    """What it was loading is a miss; it is not there before the pause is over, and serves afterwards."""
    with life.children.held():
        request, match = life.loading(A)
        life.children.made[0].kill()
    assert match.wait(5.0).num_tokens == 0
    life.cache.release(request)
    life.clock.advance(0.5)
    assert life.cache.ranks.wait_ready(30)
    assert life.num_restarts == [1, 0]
    assert life.engine.serve(A).num_cpu_tokens == NUM_TOKENS


def test_a_rank_that_hangs_is_killed_at_the_task_s_deadline(life: Life) -> None:
    """After ten seconds and half a second of grace, and not before; who waits for it gets a miss."""
    with life.children.held():
        request, match = life.loading(A)
        waiting = Beside(life.clock, lambda: match.wait(60.0).num_tokens)
        life.clock.advance(10.4)
        assert life.num_restarts == [0, 0]
        life.clock.advance(0.2)
        assert waiting.answer() == 0
    life.cache.release(request)
    life.clock.advance(0.5)
    assert life.cache.ranks.wait_ready(30)
    assert life.num_restarts == [1, 1]


def test_hearts_that_stop_are_deaths(life: Life) -> None:
    """As of stopped processes: none is missed before the time for a sign of life is over."""
    timeout_seconds = life.cache.config.transfer.heartbeat_timeout_seconds
    life.clock.advance(10 * timeout_seconds)
    assert life.num_restarts == [0, 0]
    life.children.are_stopped = True
    life.clock.advance(2 * timeout_seconds)
    life.children.wait_for_deaths(2)
    life.children.are_stopped = False
    life.clock.advance(0.5)
    assert life.cache.ranks.wait_ready(30)
    assert life.num_restarts == [1, 1]


def test_a_pause_has_a_deadline_and_a_pin_an_end(life: Life) -> None:
    """A copy that does not end keeps a cache from pausing; a pin ends by the life.clock."""
    with life.children.held():
        request, _ = life.loading(A)
        pausing = Beside(life.clock, lambda: _error_of(lambda: life.cache.life.pause(3.0)))
        life.clock.advance(3.0)
        assert isinstance(pausing.answer(), LifeCycleError)
    assert life.cache.wait_for_transfers(30)
    life.cache.release(request)
    (pin,) = [life.cache.control.pin(D, 60.0)]
    assert pin.seconds_left == 60.0
    life.clock.advance(59.0)
    assert [each.seconds_left for each in life.cache.control.pins()] == [1.0]
    life.clock.advance(1.0)
    assert life.cache.control.pins() == []


def _error_of(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except LifeCycleError as error:
        return error
    return None

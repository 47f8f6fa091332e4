"""Random verbs against a simple model; the books must add up after every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.callers.sessions import Sessions
from fastdeploy_cache.config.cache import WRITE_POLICIES
from fastdeploy_cache.errors import ControlError, PromptTooLongError
from fastdeploy_cache.policies import EVICTION_POLICIES
from fastdeploy_cache.request import Image
from tests.rigs.cache_model import CacheModel, LiveRequest

# Prompts are cut from a few texts and sometimes go their own way, so that they meet, part and extend each other.
TEXTS = [[(7 * i * i + text * (i // 9)) % 5 for i in range(60)] for text in range(4)]
IMAGES = [Image(offset, length, name) for offset in (3, 5) for length in (1, 9) for name in (b"cat", b"dog")]
ERRORS = (None, None, None, "rank died")

Hint = Callable[[Sessions, list[int], str], object]
HINTS: list[Hint] = [
    lambda sessions, tokens, namespace: sessions.supersede(tokens, len(tokens) // 2, namespace=namespace),
    lambda sessions, tokens, namespace: sessions.demote(tokens, namespace=namespace),
    lambda sessions, tokens, namespace: sessions.prefetch(tokens, namespace=namespace),
    lambda sessions, tokens, namespace: sessions.prefetch(tokens, namespace=namespace, tier="cpu"),
    lambda sessions, tokens, namespace: sessions.retain(tokens, 5.0, namespace=namespace),
]


class CacheMachine(RuleBasedStateMachine):
    """Lets hypothesis choose each step, so that a failure shrinks to the shortest story."""

    @initialize(
        size=st.integers(1, 4),
        num_gpu=st.integers(4, 24),
        num_cpu=st.sampled_from([40, 12, 5, 2, 0]),
        policy=st.sampled_from(EVICTION_POLICIES),
        recompute=st.booleans(),
        write_policy=st.sampled_from(WRITE_POLICIES),
    )
    def start(self, size: int, num_gpu: int, num_cpu: int, policy: str, recompute: bool, write_policy: str) -> None:
        self.model = CacheModel(
            size, num_gpu, num_cpu, policy=policy, recompute_last_token=recompute, write_policy=write_policy
        )

    def pick(self, data: st.DataObject) -> LiveRequest:
        return self.model.live[data.draw(st.integers(0, len(self.model.live) - 1))]

    @rule(text=st.sampled_from(TEXTS), length=st.integers(1, 48), stays=st.booleans(), patient=st.booleans())
    def serve(self, text: list[int], length: int, stays: bool, patient: bool) -> None:
        self.model.serve(text[:length], stays, patient)

    @rule(text=st.sampled_from(TEXTS), length=st.integers(1, 48), namespace=st.sampled_from(["", "", "lora"]))
    def match(self, text: list[int], length: int, namespace: str) -> None:
        self.model.match(text[:length], namespace)

    @rule(text=st.sampled_from(TEXTS), length=st.integers(24, 48), image=st.sampled_from(IMAGES))
    def serve_image(self, text: list[int], length: int, image: Image) -> None:
        self.model.serve(text[:length], stays=False, patient=True, images=[image])

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), num_blocks=st.integers(0, 6))
    def allocate(self, data: st.DataObject, num_blocks: int) -> None:
        self.model.allocate(self.pick(data), num_blocks)

    @precondition(lambda self: any(live.table is None for live in self.model.live))
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        self.model.look(data.draw(st.sampled_from([live for live in self.model.live if live.table is None])))

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), num_blocks=st.integers(0, 3), lands=st.booleans())
    def run_ahead(self, data: st.DataObject, num_blocks: int, lands: bool) -> None:
        live = self.pick(data)
        if self.model.run_ahead(live, num_blocks) and lands:
            self.model.client.land_all()

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), output=st.lists(st.integers(0, 4), max_size=4))
    def compute(self, data: st.DataObject, output: list[int]) -> None:
        live = self.pick(data)
        live.request.append_output(output)
        limit = self.model.computable(live)
        if live in self.model.live and limit >= live.num_computed:
            self.model.compute(live, data.draw(st.integers(live.num_computed, limit)))

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def commit_too_much(self, data: st.DataObject) -> None:
        live = self.pick(data)
        self.model.settle(live)
        if live in self.model.live:
            self.model.commit_too_much(live)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.model.release(self.pick(data))

    @precondition(lambda self: self.model.client.tasks)
    @rule(error=st.sampled_from(ERRORS), num_tasks=st.integers(1, 4))
    def land(self, error: str | None, num_tasks: int) -> None:
        self.model.land(error, num_tasks)

    @rule(
        hint=st.sampled_from(HINTS),
        text=st.sampled_from(TEXTS),
        length=st.integers(1, 48),
        namespace=st.sampled_from(["", "", "lora"]),
    )
    def hint(self, hint: Hint, text: list[int], length: int, namespace: str) -> None:
        with suppress(ControlError, PromptTooLongError):  # nothing to pin, or too much; it can never fit
            hint(self.model.cache.sessions, text[:length], namespace)

    @rule(up=st.sampled_from([True, True, True, False]))
    def rank_up_or_down(self, up: bool) -> None:
        self.model.client.up = up

    @rule(chance=st.integers(0, 9))
    def reset(self, chance: int) -> None:
        if chance == 9:
            self.model.reset()
        elif chance == 8:
            self.model.kv_lost()
        elif chance == 7:
            self.model.forget("lora")
        elif chance == 6:
            self.model.forget("")

    @invariant()
    def books_add_up(self) -> None:
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.finish()


CacheMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.__doc__ = "Short stories chosen by hypothesis: never a wrong byte, never a book that does not add up."


_ACTIONS = {"serve": 9, "match": 4, "land": 6, "down": 0.4, "reset": 0.1, "kv lost": 0.1, "forget": 0.2}
_ACTIONS_OF_LIVE = {"allocate": 4, "ahead": 5, "compute": 5, "release": 7}


def _walk(model: CacheModel, choose: random.Random) -> None:
    """One step with the weights of real traffic: mostly whole requests, now and then a death or a reset."""
    actions = _ACTIONS | (_ACTIONS_OF_LIVE if model.live else {})
    action = choose.choices(list(actions), list(actions.values()))[0]
    model.client.up = action != "down"
    if action in _ACTIONS_OF_LIVE:
        _walk_on(model, choose, action, choose.choice(model.live))
    elif action == "land":
        model.land(choose.choice(ERRORS), choose.randint(1, 4))
    elif action == "reset":
        model.reset()
    elif action == "kv lost":
        model.kv_lost()
    elif action == "forget":
        model.forget(choose.choice(("", "lora", "lora")))
    else:
        _walk_in(model, choose, action)


def _walk_in(model: CacheModel, choose: random.Random, action: str) -> None:
    """A new request."""
    text = choose.choice(TEXTS)[: choose.randint(1, 48)]
    text += [choose.randint(0, 4) for _ in range(choose.choice((0, 0, 3)))]
    images = [choose.choice(IMAGES)] if len(text) > 24 and choose.random() < 0.2 else []
    if action == "match":
        model.match(text, choose.choice(("", "", "", "lora")))
    elif action == "down":
        model.serve(text, stays=False, patient=True)
    else:
        model.serve(text, stays=choose.random() < 0.2, patient=choose.random() < 0.7, images=images)


def _walk_on(model: CacheModel, choose: random.Random, action: str, live: LiveRequest) -> None:
    """A request that is there goes on."""
    if action == "allocate":
        model.allocate(live, choose.randint(0, 6))
    elif action == "ahead":
        if model.run_ahead(live, choose.randint(0, 3)) and choose.random() < 0.5:
            model.client.land_all()
    elif action == "compute":
        model.compute_some(live, choose)
    else:
        model.release(live)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 4),
    num_gpu=st.integers(8, 30),
    num_cpu=st.sampled_from([60, 15]),
    policy=st.sampled_from(EVICTION_POLICIES),
    recompute=st.booleans(),
    write_policy=st.sampled_from(WRITE_POLICIES),
)
def test_long_random_walks(
    seed: int, size: int, num_gpu: int, num_cpu: int, policy: str, recompute: bool, write_policy: str
) -> None:
    """Hundreds of steps with the weights of real traffic reach full tiers, splits in flight and late loads."""
    model = CacheModel(size, num_gpu, num_cpu, policy=policy, recompute_last_token=recompute, write_policy=write_policy)
    choose = random.Random(seed)
    for _ in range(300):
        _walk(model, choose)
        model.check()
    model.finish()


def test_random_walks_do_load_from_the_cpu_tier() -> None:
    """The walk above is worth something: it serves hundreds of tokens that came back from the CPU tier, and taps hear
    of blocks that leave for each reason that there is, and of runs that are cut and joined."""
    model, choose = CacheModel(2, 20, 60), random.Random(1)
    for _ in range(2000):
        _walk(model, choose)
    model.finish()
    assert model.num_loaded_tokens > 500
    heard = {why for why, num_blocks in model.mirror.num_left.items() if num_blocks}
    assert heard == {Loss.GPU, Loss.CPU, Loss.RESET, Loss.RANK, Loss.MOVED}  # spare copies are dropped for storage
    assert min(model.mirror.num_shaped) > 0

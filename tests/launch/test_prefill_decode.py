"""Prompts computed by one engine and answered by another: real caches and peer processes under a model of integers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.errors import PeerError
from fastdeploy_cache.launch.reference_engine.generation import Generation, GenerationError, GenerationRefusedError
from fastdeploy_cache.peers.transfers import Send
from tests.rigs.echo_engine import SIZE, VOCABULARY, expected
from tests.rigs.integer_instance import NUM_LAYERS, PROMPT, SECONDS, Instance, instances, prefill

pytestmark = pytest.mark.processes

LONG = [token % VOCABULARY for token in range(301)]  # more than one step


def all_tokens(generation: Generation) -> list[int]:
    while generation.next_token(SECONDS) is not None:
        pass
    return generation.output


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (2, 1), (1, 2)])
def test_the_answer_is_the_one_computed_alone(num_prefill: int, num_decode: int) -> None:
    """Whatever the ranks of both sides: the blocks come, only what is behind them is computed, every token is right;
    and of a prompt that goes on, only the new blocks are sent."""
    with instances(lambda: Instance("prefill", num_prefill), lambda: Instance("decode", num_decode)) as (there, here):
        sent = []
        for prompt in (PROMPT, [*PROMPT, *expected(PROMPT, 4), 7, 8, 9]):
            before, computed = here.num_bytes("receive"), here.model.num_computed_tokens
            prefill, offer = there.offer(prompt)
            answer = here.engine.intake.submit(np.array(prompt), 8, offer)
            assert all_tokens(answer) == expected(prompt, 8)
            assert answer.num_gpu_tokens == len(prompt) // SIZE * SIZE
            assert here.model.num_computed_tokens - computed == len(prompt) % SIZE + len(answer.output) - 1
            assert prefill.next_token(SECONDS) is None
            assert prefill.finish_reason == "sent"
            assert prefill.send is not None
            assert prefill.send.wait(SECONDS)
            sent.append((here.num_bytes("receive") - before) / (NUM_LAYERS * 2 * 2 * 4 * SIZE))
        assert sent == [5, 1]  # the second is 7 blocks, 6 of which the first and its answer have filled


class Gate:
    """Holds an instance's model before a layer until it is opened."""

    def __init__(self, instance: Instance, layer: int) -> None:
        self._layer, self._reached, self._open = layer, threading.Event(), threading.Event()
        instance.model.on_layer = self._pass

    def _pass(self, layer: int) -> None:
        if layer == self._layer:
            self._reached.set()
            assert self._open.wait(SECONDS)

    def wait_reached(self) -> None:
        assert self._reached.wait(SECONDS)

    def open(self) -> None:
        self._open.set()


def wait_arrived(here: Instance, layer: int) -> None:
    """Until another process has written into that layer: it has nothing to wait on."""
    keys, until = here.cache.ranks.kv_views(0)[layer]["key"], time.monotonic() + SECONDS
    while not keys.any():
        assert time.monotonic() < until
        time.sleep(0.005)


def decode() -> Instance:
    return Instance("decode", 1)


def decode_or_fail() -> Instance:
    return Instance("decode", 1, recompute=False)


def test_what_decode_has_is_not_sent() -> None:
    """The same prompt again: not a byte, and the same answer."""
    with instances(prefill, decode) as (there, here):
        for num_times in range(2):
            before = here.num_bytes("receive")
            _, offer = there.offer(PROMPT)
            assert all_tokens(here.engine.intake.submit(np.array(PROMPT), 4, offer)) == expected(PROMPT, 4)
            assert (here.num_bytes("receive") > before) == (num_times == 0)


def test_layers_arrive_while_the_step_computes_the_next_ones() -> None:
    """The first step stands still before its last layer: those before it come across all the same."""
    with instances(prefill, decode) as (there, here):
        gate = Gate(there, NUM_LAYERS - 1)
        _, offer = there.offer(PROMPT)
        gate.wait_reached()
        answer = here.engine.intake.submit(np.array(PROMPT), 4, offer)
        wait_arrived(here, NUM_LAYERS - 2)
        assert not here.cache.ranks.kv_views(0)[NUM_LAYERS - 1]["key"].any()
        gate.open()
        assert all_tokens(answer) == expected(PROMPT, 4)


@pytest.mark.parametrize("here_type", [decode, decode_or_fail])
def test_a_send_that_fails_midway(here_type: Callable[[], Instance]) -> None:
    """The prompt is computed where it was to be received, or the request fails with the reason, as was chosen; the next
    one is received again."""
    with instances(prefill, here_type) as (there, here):
        gate = Gate(there, 1)
        generation, offer = there.offer(LONG)
        gate.wait_reached()
        answer = here.engine.intake.submit(np.array(LONG), 4, offer)
        wait_arrived(here, 0)
        there.engine.intake.cancel(generation)
        gate.open()
        if here_type is decode:
            assert all_tokens(answer) == expected(LONG, 4)
        else:
            with pytest.raises(GenerationError, match="did not come: cancelled"):
                all_tokens(answer)
        assert generation.next_token(SECONDS) is None
        assert generation.finish_reason == "cancelled"
        _, offer = there.offer(PROMPT[::-1])
        assert all_tokens(here.engine.intake.submit(np.array(PROMPT[::-1]), 4, offer)) == expected(PROMPT[::-1], 4)


@pytest.mark.parametrize("here_type", [decode, decode_or_fail])
def test_an_offer_that_is_none_or_of_another_prompt(here_type: Callable[[], Instance]) -> None:
    """Refused before it is queued; the prompt without it is answered."""
    with instances(prefill, here_type) as (there, here):
        _, other = there.offer(PROMPT[::-1])
        for offer, words in ((b"nothing", "no offer"), (other, "another prompt")):
            with pytest.raises(GenerationRefusedError, match=f"kv_offer: .*{words}"):
                here.engine.intake.submit(np.array(PROMPT), 4, offer)
        assert here.num_bytes("receive") == 0
        assert all_tokens(here.engine.intake.submit(np.array(PROMPT), 4)) == expected(PROMPT, 4)


def test_cancelled_while_it_is_received() -> None:
    """It ends at once though nothing else happens, its blocks go home, and the other side stops as well."""
    with instances(prefill, decode) as (there, here):
        gate = Gate(there, 1)
        generation, offer = there.offer(LONG)
        gate.wait_reached()
        num_free = here.cache.stats().gpu.by_state()["free"]
        answer = here.engine.intake.submit(np.array(LONG), 4, offer)
        wait_arrived(here, 0)
        receive = answer.receive
        assert receive is not None
        here.engine.intake.cancel(answer)
        assert answer.next_token(SECONDS) is None
        assert answer.finish_reason == "cancelled"
        assert generation.send is not None
        generation.send.wait(SECONDS)
        gate.open()
        with pytest.raises(GenerationError, match="nobody reads its blocks any more: cancelled"):
            generation.next_token(SECONDS)
        assert there.model.num_computed_tokens < len(LONG)
        receive.wait(SECONDS)
        assert (receive.reason, here.cache.stats().gpu.by_state()["free"]) == ("cancelled", num_free)


def test_a_prompt_taken_back_is_computed_by_the_other() -> None:
    """What a sleep or new weights do to a prompt that is being computed: its send fails, the answer is right."""
    with instances(prefill, decode) as (there, here):
        gate = Gate(there, 1)
        generation, offer = there.offer(LONG)
        gate.wait_reached()
        answer = here.engine.intake.submit(np.array(LONG), 4, offer)
        there.model.on_layer = lambda _: None
        pausing = threading.Thread(target=there.engine.pause, args=(SECONDS,))
        pausing.start()
        gate.open()
        pausing.join(SECONDS)
        there.engine.preempt_all()
        there.engine.resume()
        with pytest.raises(GenerationError, match="taken back"):
            generation.next_token(SECONDS)
        assert all_tokens(answer) == expected(LONG, 4)


def test_prompts_that_cannot_be_offered() -> None:
    """Less than a block, more than the pool; and no offers where the role is to take them."""
    with instances(prefill, decode) as (there, here):
        for prompt in (np.arange(SIZE - 1), np.arange(100 * SIZE + 1)):
            with pytest.raises(GenerationRefusedError, match="4 to 400"):
                there.engine.intake.submit_prefill(prompt)
        with pytest.raises(GenerationError, match="'decode'"):
            here.engine.intake.submit_prefill(np.array(PROMPT)).wait_send(SECONDS)


@pytest.mark.parametrize("seed", range(3))
def test_pools_that_hold_few_of_the_prompts(seed: int) -> None:
    """Prompts wait on both sides for the blocks of others, some without an offer or with one that was given up: all are
    answered, rightly, and nothing is held at the end."""
    choose = np.random.default_rng(seed)
    sizes = choose.integers(13, 24, 2)
    with instances(
        lambda: Instance("prefill", 1, int(sizes[0])), lambda: Instance("decode", 1, int(sizes[1]), max_running=3)
    ) as (there, here):
        prompts = [choose.integers(1, VOCABULARY, choose.integers(4, 40)).tolist() for _ in range(14)]
        prefills = [there.engine.intake.submit_prefill(np.array(prompt)) for prompt in prompts]
        answers = []
        for prompt, prefill in zip(prompts, prefills, strict=True):
            fate = choose.random()
            offer = prefill.wait_send(SECONDS).offer if fate < 0.9 else None
            if fate >= 0.8:
                there.engine.intake.cancel(prefill)
            answers.append(here.engine.intake.submit(np.array(prompt), 6, offer))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert all_tokens(answer) == expected(prompt, 6)


@pytest.mark.parametrize(("num_sends", "num_receives"), [(1, 64), (64, 1), (1, 1)])
def test_who_may_not_send_or_receive_now_waits(num_sends: int, num_receives: int) -> None:
    """Three offered prompts where one may be on its way at a time, on either side: none is refused or computed here."""
    with instances(
        lambda: Instance("prefill", 1, max_transfers=num_sends),
        lambda: Instance("decode", 1, recompute=False, max_transfers=num_receives),
    ) as (there, here):
        prompts = [[n, *PROMPT] for n in range(3)]
        there.engine.pause(SECONDS)
        prefills = [there.engine.intake.submit_prefill(np.array(prompt)) for prompt in prompts]
        there.engine.resume()

        def answer(prompt: list[int], prefill: Generation) -> list[int]:
            offer = prefill.wait_send(SECONDS).offer
            return all_tokens(here.engine.intake.submit(np.array(prompt), 6, offer))

        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(answer, prompts, prefills))
        assert answers == [expected(prompt, 6) for prompt in prompts]
        num_computed = [len(p) % SIZE + len(a) - 1 for p, a in zip(prompts, answers, strict=True)]
        assert here.model.num_computed_tokens == sum(num_computed)


def test_who_waits_too_long_to_be_sent_has_failed() -> None:
    """Nobody takes the only offer that may be open: the next prompt ends at its deadline, with the reason."""
    with instances(lambda: Instance("prefill", 1, max_transfers=1, offer_timeout_seconds=2.0)) as (there,):
        there.engine.pause(SECONDS)
        first, second = (there.engine.intake.submit_prefill(np.array([n, *PROMPT])) for n in range(2))
        held = there.cache.peers.offer
        asked = []

        def offer(request: Request) -> Send:
            asked.append(request.request_id)
            if request is second.request:
                raise PeerError("send: not now")
            return held(request)

        there.cache.peers.offer = offer  # type: ignore[method-assign]
        there.engine.resume()
        assert first.wait_send(SECONDS)
        with pytest.raises(GenerationError, match="not now"):
            second.wait_send(SECONDS)
        assert 2 <= asked.count(second.request.request_id) <= 4  # at its turn, at an end, at its deadline: no loop


def test_no_more_is_received_than_may_run() -> None:
    """Five prompts are offered and two may run: two receives are open, the others hold nothing until those have run."""
    with instances(lambda: Instance("prefill", 1, max_running=8), lambda: Instance("decode", 1, max_running=2)) as (
        there,
        here,
    ):
        gate = Gate(there, 1)
        prompts = [[n, *PROMPT] for n in range(5)]
        there.engine.pause(SECONDS)
        prefills = [there.engine.intake.submit_prefill(np.array(prompt)) for prompt in prompts]
        there.engine.resume()
        offers = [prefill.wait_send(SECONDS).offer for prefill in prefills]
        answers = [here.engine.intake.submit(np.array(p), 6, offer) for p, offer in zip(prompts, offers, strict=True)]
        # behind them: once it is answered, they were looked at
        plain = here.engine.intake.submit(np.array([7, 8, 9]), 1)
        assert len(all_tokens(plain)) == 1
        assert [each.receive is not None for each in answers] == [True, True, False, False, False]
        gate.open()
        assert [all_tokens(each) for each in answers] == [expected(prompt, 6) for prompt in prompts]
        assert all(each.num_gpu_tokens == 20 for each in answers)

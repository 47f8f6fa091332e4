"""The router before instances that hang and clients that have much open: who gets a request, and who does not."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastdeploy_cache.launch.server import instances
from fastdeploy_cache.launch.server.instances import Instances
from fastdeploy_cache.launch.server.upstream import HEALTH, NotSentError, Upstream
from tests.rigs.router_rig import CHAT, SECONDS, Instance, _Handler, answers, ask, never_answers, offers, routed

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_hung_one_instance_is_given_to_no_other(role: str, is_stream: bool) -> None:
    """Neither answer nor health: the chat fails with status 504 and its offer is given up; the next chats are answered
    by others, and reach the hung one no more."""
    hung, prefill, decode = Instance(never_answers), Instance(offers), Instance(answers)
    hung.is_hung = True
    everyone = ([hung, prefill], [decode]) if role == "prefill" else ([prefill], [hung, decode])
    with routed(*everyone, prefill_seconds=0.3, probe_seconds=0.1) as router:  # type: ignore[arg-type]
        status, answer = ask(router, {**CHAT, "stream": is_stream})
        assert status == 504
        assert f"the {role} instance at 127.0.0.1:{hung.server_port} does not answer" in answer["error"]["message"]
        assert hung.has_lost_client.wait(SECONDS)
        assert decode.asked == []
        assert len(prefill.asked) == len(prefill.deleted) == (role == "decode")
        for _ in range(3):
            assert ask(router) == (200, {"by": decode.url})
    assert [len(hung.asked), len(decode.asked)] == [1, 3]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_that_has_hung_is_asked_for_its_health_first(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """When its time is over it gets no chat before it has answered that; then it is one like the others."""
    monkeypatch.setattr(instances, "_HUNG_SECONDS", 0.0)
    hung, prefill, decode = Instance(never_answers), Instance(offers), Instance(answers)
    hung.is_hung = True
    everyone = ([hung], [decode]) if role == "prefill" else ([prefill], [hung, decode])
    with routed(*everyone, prefill_seconds=0.3, probe_seconds=0.1) as router:  # type: ignore[arg-type]
        assert ask(router)[0] == 504
        num_probes = hung.num_probes
        for _ in range(2):
            assert ask(router) == (200, {"by": decode.url})
        assert len(hung.asked) == 1 and hung.num_probes > num_probes
        hung.is_hung, hung.answer = False, offers if role == "prefill" else answers
        for _ in range(2):
            assert ask(router)[0] == 200
    assert len(hung.asked) > 1


def test_who_still_hangs_is_left_alone_again() -> None:
    """Its health is asked once, in vain; then it is passed over for as long as before."""
    two, now = Instances(["http://127.0.0.1:1", "http://127.0.0.1:2"]), time.monotonic()
    place = two.in_order()[0]
    two._hung_until[place] = now - 1.0
    assert not two.is_hung(place)

    async def ask_first() -> None:
        upstream = Upstream()
        try:
            async with two.asked(upstream, place, HEALTH):
                raise AssertionError("it was asked")
        finally:
            await upstream.close()

    with pytest.raises(NotSentError, match="has hung"):
        asyncio.run(ask_first())
    assert two.is_hung(place)
    assert two.in_turn()[-1] == place


def test_a_request_that_hangs_everybody_hangs_one(nobody: str) -> None:
    """Three decode instances, of which the first cannot be reached: the second gets it, and the third never."""
    second, third = Instance(never_answers), Instance(never_answers)
    second.is_hung = third.is_hung = True
    with routed([], [nobody, second, third], probe_seconds=0.1) as router:
        assert ask(router)[0] == 504
        assert second.has_lost_client.wait(SECONDS)
    assert [len(second.asked), len(third.asked)] == [1, 0]


def test_looking_can_hang_nobody() -> None:
    """What is read of an instance that hangs is asked of the next one."""
    hung, decode = Instance(never_answers), Instance(answers)
    hung.is_hung = True
    with routed([], [hung, decode]) as router:
        assert ask(router, method="GET", path="/v1/models") == (200, {"path": "/v1/models"})


def test_open_prefills_of_a_client_are_bounded() -> None:
    """While as many of its chats are open as may be, the next one is computed by decode alone; then it is as before."""
    may_answer = threading.Event()

    def answers_late(handler: _Handler) -> None:
        handler.server.is_held.set()
        assert may_answer.wait(SECONDS)
        answers(handler)

    prefill, decode = Instance(offers), Instance(answers_late)
    with routed([prefill], [decode], max_open_prefills=1) as router, ThreadPoolExecutor() as pool:
        first = pool.submit(ask, router)
        assert decode.is_held.wait(SECONDS)
        decode.answer = answers
        assert ask(router)[0] == 200
        assert [len(prefill.asked), "kv_offer" in decode.asked[-1]] == [1, False]
        may_answer.set()
        assert first.result(SECONDS)[0] == 200
        until = time.monotonic() + SECONDS
        while router.open_prefills.num_open:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert ask(router)[0] == 200
    assert len(prefill.asked) == 2


def test_a_decode_instance_that_has_much_to_do_is_waited_for() -> None:
    """Its health answers while its answer takes long."""

    def answers_late(handler: _Handler) -> None:
        until = time.monotonic() + SECONDS
        while handler.server.num_probes < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        answers(handler)

    slow, other = Instance(answers_late), Instance(answers)
    with routed([], [slow, other], probe_seconds=0.05) as router:
        assert ask(router) == (200, {"by": slow.url})
    assert other.asked == []


def test_a_prefill_instance_that_hangs_is_remembered() -> None:
    """The first chat waits for it; the next ones take the other, or do without."""
    hung, prefill, decode = Instance(never_answers), Instance(offers), Instance(answers)
    with routed([hung, prefill], [decode], prefill_seconds=0.3) as router:
        for _ in range(3):
            assert ask(router)[0] == 200
    assert ["kv_offer" in chat for chat in decode.asked] == [False, True, True]
    assert [len(hung.asked), len(prefill.asked)] == [1, 2]

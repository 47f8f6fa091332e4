"""The router that hears what instances have cached: whom it asks, and what it says of that."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from contextlib import ExitStack
from typing import cast

import pytest

from fastdeploy_cache.errors import ConfigError, LaunchError
from fastdeploy_cache.events import PrefixFound
from fastdeploy_cache.launch.server import choice
from fastdeploy_cache.launch.server.choice import Chooser, Costs
from fastdeploy_cache.launch.server.instances import Instances, Load
from fastdeploy_cache.launch.server.options import RouteOptions
from fastdeploy_cache.launch.server.prefix_lookup import EventSource, PrefixLookup, PromptKnown
from fastdeploy_cache.launch.server.route import route
from tests.rigs.event_rig import SIZE, publishing
from tests.rigs.prefix_router import FIRST, PLACES, READER, SECOND, URLS, Pair, chat, lookup_of, pair_of, said
from tests.rigs.router_rig import (
    SECONDS,
    Instance,
    answers,
    answers_later,
    ask,
    offers,
    routed,
    running,
)


@pytest.mark.processes
def test_a_prompt_goes_where_it_is() -> None:
    """Chats and completions go to the instance that has them, each time, and a header says so; a salt has its own."""
    with pair_of() as pair:
        pair.hold(0, FIRST)
        pair.hold(1, SECOND)
        pair.hold(1, FIRST, "tenant")
        for _ in range(2):
            for which, body in ((0, chat(FIRST)), (1, chat(SECOND)), (1, chat(FIRST, "tenant"))):
                answer, route_said = said(pair.router, body)
                assert answer == {"by": pair.instances[which].url}
                assert route_said.startswith(f"127.0.0.1:{pair.instances[which].server_port}; reason=prefix; ")
        answer, route_said = said(pair.router, {"prompt": [SECOND, SECOND + FIRST]}, "/v1/completions")
    num_cached = 2 * (len(SECOND) // SIZE * SIZE)
    assert answer == {"by": pair.instances[1].url}
    assert route_said.endswith(f"prompt_tokens={2 * len(SECOND) + len(FIRST)}; cached_tokens={num_cached}")


def test_look_ups_wait_for_few_others() -> None:
    """While so many prompts are looked up, which takes long here, another one goes where its turn is, at once."""
    known, go_on = PromptKnown(5), threading.Event()

    class Slow:
        def look_up(self, *_: object) -> PromptKnown:
            assert go_on.wait(SECONDS)
            return known

    async def ask_often() -> tuple[list[PromptKnown | None], PromptKnown | None, PromptKnown | None]:
        chooser = Chooser(cast("PrefixLookup", Slow()))
        first = [asyncio.ensure_future(chooser.look_up(b"", "")) for _ in range(choice._MOST_LOOKING)]
        await asyncio.sleep(0)
        one_more = await chooser.look_up(b"", "")
        go_on.set()
        return await asyncio.gather(*first), one_more, await chooser.look_up(b"", "")

    answers, one_more, later = asyncio.run(ask_often())
    assert answers == [known] * choice._MOST_LOOKING and (one_more, later) == (None, known)


@pytest.mark.processes
def test_an_instance_that_is_busy_is_spared() -> None:
    """What is cached counts less than a request that is being answered there, where that is said to cost more."""
    busy = Instance(answers_later)
    with pair_of(costs=Costs(open_request=1000.0), instances=[busy, Instance(answers)]) as pair:
        pair.hold(0, FIRST)
        waiting = threading.Thread(target=said, args=(pair.router, chat(FIRST)))
        waiting.start()
        assert busy.is_held.wait(SECONDS)
        answer, route_said = said(pair.router, chat(FIRST))
        busy.may_go_on.set()
        waiting.join(SECONDS)
        assert answer == {"by": pair.instances[1].url}
        assert "reason=load" in route_said
        assert said(pair.router, chat(FIRST))[0] == {"by": busy.url}  # it has nothing to do any more


@pytest.mark.processes
def test_what_is_not_known_goes_by_turns() -> None:
    """A body that no prompt can be read from, and any prompt once both caches are closed: instances take turns."""
    with pair_of() as pair:
        pair.hold(0, FIRST)
        found = [said(pair.router, {"messages": [{"role": "nobody", "content": FIRST}]}) for _ in range(2)]
        assert {answer["by"] for answer, _ in found} == {each.url for each in pair.instances}
        assert all(route_said.endswith("reason=unknown") for _, route_said in found)
        for cache in pair.caches:
            cache.close()
        deadline = threading.Event()
        for _ in range(int(SECONDS * 100)):
            if not any(state.is_current for place in pair.lookup.places() if (state := pair.lookup.state_of(place))):
                break
            deadline.wait(0.01)
        found = [said(pair.router, chat(FIRST)) for _ in range(2)]
    assert {answer["by"] for answer, _ in found} == {each.url for each in pair.instances}
    assert all(route_said.endswith("reason=unknown") for _, route_said in found)


@pytest.mark.processes
def test_who_has_it_and_is_gone(nobody: str) -> None:
    """The next one is asked, and the header says that it is the next one."""
    with ExitStack() as stack:
        there = Instance(answers)
        caches = {nobody: stack.enter_context(publishing()), there.url: stack.enter_context(publishing())}
        lookup = lookup_of(caches)
        stack.callback(lookup.close)
        router = stack.enter_context(routed([], [nobody, there], chooser=Chooser(lookup)))
        Pair([], [*caches.values()], router, lookup).hold(0, FIRST)
        answer, route_said = said(router, chat(FIRST))
    assert answer == {"by": there.url}
    assert "reason=next" in route_said


@pytest.mark.processes
def test_prefill_instances_are_chosen_the_same_way() -> None:
    """The one that has the prompt computes it, whoever's turn it is."""
    with ExitStack() as stack:
        prefill, decode = [Instance(offers), Instance(offers)], Instance(answers)
        caches = [stack.enter_context(publishing()) for _ in prefill]
        lookup = lookup_of({each.url: cache for each, cache in zip(prefill, caches, strict=True)})
        stack.callback(lookup.close)
        router = stack.enter_context(routed(prefill, [decode], chooser=Chooser(lookup)))
        Pair(prefill, caches, router, lookup).hold(1, FIRST)
        for _ in range(3):
            assert said(router, chat(FIRST))[0] == {"by": decode.url}
    assert [len(each.asked) for each in prefill] == [0, 3]


@pytest.mark.processes
def test_pages_show_what_is_known() -> None:
    """`/status` has what is cached by instance; `/metrics` counts where prompts went and how much was there."""
    with pair_of() as pair:
        pair.hold(0, FIRST)
        assert said(pair.router, chat(FIRST))[0] == {"by": pair.instances[0].url}
        status = ask(pair.router, method="GET", path="/status")[1]
        connection = http.client.HTTPConnection("127.0.0.1", pair.router.server_port, timeout=SECONDS)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
    num_blocks = len(FIRST) // SIZE
    known = {"is_current": True, "num_blocks": {"GPU": num_blocks, "CPU": 0, "DISK": 0}, "failure": None}
    assert status["decode"][0]["events"] == known
    url, prefix = pair.instances[0].url, "fastdeploy_cache_router_"
    assert f'{prefix}routed_total{{instance_url="{url}",reason="prefix"}} 1.0' in lines
    assert f'{prefix}tokens_total{{instance_url="{url}",kind="prompt"}} {float(len(FIRST))}' in lines
    assert f'{prefix}tokens_total{{instance_url="{url}",kind="cached"}} {float(num_blocks * SIZE)}' in lines
    assert f'{prefix}events_current{{instance_url="{url}"}} 1.0' in lines
    assert f'{prefix}load_tokens{{instance_url="{url}",role="decode"}} 0.0' in lines


def test_the_cost_decides() -> None:
    """Cached tokens cost nothing on the GPU, a tenth below it, and the rest one each; equals take turns."""
    found = {
        PLACES[0]: PrefixFound(num_tokens=96, num_gpu_tokens=0, num_cpu_tokens=96),
        PLACES[1]: PrefixFound(num_tokens=90, num_gpu_tokens=90),
    }
    instances, chooser = Instances(URLS), Chooser()
    choice = chooser.choose(instances, PromptKnown(100, found))
    assert list(choice.places) == [PLACES[1], PLACES[0], PLACES[2]]  # 10, 13.6 and 100
    assert choice.load_of(PLACES[0]).tokens == pytest.approx(13.6 + 16)
    equal = dict.fromkeys(PLACES, PrefixFound(num_tokens=32, num_gpu_tokens=32))
    firsts = [chooser.choose(instances, PromptKnown(100, equal)) for _ in range(3)]
    assert {each.places[0] for each in firsts} == set(PLACES)
    assert {each.reason for each in firsts} == {"turn"}


def test_a_load_shrinks_when_the_prompt_is_computed() -> None:
    """Until an instance says something it has the prompt to do, and then the answer."""
    load = Load(100.0, 16.0)
    assert load.tokens == 116.0
    load.note_prompt_computed()
    assert load.tokens == 16.0


@pytest.mark.parametrize(
    "text", ["", "http://127.0.0.1:1", "http://127.0.0.1:1,", "a,b,c,d", "ftp://a:1,tcp://b:2", "http://[::1,tcp://b:2"]
)
def test_an_option_that_says_nothing(text: str) -> None:
    """It is refused before anything is started."""
    with pytest.raises(LaunchError):
        EventSource(text)


def test_events_of_a_stranger() -> None:
    """Events of an instance that the router does not have, and an address that is none: the router does not start."""
    with pytest.raises(LaunchError, match="no instance of this router"):
        route(RouteOptions(decode=["http://127.0.0.1:1"], events=["http://127.0.0.1:2,tcp://127.0.0.1:3"], port=0))
    with pytest.raises(ConfigError, match="endpoint"):
        PrefixLookup([EventSource("http://127.0.0.1:1,nothing")], READER)


def test_a_prompt_that_is_too_long_is_not_looked_up() -> None:
    """Tokenising it could take seconds: nothing is known of it."""
    lookup = PrefixLookup([], READER)
    body = json.dumps(chat("a" * 131_073)).encode()
    assert lookup.look_up(body, "/v1/chat/completions") is None
    body = json.dumps(chat("a" * 131_072)).encode()
    assert lookup.look_up(body, "/v1/chat/completions") == PromptKnown(131_072)


@pytest.mark.processes
def test_a_mirror_that_has_ended_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot go on is replaced at the next prompt, and then all is known again."""
    monkeypatch.setattr("fastdeploy_cache.launch.server.prefix_lookup._AGAIN_SECONDS", 0.0)
    with running(), pair_of() as pair:
        pair.hold(0, FIRST)
        place = pair.lookup.places()[0]
        mirror = pair.lookup._mirrors[place]
        mirror.close()
        mirror.failure = OSError("no descriptors")
        pair.hold(0, FIRST)
        state = pair.lookup.state_of(place)
    assert state is not None
    assert state.failure is None

"""Three instances that lend each other what they have cached: real processes, real bytes, a model that checks them."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import pytest

from fastdeploy_cache.launch.server.chat import ChatApi
from fastdeploy_cache.launch.server.instance_app import InstanceApp
from tests.rigs.http_rig import served
from tests.rigs.integer_instance import PROMPT, SECONDS, Instance, Numbers, instances

pytestmark = pytest.mark.processes
COMPLETION, LEND, PREFILL = "/v1/completions", "/v1/lend", "/v1/prefill"
NUM_FULL = len(PROMPT) // 4 * 4


class Three(NamedTuple):
    """The instances and their ports."""

    made: list[Instance]
    ports: list[int]


@pytest.fixture(scope="module")
def three() -> Iterator[Three]:
    """And, behind them, one that only receives."""
    roles = ("mixed", "mixed", "mixed", "decode")
    with ExitStack() as stack:
        made = stack.enter_context(instances(*[partial(Instance, role, 1) for role in roles]))
        apps = [InstanceApp(ChatApi(each.engine, Numbers()), each.cache).build() for each in made]
        yield Three(made, [stack.enter_context(served(app)) for app in apps])


def ask(port: int, path: str, method: str = "POST", **fields: Any) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        body = {"prompt": PROMPT, **({"max_tokens": 6} if path == COMPLETION else {}), **fields}
        connection.request(method, path, json.dumps(body) if method == "POST" else None)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def said(answer: dict[str, Any]) -> tuple[str, int]:
    """What was answered, and how many tokens were not computed for it."""
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_each_borrows_what_another_has(three: Three) -> None:
    """The second takes it from the first, the third from the second; the answer is the same, and nothing is computed
    that was lent."""
    expected, _ = said(ask(three.ports[0], COMPLETION, cache_salt="each")[1])
    for lender, borrower in ((0, 1), (1, 2)):
        status, offered = ask(three.ports[lender], LEND, cache_salt="each")
        assert (status, offered["num_blocks"]) == (200, NUM_FULL // 4)
        before = three.made[borrower].model.num_computed_tokens
        lent = {"kv_offer": offered["offer"], "kv_is_lent": True}
        status, answer = ask(three.ports[borrower], COMPLETION, cache_salt="each", **lent)
        assert status == 200
        assert said(answer) == (expected, NUM_FULL)
        assert three.made[borrower].model.num_computed_tokens - before == len(PROMPT) - NUM_FULL + 5
        assert three.made[borrower].num_bytes("receive") > 0


def test_nothing_is_lent_that_is_not_there(three: Three) -> None:
    """An unknown prompt, another salt, several prompts in one request: no offer, and no request is counted."""
    nothing = {"offer": None, "offer_id": None, "num_blocks": 0}
    assert ask(three.ports[0], LEND, cache_salt="nothing") == (200, nothing)
    ask(three.ports[0], COMPLETION, cache_salt="nothing")
    before = three.made[0].cache.stats()
    assert ask(three.ports[0], LEND, cache_salt="another")[1]["offer"] is None
    assert ask(three.ports[0], LEND, prompt=[PROMPT, PROMPT])[1]["offer"] is None
    assert ask(three.ports[0], LEND, cache_salt="nothing")[1]["offer"] is not None
    assert three.made[0].cache.stats().hit_rates == before.hit_rates


def test_an_offer_that_nobody_takes_is_given_up(three: Three) -> None:
    """By its id, once; and it may be asked for anew."""
    ask(three.ports[0], COMPLETION, cache_salt="given up")
    offered = ask(three.ports[0], LEND, cache_salt="given up")[1]
    assert ask(three.ports[0], f"{PREFILL}/{offered['offer_id']}", "DELETE")[0] == 200
    assert ask(three.ports[0], LEND, cache_salt="given up")[1]["num_blocks"] == NUM_FULL // 4


def test_who_asks_and_goes_holds_nothing(three: Three) -> None:
    """Clients that hang up before the answer, or with it: no loan of theirs stays open, and the next one is made."""
    salt = {"cache_salt": "gone"}
    ask(three.ports[0], COMPLETION, **salt)
    sends, deadline = three.made[0].cache.peers.road.sends, threading.Event()
    num_before = len(sends)  # of other tests, whose loans nobody has read
    body = json.dumps({"prompt": PROMPT, **salt})
    head = f"POST {LEND} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(40):  # more than half of `max_transfers`, which one client may have
        with socket.create_connection(("127.0.0.1", three.ports[0]), timeout=SECONDS) as connection:
            connection.sendall((head + body).encode())
    for _ in range(int(SECONDS * 50)):
        if len(sends) <= num_before:
            break
        deadline.wait(0.02)
    assert len(sends) <= num_before
    assert ask(three.ports[0], LEND, **salt)[1]["num_blocks"] == NUM_FULL // 4


@pytest.mark.parametrize("what", ["offer given up", "another prompt", "its own"])
def test_without_what_was_lent_the_prompt_is_computed(three: Three, what: str) -> None:
    """The offer is over, or is none for it: the same answer, and no error."""
    salt: dict[str, Any] = {"cache_salt": what}
    expected, _ = said(ask(three.ports[0], COMPLETION, **salt)[1])
    offered, prompt = ask(three.ports[0], LEND, **salt)[1], PROMPT
    borrower = 1
    if what == "offer given up":
        assert ask(three.ports[0], f"{PREFILL}/{offered['offer_id']}", "DELETE")[0] == 200
    elif what == "another prompt":
        prompt = [*PROMPT[:-1], 30]
        expected, _ = said(ask(three.ports[2], COMPLETION, prompt=prompt, **salt)[1])
    else:
        borrower = 0
    lent = {"kv_offer": offered["offer"], "kv_is_lent": True}
    status, answer = ask(three.ports[borrower], COMPLETION, prompt=prompt, **lent, **salt)
    assert status == 200, answer
    assert said(answer)[0] == expected


def test_who_only_receives_lends_nothing(three: Three) -> None:
    """A decode instance says so."""
    status, answer = ask(three.ports[3], LEND)
    assert status == 400 and "it only receives" in answer["error"]["message"]

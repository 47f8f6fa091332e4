"""A router that hears what two instances have cached: real caches behind stand-ins for instances."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, cast

import numpy as np

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.server.api_prompts import PromptReader
from fastdeploy_cache.launch.server.choice import ROUTE_HEADER, Chooser, Costs
from fastdeploy_cache.launch.server.prefix_lookup import EventSource, PrefixLookup, check_length
from tests.rigs.event_rig import SIZE, endpoints, publishing, serve
from tests.rigs.router_rig import SECONDS, Instance, Routed, answers, routed

PLACES = [("a", 1), ("b", 2), ("c", 3)]
URLS = [f"http://{host}:{port}" for host, port in PLACES]


class Letters:
    """A tokeniser of letters: each is a token."""

    num_tokens = 0x110000

    def encode(self, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array([*map(ord, text)], np.int32)

    def encode_chat(self, messages: list[dict[str, str]]) -> np.ndarray[Any, np.dtype[np.int32]]:
        return self.encode("".join(message["content"] for message in messages))

    def min_tokens(self, messages: list[dict[str, str]]) -> int:
        return sum(len(message["content"]) for message in messages)

    def min_text_tokens(self, text: str) -> int:
        return len(text)


LETTERS = Letters()
READER = PromptReader(cast(ChatTokenizer, LETTERS), check_length)


def lookup_of(sources: dict[str, PrefixCacheManager]) -> PrefixLookup:
    """Of caches, by the URLs of their instances."""
    return PrefixLookup([EventSource(f"{url},{endpoints(cache)[0]}") for url, cache in sources.items()], READER)


class Pair(NamedTuple):
    """Two instances with their caches, and a router before both that knows what they have."""

    instances: list[Instance]
    caches: list[PrefixCacheManager]
    router: Routed
    lookup: PrefixLookup

    def hold(self, which: int, text: str, namespace: str = "") -> None:
        """One of them has a text cached, and the router knows it."""
        serve(self.caches[which], f"{which} {text[:9]} {namespace}", LETTERS.encode(text), namespace)
        place = self.lookup.places()[which]
        body = json.dumps(chat(text, namespace)).encode()
        deadline = threading.Event()
        for _ in range(int(SECONDS * 100)):
            found = self.lookup.look_up(body, "/v1/chat/completions")
            if found is not None and place in found.found and found.found[place].num_tokens >= len(text) // SIZE * SIZE:
                return
            deadline.wait(0.01)
        raise AssertionError(f"the router does not hear of it: {found}")


@contextmanager
def pair_of(*, costs: Costs | None = None, instances: list[Instance] | None = None) -> Iterator[Pair]:
    """Both answer with who they are."""
    instances = instances or [Instance(answers), Instance(answers)]
    with ExitStack() as stack:
        caches = [stack.enter_context(publishing()) for _ in instances]
        lookup = lookup_of(dict(zip([each.url for each in instances], caches, strict=True)))
        stack.callback(lookup.close)
        router = stack.enter_context(routed([], [*instances], chooser=Chooser(lookup, costs)))
        yield Pair(instances, caches, router, lookup)


def chat(text: str, salt: str = "") -> dict[str, Any]:
    salted = {"cache_salt": salt} if salt else {}
    return {"messages": [{"role": "user", "content": text}], **salted}


def said(router: Routed, body: Any, path: str = "/v1/chat/completions") -> tuple[Any, str]:
    """The answer, and what the router says of its way."""
    connection = http.client.HTTPConnection("127.0.0.1", router.server_port, timeout=SECONDS)
    try:
        connection.request("POST", path, json.dumps(body))
        response = connection.getresponse()
        return json.loads(response.read()), response.headers[ROUTE_HEADER]
    finally:
        connection.close()


FIRST, SECOND = "first " * 40, "second " * 40

"""Two instances, and two routers before both: one that hears what is cached, one that goes by turns."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.ipc.private_directory import PrivateDirectory
from fastdeploy_cache.launch.background.program import END_SECONDS, START_SECONDS, EndSignals, Program, wait_ends
from fastdeploy_cache.launch.background.run_folder import Slot
from fastdeploy_cache.launch.server.api_requests import CHAT_PATH
from fastdeploy_cache.launch.server.choice import ROUTE_HEADER

NUM_INSTANCES = 2
BY_PREFIX, BY_TURNS = "by prefix", "by turns"
_ANSWER_SECONDS, _EVENT = 300.0, b"data: "
_KNOWN_SECONDS = 30.0


@dataclass(frozen=True)
class RoutedAnswer:
    """What was said, and how it came.

    Attributes:
        route: what the router says of its choice.
        instance, reason: the first two of that.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int
    seconds_to_first_token: float
    route: str

    @property
    def instance(self) -> str:
        """Who has answered."""
        return self.route.partition(";")[0]

    @property
    def reason(self) -> str:
        """Why it was asked."""
        return self.route.partition("reason=")[2].partition(";")[0]


@contextmanager
def routed_servers(log_folder: Path, say: Callable[[str], None]) -> Iterator[Mapping[str, str]]:
    """Start them; the URL of each router. All have ended behind the block.

    Raises:
        LaunchError: one of them cannot start.
        KeyboardInterrupt: this process was asked to end.
    """
    with ExitStack() as stack:
        asked = stack.enter_context(EndSignals())
        sockets = PrivateDirectory()
        stack.callback(sockets.remove)
        programs = list[Program]()
        stack.callback(_end, programs)

        def start(name: str, words: list[str]) -> Program:
            programs.append(Program(Slot(name, sockets.path, log_folder), words, sockets.path, dies_with_us=True))
            return programs[-1]

        endpoints = [f"ipc://{sockets.path / f'events-{number}'}" for number in range(NUM_INSTANCES)]
        words = ["serve", "--port", "0", "--metrics-port", "0", "--set"]
        started = [
            start(f"instance-{number}", [*words, f"events.endpoint={endpoint}"])
            for number, endpoint in enumerate(endpoints)
        ]
        urls = [program.wait_ready(START_SECONDS, asked, say)["url"] for program in started]
        words = ["route", "--port", "0", *(word for url in urls for word in ("--decode", url))]
        events = [word for pair in zip(urls, endpoints, strict=True) for word in ("--events", ",".join(pair))]
        routers = {BY_TURNS: start("by-turns", words), BY_PREFIX: start("by-prefix", [*words, *events])}
        found = {name: each.wait_ready(START_SECONDS, asked, say)["url"] for name, each in routers.items()}
        _wait_known(found[BY_PREFIX])
        yield found


def ask(router_url: str, messages: list[dict[str, str]], *, salt: str, max_new_tokens: int) -> RoutedAnswer:
    """One chat, as a stream. `salt`: who has another one shares no cached block with it.

    Raises:
        LaunchError: it is not answered, or not to its end.
    """
    chat = {
        "messages": messages,
        "max_tokens": max_new_tokens,
        "cache_salt": salt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun, first, said, usage = time.monotonic(), 0.0, list[str](), dict[str, Any]()
    connection = http.client.HTTPConnection(router_url.removeprefix("http://"), timeout=_ANSWER_SECONDS)
    try:
        connection.request("POST", CHAT_PATH, json.dumps(chat))
        response = connection.getresponse()
        if response.status != 200:
            raise LaunchError(f"a chat was answered with status {response.status}: {response.read(1000)!r}")
        for line in response:
            if not line.startswith(_EVENT) or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line.removeprefix(_EVENT))
            usage = chunk.get("usage") or usage
            piece = "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
            if piece:
                first = first or time.monotonic() - begun
                said.append(piece)
        details = usage["prompt_tokens_details"]
        route = response.headers[ROUTE_HEADER] or ""
        return RoutedAnswer("".join(said), usage["prompt_tokens"], details["cached_tokens"], first, route)
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise LaunchError(f"a chat was not answered to its end: {error!r}") from error
    finally:
        connection.close()


def _wait_known(router_url: str) -> None:
    """Wait until the router knows what both have. Raises `LaunchError` where it does not get to."""
    deadline = time.monotonic() + _KNOWN_SECONDS
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(router_url.removeprefix("http://"), timeout=_KNOWN_SECONDS)
        try:
            connection.request("GET", "/status")
            instances = json.loads(connection.getresponse().read())["decode"]
        except (OSError, ValueError, LookupError) as error:
            raise LaunchError(f"the router does not say what it knows: {error!r}") from error
        finally:
            connection.close()
        if all(each["events"]["is_current"] for each in instances):
            return
        time.sleep(0.05)
    raise LaunchError(f"the router does not know what instances have after {_KNOWN_SECONDS:.0f} s: {instances}")


def _end(programs: list[Program]) -> None:
    """Routers first. Raises `LaunchError` where one of them had to be killed."""
    for program in reversed(programs):
        program.signal(signal.SIGTERM)
    has_ended = wait_ends([program.pidfd for program in programs], END_SECONDS)
    for program in programs:
        program.signal(signal.SIGKILL)
        program.reap()
        program.slot.forget()
        program.close()
    if not has_ended:
        raise LaunchError("a server of the demo did not end by itself")

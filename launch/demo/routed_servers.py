"""Two instances, and two routers before both: one that hears what is cached, one that goes by turns."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from fastdeploy_cache.transfer_manager.peer.signature import make_secret

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


class Servers:
    """Servers that run until the block around `started` ends."""

    def __init__(self, log_folder: Path, say: Callable[[str], None], sockets: Path, asked: EndSignals) -> None:
        self._log_folder, self._say, self._sockets, self._asked = log_folder, say, sockets, asked
        self.programs: list[Program] = []

    def instances(self, num_instances: int) -> list[tuple[str, str]]:
        """Start so many that publish events, and lend to each other. The URL of each, and where it publishes.

        Raises:
            LaunchError: one of them cannot start.
            KeyboardInterrupt: this process was asked to end.
        """
        secret, words = self._sockets / "secret", ["serve", "--port", "0", "--metrics-port", "0", "--peers"]
        make_secret(secret)
        endpoints = [f"ipc://{self._sockets / f'events-{number}'}" for number in range(num_instances)]
        given = ["--set", f"peer.secret_file={secret}", "--set"]
        programs = [
            self._start(f"instance-{number}", [*words, *given, f"events.endpoint={endpoint}"])
            for number, endpoint in enumerate(endpoints)
        ]
        return [(self._url_of(program), endpoint) for program, endpoint in zip(programs, endpoints, strict=True)]

    def router(self, name: str, urls: Iterable[str], words: Iterable[str] = ()) -> str:
        """Start a router before these; its URL. Raises as `instances`."""
        decode = [word for url in urls for word in ("--decode", url)]
        return self._url_of(self._start(name, ["route", "--port", "0", *decode, *words]))

    def _start(self, name: str, words: list[str]) -> Program:
        slot = Slot(name, self._sockets, self._log_folder)
        self.programs.append(Program(slot, words, self._sockets, dies_with_us=True))
        return self.programs[-1]

    def _url_of(self, program: Program) -> str:
        return program.wait_ready(START_SECONDS, self._asked, self._say)["url"]


@contextmanager
def started(log_folder: Path, say: Callable[[str], None]) -> Iterator[Servers]:
    """Start servers in the block. Raises `LaunchError` where one of them had to be killed in the end."""
    with ExitStack() as stack:
        asked, sockets = stack.enter_context(EndSignals()), PrivateDirectory()
        stack.callback(sockets.remove)
        servers = Servers(log_folder, say, sockets.path, asked)
        stack.callback(_end, servers.programs)
        yield servers


@contextmanager
def routed_servers(log_folder: Path, say: Callable[[str], None]) -> Iterator[Mapping[str, str]]:
    """Start them; the URL of each router. All have ended behind the block. Raises as `Servers.instances`."""
    with started(log_folder, say) as servers:
        made = servers.instances(NUM_INSTANCES)
        urls = [url for url, _ in made]
        events = [word for pair in made for word in ("--events", ",".join(pair))]
        found = {BY_TURNS: servers.router("by-turns", urls)}
        found[BY_PREFIX] = servers.router("by-prefix", urls, [*events, "--moved-token-cost", "0.05"])
        _wait_known(found[BY_PREFIX])
        yield found


def ask(url: str, messages: list[dict[str, str]], *, salt: str, max_new_tokens: int, **fields: object) -> RoutedAnswer:
    """One chat, as a stream, to a router or an instance. `salt`: who has another one shares no cached block with it.

    Raises:
        LaunchError: it is not answered, or not to its end.
    """
    chat = {
        "messages": messages,
        "max_tokens": max_new_tokens,
        "cache_salt": salt,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    begun, first, said, usage = time.monotonic(), 0.0, list[str](), dict[str, Any]()
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=_ANSWER_SECONDS)
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

"""Two engines with one Mooncake cluster, each on a host of its own; the host that owns the memory dies.

Hosts are network namespaces where these can be made (root, iproute2), and addresses of the loopback device anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.faulty_engine import BLOCK_SIZE
from tests.rigs.process_ends import SECONDS, wait_exit, watched
from tests.rigs.storage_servers import MooncakeMaster

pytestmark = pytest.mark.processes

NUM_BLOCKS = 24  # two tasks, one of 16 blocks and one of the rest
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE
ANSWER_SECONDS = 4 * SECONDS  # an engine holds each of its steps to `SECONDS`
NOTICE_SECONDS = 4  # after which the master knows that a client is dead
RECOVERY_SECONDS = 2 * SECONDS  # for the master to notice, and for B's breakers to close after that
CANNOT = ("not permitted", "denied", "not supported", "Unknown device type", "Read-only")  # what `ip` says


@dataclass(frozen=True)
class Host:
    """Where a process runs: its address, and the words in front of its command."""

    address: str
    enter: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hosts:
    """The master's, two engines', and how to take the first engine's off the network."""

    unplug_a: Callable[[], None]
    master: Host
    a: Host
    b: Host


class Master(MooncakeMaster):
    """A master on a host."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        command = [host.address if word == "127.0.0.1" else word for word in self._command]
        self._command = [*host.enter, *command, "-client_ttl", str(NOTICE_SECONDS)]
        self._host = host

    @property
    def address(self) -> str:
        """For clients."""
        return f"{self._host.address}:{self.port}"

    def start(self) -> None:
        """Start it and wait until it listens, in its own network."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + SECONDS
        while not self._listens(self._process.pid):
            assert self._process.poll() is None, f"the master ended with {self._process.returncode}"
            assert time.monotonic() < deadline, "the master does not listen"
            time.sleep(0.02)  # it says to nobody that it listens

    def _listens(self, pid: int) -> bool:
        sockets = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()]
        return any(words[3] == "0A" and int(words[1].partition(":")[2], 16) == self.port for words in sockets[1:])


class EngineProcess:
    """A `two_hosts_engine`, with descriptors on it and on all its children."""

    def __init__(self, host: Host, master: Master, log_dir: Path, stack: ExitStack) -> None:
        settings = {"local_hostname": host.address, "master_address": master.address, "log_dir": str(log_dir)}
        self.process = subprocess.Popen(
            [*host.enter, sys.executable, "-m", "tests.rigs.two_hosts_engine", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._pidfds: list[int] = []
        stack.callback(self.kill)
        pids = [self.process.pid, *self.answer()["pids"]]
        self._pidfds = [stack.enter_context(watched(pid)) for pid in pids]

    def do(self, verb: str, **order: Any) -> dict[str, Any]:
        """Have it do something; its invariants held when it answers."""
        self.begin(verb, **order)
        return self.answer()

    def begin(self, verb: str, **order: Any) -> None:
        """Have it begin something; `answer` has what comes of it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": verb, **order}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What came of the order; fails the test where it was an error."""
        stdout = self.process.stdout
        assert stdout is not None
        assert select.select([stdout], [], [], ANSWER_SECONDS)[0], "the engine hangs"
        line = stdout.readline()
        assert line, f"the engine ended with {self.process.wait(SECONDS)}"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    def serve(self, tokens: list[int]) -> int:
        """Compute and write a prompt; blocks that were written."""
        return int(self.do("serve", tokens=tokens)["num_written_blocks"])

    def fetch(self, tokens: list[int]) -> int:
        """Tokens that come from storage, to an engine that knows nothing; their bytes are right."""
        self.do("forget")
        found = self.do("fetch", tokens=tokens)
        assert found["num_tokens"] == found["num_storage_tokens"] <= NUM_TOKENS
        return int(found["num_storage_tokens"])

    def stop(self) -> None:
        """SIGSTOP to it and all that it has started."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        """To its process group, and to the ranks and other processes, which lead groups of their own."""
        os.killpg(self.process.pid, number)
        for pidfd in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)

    def kill(self) -> None:
        """SIGKILL to it and all that it has started, at once; does nothing where it has been reaped."""
        if self.process.returncode is None:
            self._signal(signal.SIGKILL)
            self.process.communicate(timeout=SECONDS)

    def all_gone(self) -> bool:
        """Neither it nor any of its children runs."""
        return all(wait_exit(pidfd) for pidfd in self._pidfds)

    def end(self) -> int:
        """Let it close its cache; its exit code."""
        self.process.communicate(timeout=ANSWER_SECONDS)
        return int(self.process.returncode)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=SECONDS)


@contextmanager
def namespaces() -> Iterator[Hosts]:
    """Three namespaces, and a bridge in the master's that joins them; nothing is made in the machine's own network."""
    master, a, b = names = [f"fdc{os.getpid()}-{part}" for part in ("master", "a", "b")]
    with ExitStack() as stack:
        try:
            for name in names:
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "delete", name)  # with all that is in it
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", master, "link", "add", "switch", "type", "bridge")
            _ip("-n", master, "address", "add", "198.18.0.1/24", "dev", "switch")
            _ip("-n", master, "link", "set", "switch", "up")
            for name, port, address in ((a, "port-a", "198.18.0.2"), (b, "port-b", "198.18.0.3")):
                _ip("-n", master, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("-n", master, "link", "set", port, "master", "switch", "up")
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
        except FileNotFoundError:
            pytest.skip("network namespaces need `ip` (apt-get install iproute2)")
        except subprocess.CalledProcessError as error:
            if not any(reason in error.stderr for reason in CANNOT):
                raise
            pytest.skip(f"network namespaces cannot be made here: {' '.join(error.cmd)}: {error.stderr.strip()}")
        hosts = [Host(f"198.18.0.{i + 1}", ("ip", "netns", "exec", name)) for i, name in enumerate(names)]
        yield Hosts(lambda: _ip("-n", master, "link", "set", "port-a", "down"), *hosts)


@contextmanager
def loopback() -> Iterator[Hosts]:
    """Addresses of the loopback device; it cannot be unplugged."""
    yield Hosts(lambda: None, *[Host(f"127.0.0.{i + 1}") for i in range(3)])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends what the test has started, the last first."""
    with ExitStack() as stack:
        yield stack


def prompt(number: int) -> list[int]:
    """A prompt of so many full blocks and a token, unlike any other from its first block on."""
    return [number, *range(1000, 1000 + NUM_TOKENS)]


def written_and_found(engine: EngineProcess, tokens: list[int]) -> None:
    """The engine computes and writes a prompt until it comes back from storage whole."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while True:
        engine.serve(tokens)
        if engine.fetch(tokens) == NUM_TOKENS:
            return
        assert time.monotonic() < deadline, "what is written does not come back"
        time.sleep(0.2)  # the master tells nobody that it has noticed a death


@pytest.mark.parametrize(
    ("network", "unplugged"),
    [(namespaces, False), (namespaces, True), (loopback, False)],
    ids=["namespaces-killed", "namespaces-unplugged", "loopback-killed"],
)
def test_the_owner_s_death_costs_the_other_host_misses_only(
    stack: ExitStack, tmp_path: Path, network: Callable[[], AbstractContextManager[Hosts]], unplugged: bool
) -> None:
    """B reads what A wrote, byte for byte; A dies while B reads: B misses, goes on, and hits again what it writes."""
    hosts = stack.enter_context(network())
    master = Master(hosts.master)
    stack.callback(master.kill)
    master.start()
    known, lost, own, later = map(prompt, range(4))

    a = EngineProcess(hosts.a, master, tmp_path / "a", stack)
    assert [a.serve(known), a.serve(lost)] == [NUM_BLOCKS, NUM_BLOCKS]  # no memory but A's is lent yet
    b = EngineProcess(hosts.b, master, tmp_path / "b", stack)
    assert b.fetch(known) == NUM_TOKENS

    a.stop()  # it takes requests and answers none
    if unplugged:
        hosts.unplug_a()  # nobody closes its connections
    b.do("forget")
    b.begin("fetch", tokens=lost)
    time.sleep(0.3)  # so that B's client, which tells nobody, waits for A's memory
    a.kill()
    assert a.all_gone()
    assert b.answer()["num_tokens"] == 0
    assert b.fetch(lost) == 0

    for tokens in (own, lost, later):
        written_and_found(b, tokens)
    assert b.end() == 0 and b.all_gone()

"""Control of a server over its private socket: who gets through, what is asked, what is answered."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.errors import ControlError, IPCError, LifeCycleError
from fastdeploy_cache.insight.control import server as control_module
from fastdeploy_cache.insight.control.client import ask, look
from fastdeploy_cache.insight.control.messages import Subject
from fastdeploy_cache.insight.control.server import ControlServer
from fastdeploy_cache.insight.doctor.finding import Finding
from fastdeploy_cache.ipc.private_socket import connected
from fastdeploy_cache.requests.explanation import Explanation, Miss
from tests.rigs.command_line import CLI

if TYPE_CHECKING:
    from fastdeploy_cache.insight.control.messages import ActionVerbs, ForgetVerb, HintVerbs, LookVerbs, TellVerbs

KILLED = """
import os, signal, sys
from pathlib import Path
from fastdeploy_cache.insight.control.server import ControlServer
ControlServer(Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


class Stub:
    """Notes what it is asked; `before` is called first."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = "running"
        miss = Miss(cause=Cause.EVICTED, num_tokens=4, tier="cpu", seconds_ago=1.5, policy="lru")
        self.explanation = Explanation(request_id="r", num_tokens=4, is_final=True, hits=(), misses=(miss,))
        self.before: Callable[[], object] = lambda: None

    def _note(self, *call: Any) -> None:
        self.before()
        self.calls.append(call)
        self.status = f"after {call[0]}"

    def pause(self, timeout_seconds: float) -> None:
        self._note("pause", timeout_seconds)

    def resume(self, timeout_seconds: float) -> None:
        self._note("resume", timeout_seconds)

    def sleep(self, timeout_seconds: float, tiers: Collection[str]) -> None:
        self._note("sleep", timeout_seconds, tuple(tiers))

    def wake(self, timeout_seconds: float) -> None:
        self._note("wake", timeout_seconds)

    def clear(self, timeout_seconds: float) -> None:
        self._note("clear", timeout_seconds)

    def update_weights(self, timeout_seconds: float, weights_id: str | None) -> None:
        self._note("update-weights", timeout_seconds, weights_id)

    def restart_ranks(self, rank: int | None) -> list[int]:
        self._note("restart-rank", rank)
        return [0, 2] if rank is None else [rank]

    def examine(self) -> list[Finding]:
        self._note("examine")
        return [Finding(name="sick", evidence="It coughs.", advice="Let it sleep.", share=0.25)]

    def explain_last(self, num_requests: int) -> list[Explanation]:
        self._note("explain-last", num_requests)
        return [self.explanation] * min(3, num_requests)


def subject_of(stub: Stub) -> Subject:
    looks, tells, acts = cast("LookVerbs", stub), cast("TellVerbs", stub), cast("ActionVerbs", stub)
    return Subject(stub, looks, tells, acts, cast("HintVerbs", stub), cast("ForgetVerb", stub))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "private" / "serve.sock"


@pytest.fixture
def stub(path: Path) -> Iterator[Stub]:
    """Served at `path`."""
    stub, server = Stub(), ControlServer(path)
    server.start(subject_of(stub))
    yield stub
    server.stop()


def send(path: Path, data: bytes) -> dict[str, str]:
    """The answer to these bytes."""
    with connected(path, 5) as connection:
        connection.sendall(data)
        return json.loads(connection.makefile("rb").readline())


def control(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*CLI, "control", "--socket", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# -- what is asked


def test_every_verb_gets_through_with_its_fields(stub: Stub, path: Path) -> None:
    """The answer is the status after it; what is left out has its default."""
    assert ask(path, "pause", 7.5) == "after pause"
    ask(path, "sleep", 1)
    ask(path, "sleep", 1, tiers=["cpu"])
    ask(path, "wake", 1)
    ask(path, "clear", 1)
    ask(path, "update-weights", 1, weights_id="v2")
    assert send(path, b'{"verb": "resume"}\n') == {"status": "after resume"}
    assert stub.calls == [
        ("pause", 7.5),
        ("sleep", 1, ("gpu", "cpu")),
        ("sleep", 1, ("cpu",)),
        ("wake", 1),
        ("clear", 1),
        ("update-weights", 1, "v2"),
        ("resume", 30),
    ]


def test_logs_do_not_say_whose_it_is(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A verb is logged with its times, and without namespace, session and tokens."""
    caplog.set_level("INFO")
    server = ControlServer(path)
    server.start(subject_of(cast("Stub", SimpleNamespace(status="running"))))
    for line in (
        b'{"verb": "forget", "namespace": "acme-secret", "timeout_seconds": 3.0}\n',
        b'{"verb": "retain", "session": "their-session", "namespace": "acme-secret", "seconds": 5.0}\n',
        b'{"verb": "supersede", "token_ids": [4711]}\n',
    ):
        assert "error" in send(path, line)  # nobody is there to do it
    server.stop()
    requests = [record.getMessage() for record in caplog.records if "event=control request" in record.getMessage()]
    assert len(requests) == 3 and "request=forget timeout_seconds=3.0" in requests[0] and "seconds=5.0" in requests[1]
    assert not any(secret in each for each in requests for secret in ("acme", "their", "4711"))


def test_who_does_not_finish_a_line_is_not_waited_for(stub: Stub, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time, or at its end, it is told so; the next one is served."""
    with connected(path, 5) as connection:
        connection.sendall(b'{"verb": "pause"}')
        connection.shutdown(socket.SHUT_WR)
        assert b"without an end" in connection.makefile("rb").readline()
    monkeypatch.setattr(control_module, "_READ_SECONDS", 0.05)
    assert "no whole line within 0.05 s" in send(path, b'{"verb": "pause"')["error"]
    assert "pause" in send(path, b"\n")["error"]  # a line of nothing is answered, too
    with connected(path, 5):
        pass  # says nothing at all
    assert ask(path, "pause", 1) == "after pause"


def test_a_failure_is_the_answer(stub: Stub, path: Path) -> None:
    """What the cache refuses is handed on, and the server goes on."""

    def refuse() -> None:
        raise LifeCycleError("the cache is asleep")

    stub.before = refuse
    with pytest.raises(ControlError, match="the cache is asleep"):
        ask(path, "pause", 1)
    stub.before = lambda: None
    ask(path, "pause", 1)


def test_what_nobody_waits_for_any_more_is_not_done(stub: Stub, path: Path) -> None:
    """A request whose sender has gone while an earlier one was served is dropped."""
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go_on.wait(10)

    stub.before = wait
    with ThreadPoolExecutor() as pool:
        first = pool.submit(ask, path, "pause", 5)
        assert inside.wait(10)
        with connected(path, 5) as connection:
            connection.sendall(b'{"verb": "clear"}\n')
        go_on.set()
        first.result(10)
        ask(path, "resume", 5)
    assert [call[0] for call in stub.calls] == ["pause", "resume"]


def test_an_error_of_ours_is_answered_and_the_server_can_still_be_asked(path: Path) -> None:
    """Else a server that was paused before could not be resumed any more."""
    server, stub = ControlServer(path), Stub()
    stub.before = lambda: 1 / 0
    server.start(subject_of(stub))
    try:
        with pytest.raises(ControlError, match="ZeroDivisionError"):
            ask(path, "pause", 1)
        stub.before = lambda: None
        ask(path, "resume", 1)
    finally:
        server.stop()


# -- who gets through


def test_only_its_user_can_reach_it(stub: Stub, path: Path) -> None:
    """The folder that it makes has mode 700, the socket 600."""
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_kernel_is_asked_who_it_is(stub: Stub, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is of another user than the server is refused, whatever the modes let through."""
    other = os.geteuid() + 1
    monkeypatch.setattr(control_module, "os", SimpleNamespace(geteuid=lambda: other))
    with pytest.raises(ControlError, match=f"user {other - 1} asks, but the server is of user {other}"):
        ask(path, "pause", 1)
    assert not stub.calls


def test_a_folder_that_others_may_enter_is_refused(path: Path) -> None:
    """Its mode is in the message; nothing is made in it."""
    path.parent.mkdir()
    path.parent.chmod(0o750)
    with pytest.raises(IPCError, match="mode 750, open to others"):
        ControlServer(path)
    assert not list(path.parent.iterdir())


def test_a_live_server_is_not_displaced(stub: Stub, path: Path) -> None:
    """A second one is refused, and the first still answers; another socket beside it is welcome."""
    with pytest.raises(IPCError, match="a server listens on"):
        ControlServer(path)
    ask(path, "pause", 1)
    beside = ControlServer(path.with_name("other.sock"))
    beside.stop()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.processes
def test_what_a_killed_server_left_is_replaced(path: Path) -> None:
    """Its socket file is still there, and nobody listens on it."""
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=30)
    assert path.is_socket()
    with pytest.raises(ConnectionRefusedError):
        ask(path, "pause", 1)
    server, stub = ControlServer(path), Stub()
    server.start(subject_of(stub))
    assert ask(path, "pause", 1) == "after pause"
    server.stop()
    assert not path.exists()


def test_something_else_in_the_way_stays(path: Path) -> None:
    """A file that is no socket is not removed."""
    path.parent.mkdir(mode=0o700)
    path.write_text("precious")
    with pytest.raises(IPCError, match="no socket"):
        ControlServer(path)
    assert path.read_text() == "precious"


def test_a_server_removes_its_own_file_only(path: Path) -> None:
    """Where somebody removed its socket and another server took the place, that one stays."""
    first = ControlServer(path)
    path.unlink()
    second = ControlServer(path)
    first.stop()
    assert path.is_socket()
    second.stop()
    assert not path.exists()


def test_a_long_path_is_no_obstacle(tmp_path: Path) -> None:
    """A socket's address holds 107 bytes; the folder may be deeper than that, its name may not."""
    path = tmp_path / ("deep" * 30) / "serve.sock"
    server, stub = ControlServer(path), Stub()
    server.start(subject_of(stub))
    assert ask(path, "pause", 1) == "after pause"
    server.stop()
    with pytest.raises(IPCError, match="cannot listen"):
        ControlServer(path.with_name("x" * 120))


# -- the command


@pytest.mark.processes
def test_exit_statuses_of_the_command(stub: Stub, path: Path) -> None:
    """0 and the status; 1 and one line with the reason; 2 for wrong usage; 3 where no server is."""
    done = control(path, "sleep", "--tier", "gpu", "--timeout", "4")
    assert (done.returncode, done.stdout) == (0, "the GPU tier alone was put to sleep; after sleep\n")
    assert control(path, "update-weights", "v3").stdout == "cleared, for the weights 'v3'; after update-weights\n"
    assert control(path, "clear").stdout == "cleared; after clear\n"
    assert control(path, "sleep").stdout == "after sleep\n"
    assert stub.calls[:2] == [("sleep", 4.0, ("gpu",)), ("update-weights", 30.0, "v3")]
    restarted = control(path, "restart-rank").stdout
    assert restarted == "ranks 0 and 2 are being started; `fastdeploy-cache ranks` shows whether that helps\n"
    assert json.loads(control(path, "restart-rank", "3", "--json").stdout) == {"ranks": [3]}
    assert stub.calls[-2:] == [("restart-rank", None), ("restart-rank", 3)]
    stub.before = lambda: 1 / 0
    refused = control(path, "pause")
    assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (1, "", 1)
    assert "ZeroDivisionError" in refused.stderr
    for usage in (
        ["dance"],
        ["pause", "x"],
        ["sleep", "--tier", "ssd"],
        ["pause", "--timeout", "1000"],
        ["restart-rank", "x"],
    ):
        wrong = control(path, *usage)
        assert (wrong.returncode, wrong.stdout) == (2, ""), usage
    for nowhere in (path.with_name("no.sock"), path.parent / "no" / "serve.sock"):
        missing = control(nowhere, "pause")
        assert (missing.returncode, missing.stderr) == (
            3,
            f"fastdeploy-cache: not running: no server listens at {nowhere}\n",
        )


def test_explanations_come_as_text_and_as_fields(stub: Stub, path: Path) -> None:
    """Of one request, and of the last ones."""
    found = look(path, "explain", 5, request_id="r")[0]
    assert found["text"] == str(stub.explanation) and "evicted from the CPU tier" in found["text"]
    assert found["misses"][0]["cause"] == "evicted" and found["misses"][0]["seconds_ago"] == 1.5
    assert len(look(path, "explain-last", 5, num_requests=3)) == 3
    assert stub.calls == [("explain-last", 10**6), ("explain-last", 3)]


@pytest.mark.processes
def test_findings_come_as_text_and_as_fields(stub: Stub, path: Path) -> None:
    """What the doctor says, and its status: 4 where something is wrong."""
    (found,) = look(path, "examine", 5)
    assert (found["name"], found["share"]) == ("sick", 0.25) and found["text"].startswith(
        "sick: It coughs. Let it sleep."
    )
    done = subprocess.run(
        [*CLI, "doctor", "--socket", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (4, found["text"])


@pytest.mark.parametrize("fields", [{}, {"request_id": 5}, {"request_id": "r", "more": 1}])
def test_an_explanation_of_nothing_is_refused(stub: Stub, path: Path, fields: dict[str, Any]) -> None:
    """One clear line, and nothing is asked."""
    with pytest.raises(ControlError, match=r"request_id|more"):
        look(path, "explain", 5, **fields)
    assert not stub.calls

"""The commands that look at a running cache and change it: against a program of its own, and where things go wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache.errors import CacheError, ControlError
from fastdeploy_cache.insight.control import client as control_client
from fastdeploy_cache.ipc.private_socket import PrivateListener
from fastdeploy_cache.launch.background.run_folder import RunFolder
from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.operating.text import status_lines
from fastdeploy_cache.launch.operating.watch import view_of
from tests.rigs.cache_program import cache_program
from tests.rigs.command_line import CLI

LOOKS = (["status"], ["top"], ["tree"], ["requests"], ["ranks"], ["pins"], ["policy"], ["verify"], ["explain"])
ACTIONS = (["pin", "0123456789abcdef"], ["unpin", "0123456789abcdef"], ["policy", "lfu"], ["control", "pause"])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of the socket of a program with a cache and one rank."""
    path = tmp_path_factory.mktemp("operating") / "private" / "cache.sock"
    with cache_program(path):
        yield path


def run(path: Path, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--socket", str(path)], catch_exceptions=True)


def found(path: Path, *words: str) -> Any:
    done = run(path, *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


# -- a cache that answers


@pytest.mark.processes
def test_every_look_says_the_same_in_words_and_as_json(path: Path) -> None:
    """Status 0, nothing on standard error, a JSON document; and the words have what the document has."""
    for words in LOOKS:
        said = run(path, *words)
        assert (said.exit_code, said.stderr) == (0, ""), (words, said.output)
        assert found(path, *words) is not None
    (system, *_) = found(path, "top", "--num", "2")
    assert system["num_prefix_tokens"] == 8 and system["num_uses"] == 3 and system["name"] in run(path, "top").stdout
    tree = run(path, "tree", "--depth", "1").stdout
    assert system["name"] in tree and "and 4 more" in tree
    running = run(path, "requests").stdout
    assert "1 running" in running and "chat-3" in running and "chat-2: 14 tokens; 8 gpu hit" in running
    assert "rank 0: up" in run(path, "status").stdout and "eviction policy lru" in run(path, "status").stdout
    assert found(path, "ranks")["ranks"][0]["up"] is True and "all hold" in run(path, "verify").stdout
    assert run(path, "doctor").stdout == "nothing is wrong, as far as can be seen\n"


@pytest.mark.processes
def test_pins_and_policies_are_set_and_shown(path: Path) -> None:
    """A pin by the name that `top` shows, seen by all that shows pins, and taken back; another policy, and back."""
    name = found(path, "top")[0]["name"]
    done = run(path, "pin", name, "--seconds", "60")
    assert (done.exit_code, done.stdout) == (0, "pinned 8 tokens, 2 blocks, for 60 seconds\n")
    assert name in run(path, "pins").stdout and "1 pin\n" in run(path, "status").stdout
    assert found(path, "top")[0]["is_pinned"] is True
    assert (
        run(path, "unpin", name).stdout == "unpinned 2 blocks\n" and run(path, "pins").stdout == "nothing is pinned\n"
    )
    assert run(path, "policy", "lfu").stdout.startswith("lfu (configured: lru; known: lru, ")
    assert found(path, "policy", "lru")["name"] == "lru"


@pytest.mark.processes
def test_a_flight_is_written_and_replayed(path: Path, tmp_path: Path) -> None:
    """To the file that is named, for this user alone; what is no folder is one line and status 1."""
    file = tmp_path / "last.flight"
    assert found(path, "flight", str(file)) == {"file": str(file)} and file.stat().st_mode & 0o777 == 0o600
    done = CliRunner().invoke(app, ["simulate", "--replay", str(file)])
    assert done.exit_code == 0 and "0 different" in done.stdout, done.output
    done = run(path, "flight", str(tmp_path / "none" / "last.flight"))
    assert done.exit_code == 1 and isinstance(done.exception, CacheError) and "none/last.flight" in str(done.exception)
    done = run(path, "flight")
    assert done.exit_code == 1 and "flight_folder" in str(done.exception)


@pytest.mark.processes
def test_other_sizes_are_shown_once_they_are_known(path: Path) -> None:
    """Before there are 10 requests that is said; the document is a list all the same."""
    assert found(path, "what-if") == [] and "10 requests" in (said := run(path, "what-if").stdout)
    assert "from now on" in said and "insight.what_if off" in said  # however many there were


@pytest.mark.processes
@pytest.mark.parametrize("name", ["chat-2", "chatcmpl-chat-2", "cmpl-chat-2"])
def test_a_request_is_found_by_the_id_of_its_answer(path: Path, name: str) -> None:
    """Which is its name behind what OpenAI's clients expect there."""
    assert [each["request_id"] for each in found(path, "explain", name)] == ["chat-2"]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["", "chatcmpl-", "chatcmpl-cmpl-chat-2", "xcmpl-chat-2"])
def test_no_name_is_no_request(path: Path, name: str) -> None:
    """An empty id is that of none, and so is one with another beginning."""
    done = run(path, "explain", name)
    assert done.exit_code == 1 and f"no request {name!r}" in str(done.exception)


@pytest.mark.processes
def test_the_life_cycle_goes_over_the_socket_too(path: Path) -> None:
    """As it does for a server."""
    assert run(path, "control", "pause").stdout == "paused\n"
    assert "== paused: pid " in run(path, "status").stdout
    assert found(path, "control", "resume") == {"status": "running"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["pin", "0123456789abcdef"], "no prefix '0123456789abcdef' is cached now"),
        (["pin", "system prompt"], "is no name of a prefix"),
        (["unpin", "0123456789abcdef"], "there is no pin"),
        (["policy", "best"], "there is no eviction policy 'best'"),
        (["explain", "nobody"], "no request 'nobody' among the last"),
        (["session", "demote", "nobody"], "session 'nobody' is not known in namespace ''"),
    ],
)
def test_what_cannot_be_done_is_one_line(path: Path, words: list[str], part: str) -> None:
    """Status 1, and nothing has changed."""
    before = found(path, "pins"), found(path, "policy")
    done = subprocess.run(
        [*CLI, *words, "--socket", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1) and part in done.stderr
    assert (found(path, "pins"), found(path, "policy")) == before


@pytest.mark.processes
def test_the_live_view_goes_on_until_ctrl_c(path: Path) -> None:
    """Views one after the other, with tiers, rates and ranks; Ctrl-C ends it with one line and status 130."""
    command = [*CLI, "status", "--watch", "--every", "0.1", "--socket", str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        seen: list[str] = []
        while sum("eviction policy" in line for line in seen) < 3:
            seen.append(process.stdout.readline())
            assert seen[-1], "it ended by itself"
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (130, "fastdeploy-cache: interrupted\n"), rest
    text = "".join(seen)
    assert "GPU" in text and "evicted/s" in text and "hit rates, recently" in text and "busy lanes" in text


# -- where things go wrong


@pytest.mark.parametrize("words", [*LOOKS, *ACTIONS, ["doctor"], ["status", "--watch"]])
def test_where_nobody_listens_the_status_is_3(tmp_path: Path, words: list[str]) -> None:
    """One line with the path, whatever was asked."""
    done = run(tmp_path / "none.sock", *words)
    text = (done.stdout + done.stderr).splitlines()
    assert done.exit_code == 3 and len(text) == 1 and "none.sock" in text[0], done.output


@pytest.mark.parametrize(
    "words",
    [
        ["top", "--num", "0"],
        ["tree", "--depth", "65"],
        ["requests", "--num", "x"],
        ["pin"],
        ["pin", "0123456789abcdef", "--seconds", "0"],
        ["control", "dance"],
        ["status", "--watch", "--json"],
        ["status", "--every", "0"],
    ],
)
def test_wrong_usage_is_status_2(tmp_path: Path, words: list[str]) -> None:
    """Before anybody is asked."""
    assert run(tmp_path / "none.sock", *words).exit_code == 2


class Broken:
    """Answers each connection with these bytes, whatever is asked."""

    def __init__(self, path: Path, answer: bytes) -> None:
        self._listener, self._answer = PrivateListener(path), answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while (connection := self._listener.accept()) is not None:
            with connection, contextlib.suppress(OSError):  # whoever asks may leave before
                connection.recv(4096)
                connection.sendall(self._answer)
                connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.end()
        self._thread.join()
        self._listener.close()


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (b'{"status": "running", "fou', "without an end"),
        (b'{"status": "running", "fou\n', "no JSON"),
        (b"[1, 2]\n", "without an answer"),
        (b'{"status": "running"}\n', "nothing found"),
        (b"", "without an answer"),
        (b'{"error": "not today"}\n', "not today"),
        (b"\xff\n", "no JSON"),
    ],
)
def test_an_answer_that_is_none_is_one_clear_line(tmp_path: Path, answer: bytes, part: str) -> None:
    """Cut off, of another kind, empty: status 1 (4 of `status`), and never a traceback."""
    path = tmp_path / "private" / "broken.sock"
    broken = Broken(path, answer)
    try:
        with pytest.raises(ControlError, match=part):
            control_client.look(path, "top", 5)
        done = run(path, "top")
        assert isinstance(done.exception, ControlError) and part in str(done.exception)
        told = run(path, "status")
        assert told.exit_code == 4 and part in told.stdout and len(told.stdout.splitlines()) == 1
        assert json.loads(run(path, "status", "--json").stdout)["problem"]
    finally:
        broken.close()


def test_the_socket_of_another_user_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever listens there might answer anything: nothing is sent."""
    path = tmp_path / "private" / "broken.sock"
    broken = Broken(path, b'{"status": "running", "found": []}\n')
    try:
        other = os.geteuid() + 1
        monkeypatch.setattr(control_client, "os", SimpleNamespace(geteuid=lambda: other))
        with pytest.raises(ControlError, match=f"is of user {other - 1}, not of yours"):
            control_client.look(path, "top", 5)
    finally:
        broken.close()


def document(evicted: int = 0, missed: int = 0, **fields: Any) -> dict[str, Any]:
    """What a cache says of itself."""
    counts = {"swapped_in_blocks": evicted, "swapped_out_blocks": 0, "quarantined_blocks": 0, "open_sends": 0}
    return {
        "pid": 1,
        "life_cycle": "running",
        "requests": 0,
        "eviction_policy": "lru",
        "pins": 0,
        "ranks": [],
        "tiers": {"gpu": {"free": 1}, "cpu": {"free": 2}},
        "storage": None,
        "evicted_blocks": {"gpu": evicted, "cpu": 0},
        "hit_rates": {"token": 0.5},
        "hit_rate_window_seconds": 300.0,
        "missed_tokens": {"new": missed},
        "saved_seconds": {},
        "transfers_in_flight": 0,
        "open_receives": 0,
        **counts,
        **fields,
    }


def viewed(now: dict[str, Any], before: dict[str, Any]) -> str:
    """The live view, two seconds after that before."""
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(view_of(console, now, before, 2.0))
    console.file.close()
    return console.export_text()


def test_rates_are_of_the_time_between_two_views() -> None:
    """The first view has none; a count that has become smaller, of a cache that was started anew, has a rate of 0."""
    first = viewed(document(10, 4), {})
    assert " - " in first and "5.0" not in first
    later = viewed(document(20, 7), document(10, 4))
    assert "5.0" in later and "+3" in later
    assert "+0" in viewed(document(0, 1), document(10, 4))


def test_what_is_held_is_not_called_pinned() -> None:
    """Requests and copies hold most of it; pins are counted apart, and the document has the word that it had."""
    holding = document(tiers={tier: {"free": 1, "pinned": 2} for tier in ("gpu", "cpu")}, pins=3)
    assert "GPU: 1 free, 2 held" in status_lines(holding)
    for said in ("\n".join(status_lines(holding)), viewed(holding, {})):
        assert "held" in said and "pinned" not in said and "3 pins" in said


def test_what_is_wrong_with_a_process_is_said() -> None:
    """In the lines and in the table: a rank that is off, or waits, is not only down."""
    status = {"rank": 0, "up": False, "pid": None, "num_restarts": 6, "num_busy_lanes": 0}
    for state, word in (("off", "OFF"), ("short", "WAITS"), ("starting", "DOWN")):
        lines = status_lines(document(ranks=[{**status, "state": state}], troubles=["the rank is not well"]))
        assert f"rank 0: {word}, pid None, restarts 6" in lines and "trouble: the rank is not well" in lines
    assert "rank 0: up, pid 7, restarts 0" in status_lines(
        document(ranks=[{**status, "up": True, "pid": 7, "num_restarts": 0, "state": "ready"}])
    )


@pytest.mark.processes
def test_ranks_that_run_are_not_restarted(path: Path) -> None:
    """The verb says so; a rank that is none is refused."""
    done = run(path, "control", "restart-rank")
    assert (done.exit_code, done.stdout) == (0, "nothing to restart: every rank has its process\n")
    assert found(path, "control", "restart-rank", "0") == {"ranks": []}
    assert run(path, "control", "restart-rank", "7").exit_code == 1


def test_without_requests_there_is_no_hit_rate() -> None:
    """That nobody asked for anything within the window is said, in the lines and in the live view, and no 0 %."""
    assert "hit rates, recently: token 50%" in status_lines(document())
    idle = document(hit_rates=dict.fromkeys(("request", "token", "gpu")))
    line = "hit rates, recently: no request came in the last 5 minutes"
    assert line in status_lines(idle) and line in viewed(idle, {}) and "%" not in viewed(idle, {})


def test_the_server_of_a_checkouts_scripts_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the working directory, unless another run folder is named; and who finds none is told where to point."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("FASTDEPLOY_CACHE_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("run"))
    for words in (["status"], ["explain"], ["doctor"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 3 and "--run-dir run" in done.output and "--socket PATH" in done.output, done.output
    folder.make()
    folder.server.note(1)
    config = CacheConfig(num_gpu_blocks=8, transfer_client="inline")
    with PrefixCacheManager(config) as cache:
        cache.control.open(folder.control_socket)
        for words in (["status"], ["explain"], ["doctor"]):
            done = CliRunner().invoke(app, words, catch_exceptions=False)
            assert done.exit_code == 0, done.output
            assert CliRunner().invoke(app, [*words, "--run-dir", "elsewhere"]).exit_code == 3
        monkeypatch.setenv("FASTDEPLOY_CACHE_RUN_DIR", "elsewhere")
        assert CliRunner().invoke(app, ["doctor"]).exit_code == 3


@pytest.mark.processes
def test_hints_of_a_session(tmp_path: Path) -> None:
    """Kept, brought, moved down and let go, in that order; a hint that there is not is refused."""
    path = tmp_path / "private" / "cache.sock"
    with cache_program(path):
        assert run(path, "session", "retain", "last", "--seconds", "60").stdout == "kept: 12 tokens, for 60 seconds\n"
        said = run(path, "session", "prefetch", "last", "--tier", "cpu").stdout
        assert said == "on the GPU: 12 tokens; in the CPU tier: 0 tokens; to cpu\n"
        assert found(path, "session", "demote", "last") == {"num_blocks": 0}  # it is kept
        name = found(path, "pins")[0]["name"]
        assert run(path, "unpin", name).exit_code == 0
        assert run(path, "session", "release", "last").stdout == "release: 1 block\n"
        assert run(path, "session", "release", "last").exit_code == 1
        done = run(path, "session", "sell", "last")
        assert done.exit_code == 2 and "use retain, release, supersede, demote or prefetch" in done.output

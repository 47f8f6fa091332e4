"""What servers in the background are made of: plans of groups, readiness, second lives."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.background import group, program, single, supervisor
from fastdeploy_cache.launch.background.group import show_group, stop_group
from fastdeploy_cache.launch.background.group_plan import GroupPlan, at_known_ports
from fastdeploy_cache.launch.background.run_folder import RunFolder, Slot, default_run_folder
from fastdeploy_cache.launch.background.supervisor import Supervisor
from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.server.readiness import ReadySocket, tell_ready

PLAY = """
import os, signal, sys, threading
from fastdeploy_cache.launch.server.readiness import tell_ready
name = next((word.partition("=")[2] for word in sys.argv if word.startswith("peer.name=")), "router")
life = os.path.join({folder!r}, name + ".lives")
with open(life, "a") as file:
    file.write(" ".join(sys.argv[1:]) + chr(10))
lives = len(open(life).readlines())
if name == {broken!r}:
    sys.exit("it has no heads")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if name == {slow!r}:
    os.kill(os.getppid(), signal.SIGTERM)
    threading.Event().wait()
tell_ready(url="http://127.0.0.1:1", metrics="http://127.0.0.1:2/metrics")
if name == "decode-0" and lives == 2:
    sys.exit(7)
if name == "decode-0" and lives == 3:
    os.kill(os.getppid(), signal.SIGTERM)
threading.Event().wait()
"""


def play(folder: Path, monkeypatch: pytest.MonkeyPatch, *, broken: str = "", slow: str = "") -> None:
    """Members are programs of a few lines. The broken one ends, the slow one has the start given up; decode-0 ends in
    its second life, and its third one asks the supervisor to end."""
    code = PLAY.format(folder=str(folder), broken=broken, slow=slow)
    monkeypatch.setattr(program, "command_of", lambda arguments: [sys.executable, "-c", code, *arguments])
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_SECONDS", 0.01)


def lives(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.lives").read_text().splitlines()


SLOW_START = """
import signal
from fastdeploy_cache.launch.server.readiness import tell_ready, tell_status
for what in ("reading the model", "starting 1 rank"):
    tell_status(what)
tell_ready(url="http://127.0.0.1:1", metrics="http://127.0.0.1:2/metrics")
signal.signal(signal.SIGTERM, lambda *_: exit(0))
signal.pause()
"""


@pytest.mark.processes
def test_a_start_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thing that the server tells of its start, once and in order, and then its facts."""
    monkeypatch.setattr(program, "command_of", lambda arguments: [sys.executable, "-c", SLOW_START])
    folder, said = RunFolder(tmp_path / "run"), list[str]()
    folder.make()
    with program.EndSignals() as asked, program.Program(folder.server, [], tmp_path) as started:
        facts = started.wait_ready(60.0, asked, said.append)
        started.signal(signal.SIGTERM)
        started.reap()
    assert said == ["reading the model", "starting 1 rank"] and facts["url"] == "http://127.0.0.1:1"


@pytest.mark.processes
def test_a_member_that_ends_is_started_again_at_its_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, while the others run on; asked to end, the supervisor leaves no pid file, secret or discovery."""
    play(tmp_path, monkeypatch)
    folder, ready = RunFolder(tmp_path / "run"), ReadySocket(tmp_path / "group.ready")
    monkeypatch.setenv("NOTIFY_SOCKET", str(ready.path))

    def end_its_first_life() -> None:
        assert select.select([ready], [], [], 60)[0], "the group is not ready"
        os.kill(int(folder.member("decode-0").pid_file.read_text().split()[0]), signal.SIGTERM)

    killer = threading.Thread(target=end_its_first_life)
    killer.start()
    assert Supervisor(GroupPlan(num_prefill=2), folder).run()
    killer.join()
    ready.close()
    assert len(lives(tmp_path, "decode-0")) == 3
    assert [len(lives(tmp_path, name)) for name in ("prefill-0", "prefill-1", "router")] == [1, 1, 1]
    assert lives(tmp_path, "decode-0")[2].endswith("--port 1 --metrics-port 2")
    assert "--prefill http://127.0.0.1:1" in lives(tmp_path, "router")[0]
    assert not list(folder.group_folder.iterdir())


@pytest.mark.processes
def test_a_group_starts_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that cannot start is an error with the end of its log, and nothing is left."""
    play(tmp_path, monkeypatch, broken="prefill-0")
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(LaunchError, match=r"prefill-0 ended while starting; its log is \S+\nit has no heads"):
        Supervisor(GroupPlan(), folder).run()
    assert not list(folder.group_folder.iterdir())
    assert show_group(folder, lambda _: None) == 3


@pytest.mark.parametrize("words", [["status"], ["up", "--status"]])
def test_where_nothing_runs_that_is_json_too(tmp_path: Path, words: list[str]) -> None:
    """Status 3, and standard output is an object: a program that reads it needs no other case."""
    done = CliRunner().invoke(app, [*words, "--json", "--run-dir", str(tmp_path)])
    assert (done.exit_code, done.stderr) == (3, "")
    told = json.loads(done.stdout)
    if words == ["status"]:
        assert told["pid"] is None and "not running" in told["problem"]
    else:
        assert told == {"is_watched": False, "members": {}}


def test_a_group_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each member with where it listens and how it is; status 4 where not all of it is up."""
    folder = RunFolder(tmp_path)
    monkeypatch.setattr(RunFolder, "members", [folder.member("decode-0"), folder.member("router")])
    monkeypatch.setattr(Slot, "pid", 7)
    monkeypatch.setattr(Slot, "facts", {"url": "http://a:1"})
    for code, state, status in ((200, "up", 0), (503, "not_ready", 4), (None, "not_answering", 4)):
        monkeypatch.setattr(group, "http_status", lambda url, code=code: code)
        done = CliRunner().invoke(app, ["up", "--status", "--json", "--run-dir", str(tmp_path)])
        member = {"pid": 7, "url": "http://a:1", "state": state}
        told = {"is_watched": True, "members": {"decode-0": member, "router": member}}
        assert (done.exit_code, json.loads(done.stdout)) == (status, told)
        assert show_group(folder, lambda _: None) == status


@pytest.mark.processes
def test_a_start_that_is_given_up_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked to end before all are ready, it ends those that it has started, and starts no router."""
    play(tmp_path, monkeypatch, slow="decode-0")
    folder = RunFolder(tmp_path / "run")
    assert Supervisor(GroupPlan(), folder).run()
    assert not list(folder.group_folder.iterdir()) and not (tmp_path / "router.lives").exists()


@pytest.mark.processes
def test_a_killed_supervisor_leaves_no_member(tmp_path: Path) -> None:
    """Its members are asked to end by the kernel, which tells so by the descriptor of their pid."""
    code = f"""
import os, signal, sys
from pathlib import Path
from fastdeploy_cache.launch.background import program
from fastdeploy_cache.launch.background.run_folder import Slot
code = "import signal; from fastdeploy_cache.launch.server.readiness import tell_ready; tell_ready(); signal.pause()"
program.command_of = lambda arguments: [sys.executable, "-c", code]
folder = Path({str(tmp_path)!r})
started = program.Program(Slot("member", folder, folder), [], folder, dies_with_us=True)
with program.EndSignals() as asked:
    started.wait_ready(60, asked, print)
print(started.pid, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        assert program.wait_ends([pidfd], 20)
        os.close(pidfd)


def test_readiness_is_told_to_whoever_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its facts; other messages are none; nobody asked, or one who has gone, changes nothing."""
    tell_ready(url="http://nobody")
    ready = ReadySocket(tmp_path / "ready")
    monkeypatch.setenv("NOTIFY_SOCKET", str(ready.path))
    assert ready.take() is None
    tell_ready(url="http://127.0.0.1:80", metrics="http://127.0.0.1:81/metrics")
    assert ready.take() == {"url": "http://127.0.0.1:80", "metrics": "http://127.0.0.1:81/metrics"}
    ready.close()
    tell_ready(url="http://127.0.0.1:80")
    assert not ready.path.exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--role", "decode"), "--role is not for a whole group: use --prefill N"),
        (("--metrics-port=9400",), "--metrics-port=9400 is not for a whole group: each member takes a free port"),
        (("--set", "peer.listen=tcp://127.0.0.1:5000"), "peer.listen=tcp://127.0.0.1:5000 is not for a whole group"),
        (("--set", "events.endpoint=tcp://127.0.0.1:5557"), "events.endpoint=tcp://127.0.0.1:5557 is not for a whole"),
        (("--set=peer.name=one",), "--set=peer.name=one is not for a whole group: each member has its own"),
    ],
)
def test_options_that_a_group_cannot_share(words: tuple[str, ...], why: str) -> None:
    """Each is named, with the reason."""
    with pytest.raises(LaunchError, match=why):
        GroupPlan(serve=words)


def test_the_commands_of_a_group(tmp_path: Path) -> None:
    """Options of `serve` come last, so they win; the router's are its own; known ports follow behind."""
    plan = GroupPlan(num_decode=2, decode_ranks=3, port=81, serve=("--set", "num_gpu_blocks=7"))
    instances = plan.instances(RunFolder(tmp_path))
    assert list(instances) == ["prefill-0", "decode-0", "decode-1"]
    assert instances["decode-1"][:5] == ["serve", "--role", "decode", "--ranks", "3"]
    assert instances["decode-1"][-2:] == ["--set", "num_gpu_blocks=7"]
    router = plan.router({"prefill-0": "http://a:1", "decode-0": "http://a:2"}, RunFolder(tmp_path))
    assert router == [
        *(["route", "--host", "127.0.0.1", "--port", "81", "--prefill", "http://a:1", "--decode", "http://a:2"])
    ]
    assert at_known_ports(router, {"url": "http://a:9"})[-2:] == ["--port", "9"]
    facts = {"url": "http://a:9", "metrics": "http://a:8/metrics"}
    assert at_known_ports(["serve"], facts) == ["serve", "--port", "9", "--metrics-port", "8"]


def test_a_group_whose_router_hears_events(tmp_path: Path) -> None:
    """Each instance publishes at an address of its own, which the router is given; a path that is too long is said."""
    plan, folder = GroupPlan(events=True), RunFolder(Path("/run/a"))
    endpoint = f"ipc://{folder.group_folder}/decode-0.events"
    assert f"events.endpoint={endpoint}" in plan.instances(folder)["decode-0"]
    assert plan.router({"decode-0": "http://a:2"}, folder)[-2:] == ["--events", f"http://a:2,{endpoint}"]
    assert "--events" in plan.words()
    with pytest.raises(LaunchError, match="use a --run-dir with a shorter path"):
        plan.instances(RunFolder(tmp_path / ("long" * 20)))


def test_a_pid_file_counts_while_its_process_lives(tmp_path: Path) -> None:
    """A pid of nobody, one without its start time, or a damaged one, is none; what listens is forgotten with it."""
    slot = RunFolder(tmp_path).server
    for text in ("", "no number", "999999999 1", "1", f"{os.getpid()}", "1 1", "-1 1", "9" * 400, "1 " + "9" * 10**5):
        slot.pid_file.write_text(text)
        assert slot.pid is None
    slot.note_facts({"url": "http://127.0.0.1:80"})
    assert slot.facts["url"] == "http://127.0.0.1:80"
    slot.forget()
    assert not slot.facts and not list(tmp_path.iterdir())
    slot.pid_file.mkdir()
    assert slot.pid is None
    for call in (slot.forget, lambda: slot.note(1)):
        with pytest.raises(LaunchError, match=r"serve\.pid cannot be \w+: Is a directory; remove it by hand"):
            call()


def test_the_run_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the XDG rules, where nothing else is said."""
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_run_folder() == Path("/state/fastdeploy_cache")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_run_folder() == Path("/home/me/.local/state/fastdeploy_cache")


def test_a_signal_wakes_whoever_waits(tmp_path: Path) -> None:
    """Also where the kernel gives it to another thread than the one that waits, as it may."""
    waits = threading.Event()

    def take_it() -> None:
        waits.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    taker = threading.Thread(target=take_it)
    with program.EndSignals() as end_signals:
        taker.start()
        waits.set()
        assert select.select([end_signals], [], [], 20)[0] == [end_signals]
        assert end_signals.is_set
    taker.join()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("runs", ["nothing", "dead", "group", "single"])
def test_what_is_said_where_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: str) -> None:
    """Of one that was killed its log, and of what else runs from the folder the commands for it: in every command."""
    folder = RunFolder(tmp_path)
    folder.make()
    if runs in ("group", "single"):
        monkeypatch.setattr(Slot, "pid", property(lambda slot: os.getpid() if slot.pid_file.exists() else None))
    slots = {"nothing": [], "dead": [folder.server, folder.group], "group": [folder.group], "single": [folder.server]}
    for slot in slots[runs]:
        slot.pid_file.write_text(f"{2**22 + 1} 1")  # more than there are pids
    log = "; it ended without being stopped; its log is {}"
    of_server = {"dead": log.format(folder.server.log_file), "group": "; a group is: see `up --status`, or end it with"}
    of_group = {"dead": log.format(folder.group.log_file), "single": "; a single server is: see `status`, or end it"}
    said: list[str] = []
    if runs != "group":
        assert show_group(folder, said.append) == 3
        assert said.pop().startswith(f"not running{of_group.get(runs, '')}")
    if runs != "single":
        status = CliRunner().invoke(app, ["status", "--run-dir", str(tmp_path)])
        assert status.exit_code == 3
        said.append(status.stdout.removeprefix("== "))
        control = CliRunner().invoke(app, ["control", "pause", "--run-dir", str(tmp_path)])
        assert control.exit_code == 3
        single.stop(folder, said.append)
        for line in (*said, control.stderr.removeprefix("fastdeploy-cache: ")):
            assert line.startswith(f"not running{of_server.get(runs, '')}")
        said.clear()
        single.stop(folder, said.append)  # it is forgotten now
        assert "without being stopped" not in said[0]


def test_a_group_has_one_supervisor(tmp_path: Path) -> None:
    """A second one is refused, and touches nothing of the first one's."""
    folder = RunFolder(tmp_path)
    with folder.locked("supervisor"):
        folder.group_folder.joinpath("peer.secret").write_text("of the first one")
        with pytest.raises(LaunchError, match="a group is watched over already"):
            Supervisor(GroupPlan(), folder).run()
        assert folder.group_folder.joinpath("peer.secret").read_text() == "of the first one"


def test_a_second_start_waits_for_nobody(tmp_path: Path) -> None:
    """While one is at work another is refused."""
    folder = RunFolder(tmp_path)
    with folder.locked("start"), pytest.raises(LaunchError, match="another start or stop"), folder.locked("start"):
        raise AssertionError("both had it")


STARTER = """
import sys
from pathlib import Path
from fastdeploy_cache.launch.background import group, group_plan, program, run_folder, single
folder = run_folder.RunFolder(Path({path!r}))
play = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"
program.command_of = lambda arguments: [sys.executable, "-c", play]
def say(line):
    print(line, flush=True)
if {is_group}:
    group.start_group(group_plan.GroupPlan(), folder, say)
else:
    single.start(folder, [], say)
"""


@pytest.mark.processes
@pytest.mark.parametrize("is_group", [False, True])
def test_a_stop_ends_a_start_that_is_at_work(tmp_path: Path, is_group: bool) -> None:
    """Of one server or a group, at any moment of it. What was started ends, and the start is interrupted."""
    folder = RunFolder(tmp_path / "run")
    code = STARTER.format(path=str(folder.path), is_group=is_group)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None and b"starting" in starter.stdout.readline()
        said = list[str]()
        (stop_group if is_group else single.stop)(folder, said.append)
        assert starter.wait(60) == -signal.SIGINT  # KeyboardInterrupt, of which the command line makes 130
    assert said == ["another start has ended", "not running"]
    assert not [*folder.group_folder.iterdir(), *folder.path.glob("*.pid")]


def test_a_stop_refuses_what_it_cannot_end(tmp_path: Path) -> None:
    """Whoever has the lock, and is no process of ours, is not asked; a stop of nothing makes no folder."""
    folder = RunFolder(tmp_path / "run")
    single.stop(folder, lambda _: None)
    assert not folder.path.exists()
    with folder.locked("start"):
        (folder.path / "start.lock").write_text("start 1")
        with pytest.raises(LaunchError, match=r"another start or stop is at work in \S+; try again"):
            single.stop(folder, lambda _: None)


def test_prometheus_finds_the_ports(tmp_path: Path) -> None:
    """There is one entry for each member that has metrics."""
    folder = RunFolder(tmp_path)
    folder.make()
    watch = Supervisor(GroupPlan(), folder)
    member = supervisor.Member(folder.member("decode-0"), ["serve"])
    watch._members["decode-0"] = member
    watch._on_ready(member, {"url": "http://127.0.0.1:80", "metrics": "http://127.0.0.1:81/metrics"})
    shown = json.loads((folder.group_folder / "prometheus.json").read_text())
    assert shown == [{"targets": ["127.0.0.1:81"], "labels": {"member": "decode-0"}}]

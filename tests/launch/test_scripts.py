"""The scripts as an operator uses them. They work on the repository's own .venv, so they run under it only."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_cache.launch.background.deployment import filled_in
from tests.rigs.storage_servers import free_port

ROOT = Path(__file__).parent.parent.parent
IN_VENV = Path(sys.prefix) == ROOT / ".venv"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not IN_VENV, reason="the scripts use .venv; run the tests with ./launch/test.sh"),
]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A run folder of the test's own."""
    return {**os.environ, "FASTDEPLOY_CACHE_RUN_DIR": str(tmp_path / "run")}


def run(script: str, *arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "launch" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, check=False)


SCRIPTS = sorted(path.name for path in (ROOT / "launch").glob("*.sh") if os.access(path, os.X_OK))
SOURCED = {"environment.sh"}


@pytest.fixture
def bystander(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that every pid file of the run folder names, and that the scripts take for a server of theirs."""
    folder = Path(environment["FASTDEPLOY_CACHE_RUN_DIR"])
    (folder / "prefill_decode").mkdir(parents=True)
    command = ["fastdeploy-cache", "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, executable=sys.executable, stdin=subprocess.PIPE) as process:
        for name in ("serve.pid", "prefill_decode/router.pid", "prefill_decode/decode-0.pid"):
            (folder / name).write_text(str(process.pid))
        yield process
        process.kill()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_which_files_are_scripts() -> None:
    """Every file of launch that is no script to run is one that they source."""
    assert {path.name for path in (ROOT / "launch").glob("*.sh")} - set(SCRIPTS) == SOURCED


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_does_nothing_else(
    environment: dict[str, str], bystander: subprocess.Popen[bytes], script: str, flag: str
) -> None:
    """Each script says what it is for; what runs goes on, and nothing is written."""
    before = contents(Path(environment["FASTDEPLOY_CACHE_RUN_DIR"]))
    result = run(script, flag, environment=environment)
    assert result.returncode == 0, result.stderr
    said = (ROOT / "launch" / script).read_text().splitlines()[1].removeprefix("# ")
    assert result.stdout.startswith(said)
    assert bystander.poll() is None
    assert contents(Path(environment["FASTDEPLOY_CACHE_RUN_DIR"])) == before


@pytest.mark.parametrize(
    "arguments", [["--no-such-option"], ["nothing-like-that", "at all"], ["--stop", "--no-such-option"]]
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_arguments_that_a_script_does_not_know(
    environment: dict[str, str], bystander: subprocess.Popen[bytes], script: str, arguments: list[str]
) -> None:
    """They are named as an error, what runs goes on, and nothing is written."""
    before = contents(Path(environment["FASTDEPLOY_CACHE_RUN_DIR"]))
    result = run(script, *arguments, environment=environment)
    assert result.returncode not in (0, 1, 3), result.stdout
    assert any(argument in result.stdout + result.stderr for argument in arguments)
    assert bystander.poll() is None
    assert contents(Path(environment["FASTDEPLOY_CACHE_RUN_DIR"])) == before


def test_the_fast_door_of_the_tests(environment: dict[str, str]) -> None:
    """`test.sh --fast` finds no test in a module whose every test is over real ranks, and all of one of a leaf;
    --help tells of it, and other arguments go on to pytest."""
    collect = ("test.sh", "--fast", "-n", "0", "--collect-only")
    none = run(*collect, "tests/faults/test_lanes.py", environment=environment)
    assert none.returncode == 5 and "deselected" in none.stdout, none.stdout + none.stderr
    some = run(*collect, "tests/ipc/test_codec.py", environment=environment)
    assert some.returncode == 0 and "tests/ipc/test_codec.py::" in some.stdout, some.stdout + some.stderr
    assert "--fast" in run("test.sh", "--help", environment=environment).stdout


@pytest.fixture
def started(environment: dict[str, str]) -> Iterator[str]:
    """A server in the background, stopped afterwards; what start.sh printed."""
    result = run("start.sh", "--ranks", "1", "--port", "0", "--metrics-port", "0", environment=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    yield result.stdout
    result = run("stop.sh", environment=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "stopped" in result.stdout


def test_start_status_second_start_stop(environment: dict[str, str], started: str) -> None:
    """Ready means that it answers; status shows ranks, tiers and hit rates; a second start is refused."""
    status = run("status.sh", environment=environment)
    assert status.returncode == 0
    for words in ("rank 0: up", "GPU: 512 free", "CPU: 1024 free", "hit rates"):
        assert words in status.stdout
    second = run("start.sh", environment=environment)
    assert second.returncode == 1
    assert "already running" in second.stderr


def test_control_of_the_running_server(environment: dict[str, str], started: str) -> None:
    """control.sh finds its socket; status names what is not running as ever; a refusal is status 1 and one line."""
    asleep = run("control.sh", "sleep", "--tier", "gpu", environment=environment)
    assert (asleep.returncode, asleep.stdout.endswith("; asleep\n")) == (0, True), asleep.stderr
    assert "== asleep: pid " in run("status.sh", environment=environment).stdout
    refused = run("control.sh", "pause", environment=environment)
    assert refused.returncode == 1
    assert "it has to be running or paused" in refused.stderr
    assert run("control.sh", "wake", "--timeout", "60", environment=environment).stdout == "running\n"
    assert "life cycle" not in run("status.sh", environment=environment).stdout


def test_without_a_server(environment: dict[str, str]) -> None:
    """Status and control say so with status 3; stop has nothing to do and succeeds."""
    status, stop = run("status.sh", environment=environment), run("stop.sh", environment=environment)
    control = run("control.sh", "pause", environment=environment)
    assert (status.returncode, stop.returncode, control.returncode) == (3, 0, 3)
    assert "not running" in status.stdout and "not running" in control.stderr


def test_a_server_that_cannot_start_is_reported(environment: dict[str, str]) -> None:
    """start.sh fails with the reason from the log, and leaves no pid file."""
    result = run("start.sh", "--ranks", "2", environment=environment)
    assert result.returncode == 1
    assert "3 KV heads neither divide by 2 ranks" in result.stderr
    assert run("status.sh", environment=environment).returncode == 3


def test_a_group_of_prefill_and_decode(environment: dict[str, str], tmp_path: Path) -> None:
    """Started, it answers through the router; it is not started twice; a member that dies shows, and is started again;
    stopped, it leaves no process, no pid file, no folder of sockets."""
    script = "start_prefill_decode.sh"
    with tempfile.TemporaryDirectory(prefix="group-") as sockets:  # a short path: addresses are
        environment["TMPDIR"] = sockets
        _try_group(script, environment, tmp_path)
        assert not list(Path(sockets).iterdir())


def _try_group(script: str, environment: dict[str, str], tmp_path: Path) -> None:
    assert run(script, "--status", environment=environment).returncode == 3
    arguments = ["--prefill", "2", "--port", "0", "--set", "num_gpu_blocks=256", "--set", "num_cpu_blocks=0"]
    result = run(script, *arguments, environment=environment)
    try:
        assert result.returncode == 0, result.stdout + result.stderr
        url = re.search(r"ready: API (\S+)", result.stdout)
        assert url is not None
        chat = b'{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}'
        with urllib.request.urlopen(url.group(1), chat, timeout=60) as answer:
            assert answer.status == 200
        secret = tmp_path / "run" / "prefill_decode" / "peer.secret"
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        second = run(script, environment=environment)
        assert (second.returncode, "already running" in second.stderr) == (1, True)
        folder = tmp_path / "run" / "prefill_decode"
        pids = {path.stem: int(path.read_text().split()[0]) for path in folder.glob("*.pid")}
        assert set(pids) == {"prefill-0", "prefill-1", "decode-0", "router", "group"}
        handles = {name: os.pidfd_open(pid) for name, pid in pids.items()}
        os.kill(pids["prefill-1"], signal.SIGTERM)
        assert select.select([handles["prefill-1"]], [], [], 30)[0]
        status = run(script, "--status", environment=environment)
        assert (status.returncode, "prefill-1: up" in status.stdout) == (4, False)
        _try_second_life(script, environment, result.stdout)
        assert "event=stopping" in (tmp_path / "run" / "log" / "prefill-1.log.old").read_text()
    finally:
        stopped = run(script, "--stop", environment=environment)
    assert (stopped.returncode, stopped.stdout) == (0, "== stopped\n"), stopped.stderr
    assert not list(folder.glob("*.pid")) and not secret.exists()
    for handle in handles.values():
        assert select.select([handle], [], [], 5)[0], "it runs on"
        os.close(handle)


def _try_second_life(script: str, environment: dict[str, str], first: str) -> None:
    """It comes by itself, at the addresses that it had, and with a new log; Prometheus finds all ports."""
    folder = Path(environment["FASTDEPLOY_CACHE_RUN_DIR"]) / "prefill_decode"
    until = time.monotonic() + 60
    while (status := run(script, "--status", environment=environment)).returncode != 0:
        assert time.monotonic() < until, status.stdout
    for name in ("prefill-0", "prefill-1", "decode-0"):
        addresses = re.search(rf"{name}: (\S+), (metrics \S+)", first)
        assert addresses is not None
        assert f"{name}: up, API {addresses[1]}, {addresses[2]}" in status.stdout
    shown = json.loads((folder / "prometheus.json").read_text())
    assert {each["labels"]["member"] for each in shown} >= {"prefill-0", "prefill-1", "decode-0"}
    for each in shown:
        with urllib.request.urlopen(f"http://{each['targets'][0]}/metrics", timeout=10) as answer:
            assert answer.status == 200


def test_a_start_that_is_interrupted(environment: dict[str, str], tmp_path: Path) -> None:
    """As soon as there is a pid file: what was started has ended when the script has, and no pid file stays."""
    folder = tmp_path / "run" / "prefill_decode"
    command = [str(ROOT / "launch" / "start_prefill_decode.sh"), "--decode", "3", "--port", "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as script:
        until = time.monotonic() + 60
        while not list(folder.glob("*.pid")):
            assert time.monotonic() < until
        script.terminate()
        assert script.stdout is not None
        said = script.stdout.read()
        assert script.wait(60) == 130, said
    assert not list(folder.glob("*.pid"))
    logs = {str(path) for path in (tmp_path / "run" / "log").glob("*")}
    assert logs
    for process in Path("/proc").glob("[0-9]*/fd/2"):
        try:
            assert str(process.readlink()) not in logs, "it runs on"
        except OSError:  # it has ended, or is not ours
            continue


@pytest.mark.parametrize(
    "arguments",
    [
        ["--role", "decode"],
        ["--control-socket", "/tmp/socket"],
        ["--metrics-port=9400"],
        ["--set", "peer.listen=tcp://127.0.0.1:5000"],
        ["--set=peer.name=one"],
    ],
)
def test_options_that_no_group_can_share(environment: dict[str, str], arguments: list[str]) -> None:
    """They are refused by name, before anything starts."""
    result = run("start_prefill_decode.sh", *arguments, environment=environment)
    assert result.returncode == 1
    assert f"{arguments[-1] if '=' in arguments[-1] else arguments[0]} is not for a whole group" in result.stderr


def test_a_group_that_cannot_start_leaves_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    """The reason from the log; whoever had started is stopped."""
    result = run("start_prefill_decode.sh", "--prefill-ranks", "2", environment=environment)
    assert result.returncode == 1
    assert "3 KV heads neither divide by 2 ranks" in result.stderr
    assert not list((tmp_path / "run" / "prefill_decode").glob("*.pid"))
    wrong = run("start_prefill_decode.sh", "--prefill", "none", environment=environment)
    assert (wrong.returncode, "--prefill" in wrong.stderr) == (2, True)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_scrapes_it(tmp_path: Path, started: str) -> None:
    """The shipped configuration is valid, and a real Prometheus with it (but our ports) sees the rank up."""
    shipped = tmp_path / "shipped.yml"
    shipped.write_text(filled_in("prometheus.yml", tmp_path / "run"))
    subprocess.run(["promtool", "check", "config", str(shipped)], check=True, capture_output=True)
    metrics = re.search(r"metrics http://([\d.:]+)/metrics", started)
    assert metrics is not None
    config = tmp_path / "prometheus.yml"
    config.write_text(shipped.read_text().replace("127.0.0.1:9400", metrics.group(1)).replace("5s", "1s"))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=log, stdout=log)
    try:
        assert '"1"' in _ask(f"http://{address}/api/v1/query?query=fastdeploy_cache_rank_up", '"1"')
    finally:
        process.terminate()
        process.wait(timeout=20)


def _ask(url: str, wanted: str) -> str:
    """Prometheus scrapes in its own time: ask until it has, for half a minute at most."""
    answer, deadline = "", time.monotonic() + 30
    while wanted not in answer and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                answer = response.read().decode()
        except OSError as error:  # not listening yet
            answer = str(error)
        time.sleep(0.2)
    return answer

"""`soak`: real engines are hurt, what is wrong is seen, and nothing is left of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.faults import soak, soak_engine
from fastdeploy_cache.launch.faults.kv_bytes import KVBytes
from fastdeploy_cache.launch.faults.real_host import RealHost
from fastdeploy_cache.launch.faults.soak_engine import EndlessActs, SoakStage
from fastdeploy_cache.launch.faults.soak_faults import SOAK_FAULTS
from fastdeploy_cache.launch.faults.soak_lines import EngineTask
from fastdeploy_cache.launch.faults.story import Settings
from fastdeploy_cache.launch.interrupts import STATUS
from tests.rigs.storage_servers import ValkeyServer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
# Ctrl-C comes when the second fault has; the engines get it as soon as they are started, and are not to hear of it
_INTERRUPTED = """
import os, signal, sys
from fastdeploy_cache.launch.cli import main
from fastdeploy_cache.launch.faults.soak import SoakRun
hurt, start = SoakRun._hurt, SoakRun._start
def start_and_interrupt(run, number):
    life = start(run, number)
    life.process.send_signal(signal.SIGINT)
    return life
def hurt_and_interrupt(run):
    hurt(run)
    if sum(run.seen.faults.values()) == 2:
        os.kill(os.getpid(), signal.SIGINT)
SoakRun._hurt, SoakRun._start = hurt_and_interrupt, start_and_interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["fastdeploy-cache", "soak", "--minutes", "3", "--json", "-"]
main()
"""


def run_soak(*arguments: str) -> dict[str, object]:
    """What a short one has seen; nothing was wrong."""
    result = CliRunner().invoke(app, ["soak", "--minutes", "0.3", "--json", "-", *arguments])
    assert result.exit_code == 0, result.output
    document: dict[str, object] = json.loads(result.stdout)
    return document


def test_it_says_what_it_saw() -> None:
    """Real processes were killed, blocks were compared, and all came to rest."""
    document = run_soak("--seed", "3", "--faults", "kill rank,kill storage,stop rank")
    counts, faults = document["counts"], document["faults"]
    assert isinstance(counts, dict) and isinstance(faults, dict)
    assert counts["blocks compared"] > 50 and counts["requests"] > 5
    assert faults and set(faults) <= {"kill rank", "kill storage", "stop rank"}
    assert document["findings"] == [] and document["num_lives"] == soak.NUM_ENGINES


def test_engines_on_one_store(tmp_path: Path) -> None:
    """With a server for all, each may find what the other one has written; their bytes say that it is right."""
    server = ValkeyServer(tmp_path)
    server.start()
    try:
        document = run_soak("--seed", "4", "--valkey-url", server.tcp_url, "--faults", "kill engine,kill storage")
    finally:
        server.kill()
    counts = document["counts"]
    assert isinstance(counts, dict) and counts["blocks compared"] > 50


def test_bad_options_are_refused() -> None:
    """In one line, with status 2."""
    result = CliRunner().invoke(app, ["soak", "--faults", "kill rank,kil storage"])
    words = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2 and f"'kil storage' is no fault; known: {next(iter(SOAK_FAULTS))}," in words


def test_ctrl_c_shows_what_was_seen() -> None:
    """Status 130, the counts up to then, and neither a process is left nor a folder, of killed processes either."""
    with tempfile.TemporaryDirectory(prefix="soak", dir="/tmp") as folder:  # private folders need a short path
        done = subprocess.run(
            [sys.executable, "-c", _INTERRUPTED],
            env=os.environ | {"TMPDIR": folder}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        left = list(Path(folder).iterdir())
    assert done.returncode == STATUS, done.stderr
    document = json.loads(done.stdout)
    assert document["interrupted"] and sum(document["faults"].values()) == 2 and document["findings"] == []
    assert left == []


def task(folder: Path) -> EngineTask:
    """One engine without ranks of others."""
    settings = Settings(num_engines=1, num_users=1, tp_size=1, has_store=False)
    return EngineTask(number=0, num_engines=1, seed=1, num_lives=0, settings=settings, store_folder=str(folder))


def test_a_wrong_byte_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose model reads something else than it should tells so at its first hit."""
    monkeypatch.setattr(KVBytes, "wrong", lambda *_: [0])
    stage = SoakStage(task(tmp_path))
    stage.machine.note_own()
    stage.engine.main()
    assert stage.findings[0][0] == "wrong bytes"
    cache = stage.engine.cache
    assert cache is not None
    cache.close()


def test_a_verb_that_is_late_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest call of each is kept; what its process was held up for does not count."""
    stage = SoakStage(task(tmp_path))
    times = iter([0.0, 30.0, 100.0, 130.0, 200.0, 230.0])
    monkeypatch.setattr(stage.host, "now", lambda: next(times))
    with contextlib.suppress(KeyError), stage.verb(0, "match", 5.0):
        raise KeyError
    stage.stalls = [(101.0, 129.0)]
    with stage.verb(0, "wait", 5.0):
        pass
    stage.looked_at = 201.0  # the stop has just ended, and is not noted yet
    with stage.verb(0, "poll", 5.0):
        pass
    assert [kind for kind, _ in stage.findings] == ["late: match"]
    assert stage.verbs["poll"].longest_seconds == 1.0
    assert stage.verbs["match"].longest_seconds == 30.0 and stage.verbs["wait"].longest_seconds == 2.0


def test_processes_left_behind_are_found() -> None:
    """Whatever carries the mark of a run and still lives, however it came about."""
    environment = os.environ | {soak._MARK: "of-this-test"}
    with subprocess.Popen(["cat"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"it runs\n")  # while a program is being started, its environment looks empty
        process.stdin.flush()
        assert process.stdout.readline() == b"it runs\n"
        assert soak._marked("of-this-test") == [str(process.pid)]
        process.kill()
    assert soak._marked("of-this-test") == []


def test_acts_follow_from_the_seed_and_end_with_the_time() -> None:
    """The same ones whenever they are asked for; none once the time is over."""
    over = threading.Event()
    first, again = (EndlessActs("seed", Settings(), over.is_set) for _ in range(2))
    batch = soak_engine._BATCH
    some = [first[at] for at in (0, 1, batch, 2 * batch + 5)]
    assert [again[at] for at in (2 * batch + 5, batch, 1, 0)] == some[::-1]
    assert len(Counter(first[at].verb for at in range(batch))) > 8 and len(first) > 10**9
    over.set()
    assert len(first) == 0


def test_shared_memory_that_stays_is_seen() -> None:
    """By its name, and apart from other descriptors, until it is closed."""
    host = RealHost(0)
    host.note_own()
    fd = os.memfd_create("cpu-blocks")
    assert [each.partition("memfd:")[2][:10] for each in host.shared_memory()] == ["cpu-blocks"]
    assert "descriptors" not in host.left_behind()
    os.close(fd)
    assert not host.shared_memory()

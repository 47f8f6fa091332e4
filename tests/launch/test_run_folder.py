"""The folder of servers in the background: what it says is believed, so it is its user's alone, and names processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.background import program, single
from fastdeploy_cache.launch.background.group import stop_group
from fastdeploy_cache.launch.background.own_files import check_own_folder
from fastdeploy_cache.launch.background.process_name import name_of, pid_of
from fastdeploy_cache.launch.background.run_folder import RunFolder, default_run_folder, folder_to_look_in
from fastdeploy_cache.launch.cli import app


@pytest.mark.processes
def test_a_stop_ends_nobody_elses_process(tmp_path: Path) -> None:
    """A pid that was given again is that of another process: it has another start time, whatever its command is."""
    folder, said = RunFolder(tmp_path), list[str]()
    folder.make()
    command = [sys.executable, "-c", "import sys; sys.stdin.read()", "fastdeploy_cache"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
        folder.server.note(other.pid)
        assert folder.server.pid == other.pid
        _, started, boot = folder.server.pid_file.read_text().split()
        for text in (f"{other.pid} {int(started) - 1} {boot}", f"{other.pid} {started}", f"{other.pid}"):
            folder.server.pid_file.write_text(text)
            single.stop(folder, said.append)
            assert said.pop().startswith("not running; it ended without being stopped")
            assert not folder.server.pid_file.exists() and other.poll() is None
        (tmp_path / "start.lock").write_text(f"start {other.pid} 1 {boot}")
        with folder.locked("group"):  # another lock: it writes its own name
            (tmp_path / "group.lock").write_text(f"start {other.pid} 1 {boot}")
            with pytest.raises(LaunchError, match="another start or stop is at work"):
                stop_group(folder, said.append)
        assert other.poll() is None
        other.communicate()


def test_a_run_folder_that_others_may_write_in_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or that is another user's, and the folders in it: before anything in it is believed or made."""
    for name in ("", "log", "prefill_decode"):
        folder = tmp_path / "run" / name
        RunFolder(tmp_path / "run").make()
        folder.chmod(0o775)
        for words in (["stop"], ["status"], ["start"], ["up"], ["control", "pause"]):
            done = CliRunner().invoke(app, [*words, "--run-dir", str(tmp_path / "run")])
            assert isinstance(done.exception, LaunchError) and f"others may write in the run folder {folder}" in str(
                done.exception
            )
        folder.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(LaunchError, match=rf"run folder \S+ is of user {os.getuid()}, and this is"):
        RunFolder(tmp_path / "run")


def test_the_run_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    """Also where the user's `umask` lets a group write."""
    before = os.umask(0o002)
    try:
        folder = RunFolder(tmp_path / "new" / "run")
        folder.make()
    finally:
        os.umask(before)
    made = (folder.path, folder.log_folder, folder.group_folder)
    assert [each.stat().st_mode & 0o777 for each in made] == [0o755] * 3


def test_links_in_a_run_folder_are_not_followed(tmp_path: Path) -> None:
    """Not by pid files, facts, locks or logs: what they point to is neither read nor written."""
    precious, folder = tmp_path / "precious", RunFolder(tmp_path / "run")
    folder.make()
    slot = folder.server
    for file in (slot.pid_file, slot.pid_file.with_suffix(".json"), folder.path / "start.lock", slot.log_file):
        precious.write_text("")
        file.symlink_to(precious)
    with pytest.raises(LaunchError, match=r"serve\.pid cannot be written"):
        slot.note(os.getpid())
    with pytest.raises(LaunchError, match=r"serve\.json cannot be written"):
        slot.note_facts({"url": "x"})
    with pytest.raises(LaunchError, match=r"start\.lock cannot be opened"), folder.locked("start"):
        raise AssertionError("it was locked")
    with pytest.raises(LaunchError, match="serve cannot be started"):
        program.Program(slot, ["serve"], tmp_path)
    assert precious.read_text() == ""
    precious.write_text(name_of(os.getpid()))
    assert slot.pid is None and slot.facts == {}


def test_what_is_damaged_in_a_run_folder_says_nothing(tmp_path: Path) -> None:
    """Facts that are no table, too deep or no text are none, and nothing but a server is asked how it is."""
    slot = RunFolder(tmp_path).server
    for data in (b"{", b"[1]", b"[" * 10**5, b"\xff", b"[" * 10**4 + b"]" * 10**4):
        slot.pid_file.with_suffix(".json").write_bytes(data)
        assert slot.facts == {}
    assert single.http_status(f"file://{slot.pid_file.with_suffix('.json')}") is None


def test_a_folder_named_run_that_is_none_of_ours_is_no_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /run is, where the working directory is /: commands look in the usual folder, and say nothing of it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert folder_to_look_in() == default_run_folder()


def test_a_name_of_before_a_reboot_is_nobodys() -> None:
    """The same pid and the same ticks may come again after a reboot; the number of the boot does not."""
    pid, started, boot = name_of(os.getpid()).split()
    assert pid_of(f"{pid} {started} {boot}") == os.getpid()
    assert pid_of(f"{pid} {started} {boot[:-1]}{'0' if boot[-1] != '0' else '1'}") is None


def test_a_link_of_another_user_is_no_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever puts a link to a folder of ours where ours is looked for: it is refused, and our own link is not."""
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    check_own_folder(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(LaunchError, match="is of user"):
        check_own_folder(tmp_path / "link")

"""Named words: seen by any program that knows the name, taken over from the dead only, gone when closed."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_cache.errors import IPCError, NotEnoughMemoryError
from fastdeploy_cache.ipc import named_signal
from fastdeploy_cache.ipc.named_signal import NamedSignal

FOLDER = Path("/dev/shm")

OUTSIDER = """
import sys
from multiprocessing import resource_tracker, shared_memory
import numpy as np
shm = shared_memory.SharedMemory(name=sys.argv[1])
resource_tracker.unregister(shm._name, "shared_memory")  # or it would remove the name when this process ends
words = np.ndarray((3,), dtype=np.int32, buffer=shm.buf)
print(words.tolist(), flush=True)
words[1] = -7
del words
shm.close()
"""

HOLDER = """
import sys
from fastdeploy_cache.ipc.named_signal import NamedSignal
make = NamedSignal.create if sys.argv[1] == "create" else NamedSignal.attach
signal = make(sys.argv[2], sys.argv[3], 3)
signal.words[0] = 5
print("holding", flush=True)
sys.stdin.read()
signal.close()
"""

WAITER = """
import sys
from fastdeploy_cache.ipc.named_signal import NamedSignal
with NamedSignal.attach(sys.argv[1], sys.argv[2], 3) as signal:
    signal.set(0, 1)
    print(signal.wait_change(2, 0, 30), flush=True)
"""


@pytest.fixture
def suffix() -> str:
    """No other test's."""
    return f"{uuid.uuid4().hex[:8]}x{os.getpid()}"


@contextlib.contextmanager
def holder(how: str, suffix: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has made, or attached, the signal and holds it until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, how, "status", suffix], stdin=-1, stdout=-1, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "holding\n"
        yield process


def leave(suffix: str, *, made_here: bool = True, words: tuple[int, ...] = (0, 0, 0)) -> Path:
    """A file that nobody holds, as a killed creator leaves it; or as another program makes it, and may still use it."""
    path = FOLDER / f"status.{suffix}"
    path.write_bytes(np.array(words, np.int32).tobytes())
    path.chmod(0o1600 if made_here else 0o600)
    return path


def names(suffix: str) -> list[str]:
    return [path.name for path in FOLDER.iterdir() if path.name.endswith(suffix)]


@pytest.mark.processes
def test_a_program_that_knows_the_name_sees_the_words(suffix: str) -> None:
    """Python's own SharedMemory and an int32 array on it read our stores, and we read theirs."""
    with NamedSignal.create("status", suffix, 3) as mine:
        mine.words[:] = (1, -2, 2**31 - 1)
        command = [sys.executable, "-c", OUTSIDER, f"status.{suffix}"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        assert result.stdout == f"{[1, -2, 2**31 - 1]}\n"
        assert mine.words.tolist() == [1, -7, 2**31 - 1]
        assert mine.words.dtype == np.int32


def test_the_file_is_private_and_goes_with_its_creator(suffix: str) -> None:
    """Mode 0600, with the mark, whatever the umask lets through; closing twice removes the name once; views stay
    valid."""
    before = os.umask(0)
    mine = NamedSignal.create("status", suffix, 3)
    os.umask(before)
    path = FOLDER / f"status.{suffix}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o1600
    assert path.stat().st_size == 12
    words = mine.words
    mine.close()
    mine.close()
    words[0] = 3
    assert words.tolist() == [3, 0, 0]
    assert not names(suffix)


def test_an_attached_one_leaves_the_name(suffix: str) -> None:
    """Only the creator removes it; what is attached goes on after that."""
    mine = NamedSignal.create("status", suffix, 3)
    with NamedSignal.attach("status", suffix, 3) as other:
        NamedSignal.attach("status", suffix, 3).close()
        assert names(suffix)
        mine.close()
        assert not names(suffix)
        other.words[1] = 4
        assert mine.words.tolist() == [0, 4, 0]


@pytest.mark.processes
def test_a_live_creator_is_not_displaced(suffix: str) -> None:
    """A second creator is refused with the file's name and what to do, in this process and in another; nothing
    changes."""
    with holder("create", suffix), NamedSignal.attach("status", suffix, 3) as seen:
        with pytest.raises(IPCError, match=rf"status\.{suffix} is in use by a running process.*another suffix"):
            NamedSignal.create("status", suffix, 3)
        assert seen.words[0] == 5
    with NamedSignal.create("status", suffix, 3), pytest.raises(IPCError, match="in use"):
        NamedSignal.create("status", suffix, 3)


@pytest.mark.processes
def test_what_a_killed_creator_left_is_taken_over(suffix: str) -> None:
    """After kill -9 the name is still there; the next creator replaces it, with words of 0 and its own size."""
    with holder("create", suffix) as process:
        process.kill()
        process.wait(30)
        assert names(suffix)
        with NamedSignal.create("status", suffix, 5) as mine:
            assert mine.words.tolist() == [0] * 5
    assert not names(suffix)


@pytest.mark.processes
def test_who_is_attached_holds_the_name_as_well(suffix: str) -> None:
    """The creator is killed while a worker is attached: no new creator before that one has gone."""
    with holder("create", suffix) as creator, holder("attach", suffix) as worker:
        creator.kill()
        creator.wait(30)
        with pytest.raises(IPCError, match="in use"):
            NamedSignal.create("status", suffix, 3)
        worker.kill()
        worker.wait(30)
        NamedSignal.create("status", suffix, 3).close()


def test_a_lock_does_not_outlive_close(suffix: str) -> None:
    """Views that live on do not keep a name that they no longer have."""
    mine = NamedSignal.create("status", suffix, 3)
    words = mine.words
    (FOLDER / f"status.{suffix}").rename(FOLDER / f"moved.{suffix}")  # so that its creator leaves it behind
    mine.close()
    NamedSignal.create("moved", suffix, 3).close()
    assert words.tolist() == [0, 0, 0]


def test_existence_and_size_are_checked(suffix: str) -> None:
    """Attaching what is not there, or is of another size, says so; nothing is left open."""
    with pytest.raises(IPCError, match=rf"there is no /dev/shm/status\.{suffix}"):
        NamedSignal.attach("status", suffix, 3)
    with NamedSignal.create("status", suffix, 3):
        for num_words in (2, 4):
            with pytest.raises(IPCError, match=f"has 12 bytes, {num_words} words"):
                NamedSignal.attach("status", suffix, num_words)


@pytest.mark.parametrize(("name", "num_words", "words"), [("", 1, "255"), ("a/b", 1, "'/'"), ("a", 0, "at least 1")])
def test_impossible_names_and_sizes_are_refused(name: str, num_words: int, words: str) -> None:
    """Before anything is made."""
    with pytest.raises(IPCError, match=words):
        NamedSignal.create(name, "x" * 250 if not name else "0", num_words)


def test_a_link_is_not_followed(suffix: str, tmp_path: Path) -> None:
    """Somebody's symbolic link under the name is an error, and what it names is untouched."""
    target = tmp_path / "target"
    target.write_bytes(b"\1" * 12)
    (FOLDER / f"status.{suffix}").symlink_to(target)
    try:
        for call in (NamedSignal.create, NamedSignal.attach):
            with pytest.raises(IPCError, match="remove it"):
                call("status", suffix, 3)
    finally:
        (FOLDER / f"status.{suffix}").unlink()
    assert target.read_bytes() == b"\1" * 12


def test_no_room_is_an_error_of_ours(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full /dev/shm is found when the words are made, not by a bus error later; no name and no descriptor stay."""

    def refuse(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(named_signal.os, "posix_fallocate", refuse)
    with pytest.raises(NotEnoughMemoryError, match="12 bytes: no space"):
        NamedSignal.create("status", suffix, 3)
    assert not names(suffix)


def test_of_two_that_find_the_same_stale_file_one_wins(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other has replaced the file between this one's look and its lock: its new file is not removed."""
    leave(suffix)
    lock = named_signal._lock
    winners: list[NamedSignal] = []

    def late(fd: int, kind: int) -> bool:
        monkeypatch.setattr(named_signal, "_lock", lock)
        winners.append(NamedSignal.create("status", suffix, 3))
        return lock(fd, kind)

    monkeypatch.setattr(named_signal, "_lock", late)
    with pytest.raises(IPCError, match="in use"):
        NamedSignal.create("status", suffix, 3)
    winners[0].words[0] = 9
    with NamedSignal.attach("status", suffix, 3) as other:
        assert other.words[0] == 9
    winners[0].close()


def test_many_creators_at_once_make_one_signal(suffix: str) -> None:
    """Over a stale file, twenty times: one of four gets the name, the others are refused."""
    for _ in range(20):
        leave(suffix)
        made: list[NamedSignal] = []
        barrier = threading.Barrier(4)

        def create(made: list[NamedSignal] = made, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(10)
            with contextlib.suppress(IPCError):
                made.append(NamedSignal.create("status", suffix, 3))

        threads = [threading.Thread(target=create) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(made) == 1
        made[0].close()


KINDS = ("nothing", "foreign", "foreign, attached", "dead", "dead, attached", "alive")


@contextlib.contextmanager
def found(kind: str, suffix: str) -> Iterator[None]:
    """What may be there under the name, all words 7; nothing is left of it afterwards."""
    path = FOLDER / f"status.{suffix}"
    with contextlib.ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        if kind == "alive":
            stack.enter_context(NamedSignal.create("status", suffix, 3)).words[:] = 7
        elif kind != "nothing":
            leave(suffix, made_here=kind.startswith("dead"), words=(7, 7, 7))
        if kind.endswith("attached"):
            stack.enter_context(NamedSignal.attach("status", suffix, 3))
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["create", "attach", "attach_or_create"])
def test_only_what_the_dead_have_left_is_replaced(suffix: str, how: str, kind: str) -> None:
    """Each way to come to words, over everything that may be there: another program's words are attached or left
    alone, a living holder's are refused, and a new file takes the place of none but one that was made here."""
    path = FOLDER / f"status.{suffix}"
    outcomes = {
        "create": {"nothing": "new", "dead": "new"},
        "attach": dict.fromkeys(KINDS[1:], "same"),
        "attach_or_create": {"nothing": "new", "dead": "new", "foreign": "same", "foreign, attached": "same"},
    }
    outcome = outcomes[how].get(kind, "refused")
    with found(kind, suffix):
        before = path.stat().st_ino if kind != "nothing" else None
        if outcome == "refused":
            with pytest.raises(IPCError):
                getattr(NamedSignal, how)("status", suffix, 3)
        else:
            with getattr(NamedSignal, how)("status", suffix, 3) as mine:
                assert mine.words.tolist() == ([0] * 3 if outcome == "new" else [7] * 3)
                mine.words[0] = 9
        if outcome == "new":
            assert not names(suffix)
        elif before is not None:
            assert path.stat().st_ino == before, "what was there is there"
            assert np.frombuffer(path.read_bytes(), np.int32)[0] == (9 if outcome == "same" else 7)


def test_words_of_another_size_are_refused_and_left(suffix: str) -> None:
    """Another program's words that do not fit: an error with both sizes, and the file is as it was."""
    path = leave(suffix, made_here=False)
    with pytest.raises(IPCError, match="has 12 bytes, 2 words"):
        NamedSignal.attach_or_create("status", suffix, 2)
    assert path.read_bytes() == bytes(12)
    path.unlink()


def test_a_name_can_be_removed_by_who_is_attached(suffix: str) -> None:
    """FastDeploy's engine lets its cache manager remove names; the words go on, and a later file stays."""
    path = leave(suffix, made_here=False)
    with NamedSignal.attach_or_create("status", suffix, 3) as mine:
        mine.remove_name()
        assert not names(suffix)
        leave(suffix, made_here=False)
        mine.remove_name()
        mine.set(0, 3)
        assert mine.words[0] == 3 and path.exists()
    mine.remove_name()
    path.unlink()


def test_close_does_not_remove_somebody_elses_file(suffix: str) -> None:
    """An outsider (a resource tracker) removed the name and another creator took it: that one's file stays."""
    mine = NamedSignal.create("status", suffix, 3)
    (FOLDER / f"status.{suffix}").unlink()
    with NamedSignal.create("status", suffix, 3):
        mine.close()
        assert names(suffix)


@pytest.mark.processes
def test_set_wakes_a_waiter_in_another_process(suffix: str) -> None:
    """`wait_change` in a child returns the negative value that is set here."""
    with NamedSignal.create("status", suffix, 3) as mine:
        command = [sys.executable, "-c", WAITER, "status", suffix]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert mine.wait_change(0, 0, 30) == 1
            mine.set(2, -3)
            assert child.communicate(timeout=30)[0] == "-3\n"


def test_set_wakes_without_the_timer(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a timer of a day the wait still ends: it is the wake that ends it."""
    monkeypatch.setattr(named_signal, "_LOOK_SECONDS", 86400.0)
    with NamedSignal.create("status", suffix, 3) as mine:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(mine.wait_change(1, -1, 86400)))
        mine.words[1] = -1
        thread.start()
        mine.set(1, 8)
        thread.join(30)
        assert found == [8]


def test_a_plain_store_ends_the_wait_as_well(suffix: str, eventually: Callable[..., None]) -> None:
    """A NumPy store that wakes nobody is seen by the timer, long before the wait's own end."""
    with NamedSignal.create("status", suffix, 3) as mine:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(mine.wait_change(1, 0, 600)))
        thread.start()
        call = Path(f"/proc/self/task/{thread.native_id}/syscall")
        eventually(lambda: call.read_text().startswith(f"{mine._signal._number} "))  # it sleeps in futex
        mine.words[1] = -4
        thread.join(30)
        assert found == [-4]


def test_a_wait_ends_with_its_time(suffix: str) -> None:
    """No change gives what was seen; a word that differs already gives its value without any time."""
    with NamedSignal.create("status", suffix, 3) as mine:
        mine.words[0] = -5
        assert mine.wait_change(0, -5, 0.01) == -5
        assert mine.wait_change(0, 1, 0) == -5

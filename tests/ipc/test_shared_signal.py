"""State words: a wait sleeps until another process's store, and never past its time."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from fastdeploy_cache.errors import IPCError
from fastdeploy_cache.ipc import shared_signal
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.ipc.shared_signal import SharedSignal

WAITER = """
import sys
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.ipc.shared_signal import SharedSignal
signal = SharedSignal(SharedArray(int(sys.argv[1]), 16), 4)
signal.set(0, 1)
print(signal.wait(2, lambda value: value >= 3, 30), flush=True)
"""


@pytest.fixture
def array() -> Iterator[SharedArray]:
    """A segment of four words."""
    segment = SharedArray.create("signal", 16)
    yield segment
    segment.close()


def test_words_are_independent_and_32_bits_wide(array: SharedArray) -> None:
    """A store touches one word only and keeps the low 32 bits."""
    signal = SharedSignal(array, 4)
    signal.set(1, 2**32 + 5)
    signal.set(3, 2**32 - 1)
    assert [signal.get(word) for word in range(4)] == [0, 5, 0, 2**32 - 1]


@pytest.mark.processes
def test_a_store_wakes_a_waiter_in_another_process(array: SharedArray) -> None:
    """A process asleep on a word returns with the value that this process stores; earlier stores do not end it."""
    signal = SharedSignal(array, 4)
    with subprocess.Popen(
        [sys.executable, "-c", WAITER, str(array.fd)], pass_fds=[array.fd], stdout=subprocess.PIPE, text=True
    ) as child:
        assert signal.wait(0, lambda value: value == 1, 30) == 1
        for value in (1, 2, 3):
            signal.set(2, value)
        assert child.communicate(timeout=30)[0] == "3\n"


def test_all_waiters_wake(array: SharedArray) -> None:
    """One store ends the wait of every thread that waits for it."""
    signal = SharedSignal(array, 4)
    seen: list[int | None] = []
    threads = [
        threading.Thread(target=lambda: seen.append(signal.wait(0, lambda value: value == 9, 30))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    signal.set(0, 9)
    for thread in threads:
        thread.join(30)
    assert seen == [9] * 5


def test_wait_times_out(array: SharedArray) -> None:
    """A word that never gets there gives None; one that is there already gives its value without any time."""
    signal = SharedSignal(array, 4)
    assert signal.wait(0, lambda value: value == 1, 0.01) is None
    assert signal.wait(0, lambda value: value == 1, 0) is None
    assert signal.wait(0, lambda value: value == 0, 0) == 0


def test_a_store_between_look_and_sleep_is_not_lost(array: SharedArray, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses to sleep on a word that no longer holds what was read: no time-out is needed to get on."""
    signal = SharedSignal(array, 4)
    sleeps = []
    futex = signal._futex

    def store_first(word: int, operation: int, value: int, timeout: object) -> None:
        if operation == shared_signal._FUTEX_WAIT:
            signal._words[word] = 8  # the writer comes in between; its wake finds nobody
            sleeps.append(value)
        futex(word, operation, value, timeout)  # type: ignore[arg-type]

    monkeypatch.setattr(signal, "_futex", store_first)
    assert signal.wait(0, lambda value: value == 8, 86400) == 8
    assert sleeps == [0]


def test_a_wrong_expected_value_does_not_sleep(array: SharedArray) -> None:
    """The bare call: a wait for a value that the word does not hold returns at once, whatever its time-out."""
    signal = SharedSignal(array, 4)
    signal.set(0, 1)
    signal._futex(0, shared_signal._FUTEX_WAIT, 0, shared_signal._Timespec(86400, 0))


def test_a_misused_word_is_an_error_not_a_hang(array: SharedArray) -> None:
    """An address that the kernel refuses raises instead of turning the wait into a busy loop."""
    signal = SharedSignal(array, 4)
    signal._address += 1  # not aligned
    with pytest.raises(IPCError, match="futex"):
        signal._futex(0, shared_signal._FUTEX_WAIT, 0, shared_signal._Timespec(0, 1))


def test_unknown_machine_is_refused(array: SharedArray, monkeypatch: pytest.MonkeyPatch) -> None:
    """No guess at a system call's number."""
    monkeypatch.setattr(shared_signal.platform, "machine", lambda: "z80")
    with pytest.raises(IPCError, match="z80"):
        SharedSignal(array, 4)


def test_words_outlive_the_closed_segment(array: SharedArray) -> None:
    """A signal keeps its memory: a waiter cannot be left on an unmapped address."""
    signal = SharedSignal(array, 4)
    array.close()
    signal.set(0, 4)
    assert signal.get(0) == 4 and isinstance(signal._words, np.ndarray)

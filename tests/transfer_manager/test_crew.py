"""Threads that share jobs: each is done once, what is told is done, and after an error nobody goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from fastdeploy_cache.transfer_manager.crew import Crew

WAIT_SECONDS = 20.0


@pytest.fixture
def crew() -> Iterator[Crew]:
    """Closed at the end, twice."""
    crew = Crew(2, "test")
    yield crew
    crew.close()
    crew.close()


def is_second() -> bool:
    """Whether this thread is the second one."""
    return threading.current_thread() is not threading.main_thread()


class Meeting:
    """Jobs that end only when both threads are in one."""

    def __init__(self) -> None:
        self._both = threading.Barrier(2)

    def job(self) -> None:
        self._both.wait(WAIT_SECONDS)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("num_jobs", [0, 1, 2, 7, 200])
def test_each_job_is_done_once_and_told_in_order(num_threads: int, num_jobs: int) -> None:
    """Counts rise up to all, and what is counted has ended."""
    crew = Crew(num_threads, "test")
    done, told = list[int](), list[int]()

    def on_done(count: int) -> None:
        assert set(range(count)) <= set(done)
        told.append(count)

    for _ in range(20):
        done.clear()
        told.clear()
        crew.run([partial(done.append, number) for number in range(num_jobs)], on_done)
        assert sorted(done) == list(range(num_jobs))
        assert told == sorted(set(told)) and told[-1:] == [num_jobs][: num_jobs > 0]
    crew.close()


def test_both_threads_take_part(crew: Crew) -> None:
    """A job of each at the same time; the first of the two counts only when it has ended."""
    meeting, told = Meeting(), list[int]()
    crew.run([meeting.job, meeting.job] * 5, told.append)
    assert told[-1] == 10


def test_a_thread_that_never_begins_is_not_waited_for(crew: Crew) -> None:
    """On a busy machine the caller does it all by itself."""
    is_free = threading.Event()
    crew._others.submit(is_free.wait, WAIT_SECONDS)
    done, told = list[int](), list[int]()
    crew.run([partial(done.append, number) for number in range(5)], told.append)
    assert done == [0, 1, 2, 3, 4] and told == [1, 2, 3, 4, 5]
    is_free.set()


@pytest.mark.parametrize("in_second", [False, True])
def test_an_error_of_either_thread_is_raised_when_both_have_stopped(crew: Crew, in_second: bool) -> None:
    """No job begins after it, and none is still running; the next jobs go on as if nothing had been."""
    meeting, running = Meeting(), set[int]()

    def fail_in_one() -> None:
        running.add(threading.get_ident())
        meeting.job()
        if is_second() is in_second:
            running.remove(threading.get_ident())
            raise ValueError("bad memory")
        running.remove(threading.get_ident())

    told = list[int]()
    after: list[Callable[[], None]] = [lambda: None] * 3
    with pytest.raises(ValueError, match="bad memory"):
        crew.run([fail_in_one, fail_in_one, *after], told.append)
    assert not running and (not told or told[-1] < 5)
    crew.run(after, told.append)
    assert told[-1] == 3


def test_an_error_of_whoever_is_told_ends_the_jobs(crew: Crew) -> None:
    """It is raised when the other thread has stopped, too."""
    done = list[int]()

    def on_done(_: int) -> None:
        raise KeyError("nobody listens")

    with pytest.raises(KeyError):
        crew.run([partial(done.append, number) for number in range(1000)], on_done)
    num_done = len(done)
    assert sorted(done) == list(range(num_done))
    crew.run([lambda: None], lambda _: None)
    assert len(done) == num_done

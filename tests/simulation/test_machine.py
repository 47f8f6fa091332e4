"""The simulated machine beside the real one: the same calls give the same, also where they fail."""

from __future__ import annotations

import os
import random
import select
import socket
from collections.abc import Callable
from typing import Any

import pytest

from fastdeploy_cache.launch.faults.disk import SimulatedDisk
from fastdeploy_cache.launch.faults.namespaces import Namespace, NotSimulatedError
from fastdeploy_cache.launch.faults.simulation import Simulation
from fastdeploy_cache.launch.faults.trouble import Trouble


def outcome(call: Callable[[], Any]) -> Any:
    """What it returns, or which error it raises."""
    try:
        return call()
    except OSError as error:
        return type(error).__name__, error.errno


def story_of_sockets(sockets: Any, polls: Any) -> list[Any]:
    """Reads, writes, ends and resets of a pair."""
    said = list[Any]()
    one, other = sockets.socketpair()
    one.setblocking(False)
    said.append(outcome(lambda: one.recv(10)))
    other.sendall(b"abc", socket.MSG_NOSIGNAL)
    poll = polls.epoll()
    poll.register(one, select.EPOLLIN | select.EPOLLOUT)
    said.append([events & (select.EPOLLIN | select.EPOLLOUT) for _, events in poll.poll(0)])
    said.append(outcome(lambda: one.recv(2)))
    said.append(outcome(lambda: one.recv(10)))
    said.append(outcome(lambda: one.send(b"unread", socket.MSG_NOSIGNAL)))
    other.close()
    said.append([bool(events & select.EPOLLIN) for _, events in poll.poll(0)])
    said.append(outcome(lambda: one.recv(10)))  # the other end closed with something unread
    said.append(outcome(lambda: one.recv(10)))
    said.append(outcome(lambda: one.send(b"more", socket.MSG_NOSIGNAL)))
    poll.close()
    one.close()
    first, second = sockets.socketpair()
    second.sendall(b"last words", socket.MSG_NOSIGNAL)
    second.close()
    said.append(outcome(lambda: first.recv(100)))
    said.append(outcome(lambda: first.recv(100)))
    first.close()
    return said


def simulated(main: Callable[[Simulation], Any], seed: int = 1) -> Any:
    """What this gives in a simulated process."""
    simulation, found = Simulation(seed), list[Any]()

    def run() -> int:
        found.append(main(simulation))
        return 0

    simulation.machine.begin("engine", run)
    simulation.scheduler.run(lambda: False)
    for _, error in simulation.scheduler.failures:
        raise error
    return found[0]


def test_sockets_are_as_the_real_ones() -> None:
    """A pair of connected sockets, its poll, its end with and without unread bytes: step by step the same."""

    def main(simulation: Simulation) -> Any:
        spaces = simulation.messages.namespaces()
        return story_of_sockets(spaces["socket"], spaces["select"])

    assert simulated(main) == story_of_sockets(socket, select)


def story_of_descriptors(system: Any) -> list[Any]:
    """Numbers that are given again, and calls on what is closed."""
    said = list[Any]()
    first, second = system.eventfd(0, os.EFD_NONBLOCK), system.eventfd(0, os.EFD_NONBLOCK)
    said.append(outcome(lambda: system.eventfd_read(first)))
    system.eventfd_write(first, 3)
    system.eventfd_write(first, 4)
    said.append(outcome(lambda: system.eventfd_read(first)))
    system.close(first)
    again = system.eventfd(0, os.EFD_NONBLOCK)
    said.append(again == first)  # the lowest number that is free
    system.close(again)
    system.close(second)
    said.append(outcome(lambda: system.fstat(second)))
    return said


def test_descriptors_are_as_the_real_ones() -> None:
    """Event counters and their numbers: the same."""
    assert simulated(lambda simulation: story_of_descriptors(simulation.files.namespaces()["os"])) == (
        story_of_descriptors(os)
    )


def new_disk() -> SimulatedDisk:
    """An empty one."""
    inodes = iter(range(1, 1000))
    return SimulatedDisk(lambda: next(inodes), lambda: 0.0, 2**20)


@pytest.mark.parametrize("seed", range(20))
def test_a_loss_of_power_keeps_what_was_synced(seed: int) -> None:
    """Bytes that were synced are there, whole; what came after them is there, in part, or not."""
    disk, chance = new_disk(), random.Random(seed)
    folder = disk.find("/store")
    file = disk.open("/store/a", os.O_CREAT | os.O_RDWR).entry
    disk.write(file, b"x" * 2000, 0)  # type: ignore[arg-type]
    file.sync()
    folder.sync()
    disk.root.sync()
    disk.write(file, b"y" * 2000, 1000)  # type: ignore[arg-type]
    disk.lose_power(chance)
    found = bytes(disk.find("/store/a").data)  # type: ignore[union-attr]
    assert found[:1000] == b"x" * 1000 and set(found[1000:2000]) <= set(b"xy")
    assert 2000 <= len(found) <= 3000


def test_a_name_may_be_lost_and_a_rename_is_whole() -> None:
    """Without a sync of the folder a new name may be gone; of a rename there is the old or the new, never both."""
    seen = set()
    for seed in range(40):
        disk = new_disk()
        for name in ("journal", "journal.new"):
            disk.open(f"/store/{name}", os.O_CREAT | os.O_RDWR)
        for folder in (disk.find("/store"), disk.root):
            folder.sync()
        disk.rename("/store/journal.new", "/store/journal")
        disk.open("/store/late", os.O_CREAT | os.O_RDWR)
        disk.lose_power(random.Random(seed))
        seen.add(tuple(sorted(disk.list("/store"))))
    assert seen == {("journal", "journal.new"), ("journal",), ("journal", "late")}


def test_a_full_disk_refuses() -> None:
    """What would not fit is not written."""
    disk = new_disk()
    file = disk.open("/store/a", os.O_CREAT | os.O_RDWR).entry
    disk.write(file, bytes(2**20), 0)  # type: ignore[arg-type]
    assert outcome(lambda: disk.write(file, b"x", 2**20)) == ("OSError", 28)  # type: ignore[arg-type]


def test_what_is_not_simulated_is_refused() -> None:
    """A call of the system that the simulated machine does not have says so, and never reaches the real one."""
    space = Namespace(os, {})
    assert space.O_RDONLY == os.O_RDONLY
    with pytest.raises(NotSimulatedError, match=r"os\.kill is not simulated"):
        space.kill(1, 9)


def test_trouble_ends() -> None:
    """Whatever was wrong is well again, but for the wall clock, which nobody sets back."""
    trouble = Trouble(disk_is_full=True, message_seconds=1.0, wall_clock_shift=60.0)
    trouble.end()
    assert trouble == Trouble(wall_clock_shift=60.0)

"""The scheduler: who goes next follows from the seed, dead processes run no further line, and nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from fastdeploy_cache.launch.faults.machine import Machine
from fastdeploy_cache.launch.faults.scheduler import FOREVER, StuckError
from fastdeploy_cache.launch.faults.simulation import Simulation
from fastdeploy_cache.launch.faults.threads import Condition, Lock, Queue, Semaphore, SimulatedEvent, Thread


def run(simulation: Simulation, main: Callable[[], int]) -> Machine:
    """A process with this main, to the end of all that there is to do."""
    simulation.machine.begin("engine", main)
    simulation.scheduler.run(lambda: False)
    return simulation.machine


@pytest.mark.parametrize("seed", range(5))
def test_the_seed_decides(seed: int) -> None:
    """Two threads write into a list: the same order for a seed each time, and not for all seeds the same."""

    def order(of: int) -> list[str]:
        simulation, written = Simulation(of), list[str]()

        def write(name: str) -> None:
            for _ in range(20):
                simulation.scheduler.step("lock")
                written.append(name)

        def main() -> int:
            threads = [Thread(simulation.threads, write, name, (name,)) for name in "ab"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return 0

        run(simulation, main)
        assert not simulation.scheduler.failures
        return written

    assert order(seed) == order(seed)
    assert any(order(seed) != order(other) for other in range(10, 20))


def test_a_lock_keeps_others_out() -> None:
    """Under a lock a thread reads and writes with a step in between: no increment is lost, and without it some are."""

    def count(*, is_locked: bool) -> int:
        simulation, total = Simulation(3), [0]
        lock = Lock(simulation.scheduler)

        def add() -> None:
            for _ in range(30):
                if is_locked:
                    lock.acquire()
                before = total[0]
                simulation.scheduler.step("message")
                total[0] = before + 1
                if is_locked:
                    lock.release()

        def main() -> int:
            threads = [Thread(simulation.threads, add) for _ in range(3)]
            for thread in threads:
                thread.start()
            return 0 * [thread.join() for thread in threads].count(None)

        run(simulation, main)
        return total[0]

    assert count(is_locked=True) == 90 > count(is_locked=False)


def test_time_jumps_to_who_waits() -> None:
    """Waits end at their deadlines to the step, and cost no real time."""
    simulation = Simulation(1)
    waited = list[tuple[bool, float]]()

    def main() -> int:
        started = simulation.now()
        event = SimulatedEvent(simulation.scheduler)
        waited.append((event.wait(3600.0), simulation.now() - started))
        waited.append((Semaphore(simulation.scheduler, 0).acquire(timeout=5.0), simulation.now() - started))
        return 0

    run(simulation, main)
    (first, after_first), (second, after_second) = waited
    assert not first and not second
    assert 3600.0 <= after_first < 3600.1 and 3605.0 <= after_second < 3605.1


def test_a_condition_and_a_queue_wake_who_waits() -> None:
    """What one thread puts or notifies, the other gets, in order."""
    simulation, got = Simulation(2), list[int]()
    items, condition = Queue(simulation.scheduler), Condition(simulation.scheduler)
    told = list[int]()

    def take() -> None:
        for _ in range(3):
            got.append(items.get())
        with condition:
            condition.wait_for(lambda: told)
            got.append(told[0])

    def main() -> int:
        taker = Thread(simulation.threads, take)
        taker.start()
        for number in range(3):
            items.put(number)
        simulation.sleep(1.0)
        with condition:
            told.append(7)
            condition.notify()
        taker.join()
        return 0

    run(simulation, main)
    assert got == [0, 1, 2, 7]


def test_a_dead_process_runs_no_finally_that_others_see() -> None:
    """Killed in a wait, its threads unwind: each call of theirs raises, and what they hold goes to nobody else."""
    simulation, before = Simulation(4), threading.active_count()
    machine = simulation.machine
    shared, cleaned = SimulatedEvent(simulation.scheduler), list[str]()

    def victim() -> int:
        try:
            simulation.scheduler.wait((), lambda: False, FOREVER, "wait")
        finally:
            cleaned.append("its own memory")
            shared.set()  # a call of a dead process
        return 0

    def killer() -> int:
        process = machine.begin("victim", victim)
        simulation.sleep(1.0)
        machine.kill(process)
        assert process.is_dead and not process.actors
        assert not shared.is_set()
        return 0

    run(simulation, killer)
    assert not simulation.scheduler.failures
    assert cleaned == ["its own memory"]
    assert threading.active_count() == before, "a thread of the dead is left"


def test_a_deadlock_is_found() -> None:
    """Where everybody waits for ever, that is said, with names."""
    simulation = Simulation(5)

    def main() -> int:
        SimulatedEvent(simulation.scheduler).wait()
        return 0

    machine = run(simulation, main)
    ((_, error),) = simulation.scheduler.failures
    assert isinstance(error, StuckError) and "engine-101/main" in str(error)
    for process in list(machine.processes.values()):
        machine.kill(process)


def test_what_a_thread_raises_ends_the_run() -> None:
    """An error that nobody catches is a finding, with the thread's name."""
    simulation = Simulation(6)

    def main() -> int:
        raise ValueError("planted")

    run(simulation, main)
    ((name, error),) = simulation.scheduler.failures
    assert name == "engine-101/main" and str(error) == "planted"

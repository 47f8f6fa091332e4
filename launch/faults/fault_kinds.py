"""The faults that a story may have, by name. Each begins between two steps of anybody."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from fastdeploy_cache.launch.faults.machine import SimulatedProcess
from fastdeploy_cache.launch.faults.scheduler import Actor
from fastdeploy_cache.launch.faults.simulation import Simulation
from fastdeploy_cache.launch.faults.story import Fault


class FaultyWorld(Protocol):
    """What a fault happens to."""

    simulation: Simulation

    def stall(self, seconds: float) -> None:
        """A thread of an engine, or all of them, have no processor for so long."""
        ...


FaultKind = Callable[[FaultyWorld, Fault], None]


def _of_program(world: FaultyWorld, program: str, target: int) -> SimulatedProcess | None:
    found = [p for p in world.simulation.machine.processes.values() if p.program == program and not p.is_dead]
    return found[target % len(found)] if found else None


def _kill(program: str) -> FaultKind:
    def happen(world: FaultyWorld, fault: Fault) -> None:
        process = _of_program(world, program, fault.target)
        if process is not None:
            world.simulation.machine.kill(process)

    return happen


def _kill_all(program: str) -> FaultKind:
    def happen(world: FaultyWorld, _: Fault) -> None:
        for process in list(world.simulation.machine.processes.values()):
            if process.program == program:
                world.simulation.machine.kill(process)

    return happen


def _stop(program: str) -> FaultKind:
    def happen(world: FaultyWorld, fault: Fault) -> None:
        process = _of_program(world, program, fault.target)
        if process is not None:
            world.simulation.machine.stop(process, fault.seconds)
            if program == "engine":
                world.stall(fault.seconds)

    return happen


def _slow_thread(world: FaultyWorld, fault: Fault) -> None:
    """A thread that gets no processor for a while."""
    scheduler = world.simulation.scheduler
    actors: list[Actor] = [a for a in scheduler.living if _program(a) != "init"]
    if actors:
        actor = actors[fault.target % len(actors)]
        actor.held_until = scheduler.now + fault.seconds
        scheduler.call_at(actor.held_until, lambda: None)
        if _program(actor) == "engine":
            world.stall(fault.seconds)


def _program(actor: Actor) -> str:
    process: SimulatedProcess = actor.process  # type: ignore[assignment]
    return process.program


def _for_a_while(**changes: Any) -> FaultKind:
    """Something is wrong with the machine until the time is over."""

    def happen(world: FaultyWorld, fault: Fault) -> None:
        trouble, scheduler = world.simulation.trouble, world.simulation.scheduler
        before = {name: getattr(type(trouble)(), name) for name in changes}
        for name, value in changes.items():
            setattr(trouble, name, value)

        def end() -> None:
            for name, value in before.items():
                setattr(trouble, name, value)

        scheduler.call_at(scheduler.now + fault.seconds, end)

    return happen


def _lose_power(world: FaultyWorld, _: Fault) -> None:
    """Everything dies at once, and what the disk had not made durable may be gone."""
    machine = world.simulation.machine
    for process in list(machine.processes.values()):
        if process.program == "engine":
            machine.kill(process)
    for process in list(machine.processes.values()):
        if process.program != "init":
            machine.kill(process)
    world.simulation.disk.lose_power(world.simulation.scheduler.chance)


def _shift_clock(world: FaultyWorld, fault: Fault) -> None:
    world.simulation.trouble.wall_clock_shift += (fault.target - 32) * 600.0


FAULTS: Final[Mapping[str, FaultKind]] = {
    "kill rank": _kill("transfer_manager"),
    "kill all ranks": _kill_all("transfer_manager"),
    "stop rank": _stop("transfer_manager"),
    "kill storage": _kill("storage"),
    "stop storage": _stop("storage"),
    "kill engine": _kill("engine"),
    "stop engine": _stop("engine"),
    "slow thread": _slow_thread,
    "slow copies": _for_a_while(copy_seconds=0.1),
    "endless copies": _for_a_while(copy_seconds=3.0),  # longer than a task may take
    "failing copies": _for_a_while(copy_error_share=0.3),
    "late messages": _for_a_while(message_seconds=0.3),
    "very late messages": _for_a_while(message_seconds=3.0),
    "lost messages": _for_a_while(lost_share=0.4),
    "kill peer": _kill("peer"),
    "stop peer": _stop("peer"),
    "disk errors": _for_a_while(disk_error_share=0.1),
    "disk broken": _for_a_while(disk_error_share=1.0),
    "slow disk": _for_a_while(disk_slow_share=0.2, disk_slow_seconds=1.0),
    "flipped bits": _for_a_while(disk_flip_share=0.3),
    "full disk": _for_a_while(disk_is_full=True),
    "lying disk": _for_a_while(disk_lies=True),
    "power loss": _lose_power,
    "no threads": _for_a_while(has_no_threads=True),
    "no processes": _for_a_while(has_no_processes=True),
    "no descriptors": _for_a_while(has_no_descriptors=True),
    "no memory": _for_a_while(has_no_memory=True),
    "memory errors": _for_a_while(memory_error_share=0.1),
    "outside errors": _for_a_while(outside_error_share=0.01),
    "clock jump": _shift_clock,
}

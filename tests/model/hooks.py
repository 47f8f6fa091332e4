"""Where a `Recorder` hears the real code: each function here stands in for one of it, calls it, and tells of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

from fastdeploy_cache import life_cycle, ranks
from fastdeploy_cache.books.block_pool import BlockPool
from fastdeploy_cache.books.generations import Generations, Reason
from fastdeploy_cache.ipc.codec import decode
from fastdeploy_cache.ipc.task_queue import TaskQueue
from fastdeploy_cache.launch.faults.machine import Machine, SimulatedProcess
from fastdeploy_cache.launch.faults.process_calls import ProcessCalls
from fastdeploy_cache.movement.outbox import Outbox
from fastdeploy_cache.transfer_manager.peer.receiver import RankReceive, ReceiveFailedError
from fastdeploy_cache.transfer_manager.peer.worker import PeerServer
from fastdeploy_cache.transfer_manager.process.flights import Flights
from fastdeploy_cache.transfer_manager.process.io_thread import ProcessIO
from fastdeploy_cache.transfer_manager.process.lane_task import LaneTask
from fastdeploy_cache.transfer_manager.process.lanes import LaneServer
from fastdeploy_cache.transfer_manager.process.supervisor import RankSupervisor
from fastdeploy_cache.transfer_manager.process.task_flow import TaskFlow
from fastdeploy_cache.transfer_manager.process.wire import TaskMessage, ToProcess
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask
from tests.model.recorder import Event, HeardTable, Recorder

_PROGRAMS: Final = ("transfer_manager", "storage", "peer")
_UNSEEN: Final = (TaskKind.SEND, TaskKind.UPDATE_SEND)  # another instance reads these: see the model of a hand-over
_TIERS: Final = {Reason.GPU_LOST: ("gpu",), Reason.CPU_LOST: ("cpu",), Reason.RESET: ("gpu", "cpu")}

Original = Callable[..., Any]


@contextmanager
def recording() -> Iterator[Recorder]:
    """Every story that runs meanwhile is heard."""
    recorder = Recorder()
    with ExitStack() as undo:
        for place, name, hook in _HOOKS:
            undo.enter_context(patch.object(place, name, _hooked(getattr(place, name), hook, recorder)))
        yield recorder


def _hooked(original: Original, hook: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        return hook(recorder, original, *arguments, **keywords)

    return wrapper


# -- in an engine: the books


def _pool_made(recorder: Recorder, original: Original, pool: Any, tier: str, *arguments: Any, **keywords: Any) -> None:
    original(pool, tier, *arguments, **keywords)
    pool._table = HeardTable(pool._table, tier.lower(), recorder)


def _generation_begun(recorder: Recorder, original: Original, generations: Generations, reason: Reason) -> None:
    for tier in _TIERS[reason]:
        if tier == "gpu" or generations not in recorder.keeping:
            recorder.say(Event("forgot", tier=tier))
    original(generations, reason)


def _gpu_dropped(recorder: Recorder, original: Original, tree: Any) -> None:
    recorder.keeping.append(tree.generations)
    try:
        original(tree)
    finally:
        recorder.keeping.remove(tree.generations)


# -- in an engine: tasks on their way


def _client_of(processes: Any) -> str:
    io = processes._processes.io
    assert io is not None, "a task for processes that were never started"
    return str(io.client)


def _outbox_made(recorder: Recorder, original: Original, outbox: Any, client: Any, on_result: Any, *more: Any) -> None:
    def refused(result: Any) -> None:
        recorder.say(Event("refused", _client_of(client), task=result.task.task_id))
        on_result(result)

    original(outbox, client, refused, *more)


def _task_put(recorder: Recorder, original: Original, outbox: Any, task: TransferTask, *more: Any) -> None:
    if task.kind not in _UNSEEN:
        sources, ids = tuple(task.source_ids.tolist()), tuple(task.destination_ids.tolist())
        client = _client_of(outbox._client)
        recorder.say(Event("put", client, task=task.task_id, tier=task.kind.value, ids=ids, sources=sources))
    original(outbox, task, *more)


def _io_made(recorder: Recorder, original: Original, io: Any, config: Any, kind: Any, *more: Any) -> None:
    original(io, config, kind, *more)
    recorder.num_clients += 1
    io.client = io.tasks.client = io.tasks.flights.client = f"{kind.name}#{recorder.num_clients}"
    for rank in io.ranks:
        rank.client = io.client


def _io_run(recorder: Recorder, original: Original, io: Any) -> None:
    recorder.spawners[id(recorder.actor)] = io.client
    original(io)


def _accepted(recorder: Recorder, original: Original, flow: Any, task: TransferTask) -> bool:
    is_taken: bool = original(flow, task)
    if not is_taken:
        recorder.say(Event("refused", flow.client, task=task.task_id))
    return is_taken


def _refused(recorder: Recorder, original: Original, flow: Any, task: TransferTask, error: str) -> None:
    recorder.say(Event("refused", flow.client, task=task.task_id))
    original(flow, task, error)


def _added(recorder: Recorder, original: Original, flights: Any, task: TransferTask, ranks_: Any) -> Any:
    flight = original(flights, task, ranks_)
    recorder.say(Event("added", flights.client, task=task.task_id))
    return flight


def _failed(
    recorder: Recorder, original: Original, flow: Any, flight: Any, rank: int, *more: Any, **keywords: Any
) -> None:
    if rank in flight.waiting:
        recorder.say(Event("unreached", flow.client, rank, flight.task.task_id))
    recorder.unreached.add((id(flight), rank))
    try:
        original(flow, flight, rank, *more, **keywords)
    finally:
        recorder.unreached.discard((id(flight), rank))


def _heard(recorder: Recorder, original: Original, flights: Any, flight: Any, result: Any, now: float) -> Any:
    task, key = flight.task, (id(flight), result.rank)
    is_said = result.rank in flight.waiting and key not in recorder.unreached
    outcome = original(flights, flight, result, now)
    if is_said:
        name = "heard ok" if result.error is None else "heard bad"
        num_good = result.num_blocks if task.kind is TaskKind.PREFETCH else -1
        recorder.say(Event(name, flights.client, result.rank, task.task_id, num_good=num_good))
    if outcome is not None:
        recorder.say(Event("ended", flights.client, task=task.task_id))
    return outcome


def _launched(recorder: Recorder, original: Original, rank: Any, now: float) -> None:
    original(rank, now)
    if rank.queue is not None:
        rank.queue.whose = rank.client, rank.rank


def _sent(recorder: Recorder, original: Original, queue: Any, data: bytes, lane: Any) -> None:
    original(queue, data, lane)
    message = decode(data, ToProcess)
    if isinstance(message, TaskMessage):
        recorder.say(Event("sent", *queue.whose, message.task.task_id))


def _reaped(recorder: Recorder, original: Original, rank: Any, now: float) -> bool:
    is_gone: bool = original(rank, now)
    if is_gone:
        recorder.say(Event("reaped", rank.client, rank.rank))
    return is_gone


# -- in a process


def _here(recorder: Recorder) -> tuple[str, int, int]:
    process = recorder.process
    assert process is not None
    return *_client_and_rank(process), process.pid


def _client_and_rank(process: Any) -> tuple[str, int]:
    return process.client, int(process.arguments[process.arguments.index("--rank") + 1])


def _lanes_made(recorder: Recorder, original: Original, server: Any, setup: Any, signal: Any, executor: Any) -> None:
    do = executor.do

    def begin(task: TransferTask) -> Any:
        client, rank, pid = _here(recorder)
        recorder.begun.add((pid, task.task_id))
        recorder.say(Event("begun", client, rank, task.task_id))
        return do(task)

    executor.do = begin
    original(server, setup, signal, executor)


def _stepped(recorder: Recorder, original: Original, work: Any) -> Any:
    done, task = original(work), work.task
    if done is None:
        return None
    client, rank, pid = _here(recorder)
    is_begun = (pid, task.task_id) in recorder.begun
    recorder.begun.discard((pid, task.task_id))
    name = "left out" if not is_begun else "failed" if done.result.error is not None else "finished"
    if not work._executor.is_lost:
        num_good = done.result.num_blocks if task.kind is TaskKind.PREFETCH else -1
        recorder.say(Event(name, client, rank, task.task_id, num_good=num_good))
    return done


def _receive_asked(recorder: Recorder, original: Original, server: Any, task: TransferTask, detail: Any) -> None:
    client, rank, pid = _here(recorder)
    is_double = detail.receive_number in server._receives
    if not is_double:
        recorder.receives[pid, detail.receive_number] = task
    original(server, task, detail)
    if is_double or detail.receive_number not in server._receives:
        recorder.say(Event("left out", client, rank, task.task_id))


def _received(recorder: Recorder, original: Original, receive: Any) -> int:
    client, rank, pid = _here(recorder)
    process, task = recorder.process, recorder.receives.pop((pid, receive._detail.receive_number))
    recorder.say(Event("begun", client, rank, task.task_id))
    try:
        num_bytes: int = original(receive)
    except ReceiveFailedError:  # on any other error the process ends
        recorder.say(Event("failed", client, rank, task.task_id), process)
        raise
    recorder.say(Event("finished", client, rank, task.task_id))
    return num_bytes


# -- processes


def _machine_made(recorder: Recorder, original: Original, machine: Machine, *more: Any) -> None:
    original(machine, *more)
    recorder.begin(machine)


def _process_made(
    recorder: Recorder, original: Original, machine: Any, program: str, *more: Any, **keywords: Any
) -> Any:
    process = original(machine, program, *more, **keywords)
    process.client = recorder.spawners.get(id(recorder.actor), "")
    return process


def _process_ended(
    recorder: Recorder, original: Original, machine: Any, process: SimulatedProcess, status: int
) -> None:
    if not process.is_dead and process.program in _PROGRAMS and "--rank" in process.arguments:
        recorder.say(Event("died", *_client_and_rank(process)), process)
    original(machine, process, status)


def _program_run(recorder: Recorder, original: Original, calls: Any, process: Any, command: list[str]) -> int:
    process.arguments = ["-m", *command[command.index("-m") + 2 :]]
    recorder.say(Event("started", *_client_and_rank(process)), process)
    status: int = original(calls, process, command)
    return status


_HOOKS: Final[tuple[tuple[Any, str, Callable[..., Any]], ...]] = (
    (BlockPool, "__init__", _pool_made),
    (Generations, "begin", _generation_begun),
    (life_cycle, "drop_gpu", _gpu_dropped),
    (ranks, "drop_gpu", _gpu_dropped),
    (Outbox, "__init__", _outbox_made),
    (Outbox, "put", _task_put),
    (ProcessIO, "__init__", _io_made),
    (ProcessIO, "run", _io_run),
    (TaskFlow, "accept", _accepted),
    (TaskFlow, "refuse", _refused),
    (TaskFlow, "fail", _failed),
    (Flights, "add", _added),
    (Flights, "answer", _heard),
    (RankSupervisor, "launch", _launched),
    (RankSupervisor, "reap", _reaped),
    (TaskQueue, "put", _sent),
    (LaneServer, "__init__", _lanes_made),
    (LaneTask, "step", _stepped),
    (PeerServer, "_receive", _receive_asked),
    (RankReceive, "run", _received),
    (Machine, "__init__", _machine_made),
    (Machine, "begin", _process_made),
    (Machine, "end", _process_ended),
    (ProcessCalls, "run_program", _program_run),
)

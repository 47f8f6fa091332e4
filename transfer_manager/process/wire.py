"""What an engine and a process of a rank say to each other. Wire format: msgpack, see `fastdeploy_cache.ipc.codec`."""

from __future__ import annotations

import msgspec

from fastdeploy_cache.transfer_manager.task import Lane, RankResult, TransferTask

EXIT_REFUSED = 3  # the process cannot start as configured, and trying again will not help
EXIT_ENGINE_GONE = 4


class TaskMessage(msgspec.Struct, frozen=True, tag="task"):
    """Engine to process: one task. Another incarnation than the one that it is for leaves it alone."""

    incarnation: int
    task: TransferTask


class StopMessage(msgspec.Struct, frozen=True, tag="stop"):
    """Engine to process: end now."""


class ReadyMessage(msgspec.Struct, frozen=True, tag="ready"):
    """Process to engine: this lane waits for tasks.

    `report` is what a process of its kind has to say of itself, as a message that only its owner understands.
    """

    incarnation: int
    lane: Lane
    report: bytes = b""


class DoneMessage(msgspec.Struct, frozen=True, tag="done"):
    """Process to engine: the answer to a task."""

    task_id: int
    incarnation: int
    result: RankResult


ToProcess = TaskMessage | StopMessage
FromProcess = ReadyMessage | DoneMessage

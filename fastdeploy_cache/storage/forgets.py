"""A store is asked to remove all that it has of a namespace."""

from __future__ import annotations

from functools import partial

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.storage.forget import StorageForget
from fastdeploy_cache.storage.link import StorageLink
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult

_NO_MARK = (
    "the default namespace has no mark in the names of its objects; `fastdeploy-cache storage clear` removes all that "
    "the weights have there"
)


class StorageForgets:
    """Those that were asked for and not answered. Under the lock."""

    def __init__(self, books: Books, link: StorageLink) -> None:
        self._books, self._link = books, link
        self._asked: dict[int, StorageForget] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked."""
        return not self._asked

    def are_about(self, namespace: str) -> bool:
        """Whether what the store has of a namespace is being removed: nothing of it is read meanwhile."""
        return any(each.namespace == namespace for each in self._asked.values())

    def start(self, namespace: str, deadline: float) -> StorageForget:
        """Ask each rank's store; by the lane of writes, so behind all that were begun. To overwrite
        files may take until `deadline`."""
        forget = StorageForget(namespace, self._books.clock.event())
        if not namespace:
            return forget.end(_NO_MARK)
        if self._link.is_quiet or self._link.is_unfit:
            return forget.end("the store cannot be asked now; forget the namespace again later")
        forget.ask = partial(self._ask, forget, deadline)
        forget.go_on()
        return forget

    def _ask(self, forget: StorageForget, deadline: float) -> bool:
        if not self._link.can(TaskKind.FORGET):
            return False
        task = self._link.new_task(TaskKind.FORGET, forget.namespace, b"", deadline=deadline)
        self._link.outbox.put(task, self._asked, forget)
        return True

    def has_asked(self, task_id: int) -> bool:
        """Whether a task is one of these."""
        return task_id in self._asked

    def finish(self, result: TransferResult) -> None:
        """Every rank has answered, or is reaped."""
        forget = self._asked.pop(result.task.task_id)
        forget.num_objects = sum([rank.num_blocks for rank in result.ranks])
        forget.end(f"{result.error}; forget the namespace again" if result.error is not None else "")

"""When a store is asked what it has, for somebody who listens. Under the lock."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import StoreChanged
from fastdeploy_cache.transfer_manager.task import TransferResult


class StoreListening:
    """Each answer of a store brings what is new. A question of its own is put where no other task may come that would
    bring it: for a new listener, when the store is open again, and behind a task that has failed, or was for nobody.

    What is more than an answer holds is asked for when the listener has taken that answer, so that nothing piles up.
    A question that fails is put again with the next task, or when the listener asks for it (`hear`).

    Attributes:
        listener: who is told; 0: nobody.
    """

    def __init__(self, books: Books, ask: Callable[[dict[int, None]], None]) -> None:
        """`ask` hands out a question, if that can be now, and notes its number."""
        self._books, self._ask = books, ask
        self.listener = 0
        self._is_due = self._is_more = False  # something may have been told to nobody; there is more to be told
        self.asked: dict[int, None] = {}

    def hear(self, listener: int) -> None:
        """This one listens from now on; or still does, and wants to be sure."""
        self.listener, self._is_due = listener, listener > 0
        self.go_on()

    def opened(self) -> None:
        """The store can be asked from now on."""
        self._is_due = self.listener > 0
        self.go_on()

    def taken(self) -> None:
        """The listener has taken all that was told."""
        if self._is_more:
            self._is_more, self._is_due = False, True
            self.go_on()

    def go_on(self) -> None:
        """Ask, where that is due."""
        if self._is_due and not self.asked:
            self._ask(self.asked)

    def finish(self, result: TransferResult) -> None:
        """A task has ended: tell what it brings."""
        was_question = result.task.task_id in self.asked
        self.asked.pop(result.task.task_id, None)
        if not self.listener:
            return
        is_good = result.error is None and result.task.listener == self.listener
        if is_good and was_question:
            self._is_due = False
        elif not is_good:
            self._is_due = True
        for each in result.ranks:
            if each.news is not None and each.news.listener == self.listener:
                self._is_more |= each.news.has_more
                self._books.note(StoreChanged(rank=each.rank, num_ranks=len(result.ranks), news=each.news))
        if not was_question or result.error is None:
            self.go_on()

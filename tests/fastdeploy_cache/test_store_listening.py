"""When a store is asked what it has: whatever happens, the last that it has is told in the end, and nothing goes round
in circles."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.storage.news import StoreListening
from fastdeploy_cache.transfer_manager.task import RankResult, StoreNews, TaskKind, TransferResult, TransferTask

_NO_IDS = np.empty(0, np.int32)


class Asked:
    """A store that is asked, and what was noted."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.can_ask = True
        self.listening = StoreListening(cast("Books", self), self._ask)
        self.num_asked = 0

    def note(self, change: Any) -> None:
        """As `Books.note`."""
        self.told.append(change.news.number)

    def _ask(self, asked: dict[int, None]) -> None:
        if self.can_ask:
            self.num_asked += 1
            asked[1000 + self.num_asked] = None

    def answer(self, number: int, *, task_id: int | None = None, listener: int | None = None, **said: Any) -> None:
        """A task ends: the question, where nothing else is said. `number` of its news; below 0: it brings none."""
        mine = self.listening.listener if listener is None else listener
        task = TransferTask(
            task_id=next(iter(self.listening.asked)) if task_id is None else task_id,
            kind=TaskKind.LOOKUP, source_ids=_NO_IDS, destination_ids=_NO_IDS, deadline=0.0, listener=mine,
        )  # fmt: skip
        news = StoreNews(mine, 1, number, b"", b"", said.get("has_more", False)) if number >= 0 else None
        self.listening.finish(
            TransferResult(task=task, ranks=(RankResult(rank=0, news=news, error=said.get("error")),))
        )

    @property
    def is_asking(self) -> bool:
        return bool(self.listening.asked)


def test_nobody_is_told_of_what_nobody_hears() -> None:
    """Without a listener nothing is asked, whatever fails."""
    store = Asked()
    store.listening.opened()
    store.answer(-1, task_id=1, error="gone")
    assert not store.num_asked and not store.told


def test_a_new_listener_behind_a_question_of_the_old_one() -> None:
    """Its answer is for nobody: it is asked once more, for the new one."""
    store = Asked()
    store.listening.hear(1)
    store.listening.hear(2)
    store.answer(0, listener=1)
    assert store.is_asking and not store.told
    store.answer(0)
    assert store.told == [0] and not store.is_asking


def test_tasks_that_fail_or_were_for_another_one() -> None:
    """What they have changed is asked for, also behind a task without names; a good one needs no question."""
    store = Asked()
    store.listening.hear(1)
    store.answer(0)
    store.answer(1, task_id=1)
    assert store.num_asked == 1
    for said in ({"error": "late"}, {"listener": 0}):
        num_asked = store.num_asked
        store.answer(-1, task_id=2, **said)
        assert store.num_asked == num_asked + 1
        store.answer(2)
        assert not store.is_asking


def test_a_question_that_fails_is_not_put_at_once() -> None:
    """With the next task, or when the listener wants to be sure."""
    store = Asked()
    store.listening.hear(1)
    store.answer(-1, error="late")
    assert not store.is_asking
    store.answer(0, task_id=1)
    assert store.is_asking
    store.answer(-1, error="late")
    store.listening.hear(1)
    assert store.is_asking


def test_what_cannot_be_asked_now_is_asked_later() -> None:
    """A cache that is paused, or a store that is not open: with whatever goes on."""
    store = Asked()
    store.can_ask = False
    store.listening.hear(1)
    assert not store.is_asking
    store.can_ask = True
    store.listening.go_on()
    assert store.is_asking


def test_more_is_asked_for_when_the_last_was_taken() -> None:
    """A large store is told in pieces, each when the listener has taken the one before."""
    store = Asked()
    store.listening.hear(1)
    store.answer(0, has_more=True)
    assert not store.is_asking
    store.listening.taken()
    store.answer(1)
    store.listening.taken()
    assert store.told == [0, 1] and not store.is_asking

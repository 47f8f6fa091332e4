"""Whether a store has what it once took: it is asked for every block that is cached. Under the lock."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint, chain_of
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.books.run_notes import NOT_STORED
from fastdeploy_cache.ipc.clock import Event
from fastdeploy_cache.storage.checkpoint_writes import names_of_image
from fastdeploy_cache.storage.link import StorageLink
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult

_TASKS_AT_A_TIME = 4  # of an audit: prefetches share the lane


@dataclass(eq=False)
class Audit:
    """One round of questions."""

    runs: list[Run]  # still to be asked for, parents first
    done: Event
    checkpoints: list[Checkpoint] = field(default_factory=list)  # still to be asked for
    num_asked: dict[Run, int] = field(default_factory=dict)  # blocks
    num_in_flight: int = 0  # tasks
    num_missing: int = 0  # blocks, and checkpoints
    has_failed: bool = False  # something could not be asked

    @property
    def is_open(self) -> bool:
        """Whether there is more to ask for."""
        return bool(self.runs or self.checkpoints)


@dataclass(eq=False)
class _Question:
    """The blocks of some runs of one prompt, as they were then."""

    audit: Audit
    parts: list[tuple[Run, int, bytes]]  # blocks, and the last one's hash
    checkpoint: Checkpoint | None = None  # instead of blocks: all pages of its image


class StorageAudits:
    """A store drops blocks that it took: for later ones within its capacity, on a full disk, or since an operator has
    removed them. What is missing is unmarked, so that it is written again with its next use or flush."""

    def __init__(self, books: Books, link: StorageLink) -> None:
        self._tree, self._link, self._clock = books.tree, link, books.clock
        self._checkpoints = books.rows.checkpoints if books.rows is not None else None
        self._audits: list[Audit] = []
        self._questions: dict[int, _Question] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no question is on its way."""
        return not self._questions

    def has_asked(self, task_id: int) -> bool:
        """Whether a look-up is one of these."""
        return task_id in self._questions

    def start(self) -> Audit:
        """Ask for all that is cached now."""
        audit = Audit([run for run in self._tree.runs() if run.epoch == self._tree.epoch], self._clock.event())
        if self._checkpoints is not None:
            audit.checkpoints = [each for run in audit.runs for each in chain_of(run) if self._num_pages(each)]
        self._audits.append(audit)
        self.pump()
        return audit

    def is_whole(self, audit: Audit) -> bool:
        """Whether storage has everything that is cached; of an audit that is done."""
        runs = (run for run in self._tree.runs() if run.epoch == self._tree.epoch)
        is_answered = not audit.has_failed and not audit.num_missing
        return is_answered and all(audit.num_asked.get(run, 0) >= run.num_blocks for run in runs)

    def give_up(self, audit: Audit) -> None:
        """Nobody waits for it any more, or there must be quiet."""
        audit.runs.clear()
        audit.checkpoints.clear()
        audit.has_failed = True
        audit.done.set()
        if audit in self._audits:
            self._audits.remove(audit)

    def stop(self) -> None:
        """Answer who waits."""
        for audit in list(self._audits):
            self.give_up(audit)

    def pump(self) -> None:
        """Ask on, as far as there is room in flight."""
        link = self._link
        for audit in list(self._audits):
            try:
                while audit.is_open and audit.num_in_flight < _TASKS_AT_A_TIME and link.can(TaskKind.LOOKUP):
                    (self._ask if audit.runs else self._ask_for_image)(audit)
            except MemoryError:  # who waits for it hears that it has failed
                self._tree.mishaps.note("write_out")
                self.give_up(audit)
                continue
            is_asked = link.client.available and link.reading.is_closed and not link.is_quiet and not link.is_unfit
            if audit.is_open and not is_asked:
                self.give_up(audit)
            elif not audit.is_open and not audit.num_in_flight:
                self._audits.remove(audit)
                audit.done.set()

    def _ask(self, audit: Audit) -> None:
        """Ask for the blocks of one prompt, from its end up to what was asked for already."""
        run = audit.runs.pop()
        if run in audit.num_asked or run.parent is None or run.epoch != self._tree.epoch:
            return
        path, start = run.path(), 0
        for i, above in enumerate(path):
            start = i + 1 if above in audit.num_asked else start
        names = self._tree.names
        parts = [(each, each.num_blocks, names.of_last(each)) for each in path[start:]]
        tokens = b"".join(bytes(each.tokens) for each in path) if self._link.client.needs_token_ids else b""
        hashes = b"".join(names.of(each, 0, each.num_blocks) for each in path[start:])
        task = self._link.new_task(TaskKind.LOOKUP, run.root().namespace, hashes, token_ids=tokens)
        audit.num_asked.update({each: num_blocks for each, num_blocks, _ in parts})
        self._link.outbox.put(task, self._questions, _Question(audit, parts))
        audit.num_in_flight += 1

    def _num_pages(self, checkpoint: Checkpoint) -> int:
        assert self._checkpoints is not None
        return self._checkpoints.sizes.num_pages(checkpoint.boundary)

    def _ask_for_image(self, audit: Audit) -> None:
        checkpoint = audit.checkpoints.pop()
        if self._checkpoints is None or not self._checkpoints.is_here(checkpoint):
            return
        names = names_of_image(self._tree.names, checkpoint, self._num_pages(checkpoint))
        task = self._link.new_task(TaskKind.LOOKUP, checkpoint.run.root().namespace, names)
        self._link.outbox.put(task, self._questions, _Question(audit, [], checkpoint))
        audit.num_in_flight += 1

    def finish(self, result: TransferResult) -> None:
        """A question was answered; `pump` goes on."""
        question = self._questions.pop(result.task.task_id)
        audit = question.audit
        audit.num_in_flight -= 1
        self._link.judge(result)
        if result.error is not None:
            audit.has_failed = True
        elif question.checkpoint is None:
            self._note_missing(question, result.num_blocks)
        elif result.num_blocks < self._num_pages(question.checkpoint):
            audit.num_missing += 1
            question.checkpoint.stored = NOT_STORED

    def _note_missing(self, question: _Question, num_there: int) -> None:
        """Nothing behind the first `num_there` blocks counts."""
        for run, num_blocks, last_hash in question.parts:
            num_found = min(max(num_there, 0), num_blocks)
            num_there -= num_blocks
            if num_found == num_blocks:
                continue
            question.audit.num_missing += num_blocks - num_found
            is_there = run.parent is not None and run.num_blocks >= num_blocks
            # it was not cut, merged or evicted meanwhile
            if is_there and self._tree.names.of(run, num_blocks - 1, num_blocks) == last_hash:
                run.stored = run.stored.front(num_found)

"""FastDeploy's schedulers at random: what they do to a task between any two calls, and what is published of it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from tests.rigs.fastdeploy_engine import Kernel, Task, give_up_v1

SIZE = 4


@dataclass(eq=False)
class Served:
    """A task, and what the engine knows of it that the task does not say any more."""

    task: Task
    tokens: list[int]  # prompt and output, whatever became of the task's own lists
    is_v0: bool
    num_prompt: int  # tokens to compute before it says something
    table: list[int] = field(default_factory=list)
    num_scheduled: int = 0
    num_computed: int = 0


class Engine:
    """Schedules steps before they run, and does to tasks what the schedulers of both generations do to them.

    Both: outputs are appended by another part of the engine. v0: the cached part is cut off the prompt; on a decode
    instance the first token comes from elsewhere, takes the place of the prompt's first one, and is no output. v1:
    block tables are extended, a task is preempted at any time and comes back with what it had said.
    """

    def __init__(self, manager: PrefixCacheManager, choose: random.Random, *, after_steps: bool = False) -> None:
        self.manager, self.choose, self.kernel = manager, choose, Kernel(manager)
        self.after_steps = after_steps  # update_cache_blocks is called when a step has ended
        self.running: list[Served] = []
        self.seen: Counter[str] = Counter()
        self._texts = [[choose.randrange(5) for _ in range(40)] for _ in range(3)]
        self._num_tasks = 0

    def walk(self) -> None:
        """One thing that happens."""
        actions = [self._start, self._schedule, self._run, self._run, self._finish, self._give_up, self._spoil]
        action = self.choose.choice(actions)
        if action == self._start:
            self._start(is_v0=self.choose.random() < 0.4)
        elif self.running:
            action(self.choose.choice(self.running))  # type: ignore[operator]

    def finish(self) -> None:
        """Everything ends."""
        for served in self.running[:]:
            self._give_up(served)

    def check(self) -> None:
        """What is published holds, in each block, what was computed from the tokens that it is found by."""
        self.manager.cache.check_invariants()
        tokens_of: dict[bytes, list[int]] = {}
        for run in self.manager.cache.blocks.view.runs():
            tokens = tokens_of.get(run.parent_hash, [])
            assert len(tokens) == run.first_block * SIZE
            tokens = tokens + run.token_ids.tolist()
            tokens_of |= {h: tokens[: SIZE * (run.first_block + i + 1)] for i, h in enumerate(run.hashes)}
            table = [-1] * run.first_block + run.block_ids
            self.kernel.check(tokens, table, len(table), first_block=run.first_block)

    # -- what happens

    def _start(self, *, is_v0: bool) -> None:
        if len(self.running) > 4:
            return
        self._num_tasks += 1
        text = self.choose.choice(self._texts)
        prompt = text[: self.choose.randint(1, 40)] + [self.choose.randrange(5)] * self.choose.choice([0, 0, 3])
        task = Task(str(self._num_tasks), np.array(prompt) if self.choose.random() < 0.3 else list(prompt))
        self._admit(Served(task, list(prompt), is_v0, len(prompt)))

    def _admit(self, served: Served) -> None:
        task, manager = served.task, self.manager
        try:
            if served.is_v0:
                common, own, _ = manager.request_block_ids(task, SIZE, 8)
                served.table = common + own
            else:
                common, _, _ = manager.request_match_blocks(task, SIZE)
                served.table = task.block_tables = list(common)
        except AssertionError:
            self.seen["refused"] += 1
            return
        self.kernel.check(served.tokens, common, len(common))
        served.num_scheduled = served.num_computed = len(common) * SIZE
        self.running.append(served)
        if served.is_v0:
            task.prompt_token_ids = task.prompt_token_ids[len(common) * SIZE :]
            self.seen["cut"] += bool(common)
            served.num_scheduled = served.num_prompt  # all of it goes to the worker at once
        self.seen["hit"] += bool(common)

    def _schedule(self, served: Served) -> None:
        if served.is_v0 or (served.num_scheduled == served.num_prompt and not self.after_steps):
            return
        num_tokens = min(served.num_prompt, served.num_scheduled + self.choose.randint(1, 12))
        missing = self.manager.get_required_block_num(num_tokens, SIZE) - len(served.table)
        if not self.manager.can_allocate_gpu_blocks(missing):
            return
        served.table += self.manager.allocate_gpu_blocks(missing, served.task.request_id)
        served.num_scheduled = num_tokens
        if not self.after_steps:
            self.manager.update_cache_blocks(served.task, SIZE, num_tokens)
        self.seen["ahead"] += 1

    def _run(self, served: Served) -> None:
        """The worker computes what it was given; behind its prompt it says a token, and computes on."""
        self.kernel.compute(served.tokens, served.table, served.num_computed, served.num_scheduled)
        served.num_computed = max(served.num_computed, served.num_scheduled)
        if self.after_steps and not served.is_v0:
            self.manager.update_cache_blocks(served.task, SIZE, min(served.num_computed, served.num_prompt))
        if served.num_computed < served.num_prompt:
            return
        if len(served.tokens) > served.num_prompt:  # the token of before is computed now
            if len(served.tokens) > len(served.table) * SIZE:
                return
            self.kernel.compute(served.tokens, served.table, served.num_computed, len(served.tokens))
            served.num_computed = served.num_scheduled = len(served.tokens)
        token = self.choose.randrange(5)
        served.tokens.append(token)
        if served.is_v0 and self.manager.splitwise_role == "decode" and len(served.tokens) == served.num_prompt + 1:
            served.task.prompt_token_ids[0] = token
            self.seen["spoilt"] += 1
            return
        served.task.output_token_ids.append(token)
        self.seen["said"] += 1
        is_full = not served.is_v0 and len(served.tokens) > len(served.table) * SIZE
        if is_full and self.manager.can_allocate_gpu_blocks(1):
            served.table += self.manager.allocate_gpu_blocks(1, served.task.request_id)

    def _finish(self, served: Served) -> None:
        if len(served.tokens) == served.num_prompt:
            return
        if not served.is_v0 and self.manager.cache.config.cache_outputs:
            self.manager.cache_output_blocks(served.task, SIZE)
        self._give_up(served)
        self.seen["finished"] += 1

    def _give_up(self, served: Served) -> None:
        """At its end, or preempted, or aborted: also before anything of it has run."""
        self.running.remove(served)
        self.manager.write_cache_to_storage(served.task)
        if served.is_v0:
            self.manager.release_block_ids_async(served.task).result()
            return
        served.task.block_tables = served.table
        give_up_v1(self.manager, served.task)
        if self.choose.random() < 0.3 and len(served.tokens) < 60:
            served.num_prompt = len(served.tokens)
            self._admit(served)
            self.seen["back"] += 1

    def _spoil(self, served: Served) -> None:
        """What is left of the prompt becomes an array, or loses a token."""
        task = served.task
        if served.is_v0 and self.choose.random() < 0.5:
            task.prompt_token_ids = np.array(task.prompt_token_ids)
        elif served.is_v0 and len(task.prompt_token_ids) > 1:
            task.prompt_token_ids = task.prompt_token_ids[1:]
            self.seen["spoilt"] += 1

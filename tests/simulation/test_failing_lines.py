"""Lines at which memory runs out in stories: each is asked once in a step of the scheduler."""

from __future__ import annotations

import ast
import random
from types import SimpleNamespace
from typing import Any, cast

from fastdeploy_cache.books.block_pool import RUN, BlockPool
from fastdeploy_cache.launch.faults.failing_lines import PACKAGE, FailingLines, grows
from fastdeploy_cache.launch.faults.trouble import Trouble


class _Asked(random.Random):
    """Lets nothing fail, and counts how often it was asked."""

    num_times = 0

    def random(self) -> float:
        self.num_times += 1
        return 1.0


def test_a_line_is_asked_once_in_a_step() -> None:
    """Python 3.11 announces a line that loops over blocks for each of these, and later versions once; a story draws a
    number for each question, so it would be another one under each version."""
    chance, pool = _Asked(), BlockPool("GPU", 8)
    scheduler = SimpleNamespace(num_steps=0, chance=chance)
    lines = FailingLines(cast("Any", scheduler), Trouble())
    lines.memory_error_share = 0.5
    ids = pool.allocate(6, RUN)
    pool.begin_reading(ids[:2])
    lines.follow(True)
    try:
        for _ in range(3):
            assert pool.unread(ids) == ids[2:]
            scheduler.num_steps += 1
    finally:
        lines.follow(False)
    assert chance.num_times == 3


def test_what_needs_no_memory_asks_for_none() -> None:
    """A function whose docstring says so has no line that asks for memory in proportion to blocks, nor lengthens a
    list."""
    said, asking = 0, []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "Needs no memory." in (ast.get_docstring(node) or ""):
                said += 1
                asking += [ast.unparse(part) for part in ast.walk(node) if grows(part) or _lengthens(part)]
    assert said > 20 and not asking


def _lengthens(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"append", "add"}

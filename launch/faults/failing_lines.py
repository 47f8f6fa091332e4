"""Lines of the product at which memory can run out, and calls of what it calls outside; some of them fail."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import fastdeploy_cache
from fastdeploy_cache.books.leaves.guarded import GuardedPolicy
from fastdeploy_cache.books.leaves.policy import EvictionPolicy, LeastRecentlyUsed
from fastdeploy_cache.launch.faults.scheduler import Scheduler
from fastdeploy_cache.launch.faults.trouble import Trouble
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.policies.eviction import RANKING_POLICIES
from fastdeploy_cache.policies.reuse import Reuse

PACKAGE = Path(fastdeploy_cache.__file__).parent
PLACES = ("books", "policies", "movement", "requests", "storage", "peers", "callers", "insight", "manager.py")
# What asks for memory in proportion to blocks: it lengthens, cuts, joins or copies ids, tokens, hashes or heaps.
_GROWING = {"extend", "frombytes", "heappush", "tolist"}
_IDS = {"ids", "block_ids", "hashes", "duplicates", "sources", "new", "evicted", "known"}
_GROWN = {*_IDS, "tokens"}  # though slices of tokens are mostly those of one block, and are left out
_POINTERS = {"stack", "below"}  # of walks over runs: some bytes a run
_INLINED = {"<listcomp>", "<setcomp>", "<dictcomp>"}  # since Python 3.12 they have no frame of their own
_STEPS_BETWEEN = 20  # what undoes a call that has failed does not fail, too
_STEPS_AFTER_OUTSIDE = 100  # nor does what is done instead, which is logged before


class OutsideError(Exception):
    """Something that the cache calls has raised."""


class NoMoreMemoryError(MemoryError):
    """An array could not grow."""


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def grows(node: ast.AST) -> bool:
    """Whether that asks for memory in proportion to blocks."""
    match node:
        case ast.AugAssign(op=ast.Add()):
            return last_name(node.target) in _GROWN
        case ast.BinOp(op=ast.Add()):
            return not _IDS.isdisjoint((last_name(node.left), last_name(node.right)))
        case ast.Subscript(slice=ast.Slice(), ctx=ast.Load()):
            return last_name(node.value) in _IDS
        case ast.Call(func=ast.Attribute(value=value, attr=name)):
            return name in _GROWING and last_name(value) not in _POINTERS
        case ast.Call(func=ast.Name(id="array"), args=[_, ast.ListComp() | ast.GeneratorExp() | ast.Name()]):
            return True
    return False


@functools.cache
def growing_lines() -> frozenset[tuple[str, int]]:
    """Every line of the manager and its rooms that does: its file and its number."""
    places = [PACKAGE / place for place in PLACES]
    return frozenset(
        (str(path), node.lineno)  # type: ignore[attr-defined]
        for place in places
        for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])
        for node in ast.walk(ast.parse(path.read_text()))
        if grows(node)
    )


@functools.cache
def _outside() -> frozenset[CodeType]:
    """What policies are called by, and what metrics are told by."""
    found = [*_methods(CacheMetrics, CacheMetrics, "record")]
    for kind in (LeastRecentlyUsed, Reuse, *RANKING_POLICIES.values()):
        found += _methods(EvictionPolicy, kind)
    return frozenset(found)


def _methods(protocol: type, kind: Any, beginning: str = "") -> Iterator[CodeType]:
    for name in dir(protocol):
        member = inspect.getattr_static(kind, name, None)
        if isinstance(member, FunctionType) and not name.startswith("_") and name.startswith(beginning):
            yield member.__code__


def _is_instead(frame: FrameType | None) -> bool:
    """Whether a policy that has failed is being replaced, further up."""
    while frame is not None and frame.f_code is not GuardedPolicy.replace.__code__:
        frame = frame.f_back
    return frame is not None


class FailingLines:
    """Lets some of them fail, as `trouble` says, in threads of the product and in verbs that users call."""

    def __init__(self, scheduler: Scheduler, trouble: Trouble) -> None:
        self._scheduler, self._trouble = scheduler, trouble
        self._next_step = 0
        self.memory_error_share = self.outside_error_share = 0.0  # at all times
        self.raised = Counter[str]()  # by kind and place
        self._known: dict[CodeType, tuple[bool, frozenset[int]]] = {}
        self._drawn: set[tuple[str, int]] = set()  # lines that have been asked in this step
        self._drawn_step = -1

    @property
    def is_on(self) -> bool:
        """Whether any may fail now."""
        return bool(sum(self._shares))

    @property
    def _shares(self) -> tuple[float, float]:
        """Those of lines that grow, and of calls outside."""
        trouble = self._trouble
        return (
            max(self.memory_error_share, trouble.memory_error_share),
            max(self.outside_error_share, trouble.outside_error_share),
        )

    def follow(self, is_wanted: bool) -> None:
        """The thread that calls this may fail from here on, or may not."""
        if is_wanted and self.is_on:
            sys.settrace(self._called)
        elif sys.gettrace() == self._called:
            sys.settrace(None)

    def _fails(self, share: float, where: str, frame: FrameType | None = None) -> bool:
        scheduler = self._scheduler
        if scheduler.num_steps < self._next_step or not self._trouble.fails(share, scheduler.chance):
            return False
        if _is_instead(frame):  # others have taken so many steps while this thread logged why
            return False
        is_outside = where.startswith("outside")
        self._next_step = scheduler.num_steps + (_STEPS_AFTER_OUTSIDE if is_outside else _STEPS_BETWEEN)
        self.raised[where] += 1
        return True

    def _called(self, frame: FrameType, event: str, value: Any) -> Any:
        code = frame.f_code
        known = self._known.get(code)
        if known is None:
            known = self._known[code] = _what_may_fail(code)
        is_outside, growing = known
        if not is_outside and not growing:
            return None
        if not self.is_on:
            sys.settrace(None)
            return None
        caller = frame.f_back
        while caller is not None and caller.f_code.co_name in _INLINED:
            caller = caller.f_back
        if code.co_name not in _INLINED:  # it is called once more
            self._drawn.difference_update((code.co_filename, line) for line in growing)
        is_outside = is_outside and caller is not None and caller.f_code not in _outside()  # else it calls itself
        if is_outside and self._fails(self._shares[1], f"outside error: {code.co_qualname}", frame):
            raise OutsideError(f"{code.co_qualname} failed")
        return self._in_line if growing else None

    def _in_line(self, frame: FrameType, event: str, value: Any) -> Any:
        code, line = frame.f_code, frame.f_lineno
        if event == "line" and line in self._known[code][1] and self._is_first(code, line):
            where = f"memory error: {Path(code.co_filename).stem}:{line}"
            if self._fails(self._shares[0], where):
                raise NoMoreMemoryError(f"{code.co_qualname} got no memory")
        return self._in_line

    def _is_first(self, code: CodeType, line: int) -> bool:
        """Whether this call has not asked the line yet in this step. How often Python announces the line of a
        comprehension, or of a statement over several lines, differs between its versions, and a story is to be the same
        under each. So a loop asks at its first pass alone, unless the passes are steps."""
        if self._drawn_step != self._scheduler.num_steps:
            self._drawn_step = self._scheduler.num_steps
            self._drawn.clear()
        num_before = len(self._drawn)
        self._drawn.add((code.co_filename, line))
        return len(self._drawn) > num_before


def _what_may_fail(code: CodeType) -> tuple[bool, frozenset[int]]:
    """Whether all of it may, as something outside; and at which of its lines memory can run out."""
    lines = {line or 0 for _, _, line in code.co_lines()}
    return code in _outside(), frozenset(line for line in lines if (code.co_filename, line) in growing_lines())

"""Where the cache calls something that can really fail, read off its source; and a way to let one such call fail."""

from __future__ import annotations

import ast
import contextlib
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

from fastdeploy_cache.launch.faults.failing_lines import PACKAGE, OutsideError, grows, last_name

NOT_DURING_VERBS = {"start", "stop"}


class Site(NamedTuple):
    """What can fail: a line of the source (`growth`, `log`), or a method that is called of something outside."""

    kind: str
    where: str  # a file, or a class
    what: str  # a line, or a method

    def __str__(self) -> str:
        return f"{self.kind} at {self.where.rpartition('/')[2]} {self.what}"


class OutOfMemoryError(MemoryError):
    """An array could not grow."""


def _kind(node: ast.AST) -> str | None:
    if grows(node):
        return "growth"
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return "log" if is_call and last_name(node.func.value) == "logger" else None


def lines() -> frozenset[Site]:
    """Every line of the manager's own modules (adapters stand above them) that asks for memory by blocks, or logs."""
    found = set[Site]()
    for path in PACKAGE.rglob("*.py"):
        if "adapters" in path.relative_to(PACKAGE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            kind = _kind(node)
            if kind is not None:
                found.add(Site(kind, str(path), str(node.lineno)))  # type: ignore[attr-defined]
    return frozenset(found)


def methods(kind: str, protocol: type, *implementations: type) -> dict[CodeType, Site]:
    """The code of every method that a protocol names, in each class that implements it."""
    found = dict[CodeType, Site]()
    for name in dir(protocol):  # with what it inherits of other protocols
        for each in implementations:
            member = inspect.getattr_static(each, name, None)
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType) and not name.startswith("_") and name not in NOT_DURING_VERBS:
                found[function.__code__] = Site(kind, protocol.__name__, name)
    return found


class Tracer(logging.Handler):
    """Follows one thread through verbs, counts the `sites` that it comes by, and lets one of them fail.

    Growth fails before its line; what is outside fails as soon as it has been entered, as if by itself; a log line
    fails in this handler.
    """

    def __init__(self, outside: Mapping[CodeType, Site]) -> None:
        super().__init__(logging.DEBUG)
        self._by_line = {(site.where, int(site.what)): site for site in lines()}
        # By the number of a code object: to hash one costs more than the rest of a look.
        self._outside = {id(code): site for code, site in outside.items()}
        self._grows: dict[int, bool] = {}  # whether a line of it may ask for memory: only such are followed
        self._known = [*outside]  # code objects whose numbers are noted: nobody else gets these
        self._codes: dict[Site, set[int]] = {}  # of a site, as far as known: where to look for it
        for number, site in self._outside.items():
            self._codes.setdefault(site, set()).add(number)
        self._looked_at: set[int] | None = None  # such codes; None stands for all
        self.hits: Counter[Site] = Counter()
        self._armed: tuple[Site, int] | None = None  # raise at its n-th hit, counted from 1
        self._is_over = False  # nothing is looked for any more
        self.has_raised = False
        self._is_following = False

    def begin(self, armed: tuple[Site, int] | None) -> None:
        """Count from now on, every site or only the armed one, which fails at that hit."""
        self.hits.clear()
        self._armed, self._is_over, self.has_raised = armed, False, False
        self._looked_at = self._codes.get(armed[0], set()) if armed is not None else None

    def end(self) -> None:
        """Nothing fails any more, and nothing is counted."""
        self._is_over = True

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """While a verb runs, and what it calls."""
        if self._is_following or self._is_over:
            yield
            return
        self._is_following = True
        if self._looked_at != set():  # else it is a line that logs: `emit` sees it
            sys.settrace(self._called if self._looked_at is None else self._called_there)
        try:
            yield
        finally:
            sys.settrace(None)
            self._is_following = False

    def _hit(self, site: Site) -> None:
        self.hits[site] += 1
        if self._armed == (site, self.hits[site]):
            self.has_raised = self._is_over = True
            raise (OutOfMemoryError if site.kind == "growth" else OutsideError)(f"{site} failed")

    def emit(self, record: logging.LogRecord) -> None:
        site = self._by_line.get((record.pathname, record.lineno))
        if self._is_following and site is not None and site.kind == "log":
            self._hit(site)

    def _called(self, frame: FrameType, event: str, value: Any) -> Any:
        number, caller = id(frame.f_code), frame.f_back
        site = self._outside.get(number)
        if site is not None and caller is not None and id(caller.f_code) not in self._outside:  # else it calls itself
            self._hit(site)
        grows = self._grows.get(number)
        if grows is None:
            grows = self._grows[number] = self._may_grow(frame.f_code)
            self._known.append(frame.f_code)
        return self._line_follower() if grows else None

    def _called_there(self, frame: FrameType, event: str, value: Any) -> Any:
        """The same, where only one site matters, which has been seen before."""
        assert self._looked_at is not None
        return self._called(frame, event, value) if id(frame.f_code) in self._looked_at else None

    def _may_grow(self, code: CodeType) -> bool:
        sites = (self._by_line.get((code.co_filename, line or 0)) for _, _, line in code.co_lines())
        return any(site is not None and site.kind == "growth" for site in sites)

    def _line_follower(self) -> Callable[[FrameType, str, Any], Any]:
        """What sees the lines of one call. A line that goes round within itself, as one with a comprehension does from
        Python 3.12 on, is seen once: what is raised at such a jump passes `except` by, which no real failure does."""
        last = 0

        def follow(frame: FrameType, event: str, value: Any) -> Any:
            nonlocal last
            if event == "line" and frame.f_lineno != last:
                last = frame.f_lineno
                site = self._by_line.get((frame.f_code.co_filename, last))
                if site is not None and site.kind == "growth":
                    self._codes.setdefault(site, set()).add(id(frame.f_code))
                    self._hit(site)
            return follow

        return follow


def traced(tracer: Tracer, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, followed by the tracer."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with tracer.follow():
            return method(*args, **kwargs)

    return run

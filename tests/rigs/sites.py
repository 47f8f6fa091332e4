"""Where the cache calls something that can really fail, read off its source; and a way to let one such call fail."""

from __future__ import annotations

import ast
import contextlib
import inspect
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import fastdeploy_cache

PACKAGE = Path(fastdeploy_cache.__file__).parent
ROOMS = ("books", "policies", "movement", "requests", "storage", "peers", "callers")
# Growth in proportion to blocks: of ids, tokens, hashes and the heaps of free ids and leaves.
GROWING = {"extend", "heappush"}
GROWN = {"ids", "block_ids", "tokens", "hashes", "duplicates", "sources", "kept_ids", "new", "evicted"}
POINTERS = {"stack", "below"}  # of walks over runs: some bytes a run
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


class OutsideError(Exception):
    """Something that the cache calls has raised."""


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _kind(node: ast.AST) -> str | None:
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return "growth" if _last_name(node.target) in GROWN else None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    owner = _last_name(node.func.value)
    if node.func.attr in GROWING and owner not in POINTERS:
        return "growth"
    return "log" if owner == "logger" else None


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
        self._grows: dict[CodeType, bool] = {}  # whether a line of it may ask for memory: only such are followed
        self._outside = outside
        self.hits: Counter[Site] = Counter()
        self.armed: tuple[Site, int] | None = None  # raise at its n-th hit, counted from 1
        self.has_raised = False
        self._is_following = False

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        """While a verb runs, and what it calls."""
        if self._is_following:
            yield
            return
        sys.settrace(self._called)
        self._is_following = True
        try:
            yield
        finally:
            sys.settrace(None)
            self._is_following = False

    def _hit(self, site: Site) -> None:
        self.hits[site] += 1
        if self.armed == (site, self.hits[site]):
            self.has_raised = True
            raise (OutOfMemoryError if site.kind == "growth" else OutsideError)(f"{site} failed")

    def emit(self, record: logging.LogRecord) -> None:
        site = self._by_line.get((record.pathname, record.lineno))
        if self._is_following and site is not None and site.kind == "log":
            self._hit(site)

    def _called(self, frame: FrameType, event: str, value: Any) -> Any:
        site, caller = self._outside.get(frame.f_code), frame.f_back
        if site is not None and caller is not None and caller.f_code not in self._outside:  # else it calls itself
            self._hit(site)
        grows = self._grows.get(frame.f_code)
        if grows is None:
            grows = self._grows[frame.f_code] = self._may_grow(frame.f_code)
        return self._in_line if grows else None

    def _may_grow(self, code: CodeType) -> bool:
        sites = (self._by_line.get((code.co_filename, line or 0)) for _, _, line in code.co_lines())
        return any(site is not None and site.kind == "growth" for site in sites)

    def _in_line(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "line":
            site = self._by_line.get((frame.f_code.co_filename, frame.f_lineno))
            if site is not None and site.kind == "growth":
                self._hit(site)
        return self._in_line

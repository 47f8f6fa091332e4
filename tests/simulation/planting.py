"""Planting faults into the product: each replaces a few words of its own source, so that it says exactly what is taken
away; where the words are not there any more, planting fails."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rewrite:
    """In a function of a module, `old`, which is there once, becomes `new`."""

    module: str
    function: str  # `name`, or `Class.name`
    old: str
    new: str


@dataclass(frozen=True)
class Planted:
    """A fault, and the kinds of findings by which it shows."""

    name: str
    rewrites: tuple[Rewrite, ...]


@contextmanager
def in_place(planted: Planted) -> Iterator[None]:
    """The product has this fault."""
    with ExitStack() as undo:
        for rewrite in planted.rewrites:
            undo.enter_context(_rewritten(rewrite))
        yield


@contextmanager
def _rewritten(rewrite: Rewrite) -> Iterator[None]:
    module = importlib.import_module(f"fastdeploy_cache.{rewrite.module}")
    found: Any = module
    for part in rewrite.function.split("."):
        found = inspect.getattr_static(found, part)
    function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    before = function.__code__
    source = _SOURCES.get(before) or textwrap.dedent(inspect.getsource(function))
    assert source.count(rewrite.old) == 1, f"{rewrite.function} has {rewrite.old!r} {source.count(rewrite.old)} times"
    changed = source.replace(rewrite.old, rewrite.new)
    decorators = changed[: changed.index("def ")]
    # at its own lines, since memory runs out by line
    num_above = before.co_firstlineno - 1 + (0 if before in _SOURCES else decorators.count("\n"))
    text = "from __future__ import annotations" + num_above * "\n" + changed.removeprefix(decorators)
    names: dict[str, Any] = {}
    exec(compile(text, before.co_filename, "exec"), dict(vars(module)), names)
    (made,) = [each for each in names.values() if getattr(each, "__name__", "") == function.__name__]
    _SOURCES[made.__code__] = changed  # another rewrite of the same function goes on from it
    function.__code__ = made.__code__
    try:
        yield
    finally:
        function.__code__ = before


_SOURCES: dict[Any, str] = {}

"""Parts of a package imported by themselves: empty stand-ins take the place of whatever else they import.

For a package that lies in a folder without the libraries that it needs, of which somebody uses a few modules only.
What is imported beside these is named in annotations, derived from, or called while modules are being loaded; a
stand-in allows all of that and does nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class _HollowType(type):
    """The type of hollow classes: they have every attribute, and decorate, subscript and join with `|` as nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _hollow_class(name)
        setattr(cls, name, value)
        return value

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and not options and callable(args[0]):
            return args[0]  # it decorates
        return super().__call__(*args, **options)

    def __getitem__(cls, key: object) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class _Hollow(metaclass=_HollowType):
    """An object that may be called and has every attribute; it is false and empty."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Hollow()

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and not options and callable(args[0]) else _Hollow()

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False


def _hollow_class(name: str) -> _HollowType:
    return _HollowType(name, (_Hollow,), {})


class _HollowModule(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _hollow_class(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a hollow module under each name that it is asked for and `is_hollow` says so of."""

    def __init__(self, is_hollow: Callable[[str], bool]) -> None:
        self._is_hollow = is_hollow

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """See `MetaPathFinder`."""
        if not self._is_hollow(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """See `Loader`."""
        return _HollowModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """See `Loader`: there is nothing to do."""


def import_from_now_on(folder: Path, package: str, parts: Sequence[str]) -> None:
    """Let `import` find the named parts of the package in `folder`, without its `__init__`, and everything below those
    that end with a dot. All else of the package is hollow, and so are libraries that are not installed.

    It holds until the process ends, so the process should have no other purpose.
    """
    whole = types.ModuleType(package)
    whole.__path__ = [str(folder / package)]
    sys.modules[package] = whole
    inside, below = f"{package}.", tuple(f"{package}.{part}" for part in parts if part.endswith("."))
    real = {inside + part.removesuffix(".") for part in parts}

    def is_left_out(name: str) -> bool:
        return name.startswith(inside) and name not in real and not name.startswith(below)

    def is_not_installed(name: str) -> bool:  # asked last, when nobody has found it
        top = name.partition(".")[0]
        return top != package and top not in sys.stdlib_module_names and not top.startswith("_")

    sys.meta_path.insert(0, _Finder(is_left_out))
    sys.meta_path.append(_Finder(is_not_installed))

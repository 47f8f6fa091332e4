"""What all classes of settings share: integers are integers, and a misspelt name is told with the right one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, TypeVar

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.sizes import parse_size

T = TypeVar("T")
_MAX_LISTED = 16  # names in a message


def check_integers(config: Any, error: type[Exception], prefix: str = "") -> None:
    """Raise `error` for a dataclass field that is declared as an integer and holds something else."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if (item.type == "int" or (item.type == "int | None" and value is not None)) and type(value) is not int:
            raise error(f"{prefix}{item.name} is {value!r}; give a whole number")


def meant(name: str, known: Iterable[str], prefix: str = "") -> str:
    """What to say of a name that is none: the known one that it is like or, where it is like none, where all of them
    are. `prefix` stands before each."""
    import difflib  # late: of mistakes alone

    names = list(known)
    if near := difflib.get_close_matches(name, names, n=1):
        return f"did you mean {prefix + near[0]!r}?"
    if len(names) > _MAX_LISTED:
        return "it is like no setting; `fastdeploy-cache config sample` prints all of them."
    return f"use one of {', '.join([prefix + each for each in names])}."


def names_checked(cls: type[T]) -> type[T]:
    """Decorates a dataclass with keyword-only fields: a call with a name that it does not have, or without one that it
    needs, is a `ConfigError` of ours, where Python's own `TypeError` says nothing of what to do. A text of a field that
    ends in `_bytes`, such as `10GB`, is the bytes that it means, as in a file."""
    fields: dict[str, Any] = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    needed = [
        name
        for name, item in fields.items()
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]
    make: Any = vars(cls)["__init__"]

    @functools.wraps(make)
    def init(self: T, **given: Any) -> None:
        unknown = next((name for name in given if name not in fields), None)
        if unknown is not None:
            raise ConfigError(f"{cls.__name__} has no {unknown!r}; {meant(unknown, fields)}")
        missing = [name for name in needed if name not in given]
        if missing:
            them = "it" if len(missing) == 1 else "them"
            raise ConfigError(f"{cls.__name__} is made without {', '.join(missing)}; give {them}")
        texts = [name for name, value in given.items() if isinstance(value, str) and name.endswith("_bytes")]
        make(self, **{**given, **{name: parse_size(given[name], name) for name in texts}})

    setattr(cls, "__init__", init)  # noqa: B010 (a checker forbids the assignment)
    return cls

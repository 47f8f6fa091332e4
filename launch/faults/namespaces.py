"""What the product finds under the names of modules while it is simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_CONSTANTS = (int, str, bytes, float, frozenset)


class NotSimulatedError(AssertionError):
    """The product calls something of the system that the simulated machine does not have."""


class Namespace:
    """A module's place: what is simulated, and the constants and errors of the real one. All else is refused."""

    def __init__(self, real: ModuleType, simulated: Mapping[str, Any], also: tuple[str, ...] = ()) -> None:
        """`also`: further names of the real one, which touch nothing."""
        self._real, self._also = real, also
        vars(self).update(simulated)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        is_error = isinstance(found, type) and issubclass(found, BaseException)
        if isinstance(found, _CONSTANTS) or is_error or name in self._also:
            vars(self)[name] = found
            return found
        raise NotSimulatedError(f"{self._real.__name__}.{name} is not simulated")


@contextmanager
def substituted(modules: Mapping[str, ModuleType], places: Mapping[int, Any]) -> Iterator[None]:
    """Put what is simulated into the modules, wherever one has the real thing under some name of its own; and back.

    `places`: by the `id` of the real thing.
    """
    undone: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in modules.values():
            names = vars(module)
            for name, value in list(names.items()):
                if id(value) in places and not name.startswith("__"):
                    undone.append((names, name, value))
                    names[name] = places[id(value)]
        yield
    finally:
        for names, name, value in reversed(undone):
            names[name] = value

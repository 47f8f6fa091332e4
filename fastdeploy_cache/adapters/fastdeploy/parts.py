"""What the adapter is put together from, and how a manager has the calls of its parts and shows what they have."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Concatenate, Generic, NoReturn, ParamSpec, Protocol, Self, TypeVar, cast, overload

from fastdeploy_cache.adapters.fastdeploy.blocks import BlockCalls
from fastdeploy_cache.adapters.fastdeploy.current_cache import CurrentCache
from fastdeploy_cache.adapters.fastdeploy.held_tasks import HeldTasks
from fastdeploy_cache.adapters.fastdeploy.launching import Launcher
from fastdeploy_cache.adapters.fastdeploy.peers import PeerCalls
from fastdeploy_cache.adapters.fastdeploy.sequences import CallSequences
from fastdeploy_cache.adapters.fastdeploy.storage import StorageCalls
from fastdeploy_cache.adapters.fastdeploy.views import Views

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Part = TypeVar("Part")
P = ParamSpec("P")


class Parts:
    """Each is about one kind of calls. All look at one current cache, and most at the tasks that are held."""

    def __init__(
        self, current: CurrentCache, tp_size: int, *, load_timeout_seconds: float, schedules_ahead: bool
    ) -> None:
        """Put them together around a cache."""
        self.current = current
        self.tasks = HeldTasks(current, load_timeout_seconds=load_timeout_seconds, schedules_ahead=schedules_ahead)
        self.sequences = CallSequences(current, self.tasks)
        self.blocks = BlockCalls(current)
        self.views = Views(current, self.tasks)
        self.storage = StorageCalls(current, self.tasks, load_timeout_seconds=load_timeout_seconds)
        self.launcher = Launcher(current, self.tasks, tp_size=tp_size)
        self.peers = PeerCalls(current, self.tasks, self.launcher)


class _HasParts(Protocol):
    @property
    def parts(self) -> Parts: ...


class Shown(Generic[T_co]):
    """An attribute of a manager: what a part has there at the moment of the look. Nobody can set it."""

    def __init__(self, look: Callable[[Parts], T_co]) -> None:
        self._look = look

    @overload
    def __get__(self, manager: None, kind: type) -> Self: ...
    @overload
    def __get__(self, manager: _HasParts, kind: type) -> T_co: ...
    def __get__(self, manager: _HasParts | None, kind: type) -> Self | T_co:
        return self if manager is None else self._look(manager.parts)

    def __set__(self, manager: _HasParts, value: object) -> NoReturn:
        raise AttributeError("this attribute is read from the cache; nobody can set it")


class Handed(Generic[Part, P, T]):
    """A call of a manager that one of its parts does. Looked at on the class it is the part's function, whose
    parameters the hook compares; a manager keeps it bound from the first look on, so that it costs nothing more."""

    def __init__(self, part: Callable[[Parts], Part], call: Callable[Concatenate[Part, P], T]) -> None:
        self._part, self._call = part, call

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, manager: None, kind: type) -> Callable[Concatenate[Part, P], T]: ...
    @overload
    def __get__(self, manager: _HasParts, kind: type) -> Callable[P, T]: ...
    def __get__(self, manager: _HasParts | None, kind: type) -> Callable[Concatenate[Part, P], T] | Callable[P, T]:
        if manager is None:
            return self._call
        bound = cast("Callable[P, T]", MethodType(self._call, self._part(manager.parts)))
        vars(manager)[self._name] = bound
        return bound

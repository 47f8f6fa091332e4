"""An import hook: where FastDeploy takes its `PrefixCacheManager`, it gets ours.

FastDeploy's resource manager imports the class by name from one module. The hook wraps the loader of that module alone:
once the module has run, the class in it is held against ours, call by call, and replaced. Nothing else is touched, and
where the module is never imported nothing happens.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

from fastdeploy_cache.errors import ConfigError

logger = logging.getLogger(__name__)

MODULE = "fastdeploy.cache_manager.prefix_cache_manager"
CLASS = "PrefixCacheManager"
# Steps inside theirs, which nobody outside calls: see docs/adapters/fastdeploy.md.
_INSIDE = {
    *("match_block", "mm_match_block", "build_path", "mm_build_path", "clear_prefix_cache"),
    *("recv_data_transfer_result", "cal_block_hash", "hash_block_features", "issue_swap_task", "sync_swap_task"),
    *("issue_write_back_storage_task", "wait_write_storage_task"),
    *("issue_prefetch_storage_task", "wait_prefetch_storage_task"),
}
# What a call writes into the task and the answer, which its callers read: versions of 2025 have other names.
_WRITTEN = {
    "request_match_blocks": (
        "num_cached_blocks",
        "gpu_match_token_num",
        "storage_match_token_num",
        "gpu_recv_block_ids",
    ),
    "update_cache_blocks": ("num_cached_blocks",),
    "request_block_ids": ("gpu_cache_blocks", "cpu_cache_blocks"),
}


class UnknownVersionError(ConfigError):
    """This FastDeploy's cache manager has calls that ours does not take. No ImportError: nothing may pass over it."""


def install() -> None:
    """Put the hook before all other finders, once. Before FastDeploy is imported.

    Raises:
        ConfigError: FastDeploy's cache manager is imported already.
    """
    if MODULE in sys.modules:
        raise ConfigError(f"{MODULE} is imported already; install the hook before FastDeploy is imported")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def uninstall() -> None:
    """Take the hook away; what was replaced stays replaced."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


def differences(theirs: type, ours: type) -> list[str]:
    """Calls of theirs that ours does not take as they are, and names that theirs does not write as ours does; none
    where ours can take the place of theirs.

    A call of ours may have further parameters that need not be given. What begins with an underscore is not looked at.
    """
    calls = {"__init__", *(name for name in vars(theirs) if not name.startswith("_"))} - _INSIDE
    unwritten = [
        f"{call} does not write {name}"
        for call, names in _WRITTEN.items()
        for name in names
        if name not in _names_in(getattr(theirs, call, None))
    ]
    return [*_differences(sorted(calls), theirs, ours), *unwritten]


def _names_in(call: Any) -> set[object]:
    """Attributes, and texts, that a function names."""
    code = getattr(inspect.unwrap(call), "__code__", None) if call is not None else None
    if code is None:
        return set()
    texts = [each for value in code.co_consts for each in (value if isinstance(value, tuple) else (value,))]
    return {*code.co_names, *(each for each in texts if isinstance(each, str))}


def _differences(names: Sequence[str], theirs: type, ours: type) -> Iterator[str]:
    for name in names:
        call, own = inspect.getattr_static(theirs, name), inspect.getattr_static(ours, name, None)
        if own is None:
            yield f"{name} is not known here"
        elif inspect.isroutine(call):
            parameters = _parameters(getattr(theirs, name), is_static=isinstance(call, staticmethod))
            if not _takes(getattr(ours, name), parameters, is_static=isinstance(own, staticmethod)):
                here = inspect.signature(getattr(ours, name))
                yield f"{name}({', '.join(parameters)}) is called otherwise here: {here}"


def _parameters(call: Callable[..., Any], *, is_static: bool) -> list[str]:
    """The names that a caller may give, by place or by keyword, without `self`."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    given = [p.name for p in inspect.signature(call).parameters.values() if p.kind in kinds]
    return given if is_static else given[1:]


def _takes(call: Callable[..., Any], parameters: Sequence[str], *, is_static: bool) -> bool:
    """Whether a call takes these by keyword as well as by place, each for the same, and needs no others."""
    own = () if is_static else ("self",)
    signature = inspect.signature(call)
    try:
        signature.bind(*own, **{name: name for name in parameters})
        bound = signature.bind(*own, *parameters).arguments
    except TypeError:
        return False
    return all(bound.get(name) == name for name in parameters)


class _Finder(MetaPathFinder):
    """Finds the one module as the finders after it do, and wraps its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Loads as the loader that it wraps, and replaces the class after it."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:  # get_source and the like, for tracebacks
        return getattr(self._wrapped, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._wrapped.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._wrapped.exec_module(module)
        _replace(module)


def _replace(module: ModuleType) -> None:
    from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager  # only where it is used

    theirs = getattr(module, CLASS, None)
    if not isinstance(theirs, type):
        raise UnknownVersionError(f"{module.__file__} has no class {CLASS}; this FastDeploy is not known here")
    if wrong := differences(theirs, PrefixCacheManager):
        raise UnknownVersionError(
            f"the {CLASS} of {module.__file__} is not known here: {'; '.join(wrong)}. Run FastDeploy without "
            "fastdeploy_cache, or with a version that docs/adapters/fastdeploy.md names"
        )
    setattr(module, CLASS, PrefixCacheManager)
    ours = f"{PrefixCacheManager.__module__}.{CLASS}"
    logger.warning("event=replaced name=%s.%s file=%s by=%s pid=%d", MODULE, CLASS, module.__file__, ours, os.getpid())

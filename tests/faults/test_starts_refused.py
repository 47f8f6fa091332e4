"""What the system refuses while something starts: an error that its page names, and nothing is left behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fastdeploy_cache import PrefixCacheManager, StorageConfig
from fastdeploy_cache.errors import StorageError
from tests.rigs.faulty_engine import Engine, new_config

pytestmark = pytest.mark.processes
PROMPT = list(range(100, 121))


def refuse_threads(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    """The system has no more threads of that name."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == named:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)


def test_a_manager_without_its_thread_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptors and its shared memory are gone, and the next one starts."""
    with monkeypatch.context() as patch:
        refuse_threads(patch, "transfer-io")
        with pytest.raises(RuntimeError, match="can't start new thread"):
            PrefixCacheManager(new_config(2, 8, 20))
    with PrefixCacheManager(new_config(2, 8, 20)) as cache:
        Engine(cache, 2).serve(PROMPT)


def test_a_store_without_its_thread_is_not_attached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`attach` raises what its page says; the cache serves on without a store, and a later call attaches it."""
    store = StorageConfig(folder=str(tmp_path / "store"), weights_id="w")
    with PrefixCacheManager(new_config(2, 8, 20)) as cache:
        with monkeypatch.context() as patch:
            refuse_threads(patch, "transfer-io")
            with pytest.raises(StorageError, match="the store cannot be opened now: can't start new thread"):
                cache.storage.attach(store)
        assert not cache.storage.is_attached
        Engine(cache, 2).serve(PROMPT)
        cache.check_invariants()
        cache.storage.attach(store)
        assert cache.storage.is_attached
        cache.check_invariants()

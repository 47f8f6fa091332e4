"""Instances of a test, here and in processes of their own, and the prompt that they hand over."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from fastdeploy_cache import PrefixCacheManager
from tests.rigs.instance import BLOCK_SIZE, Instance, InstanceProcess, new_config

NUM_BLOCKS = 9
TOKENS = list(range(100, 100 + NUM_BLOCKS * BLOCK_SIZE + 2))
NONE_HELD = [0, 0, 0]


class Rig:
    """Instances that are closed at the end."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened

    def here(self, role: str, **settings: Any) -> Instance:
        """In this process."""
        config = new_config(role=role, **settings)
        return Instance(self._opened.enter_context(PrefixCacheManager(config)))

    def apart(self, role: str, **settings: Any) -> InstanceProcess:
        """In a process of its own."""
        process = InstanceProcess(role=role, **settings)
        self._opened.callback(process.close)
        return process

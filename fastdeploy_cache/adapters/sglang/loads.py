"""Loads from the CPU tier for SGLang's cache: waited for, or used layer by layer while they arrive."""

from __future__ import annotations

from fastdeploy_cache.adapters.sglang.nodes import Node
from fastdeploy_cache.callers.transfers import CallerLoad
from fastdeploy_cache.manager import PrefixCacheManager

_KILL_SECONDS = 5.0  # behind a task's deadline its rank is killed and reaped; that answers every wait


class Loads:
    """Those that were started and not checked. One thread at a time."""

    def __init__(self, manager: PrefixCacheManager, *, overlap: bool) -> None:
        self._manager, self._overlap = manager, overlap
        self._going: list[tuple[Node, CallerLoad]] = []
        self._started: list[int] = []

    def start(self, node: Node) -> list[int] | None:
        """Load what is missing up to a node; its pages, or None where it cannot be had now."""
        load = self._manager.blocks.copies.load(node.request, node.num_pages, ahead=True)
        if load is None:
            return None
        if self._overlap:
            self._going.append((node, load))
            self._started += load.task_ids
            return load.block_ids
        came = self._manager.blocks.copies.end_load(load, self._manager.config.transfer.task_timeout_seconds)
        return load.block_ids if came else None

    def take_started(self) -> tuple[int, ...]:
        """The task ids of the loads that were started since the last call: what workers give to
        `LayerProgress.wait_layer` as the producer of this batch."""
        started, self._started = tuple(self._started), []
        return started

    def check(self) -> list[Node]:
        """End those that are done; returns the nodes of those that failed: what was computed on them is worth nothing,
        and its request has to be computed again."""
        done = [(node, load) for node, load in self._going if load.done]
        self._going = [(node, load) for node, load in self._going if not load.done]
        return [node for node, load in done if not self._manager.blocks.copies.end_load(load)]

    def settle(self, node: Node) -> None:
        """Wait until a node's loads have ended: workers see the last layer before the answer is here, and until then
        its blocks are the load's. Every load ends at its own deadline."""
        for _, load in [each for each in self._going if each[0] == node]:
            load.wait(self._manager.config.transfer.task_timeout_seconds + _KILL_SECONDS)

    def end_all(self) -> None:
        """Nobody uses them any more."""
        for _, load in self._going:
            self._manager.blocks.copies.end_load(load)
        self._going, self._started = [], []

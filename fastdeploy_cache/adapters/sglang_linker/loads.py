"""Loads of whole batches, layer by layer. One thread."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_cache.adapters.sglang_linker.page_cache import PageCache, PageLoad
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.event_log import event_log

logger = event_log(__name__)


class _Batch:
    """Loads that begin together, with the caches that they are of."""

    def __init__(self, loads: Sequence[tuple[PageCache, PageLoad]], deadline: float, *, is_short: bool) -> None:
        self._loads, self._deadline = list(loads), deadline
        self._failed = is_short
        self._last = -1  # layer of the model that was waited for

    def start(self) -> None:
        """Begin them all, as far as there is a place for them."""
        for _, load in self._loads:
            load.start()

    def wait_layer(self, layer: int) -> None:
        """Wait until a layer of the model is there, and those before it, or until it is known that they do not come."""
        before, self._last = self._last, max(self._last, layer)
        for cache, load in self._loads:
            number = cache.num_layers_up_to(layer) - 1
            if number < cache.num_layers_up_to(before):
                continue  # none since
            while not self._failed and not self._has_come(cache, load, number):
                self._failed = not load.begin_again(self._deadline)

    def _has_come(self, cache: PageCache, load: PageLoad, number: int) -> bool:
        # The model writes its new state over the one that it has read. A rank that dies behind the first layer's
        # answer, and a copy that is begun again by the next, would bring the old state back: so no layer of a state is
        # told of before nothing can write into any of them.
        return load.wait(self._deadline) if cache.is_state else load.wait_layer(number, self._deadline)

    def finish(self) -> bool:
        """Wait until nothing of it is written any more; whether all is there."""
        for _, load in self._loads:
            while not self._failed and not load.wait(self._deadline):
                self._failed = not load.begin_again(self._deadline)
        for _, load in self._loads:
            load.end()
        return not self._failed


class LayerLoads:
    """SGLang's `layer_done_counter`: the model waits here for each layer of the batch that it computes.

    A load that fails with its rank is begun again by the next one, so that its death costs time alone. Whoever waits
    for a layer does that: there is no thread.

    Attributes:
        num_layers, consumer_index: SGLang reads both, where it waits for the last layer alone.
        num_failed: batches.
    """

    def __init__(self, num_layers: int, seconds: float) -> None:
        """`num_layers`: of the model. `seconds`: that a batch may take."""
        self.num_layers, self._seconds = num_layers, seconds
        self._batches: dict[int, _Batch] = {}
        self._last, self.consumer_index = -1, -1
        self.num_failed = 0

    def begin(self, loads: Sequence[tuple[PageCache, PageLoad]], *, is_short: bool = False) -> int:
        """Start these; the batch's index. `is_short`: some of what it needs is not here, so that it fails."""
        self._last += 1
        batch = self._batches[self._last] = _Batch(loads, SYSTEM_CLOCK.now() + self._seconds, is_short=is_short)
        batch.start()
        return self._last

    def set_consumer(self, index: int) -> None:
        """The batch that is computed next; -1: one without loads."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """The model is about to read this layer."""
        batch = self._batches.get(self.consumer_index)
        if batch is not None:
            batch.wait_layer(layer)

    def finish(self, index: int) -> bool:
        """Wait until a batch stops writing; whether all of it is there. Of none, it is."""
        batch = self._batches.pop(index, None)
        if batch is None or batch.finish():
            return True
        self.num_failed += 1
        logger.error("event=linker_load_failed batch=%d action=requests_aborted num=%d", index, self.num_failed)
        return False

    def finish_all(self) -> None:
        """Wait for all of them."""
        for index in list(self._batches):
            self.finish(index)

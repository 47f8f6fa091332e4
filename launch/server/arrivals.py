"""What the engine's thread brings, awaited on an event loop: it costs no thread, and nobody looks every so often."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastdeploy_cache.launch.reference_engine.engine import Engine
from fastdeploy_cache.launch.reference_engine.generation import Generation, GenerationTimeoutError

T = TypeVar("T")


class Arrivals:
    """The arrivals of one generation or several, for one task."""

    def __init__(self, engine: Engine, generations: Sequence[Generation]) -> None:
        self._engine, self._generations = engine, generations
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        for generation in generations:
            generation.on_change(self.note)

    def note(self) -> None:
        """Something has come. Any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
            self._loop.call_soon_threadsafe(self._news.set)

    async def take(self, look: Callable[[float], T], seconds: float) -> T:
        """What `look` finds within these seconds, called with no time to wait; else all of them are cancelled.

        Raises:
            GenerationTimeoutError: the time is over.
            GenerationError: the engine failed one of them.
        """
        try:
            async with asyncio.timeout(seconds):
                while True:
                    # cleared first: what came between a look and a clear would be told to nobody
                    self._news.clear()
                    with contextlib.suppress(GenerationTimeoutError):
                        return look(0.0)
                    await self._news.wait()
        except TimeoutError:
            self._cancel()
            text = f"nothing came within {seconds} s; the engine is overloaded, paused or asleep"
            raise GenerationTimeoutError(text) from None
        except BaseException:
            self._cancel()
            raise

    def _cancel(self) -> None:
        for generation in self._generations:
            self._engine.intake.cancel(generation)

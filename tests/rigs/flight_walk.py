"""Random verbs over a cache that records them, and what a replay of that recording makes of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from fastdeploy_cache.insight.flight.file import read_recording
from fastdeploy_cache.launch.simulator.flight_replay import FlightReplay
from fastdeploy_cache.launch.simulator.replay_outcome import ReplayOutcome
from fastdeploy_cache.request import Image, Request
from tests.rigs.cache_model import CacheModel, LiveRequest
from tests.rigs.manual_clock import ManualClock

TEXTS = [[(7 * i * i + text * (i // 9)) % 5 for i in range(60)] for text in range(4)]
IMAGES = [Image(offset, length, name) for offset in (3, 5) for length in (1, 9) for name in (b"cat", b"dog")]
_ACTIONS = {"serve": 9, "match": 4, "reset": 0.2, "kv lost": 0.1, "pause": 0.2, "prefetch": 1}
_ACTIONS_OF_LIVE = {"allocate": 4, "compute": 5, "release": 7, "step": 9}


class FlightWalk:
    """`is_inline`: each copy ends at once, as with the in-process client; else some steps later, or fails."""

    def __init__(
        self, seed: int, block_size: int, num_gpu: int, num_cpu: int, *, is_inline: bool, **given: Any
    ) -> None:
        self._choose, self._is_inline, self._clock = random.Random(seed), is_inline, ManualClock(seed)
        self.model = CacheModel(block_size, num_gpu, num_cpu, clock=self._clock, **given)
        self.model.client.auto = is_inline
        self._say = random.Random(seed + 1)
        self.model.hint = self._hint

    def run(self, num_steps: int) -> None:
        """Go so many steps."""
        for _ in range(num_steps):
            self._clock.advance(self._choose.random())
            self._step()

    def replayed(self, path: Path) -> ReplayOutcome:
        """Write the recording, and replay it."""
        self.model.cache.insight.write_flight(path)
        return FlightReplay(read_recording(path)).run()

    def _step(self) -> None:
        model, choose = self.model, self._choose
        actions = _ACTIONS | (_ACTIONS_OF_LIVE if model.live else {}) | ({} if self._is_inline else {"land": 8})
        action = choose.choices(list(actions), list(actions.values()))[0]
        if action == "step":
            together = choose.sample(model.live, choose.randint(1, len(model.live)))
            model.step([(live, [choose.randint(0, 4) for _ in range(choose.randint(0, 9))]) for live in together])
        elif action in _ACTIONS_OF_LIVE:
            self._go_on(action, choose.choice(model.live))
        elif action == "land":
            model.land(choose.choice((None, None, None, "rank died")), choose.randint(1, 4))
        elif action == "reset":
            model.reset()
        elif action == "kv lost":
            model.kv_lost()
        elif action == "pause":
            model.client.land_all()
            model.client.auto = True  # what asks the lanes whether they have done all is answered
            model.cache.life.pause()
            model.cache.life.resume()
            model.client.auto = self._is_inline
        else:
            self._begin(action)

    def _hint(self, request: Request) -> None:
        """Some name a session, some say whether they go on."""
        say = self._say
        request.session_id = say.choice(("", "", "one", "two", "three"))
        request.tool_name = say.choice(("", "grep"))
        request.will_go_on = say.choice((None, None, 0.0, 0.4, 1.0))
        request.session_ended, request.tool_call_pending = say.random() < 0.1, say.random() < 0.1

    def _begin(self, action: str) -> None:
        model, choose = self.model, self._choose
        text = choose.choice(TEXTS)[: choose.randint(1, 48)]
        text += [choose.randint(0, 4) for _ in range(choose.choice((0, 0, 3)))]
        images = [choose.choice(IMAGES)] if len(text) > 24 and choose.random() < 0.2 else []
        if action == "serve":
            model.serve(text, stays=choose.random() < 0.2, patient=choose.random() < 0.7, images=images)
            return
        live = model.match(text, choose.choice(("", "", "", "lora")))
        if action == "prefetch" and live is not None:
            request = live.request
            model.release(live)
            model.cache.prefetch(request)
            model.cache.end_prefetch(request)

    def _go_on(self, action: str, live: LiveRequest) -> None:
        model, choose = self.model, self._choose
        if action == "allocate":
            model.allocate(live, choose.randint(0, 6))
        elif action == "release":
            model.release(live)
        else:
            live.request.append_output([choose.randint(0, 4) for _ in range(choose.randint(0, 9))])
            limit = model.computable(live)
            if live in model.live and limit >= live.num_computed:
                model.compute(live, choose.randint(live.num_computed, limit))

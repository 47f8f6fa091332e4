"""A scheduler for several conversations at once; it knows the cache only through `PrefixCacheManager`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fastdeploy_cache import Match, PrefixCacheManager
from fastdeploy_cache.errors import CacheError, OutOfBlocksError
from fastdeploy_cache.launch.reference_engine.block_tables import new_tables
from fastdeploy_cache.launch.reference_engine.generation import Generation
from fastdeploy_cache.launch.reference_engine.hybrid_spec import STEP_TOKENS
from fastdeploy_cache.launch.reference_engine.intake import Intake
from fastdeploy_cache.launch.reference_engine.open_transfers import OpenTransfers
from fastdeploy_cache.launch.reference_engine.overlap import LOAD_SECONDS, LoadOverlap
from fastdeploy_cache.launch.reference_engine.paged_kv import SequenceChunk
from fastdeploy_cache.launch.reference_engine.receiving import Receives
from fastdeploy_cache.launch.reference_engine.sending import Sends
from fastdeploy_cache.launch.reference_engine.waiting_line import WaitingLine

_TRANSFER_WAIT_SECONDS = 1.0


class Model(Protocol):
    """What the engine needs of `launch.reference_engine.model.Llama`."""

    def forward(
        self, chunks: Sequence[SequenceChunk], before_layer: Callable[[int], None]
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Compute the chunks and return the logits of each one's last token.

        Calls `before_layer` with a layer's number before it reads that layer's KV.
        """
        ...


@dataclass(frozen=True)
class EngineSettings:
    """What an engine has to know of its model, and how it serves.

    Attributes:
        eos_token_id: the token that ends an answer.
        context_length: the most tokens that the model takes, prompt and answer.
        max_running: how many generations share a step.
        overlap: a prompt is computed while its cached prefix is still being loaded: each layer waits for its own.
        recompute_not_received: without it a prompt whose blocks do not come from the instance that offered them has
            failed.
    """

    eos_token_id: int
    context_length: int
    max_running: int = 4
    overlap: bool = True
    recompute_not_received: bool = True


class Engine:
    """Continuous batching: match, allocate, run, sample and commit per step, release.

    `step` and `run` may be called by one thread, `pause`, `preempt_all` and `resume` by another one, `stop` and what
    `intake` has by any.
    """

    def __init__(
        self,
        cache: PrefixCacheManager,
        model: Model,
        settings: EngineSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self._model, self._settings, self._clock = model, settings, clock
        self._line, self._tables = WaitingLine(), new_tables(cache)
        self.overlap = LoadOverlap(cache, is_wanted=settings.overlap)
        self._running: list[Generation] = []  # oldest first
        self._paused = False
        self._step_lock = threading.Lock()  # held while _running changes: by a step, by preempt_all, at the end
        self._transfers = OpenTransfers(self._line.ring)
        self.intake = Intake(cache, settings.context_length, self._line, self._transfers)
        self._sends = Sends(cache, self._transfers)
        self._receives = Receives(
            cache, self._transfers, max_open=settings.max_running, can_recompute=settings.recompute_not_received
        )

    def step(self) -> bool:
        """Admit what fits and compute one batch, unless paused; False when there is nothing to do."""
        with self._step_lock:
            if not self._paused:
                self._drop_cancelled()
                self._admit()
                batch = self._plan()
                if batch:
                    self._compute(batch)
            return bool(self._running or self._line)

    def run(self) -> None:
        """Serve until `stop`; then every unfinished generation fails."""
        try:
            while self._line.wait(self._may_step, self._hold_seconds):
                self.step()
        finally:
            self._abort_all()

    def stop(self) -> None:
        """Let `run` return after its present step."""
        self._line.close()

    def _may_step(self) -> bool:
        """Whether a step would find work. What only waits for another instance's blocks rings when they have come."""
        if self._paused:
            return False
        return bool(self._running) or any(each.cancelled or not self._waits(each) for each in self._line.snapshot())

    def _waits(self, generation: Generation) -> bool:
        """Whether it waits for another instance: it is not looked at meanwhile."""
        return generation.is_borrowing or self._receives.waits(generation) or self._sends.waits(generation)

    def _hold_seconds(self) -> float | None:
        """How long until somebody may ask again; None where nobody waits for that, and while paused."""
        holds = [each.hold.seconds_left for each in (self._receives, self._sends)]
        return None if self._paused else min(filter(None, holds), default=None)

    def pause(self, timeout_seconds: float) -> bool:
        """Take no further step until `resume`: what is submitted waits, what runs stands still and keeps its blocks.

        Returns when the present step is over. False when the time is over first: then nothing has changed.
        """
        was_paused, self._paused = self._paused, True
        # a step looks at the flag under the lock: who gets the lock after this sees it
        is_over = self._step_lock.acquire(timeout=max(0.0, timeout_seconds))
        if is_over:
            self._step_lock.release()
        elif not was_paused:
            self.resume()
        return is_over

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        self._line.ring()

    def preempt_all(self) -> None:
        """Take back every block that a generation holds, while paused. It is matched again after `resume`."""
        with self._step_lock:
            for generation in self._running[::-1]:  # the oldest last, so that it is the first again
                self._preempt(generation)
            matched = [generation for generation in self._line.snapshot() if generation.match is not None]
            for generation in matched:  # they wait for their loads
                self.cache.release(generation.request)
                generation.note_refusal()

    def _drop_cancelled(self) -> None:
        for generation in list(self._running):
            is_over = generation.send is not None and generation.send.done
            if is_over and not generation.cancelled:  # early: refused, or its reader has it all
                self._end_prefill(generation)
        for generation in [g for g in (*self._running, *self._line.snapshot()) if g.cancelled]:
            self._withdraw(generation)
            (self._running if generation in self._running else self._line).remove(generation)
            generation.finish(generation.cancel_reason)

    def _withdraw(self, generation: Generation) -> None:
        """Give back what it has of the cache, wherever it is."""
        if generation in self._running or generation.match is not None:
            self.cache.release(generation.request)
        else:
            self.cache.end_prefetch(generation.request)
            self.cache.peers.cancel_receive(generation.request)
            self._receives.forget(generation)

    # -- admission

    def _admit(self) -> None:
        waiting = self._line.snapshot()
        self._transfers.look()
        for generation in waiting:
            if len(self._running) == self._settings.max_running:
                break
            if self._waits(generation):
                continue
            if self._try_admit(generation):
                self._line.remove(generation)
            elif not self._waits(generation):
                return  # nobody takes the blocks that it waits for
        self._receives.begin_next(each for each in waiting if not each.finish_reason)

    def _try_admit(self, generation: Generation) -> bool:
        """False when it has to wait: for its loads, or, holding nothing, for blocks. True when it runs or failed."""
        request = generation.request
        try:
            match = self._match(generation) if self._receives.is_settled(generation) else None
            if match is None or not (match.ready or self.overlap.is_possible(generation, match)):
                return False
            num_matched = len(match.block_ids) + len(match.coming_block_ids)
            num_missing = self._num_blocks(generation.num_wanted_tokens) - num_matched
            generation.is_ahead = not match.ready
            first = self._tables.num_first_blocks(num_missing)
            new = self._tables.allocate(generation, first, ahead_of_loads=generation.is_ahead)
            if generation.is_ahead:
                self.overlap.follow(match)
                match = match.poll()
            if generation.num_offered_tokens and not self._sends.offer(generation):
                self._withdraw(generation)
                generation.note_refusal()
                return False
        except OutOfBlocksError as shortage:
            self._withdraw(generation)
            generation.note_refusal()
            if self._can_wait(shortage):
                return False
            generation.finish("error", f"no room for {request.num_tokens} tokens though nothing runs: {shortage}")
            return True
        except CacheError as error:
            self._withdraw(generation)
            generation.finish("error", str(error))
            return True
        generation.note_admission(match)
        self._tables.admitted(generation, match)
        self._tables.add(generation, new)
        self._running.append(generation)
        if generation.is_prefilled:  # all was cached
            self._end_prefill(generation)
        return True

    def _can_wait(self, shortage: OutOfBlocksError) -> bool:
        """Whether blocks will come home, with nobody to begin a step meanwhile: then some time has passed."""
        if self._running or self._receives.give_back():
            return True
        if shortage.coming:
            self.cache.wait_for_transfers(_TRANSFER_WAIT_SECONDS)
        elif self._transfers.may_give_blocks():
            self._transfers.wait_end(_TRANSFER_WAIT_SECONDS)
        else:
            return False
        return True

    def _match(self, generation: Generation) -> Match:
        """Its match: ready, or to be asked for again. Answers that run do not stall behind somebody else's loads."""
        if generation.match is None:
            generation.note_match(self._clock(), self.cache.match(generation.request), LOAD_SECONDS)
        assert generation.match is not None
        generation.match = generation.match.poll()
        if not generation.match.ready and not self.overlap.is_possible(generation, generation.match):
            seconds_left = max(0.0, generation.load_deadline - self._clock())
            if not self._running or not seconds_left:
                generation.match = generation.match.wait(seconds_left)
        return generation.match

    # -- one step

    def _plan(self) -> list[tuple[Generation, int]]:
        """Who computes how many tokens now: one for whoever is decoding, what is left of the budget for prompts."""
        batch, budget = [], STEP_TOKENS
        for generation in list(self._running):
            if generation not in self._running:  # preempted for an older one
                continue
            done = generation.num_computed_tokens
            end = self._tables.end_of_piece(generation, min(generation.num_wanted_tokens, done + max(budget, 1)))
            num_tokens = end - done
            if budget and self._has_room(generation, generation.num_computed_tokens + num_tokens):
                batch.append((generation, num_tokens))
                budget = max(0, budget - num_tokens)
        return [(generation, n) for generation, n in batch if generation in self._running]

    def _has_room(self, generation: Generation, num_tokens: int) -> bool:
        """Blocks for so many tokens, preempting the youngest where there are none."""
        while (missing := self._num_blocks(num_tokens) - len(generation.block_ids)) > 0:
            try:
                self._tables.add(generation, self._tables.allocate(generation, missing))
            except OutOfBlocksError as shortage:
                youngest = self._running[-1]
                if len(self._running) == 1 and shortage.coming:
                    self.cache.wait_for_transfers(_TRANSFER_WAIT_SECONDS)
                else:  # also when it is alone: its own copies of blocks that are cached anyway go home with it
                    self._preempt(youngest)
                if youngest is generation:
                    return False
        return True

    def _preempt(self, generation: Generation) -> None:
        """Give everything back; it is matched again later, over its prompt and what it has said so far.

        A prefill ends: its offer has failed with the release, and who has it computes the prompt or asks again.
        """
        self.cache.release(generation.request)
        self._running.remove(generation)
        if generation.num_offered_tokens:
            generation.finish("error", "its blocks were taken back before they were computed")
            return
        generation.block_ids, generation.is_ahead, generation.load_ids, generation.match = [], False, (), None
        self._line.add_first(generation)

    def _compute(self, batch: list[tuple[Generation, int]]) -> None:
        chunks = []
        for generation, num_tokens in batch:
            start = generation.num_computed_tokens
            tokens = generation.request.token_ids(start, start + num_tokens)
            chunks.append(self._tables.chunk(generation, tokens))
        arrived = {generation: True for generation, _ in batch if generation.is_ahead}
        wait, mark = self.overlap.layer_waiter(arrived), self._sends.begin_step(batch)

        def before_layer(layer: int) -> None:
            mark(layer)  # those before it are written
            wait(layer)

        logits = self._model.forward(chunks, before_layer)
        computed: list[tuple[Generation, int | None]] = []
        for (generation, num_tokens), scores in zip(batch, logits, strict=True):
            if generation.is_ahead and not self._confirm(generation, arrived[generation]):
                continue
            generation.num_computed_tokens += num_tokens
            self._tables.computed(generation)
            is_sampled = generation.num_computed_tokens == generation.request.num_tokens and not generation.is_prefilled
            token_id = generation.sampling.choose(scores, len(generation.output)) if is_sampled else None
            computed.append((generation, token_id))
        self._end_step(computed)

    def _end_step(self, computed: list[tuple[Generation, int | None]]) -> None:
        """Tell the cache what the step has computed and sampled. A last token needs no room: nobody computes it. Nor
        does the end of a prompt that is computed for another instance, or one that gets its blocks piece by piece."""
        steps = []
        for generation, token_id in computed:
            if self._tables.is_committed(generation, token_id):
                self.cache.commit(generation.request, generation.num_computed_tokens)
            else:
                tokens = [] if token_id is None or self._is_last(generation, token_id) else [token_id]
                steps.append((generation.request, tokens, generation.num_computed_tokens))
        answers = iter(self._tables.step(steps))
        for generation, token_id in computed:
            answer = None if self._tables.is_committed(generation, token_id) else next(answers)
            if isinstance(answer, OutOfBlocksError) and token_id is not None:  # the next plan makes room for its token
                self.cache.commit(generation.request, generation.num_computed_tokens)
                generation.request.append_output([token_id])
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                self._tables.add(generation, answer)
            if generation.is_prefilled:
                self._end_prefill(generation)
            elif token_id is not None:
                self._say(generation, token_id)

    def _confirm(self, generation: Generation, arrived: bool) -> bool:
        """Whether all loads came that a step ran ahead of; else the step was for nothing, and it starts over."""
        generation.is_ahead, generation.load_ids = False, ()
        if self.cache.confirm(generation.request, LOAD_SECONDS, arrived=arrived):
            generation.note_confirmed()
            return True
        self._preempt(generation)
        return False

    def _is_last(self, generation: Generation, token_id: int) -> bool:
        is_stop = token_id == self._settings.eos_token_id
        return is_stop or len(generation.output) + 1 == generation.max_new_tokens

    def _say(self, generation: Generation, token_id: int) -> None:
        is_last = self._is_last(generation, token_id)
        generation.push(token_id)
        if is_last:
            generation.request.append_output([token_id])
            self._running.remove(generation)
            self.cache.release(generation.request)
            generation.finish("stop" if token_id == self._settings.eos_token_id else "length")

    def _end_prefill(self, generation: Generation) -> None:
        """All of it is computed, or its send has ended before. The blocks stay until they have been read."""
        send = generation.send
        assert send is not None
        self._running.remove(generation)
        self.cache.release(generation.request)
        if generation.cancelled:  # who did so before there was a send could not end it
            self.cache.peers.cancel_send(send)
        if send.done and not send.succeeded:
            generation.finish("error", f"nobody reads its blocks any more: {send.reason}: {send.error}")
        else:
            generation.finish("sent")

    def _abort_all(self) -> None:
        self._line.close()  # nobody joins them any more
        with self._step_lock:
            unfinished = [*self._running, *self._line.snapshot()]
            for generation in unfinished:
                self._withdraw(generation)
            self._running = []
            self._line.clear()
        for generation in unfinished:
            generation.finish("error", "the engine has stopped")

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.config.block_size)

"""A flight recording run again, step by step, through the real manager; what it decides is compared."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastdeploy_cache import Match, PrefixCacheManager, Request, StorageConfig
from fastdeploy_cache.books.leaves.policy import SessionHint
from fastdeploy_cache.errors import CacheError, OutOfBlocksError, RecordingError
from fastdeploy_cache.insight.flight.file import FlightRecording
from fastdeploy_cache.insight.flight.records import STATUSES, TASK_KINDS, Flag, Record, RecordKind
from fastdeploy_cache.launch.simulator.heard_decisions import HeardDecisions, found_text
from fastdeploy_cache.launch.simulator.recorded_client import RecordedClient
from fastdeploy_cache.launch.simulator.recorded_prompts import RecordedPrompts
from fastdeploy_cache.launch.simulator.recorded_rows import RecordedRows
from fastdeploy_cache.launch.simulator.recorded_settings import recorded_config
from fastdeploy_cache.launch.simulator.recorded_turns import turns
from fastdeploy_cache.launch.simulator.replay_outcome import MAX_SHOWN, Difference, ReplayOutcome
from fastdeploy_cache.launch.simulator.store import SimulatedStore
from fastdeploy_cache.life_cycle import LifeCycleStatus
from fastdeploy_cache.policies import EVICTION_POLICIES
from fastdeploy_cache.requests.active_request import WAITING, ActiveRequest

_STORE = "fastdeploy_cache.launch.simulator.store:SimulatedStore"
_STORE_BLOCKS = 10**9  # more than it is ever given
_MOST_HELD_TOKENS = 2**28  # 1 GiB
_SECONDS = 1.0  # that a change of the life cycle may take: nothing is in flight


@dataclasses.dataclass
class _Live:
    request: Request
    match: Match
    active: ActiveRequest
    num_held_tokens: int = 0


class FlightReplay:
    """Does what the recording says was asked, in its order and at its times, and ends each copy where it says so.

    Prompts are made up from marks. What a cache had before the recording begins is taught when a match has found it.
    """

    def __init__(self, recording: FlightRecording, changes: Mapping[str, Any] | None = None) -> None:
        """`changes`: settings to run it with instead of the recorded ones.

        Raises:
            RecordingError: a recording that cannot be.
        """
        self._recording, header = recording, recording.header
        config = recorded_config(header, changes or {})
        self._num_ranks = num_ranks = config.transfer.tp_size
        self._is_whole = not header.get("num_dropped")
        self._prompts = RecordedPrompts(recording, config.block_size)
        self._size, self._now = config.block_size, 0.0
        self._client = RecordedClient(num_ranks)
        self.cache = PrefixCacheManager(config, client=self._client, clock=lambda: self._now)
        self._num_matched = {
            str(record["number"]): record["num_matched"] + (record["num_copied"] > 0)
            for record in recording.of_kind(RecordKind.RELEASED)
        }
        self._rows = RecordedRows(self.cache, recording, self._prompts)
        self._verbs = self.cache.rows if self._rows.is_hybrid else self.cache
        self._heard, self._live = HeardDecisions(), dict[int, _Live]()
        self.cache.insight.tell(self._heard)
        if header.get("has_storage") and config.pool_sizes()[1]:
            self._attach_store()
        self._num_held_tokens = 0  # of requests that are there
        self._evicted = (0, 0)  # recorded and not replayed, of both tiers
        self.outcome, self._record = ReplayOutcome(), Record()
        self._began: float | None = None
        self._steps_of_requests: dict[RecordKind, Callable[[Record, _Live], object]] = {
            RecordKind.SETTLED_LATE: self._settle,
            RecordKind.ALLOCATED: self._allocate,
            RecordKind.REFUSED: self._refuse,
            RecordKind.COMMITTED: self._commit,
            RecordKind.CONFIRMED: self._confirm,
            RecordKind.RELEASED: self._release,
            RecordKind.SNAPSHOT: self._snapshot,
            RecordKind.ANCHORED: self._anchored,
            RecordKind.STATE_COPIED: self._look_again,
        }
        self._steps: dict[RecordKind, Callable[[Record], object]] = {
            **dict.fromkeys(self._steps_of_requests, self._step_of_request),
            RecordKind.MATCHED: self._match,
            RecordKind.LOOKED: self._look,
            RecordKind.TASK_ENDED: self._end_task,
            RecordKind.RESET: lambda _: self.cache.reset(),
            RecordKind.GPU_FORGOTTEN: lambda record: self.cache.ranks.kv_lost(self._rank(record)),
            RecordKind.STATUS: self._change_status,
            RecordKind.POLICY: lambda record: self.cache.control.set_policy(EVICTION_POLICIES[record["policy"]]),
            RecordKind.RANK: lambda record: self._client.set_up(self._rank(record), up=bool(record["up"])),
        }

    def _attach_store(self) -> None:
        store = SimulatedStore(_STORE_BLOCKS, "all")
        self.cache.storage.attach(StorageConfig(kind=_STORE, weights_id="recorded"), client=store)

    def run(self, at_end: Callable[[PrefixCacheManager], None] = lambda _: None) -> ReplayOutcome:
        """Replay all of it. `at_end` is given the cache before it is closed.

        Raises:
            RecordingError: a record that cannot be.
        """
        try:
            for turn in turns(self._recording.records()):
                record, self._now = turn[0], turn[0]["at"]
                step = self._steps.get(record["kind"])
                if step is None:
                    continue
                self._record = record
                self._began = self._now if self._began is None else self._began
                self.outcome.num_steps += len(turn)
                try:
                    if len(turn) > 1:
                        self._step_together(turn)
                    else:
                        step(record)
                except RecordingError:
                    raise
                except CacheError as error:
                    self._differ(record["kind"].name.lower(), "done", f"refused: {error}")
            at_end(self.cache)
        finally:
            self.cache.close()
        return self.outcome

    # -- steps

    def _match(self, record: Record) -> None:
        request = self._request(record)
        if not self._is_whole:
            self._teach(record, request)
        self.outcome.num_requests += 1
        match, active = self.cache.match(request), self._heard.active
        assert active is not None
        self._live[record["number"]] = live = _Live(request, match, active)
        self._hold(live, request.num_tokens)
        recorded = record["num_found"], record["num_gpu"], record["num_unloaded"], record["cause"]
        if recorded != self._heard.found:
            self._differ("match", found_text(recorded), found_text(self._heard.found))

    def _look(self, record: Record) -> None:
        self.cache.prefetch(self._request(record))
        if self._heard.num_looked != record["num_found"]:
            self._differ("prefetch", f"{record['num_found']} blocks found", f"{self._heard.num_looked}")

    def _step_of_request(self, record: Record) -> None:
        live = self._of(record)
        if live is not None:
            self._steps_of_requests[record["kind"]](record, live)

    def _settle(self, _: Record, live: _Live) -> None:
        live.match = live.match.wait(0)

    def _allocate(self, record: Record, live: _Live) -> None:
        num_blocks, ahead = record["num_blocks"], bool(record["ahead"])
        if not ahead:
            self._poll(live)
        try:
            self._verbs.allocate(live.request, num_blocks, ahead_of_loads=ahead)
        except OutOfBlocksError as error:
            self._differ("allocate", f"{num_blocks} blocks given", f"refused, {error.missing} missing")

    def _refuse(self, record: Record, live: _Live) -> None:
        wanted = f"refused, {record['num_missing']} missing"
        try:
            self._verbs.allocate(live.request, record["num_blocks"])
        except OutOfBlocksError as error:
            if error.missing != record["num_missing"]:
                self._differ("allocate", wanted, f"refused, {error.missing} missing")
        else:
            self._differ("allocate", wanted, f"{record['num_blocks']} blocks given")

    def _commit(self, record: Record, live: _Live) -> None:
        self._poll(live)
        if record["num_held"] > _num_held(live.active):
            self._step_together([record])
            return
        request, num_computed = live.request, record["num_computed"]
        if num_computed > request.num_tokens:
            self._hold(live, num_computed - request.num_tokens)
            request.append_output(self._prompts.tokens(record["number"], request.num_tokens, num_computed))
        self.cache.commit(request, num_computed)

    def _step_together(self, records: list[Record]) -> None:
        """What these say was one step, in one turn. How many tokens it has follows from the blocks that it got."""
        steps: dict[int, tuple[Record, Request, int]] = {}
        for record in records:
            live = self._of(record)
            if live is not None:
                self._poll(live)
                num_held = record.get("num_held", _num_held(live.active) + record.get("num_blocks", 0))
                steps[record["number"]] = record, live.request, num_held
        given = []
        for number, (record, request, num_held) in steps.items():
            num_computed = record.get("num_computed", self._live[number].active.num_computed_tokens)
            num_tokens = max(request.num_tokens, num_computed, (num_held - 1) * self._size + 1)
            self._hold(self._live[number], num_tokens - request.num_tokens)
            given.append((request, self._prompts.tokens(number, request.num_tokens, num_tokens), num_computed))
        answers: Sequence[object] = self._verbs.step(given)
        for (record, _, _), answer in zip(steps.values(), answers, strict=True):
            self._record, is_refusal = record, record["kind"] is RecordKind.REFUSED
            missing = answer.missing if isinstance(answer, OutOfBlocksError) else None
            if is_refusal and missing != record["num_missing"]:
                found = "blocks given" if missing is None else f"refused, {missing} missing"
                self._differ("step", f"refused, {record['num_missing']} missing", found)
            elif not is_refusal and isinstance(answer, Exception):
                self._differ("step", "done", f"refused: {answer}")

    def _snapshot(self, record: Record, live: _Live) -> None:
        self._hold(live, max(0, record["num_tokens"] - live.request.num_tokens))
        is_given = self._rows.snapshot(record, live.request, live.active)
        if is_given != bool(record["given"]):
            self._differ("snapshot", _given(bool(record["given"])), _given(is_given))

    def _anchored(self, record: Record, _: _Live) -> None:
        if record["boundary"] != self._heard.boundary:
            self._differ("match", f"a checkpoint at block {record['boundary']}", f"one at {self._heard.boundary}")

    @staticmethod
    def _look_again(_: Record, live: _Live) -> None:
        live.match = live.match.poll()

    def _confirm(self, record: Record, live: _Live) -> None:
        if live.active.is_ahead:
            self.cache.confirm(live.request, 0, arrived=bool(record["arrived"]))

    def _release(self, record: Record, live: _Live) -> None:
        flags = record["flags"]
        self._poll(live)
        live.request.session_ended = bool(flags & Flag.SESSION_ENDED)
        live.request.tool_call_pending = bool(flags & Flag.TOOL_CALL_PENDING)
        live.request.take_session_hint(SessionHint(*record["session_hint"]) if "session_hint" in record else None)
        stats, active = self.cache.stats(), live.active
        del self._live[record["number"]]
        self._num_held_tokens -= live.num_held_tokens
        self.cache.release(live.request)
        ours, theirs = (
            (num_matched, min(num_matched, num_gpu))
            for num_matched, num_gpu in (
                (active.num_matched_blocks, active.num_gpu_blocks),
                (record["num_matched"], record["num_gpu"]),
            )
        )
        if ours != theirs:
            self._differ("hit", _hit(theirs), _hit(ours))
        recorded = record["num_gpu_evicted"], record["num_cpu_evicted"]
        self._compare_evicted(recorded, (stats.gpu.num_evicted, stats.cpu.num_evicted))

    def _compare_evicted(self, recorded: tuple[int, int], replayed: tuple[int, int]) -> None:
        """Where they have parted once, only a further parting is a difference. A replay that begins in the midst begins
        with an empty cache: there it says nothing."""
        apart, before = (recorded[0] - replayed[0], recorded[1] - replayed[1]), self._evicted
        if apart != before and self._is_whole:
            ours = replayed[0] + before[0], replayed[1] + before[1]
            self._differ("evicted so far", f"{recorded[0]} and {recorded[1]} blocks", f"{ours[0]} and {ours[1]}")
        self._evicted = apart

    def _end_task(self, record: Record) -> None:
        kind = TASK_KINDS[record["task_kind"]]
        if kind.is_swap and record["num_blocks"]:
            failed, seconds = bool(record["failed"]), record["task_seconds"]
            self._client.end(record["task_id"], kind, failed=failed, seconds=seconds)

    def _change_status(self, record: Record) -> None:
        status, life = LifeCycleStatus(STATUSES[record["status"]]), self.cache.life
        if status is LifeCycleStatus.PAUSED:
            life.pause(_SECONDS)
        elif status is LifeCycleStatus.ASLEEP:
            asleep = record["asleep"]
            life.sleep(_SECONDS, tiers=[name for bit, name in ((1, "gpu"), (2, "cpu")) if asleep & bit])  # type: ignore[misc]
        elif status is LifeCycleStatus.RUNNING and life.status is LifeCycleStatus.ASLEEP:
            life.wake(_SECONDS)
        elif status is LifeCycleStatus.RUNNING:
            life.resume(_SECONDS)

    # -- of requests

    def _request(self, record: Record) -> Request:
        number, flags, num_prompt = record["number"], record["flags"], record["num_prompt_tokens"]
        namespace, given = record["namespace"], {}
        if flags & Flag.HAS_HINTS:
            for name in ("priority", "keep_seconds"):
                if not math.isnan(record[name]):
                    given[name] = record[name]
        images = [(offset, length, str(name)) for offset, length, name in record.get("images", ())]
        request = Request(
            request_id=str(number),
            prompt_token_ids=self._prompts.tokens(number, 0, num_prompt),
            namespace=f"{namespace:x}" if namespace else "",
            images=images,
            match_inside_images=bool(flags & Flag.INSIDE_IMAGES),
            **given,
        )
        if record["num_tokens"] > num_prompt:
            request.append_output(self._prompts.tokens(number, num_prompt, record["num_tokens"]))
        request.counted, request.used = bool(flags & Flag.WAS_COUNTED), bool(flags & Flag.WAS_USED)
        return request

    def _hold(self, live: _Live, num_tokens: int) -> None:
        """So many more are kept until the request's release. What one recording keeps at a time is bounded."""
        live.num_held_tokens += num_tokens
        self._num_held_tokens += num_tokens
        if self._num_held_tokens > _MOST_HELD_TOKENS:
            raise RecordingError(
                f"the recording has requests of more than {_MOST_HELD_TOKENS} tokens at a time; it is not replayed"
            )

    def _rank(self, record: Record) -> int:
        rank = int(record["rank"])
        if rank >= self._num_ranks:
            raise RecordingError(f"the recording is damaged: it tells of rank {rank}, and has {self._num_ranks} ranks")
        return rank

    def _of(self, record: Record) -> _Live | None:
        live = self._live.get(record["number"])
        self.outcome.num_without_begin += live is None
        return live

    def _poll(self, live: _Live) -> None:
        """Its caller has looked, in the recording, before it went on: else it would not have had so much in the end."""
        active = live.active
        if not active.is_settled and active.num_readable_blocks < self._num_matched.get(active.request.request_id, 0):
            live.match = live.match.poll()

    def _teach(self, record: Record, request: Request) -> None:
        """The recording begins in the midst: what a match has found, and nobody has computed since, was there."""
        num_found = self._rows.num_taught(record)
        if not num_found:
            return
        known = self.cache.prefetch(request)
        num_known = (known.num_gpu_tokens + known.num_cpu_tokens) // self._size
        if num_known >= num_found:
            return
        tokens = request.token_ids(0, num_found * self._size)
        before = Request(request_id=f"before {record['number']}", prompt_token_ids=tokens, namespace=request.namespace)
        before.counted = True
        match = self.cache.match(before)
        try:
            new = self._verbs.allocate(before, num_found - len(match.block_ids))
            self._rows.end_with_snapshot(before, new)
            self.cache.commit(before, before.num_tokens)
            self.outcome.num_taught_blocks += num_found - num_known
        except OutOfBlocksError:  # there was more room in the recording
            pass
        finally:
            self.cache.release(before)

    def _differ(self, what: str, recorded: str, replayed: str) -> None:
        outcome, record = self.outcome, self._record
        outcome.num_different += 1
        if len(outcome.differences) < MAX_SHOWN:
            seconds = self._now - (self._began or 0.0)
            step = Difference(outcome.num_steps, seconds, record.get("number"), what, recorded, replayed)
            outcome.differences.append(step)


def _num_held(active: ActiveRequest) -> int:
    """The blocks that it has, or will have as soon as its match settles at what its caller has seen."""
    has_copy = active.copy is not None and active.copy.is_shown
    return active.num_readable_blocks + has_copy if active.phase is WAITING else len(active.block_ids)


def _given(is_given: bool) -> str:
    return "given" if is_given else "not given"


def _hit(hit: tuple[int, int]) -> str:
    num_matched, num_gpu = hit
    return f"{num_matched} blocks, {num_gpu} of them from the GPU"

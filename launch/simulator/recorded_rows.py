"""What a replay does of the rows of a hybrid model: snapshots, and checkpoints that were there before."""

from __future__ import annotations

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.errors import RecordingError
from fastdeploy_cache.insight.flight.file import FlightRecording
from fastdeploy_cache.insight.flight.records import Record, RecordKind
from fastdeploy_cache.launch.simulator.recorded_prompts import MAX_TOKENS, RecordedPrompts
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.tables import RowBlocks

_OTHER = 2**31 - 1  # a token that no made-up prompt has


class RecordedRows:
    """What is known of rows before the replay begins: which snapshots were of drafts, and where matches could end."""

    def __init__(self, cache: PrefixCacheManager, recording: FlightRecording, prompts: RecordedPrompts) -> None:
        layout = cache.config.rank_layout()
        rows = layout.rows[1:] if layout is not None else ()
        self._cache, self._prompts, self._size = cache, prompts, cache.config.block_size
        self.is_hybrid = bool(rows)
        self._state_rows = [number for number, row in enumerate(rows) if row.kind == "state"]
        self._boundaries = dict[int, int]()  # by number of a request
        self._drafts = set[int]()  # snapshots, in the order of the recording
        self._num_snapshots = 0
        self._look_ahead(recording)

    def _look_ahead(self, recording: FlightRecording) -> None:
        if not self.is_hybrid:
            return
        last, num_snapshots = dict[int, int](), 0
        for record in recording.of_kind(RecordKind.SNAPSHOT, RecordKind.DRAFTED, RecordKind.ANCHORED):
            number, kind = record["number"], record["kind"]
            if kind is RecordKind.ANCHORED:
                self._boundaries[number] = record["boundary"]
            elif kind is RecordKind.SNAPSHOT:
                if record["num_tokens"] > MAX_TOKENS:
                    place = f"{record['num_tokens']} tokens, more than the {MAX_TOKENS} that are replayed"
                    raise RecordingError(f"the recording is damaged: request {number} has a snapshot at {place}")
                last[number] = num_snapshots
                num_snapshots += 1
            elif number in last:
                self._drafts.add(last[number])

    def num_taught(self, record: Record) -> int:
        """How many blocks of what a match has found were of use to it."""
        return self._boundaries.get(record["number"], 0) if self.is_hybrid else int(record["num_found"])

    def snapshot(self, record: Record, request: Request, active: ActiveRequest) -> bool:
        """Take one; whether there was a slot for it. Of a draft its tokens are others than those that come."""
        number, num_tokens, is_draft = record["number"], record["num_tokens"], self._num_snapshots in self._drafts
        self._num_snapshots += 1
        kept = max(request.num_prompt_tokens, active.num_computed_tokens)
        if is_draft and kept < num_tokens:
            request.cut_output(min(kept, request.num_tokens))
            request.append_output([_OTHER] * (num_tokens - request.num_tokens))
        elif num_tokens > request.num_tokens:
            request.append_output(self._prompts.tokens(number, request.num_tokens, num_tokens))
        assert active.rows is not None
        slots = [slot for row in self._state_rows for slot in active.rows.tables[row]]
        is_given = self._cache.rows.snapshot(request, num_tokens, slots) is not None
        if is_draft and kept < num_tokens:
            request.cut_output(kept)
        return is_given

    def end_with_snapshot(self, request: Request, new: object) -> None:
        """What is taught ends with a checkpoint: of a request that has just got these blocks."""
        if self._state_rows and isinstance(new, RowBlocks):
            slots = [slot for row in self._state_rows for slot in new.tables[row].block_ids]
            self._cache.rows.snapshot(request, request.num_tokens, slots)

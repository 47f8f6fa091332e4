"""What a request gives to the cache: the blocks that it computed, and the note that it used them. Under the lock."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import NotCopied, Used
from fastdeploy_cache.books.growing import grow, insert
from fastdeploy_cache.books.run import CPU, Pin, Run
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.policies.load_or_compute import MIN_SAMPLE_TOKENS
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.active_request import SETTLED, ActiveRequest
from fastdeploy_cache.requests.anchors import Anchors
from fastdeploy_cache.requests.listener import COMMITTED, RequestListener
from fastdeploy_cache.requests.matcher import Matcher
from fastdeploy_cache.requests.misses import Misses
from fastdeploy_cache.storage.access import StorageAccess


class Publisher:
    """What `commit`, `write_to_storage` and `release` do with the blocks of a request."""

    def __init__(
        self,
        config: CacheConfig,
        books: Books,
        movement: Movement,
        matcher: Matcher,
        *,
        misses: Misses,
        anchors: Anchors | None,
    ) -> None:
        self._misses = misses
        self._size, self._cache_outputs = config.block_size, config.cache_outputs
        self._enabled = config.enable_prefix_caching
        self._books, self._tree = books, books.tree
        self._matcher, self._copy_down, self._speeds = matcher, movement.copy_down, movement.speeds
        self._has_copies = books.pools[CPU].num_blocks > 0
        self._listener: RequestListener | None = None
        self._anchors = anchors
        self.num_unpublished = 0  # requests that have gone without a commit, and without a hit

    def tell(self, listener: RequestListener) -> None:
        """See `Requests.tell`."""
        self._listener = listener

    def commit(self, active: ActiveRequest, num_computed_tokens: int, now: float) -> bool:
        """The first so many tokens are computed and accepted: their full blocks become findable. Whether that was
        told."""
        num_before, stepped_at = active.num_computed_tokens, active.trail.stepped_at
        active.num_computed_tokens, active.trail.stepped_at = num_computed_tokens, now
        num_blocks = num_computed_tokens // self._size if self._cache_outputs else self._num_cacheable(active)
        is_told = False
        if num_blocks > active.num_committed_blocks and self._enabled and self._may(active):
            try:
                self._publish(active, num_blocks)
                is_told = True
            except MemoryError:  # nothing was published
                active.num_computed_tokens, active.trail.stepped_at = num_before, stepped_at
                raise
        if self._anchors is not None:
            try:
                is_changed = self._anchors.committed(active)
            except MemoryError:  # it is published; what was to be free is so at the next commit, or at the release
                self._books.mishaps.note("checkpoint")
                is_changed = True
            if not is_told and (listener := self._listener) is not None:  # units came and went all the same
                is_at_end = not num_before % self._size or num_before // self._size < num_computed_tokens // self._size
                is_told = is_changed or is_at_end
                if is_told:
                    listener.note((COMMITTED, active.trail.number, num_computed_tokens, len(active.block_ids)))
        if stepped_at and num_computed_tokens - num_before >= MIN_SAMPLE_TOKENS:
            num_before = max(num_before, active.num_matched_blocks * self._size + active.num_copied_tokens)
            self._speeds.note_prefill(num_computed_tokens - num_before, now - stepped_at)
        return is_told

    def _may(self, active: ActiveRequest) -> bool:
        """Whether what it computes continues something that is cached."""
        is_current = active.generation >= self._tree.generations.last_reset
        return is_current and active.phase is SETTLED and not active.is_detached

    def write(self, active: ActiveRequest, storage: StorageAccess) -> None:
        """Write what is committed to storage now, whatever the policies say."""
        if not storage.is_attached or not self._may(active):
            return
        num_blocks = min(self._num_cacheable(active), len(active.block_ids))
        if num_blocks > active.num_committed_blocks:
            self._publish(active, num_blocks)
        if active.pin is not None:
            storage.write(active.pin.run.path())

    def _num_cacheable(self, active: ActiveRequest) -> int:
        """Full blocks of what is computed that may be published."""
        num_tokens = active.num_computed_tokens
        if not self._cache_outputs:
            num_tokens = min(num_tokens, active.request.num_prompt_tokens)
        return num_tokens // self._size

    def _publish(self, active: ActiveRequest, num_blocks: int) -> None:
        """Put the blocks up to `num_blocks` into the tree, and copy down when there is enough to copy."""
        tree, start, pin = self._tree, active.num_committed_blocks, active.pin
        ids = active.block_ids[start:num_blocks]
        if pin is None or not grow(tree, pin, active.keys, start, ids):
            at = (pin.run, pin.end) if pin is not None else (tree.root(active.request.namespace), 0)
            done = insert(tree, at, active.keys, start, ids, duplicates=active.duplicates)
            active.pin = pin = tree.move_pin(pin, done.run, done.end)
            active.duplicates = done.duplicates
            num_blocks = start + done.num_blocks
        active.num_pinned_blocks = active.num_committed_blocks = num_blocks
        assert pin is not None
        try:
            if num_blocks < active.asked.num_asked and active.trail.computing_key is not None:
                self._misses.committed(active)
            if active.request.is_hinted:
                self._note_priority((pin.run,), active.request)
            if (listener := self._listener) is not None:
                note = listener.note
                note((COMMITTED, active.trail.number, active.num_computed_tokens, len(active.block_ids)))
            if self._has_copies:
                self._copy_down.committed(pin.run, num_blocks - start)
        except MemoryError:  # it is published, whatever was to follow from that
            self._books.mishaps.note("write_out")

    @staticmethod
    def _note_priority(path: Sequence[Run], request: Request) -> None:
        """For storage, which may take what matters alone."""
        for run in path:
            if request.priority is not None and run.stored.priority != request.priority:
                run.stored = run.stored.but(priority=request.priority)

    def release(self, active: ActiveRequest) -> None:
        """Note the use, copy the rest down, take the pin back."""
        pin = active.pin
        try:
            if active.prefetch is not None:
                self._matcher.end_prefetch(active)
            if self._anchors is not None:
                self._anchors.finish(active)
            if not self._cache_outputs and self._enabled and self._may(active):
                self._misses.kept_out(active)
            if pin is None:
                self.num_unpublished += active.is_admitted and active.asked.num_asked > 0
                return
            is_current = active.generation >= self._tree.generations.last_reset
            if is_current and active.is_admitted and not active.is_detached:
                is_first = not active.request.used
                self._note_use(active, pin)
                if self._anchors is not None:
                    self._anchors.use(active, is_first=is_first)
        except MemoryError:  # it is not counted, and the request goes all the same
            self._books.mishaps.note("policy")
        finally:
            if self._anchors is not None:
                self._anchors.end(active)
        if pin is not None:
            self._books.let_go(pin)

    def _note_use(self, active: ActiveRequest, pin: Pin) -> None:
        tree, request = self._tree, active.request
        if pin.end == pin.run.num_held < pin.run.num_blocks:  # what is behind, and nobody uses now, keeps its age
            tree.split(pin.run, pin.end)
        path = pin.run.path()
        tree.residency.ages.used(path)
        if request.used:
            tree.policy.touch(path)
        else:
            request.used = True
            self._books.use(path, request, active.asked)
        if self._has_copies or request.is_hinted:
            path = pin.run.path()  # the policy may have cut it
        if request.is_hinted:
            self._note_priority(path, request)
        num_skipped = self._copy_down.released(path) if self._has_copies else 0
        if Used in self._books.listeners:
            self._books.note(Used(Pin(pin.run, pin.end), has_uncopied=num_skipped > 0))
        if num_skipped:
            self._books.note(NotCopied(num_blocks=num_skipped))

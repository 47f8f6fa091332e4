"""Whether to load a prefix or to compute it again: by what loading and computing have been seen to take. Pure."""

from __future__ import annotations

_WEIGHT = 0.2  # of the newest sample in a moving mean
_TRY_AGAIN = 16  # of so many prefixes that would be slower to load one is loaded
_MIN_SAMPLE_TOKENS = 32  # fewer say more about the step around them


class Speed:
    """A moving mean of something per second; None before the first sample."""

    def __init__(self, per_second: float | None = None) -> None:
        self.per_second = per_second

    def note(self, amount: float, seconds: float) -> None:
        """So much took so long."""
        if amount <= 0 or seconds <= 0:
            return
        sample, known = amount / seconds, self.per_second
        # in seconds, not in speeds: a slow sample counts for what it costs
        self.per_second = sample if known is None else 1 / ((1 - _WEIGHT) / known + _WEIGHT / sample)


class LoadOrCompute:
    """Compares the time of a load with that of computing the same tokens. One thread at a time."""

    def __init__(self, policy: str, prefill_tokens_per_second: float | None, block_bytes: int, block_size: int) -> None:
        """`policy`: `auto`, `always` or `never`. A prefill speed that is given is not learned."""
        self._policy = policy
        self._is_told = prefill_tokens_per_second is not None
        self.prefill = Speed(prefill_tokens_per_second)
        self.cpu = Speed()  # bytes of a rank, CPU tier to GPU
        self.storage = Speed()  # bytes of a rank, storage to CPU tier
        self._block_bytes, self._block_size = block_bytes, block_size
        self._num_computed = 0  # prefixes that were not loaded

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens of one request in so long."""
        if not self._is_told and num_tokens >= _MIN_SAMPLE_TOKENS:
            self.prefill.note(num_tokens, seconds)

    def compute_seconds(self, num_blocks: int) -> float | None:
        """What computing so many blocks takes; None: not known yet."""
        speed = self.prefill.per_second
        return None if speed is None else num_blocks * self._block_size / speed

    def is_worth_loading(self, num_blocks: int) -> bool:
        """Whether loading from the CPU tier is faster than computing; where one is not known, loading finds out.

        Now and then it loads all the same: what was slow once would else stay so for ever.
        """
        if self._decide(num_blocks, self._seconds(self.cpu, num_blocks)):
            return True
        self._num_computed += 1
        return self._policy == "auto" and self._num_computed % _TRY_AGAIN == 0

    def is_worth_fetching(self, num_blocks: int) -> bool:
        """The same for storage, from where blocks go through the CPU tier."""
        fetch, load = self._seconds(self.storage, num_blocks), self._seconds(self.cpu, num_blocks)
        return self._decide(num_blocks, None if fetch is None else fetch + (load or 0.0))

    def _decide(self, num_blocks: int, load_seconds: float | None) -> bool:
        if self._policy != "auto":
            return self._policy == "always"
        compute_seconds = self.compute_seconds(num_blocks)
        return load_seconds is None or compute_seconds is None or load_seconds < compute_seconds

    def _seconds(self, speed: Speed, num_blocks: int) -> float | None:
        return None if speed.per_second is None else num_blocks * self._block_bytes / speed.per_second

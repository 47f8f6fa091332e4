"""Whether to load a prefix or to compute it again: by what loading and computing have been seen to take. Pure."""

from __future__ import annotations

_WEIGHT = 0.2  # of the newest sample in a moving mean
_TRY_AGAIN = 16  # of so many prefixes that would be slower to load one is loaded
_MANY_BLOCKS = 1000
MIN_SAMPLE_TOKENS = 32  # fewer say more about the step around them
_MIN_SPREAD = 0.3  # of the sizes seen, as a share of their mean: with less, latency and speed cannot be told apart


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


class Cost:
    """Seconds as a latency and a time per byte: a line through what was seen, newer samples counting more."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, num_bytes: float, seconds: float) -> None:
        """So many bytes took so long."""
        if num_bytes <= 0 or seconds <= 0:
            return
        x, y, keep = num_bytes, seconds, 1 - _WEIGHT
        self._weight = keep * self._weight + 1
        self._x, self._y = keep * self._x + x, keep * self._y + y
        self._xx, self._xy = keep * self._xx + x * x, keep * self._xy + x * y

    def seconds(self, num_bytes: float) -> float | None:
        """What so many bytes will take; None before the first sample."""
        if not self._weight:
            return None
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        slope = (self._xy / self._weight - x * y) / variance if variance > (_MIN_SPREAD * x) ** 2 else 0.0
        if slope <= 0 or slope * x >= y:  # it says nothing of a latency
            return y / x * num_bytes
        return y + slope * (num_bytes - x)


class LoadOrCompute:
    """Compares the time of a load with that of computing the same tokens. One thread at a time."""

    def __init__(self, policy: str, prefill_tokens_per_second: float | None, block_bytes: int, block_size: int) -> None:
        """`policy`: `auto`, `always` or `never`. A prefill speed that is given is not learned."""
        self._policy = policy
        self._is_told = prefill_tokens_per_second is not None
        self.prefill = Speed(prefill_tokens_per_second)
        self.cpu = Cost()  # of a rank, CPU tier to GPU
        self.storage = Cost()  # of a rank, storage to CPU tier
        self.lookup = Speed()  # look-ups in storage
        self.peer = Cost()  # of a rank, what another instance lends
        self._block_bytes, self._block_size = block_bytes, block_size
        self._num_computed = 0  # prefixes that were not loaded

    def forget_storage(self) -> None:
        """It is another store from now on."""
        self.storage, self.lookup = Cost(), Speed()

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine has computed so many tokens of one request in so long."""
        if not self._is_told and num_tokens >= MIN_SAMPLE_TOKENS:
            self.prefill.note(num_tokens, seconds)

    def compute_seconds(self, num_blocks: int) -> float | None:
        """What computing so many blocks takes; None: not known yet."""
        speed = self.prefill.per_second
        return None if speed is None else num_blocks * self._block_size / speed

    def patience_seconds(self, num_blocks: int) -> float | None:
        """How long it is worth to wait for so many blocks; None: nothing is known against it."""
        return self.compute_seconds(num_blocks) if self._policy == "auto" else None

    def num_fetched_blocks_in(self, seconds: float) -> int:
        """How many blocks storage reads in so long, latency aside; 0: not known."""
        many = self.storage.seconds(_MANY_BLOCKS * self._block_bytes)
        return int(seconds * _MANY_BLOCKS / many) if many else 0

    def load_seconds(self, num_blocks: int) -> float | None:
        """What loading so many blocks from the CPU tier takes; None: not known yet."""
        return self.cpu.seconds(num_blocks * self._block_bytes)

    def is_worth_loading(self, num_blocks: int, num_saved: int | None = None) -> bool:
        """Whether loading so many blocks from the CPU tier is faster than computing those that it saves, which are as
        many where it is not said; where one is not known, loading finds out.

        Now and then it loads all the same: what was slow once would else stay so for ever.
        """
        return self._decide(num_blocks if num_saved is None else num_saved, self.load_seconds(num_blocks))

    def is_worth_borrowing(self, num_blocks: int) -> bool:
        """The same for blocks that another instance has cached, and lends."""
        return self._decide(num_blocks, self.borrow_seconds(num_blocks))

    def borrow_seconds(self, num_blocks: int) -> float | None:
        """What it takes to receive so many of these; None: not known yet."""
        return self.peer.seconds(num_blocks * self._block_bytes)

    def is_worth_fetching(self, num_blocks: int, num_queued_blocks: int = 0) -> bool:
        """The same for storage, from where blocks go through the CPU tier, behind others that are on their way."""
        fetch = self.storage.seconds((num_blocks + num_queued_blocks) * self._block_bytes)
        if fetch is not None:
            fetch += self.cpu.seconds(num_blocks * self._block_bytes) or 0.0
            fetch += 1 / self.lookup.per_second if self.lookup.per_second is not None else 0.0
        return self._decide(num_blocks, fetch)

    def _decide(self, num_blocks: int, load_seconds: float | None) -> bool:
        if self._policy != "auto":
            return self._policy == "always"
        compute_seconds = self.compute_seconds(num_blocks)
        if load_seconds is None or compute_seconds is None or load_seconds < compute_seconds:
            return True
        self._num_computed += 1
        return self._num_computed % _TRY_AGAIN == 0

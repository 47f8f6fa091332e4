"""What a request found in the cache."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Match(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request's cached prefix at the moment of the call; pinned until the request is released.

    Attributes:
        block_ids: GPU blocks that may be read now, first to last. The engine never writes them, but for the last token
            of a whole prompt's hit under `recompute_last_token`: there the last block is the request's own copy.
        num_tokens: tokens in them; the engine computes from here on.
        num_gpu_tokens: of these, found on the GPU.
        num_cpu_tokens: of these, loaded from the CPU tier.
        num_storage_tokens: of these, loaded from storage.
        num_coming_tokens: further tokens on their way to the GPU; `wait` for them, or allocate and do without.
        num_unloaded_tokens: further tokens in the CPU tier that were not loaded: no room, or a rank is down.
    """

    block_ids: list[int]
    num_tokens: int
    num_gpu_tokens: int
    num_cpu_tokens: int
    num_storage_tokens: int
    num_coming_tokens: int
    num_unloaded_tokens: int
    _poll: Callable[[], Match]
    _wait: Callable[[float | None], Match]

    @property
    def ready(self) -> bool:
        """Nothing more is on its way."""
        return self.num_coming_tokens == 0

    def poll(self) -> Match:
        """The match as it stands now; unlike `wait` it cuts nothing off while loads are on their way."""
        return self._poll()

    def wait(self, timeout_seconds: float | None = None) -> Match:
        """The match as it then stands: with what arrived in time, cut at what did not.

        Returns when nothing is on its way any more or the time is over; without a time, that of a transfer task. Call
        it outside any lock that other cache calls need.
        """
        return self._wait(timeout_seconds)

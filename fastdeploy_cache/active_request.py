"""What the manager keeps of a request between match and release."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from fastdeploy_cache.prefix_tree import BlockKeys
from fastdeploy_cache.request import Request
from fastdeploy_cache.run import BlockCopy, Pin, Transfer


@dataclass(eq=False)
class ActiveRequest:
    """Blocks of the request::

        block_ids   [ matched | committed, in the tree or duplicates | private ]
                              ^ num_matched_blocks                   ^ num_committed_blocks

    Until the match is settled, `pin` may lie deeper than what is readable, for what is coming.
    """

    request: Request
    keys: BlockKeys
    epoch: int
    pin: Pin | None = None
    num_pinned_blocks: int = 0
    loads: list[Transfer] = field(default_factory=list)
    settled: bool = False
    admitted: bool = False  # it got blocks, or committed some: else its release is no use
    num_asked_blocks: int = 0  # that the match looked for
    num_found_blocks: int = 0  # of these, cached in any tier
    num_gpu_blocks: int = 0  # found on the GPU by the match
    num_unloaded_blocks: int = 0  # in the CPU tier, not loaded for want of room
    block_ids: array[int] = field(default_factory=lambda: array("i"))
    num_matched_blocks: int = 0
    num_committed_blocks: int = 0
    copy: BlockCopy | None = None  # of the last block of a whole-prompt hit, while the match is not settled
    num_copied_tokens: int = 0  # in the private block that such a copy has filled
    duplicates: array[int] = field(default_factory=lambda: array("i"))

    def private_ids(self) -> array[int]:
        """Blocks that are the request's own: duplicates of cached ones, and those not committed yet."""
        own = self.duplicates + self.block_ids[self.num_committed_blocks :]
        return own + self.copy.ids if self.copy is not None and self.copy.landed else own

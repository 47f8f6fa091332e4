"""What came of a replay: how many steps were the same, and the first that were not."""

from __future__ import annotations

import dataclasses
from typing import Final

MAX_SHOWN: Final = 10


@dataclasses.dataclass(frozen=True)
class Difference:
    """A step that went another way."""

    step: int
    seconds: float  # since the first record
    request: int | None
    what: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        of = f", request {self.request}" if self.request is not None else ""
        where = f"step {self.step} at {self.seconds:.3f} s{of}: {self.what}"
        return f"{where}: recorded {self.recorded}, replayed {self.replayed}"


@dataclasses.dataclass
class ReplayOutcome:
    """How many steps there were, and which differ. `taught`: blocks that were cached before the recording begins."""

    num_steps: int = 0
    num_requests: int = 0
    num_different: int = 0
    num_without_begin: int = 0  # steps of requests that were matched before the recording begins
    num_taught_blocks: int = 0
    differences: list[Difference] = dataclasses.field(default_factory=list)

"""Which token comes next: the likeliest one, or one that is drawn from the likely ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_SEED_BITS = 2**64 - 1


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one answer are chosen.

    Attributes:
        temperature: 0 takes the likeliest token each time. Above it tokens are drawn, the more evenly the higher it is.
        top_p: tokens are drawn from the fewest likeliest ones that together have this share; 0 leaves the likeliest.
        seed: with the same one the same scores give the same answer.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def choose(self, scores: np.ndarray[Any, np.dtype[np.float32]], position: int) -> int:
        """The token at `position` of the answer, by the scores of all tokens.

        What is drawn depends on seed and position alone, so that a step which is done again draws the same. No other
        answer, and no preemption, changes it.
        """
        if self.temperature == 0.0:
            return int(scores.argmax())
        with np.errstate(over="ignore"):  # a tiny temperature leaves the likeliest token alone
            shares = np.exp((scores.astype(np.float64) - float(scores.max())) / self.temperature)
        order = np.argsort(-shares)
        totals = np.cumsum(shares[order])
        num_likely = int(np.searchsorted(totals, self.top_p * totals[-1])) + 1
        totals = totals[:num_likely]
        drawn = np.random.default_rng((self.seed & _SEED_BITS, position)).random() * totals[-1]
        last = len(totals) - 1  # rounding may bring what was drawn to the very end
        return int(order[min(last, int(np.searchsorted(totals, drawn, side="right")))])

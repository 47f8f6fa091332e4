"""How much each client has open of something that many share: connections, or prompts computed at its wish."""

from __future__ import annotations

import threading
from collections import Counter


class ClientCounts:
    """Counts for each client, by its address; none has more than the others leave room for. Any thread."""

    def __init__(self, max_per_client: int) -> None:
        self.max_per_client = max_per_client
        self._lock = threading.Lock()
        self._num_open: Counter[str] = Counter()

    def enter(self, client: str) -> bool:
        """One more; False, and nothing is counted, where the client has as many as it may."""
        with self._lock:
            if self._num_open[client] >= self.max_per_client:
                return False
            self._num_open[client] += 1
            return True

    @property
    def num_open(self) -> int:
        """Open connections of all clients together."""
        with self._lock:
            return self._num_open.total()

    def leave(self, client: str) -> None:
        """One that had entered is over."""
        with self._lock:
            self._num_open[client] -= 1
            if not self._num_open[client]:
                del self._num_open[client]

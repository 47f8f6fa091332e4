"""One way to wait for what announces itself to nobody."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Look until a condition holds; for what no descriptor, event or futex tells."""

    def look(condition: Callable[[], object], timeout_seconds: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            assert time.monotonic() < deadline, f"{condition} did not come to hold"
            time.sleep(0.01)

    return look

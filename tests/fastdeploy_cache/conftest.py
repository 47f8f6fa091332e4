"""What tests of the cache share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.rigs.linked_caches import Linked


@pytest.fixture
def linked_pair() -> Iterator[Linked]:
    """Two hybrid caches and the link between them."""
    from tests.rigs.linked_caches import Linked  # late: most tests need none

    given = Linked()
    yield given
    given.close()
    vars(given).clear()  # pytest keeps it, and with it the memory of both

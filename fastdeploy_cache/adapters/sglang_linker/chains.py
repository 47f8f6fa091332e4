"""Where pages lie in the chains by which they were cached. SGLang names a page by its hash alone, and our tree keeps
chains of pages: this knows which hash is where in which."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from fastdeploy_cache.adapters.sglang_linker.device_pools import PAGE_TOKENS
from fastdeploy_cache.request import Request

Hashes = Sequence[bytes]  # 32 bytes each


class ChainPart(NamedTuple):
    """Pages [first, end) of a chain, which `request` names from its front."""

    request: Request
    first: int
    end: int


class PageChains:
    """A chain is the pages of one offload, or what a look-up found in storage. One thread.

    Which pages stand in front of a look-up's first is not told, so that a page which begins one has to be found by
    itself. What is forgotten here is found as the beginning of a chain at most.
    """

    def __init__(self, most: int) -> None:
        """`most`: pages that are remembered; those that were not asked for the longest go first."""
        self._most = most
        self._at: OrderedDict[bytes, tuple[tuple[bytes, ...], int]] = OrderedDict()
        self._numbers = count(1)

    def __contains__(self, page: bytes) -> bool:
        """Whether it is remembered."""
        return page in self._at

    def part(self, hashes: Hashes, *, is_known: bool = False) -> ChainPart:
        """The chain on which the first of these pages lies, with the others behind it; of an unknown page, its own.

        `is_known`: with those alone that are known to lie on that chain. Storage may have more of it.
        """
        chain, place = self._at.get(hashes[0], ((), 0))
        if chain:
            self._at.move_to_end(hashes[0])
        if is_known:
            pairs = zip(chain[place:], hashes, strict=False)
            num = next((number for number, (known, page) in enumerate(pairs) if known != page), len(chain) - place)
            hashes = hashes[: max(1, num)]
        return ChainPart(self._request([*chain[:place], *hashes]), place, place + len(hashes))

    def fresh(self, hashes: Hashes) -> ChainPart:
        """A chain of these pages alone."""
        return ChainPart(self._request(hashes), 0, len(hashes))

    def note(self, part: ChainPart, hashes: Hashes) -> None:
        """These pages lie there."""
        tokens = np.frombuffer(part.request.tokens, np.int32).astype(">u2").tobytes()
        chain = tuple([tokens[at : at + 32] for at in range(0, 32 * (part.first + len(hashes)), 32)])
        for place, page in enumerate(hashes, part.first):
            self._at[page] = chain, place
            self._at.move_to_end(page)
        while len(self._at) > self._most:
            self._at.popitem(last=False)

    def clear(self) -> None:
        """Nothing lies anywhere."""
        self._at.clear()

    def _request(self, hashes: Hashes) -> Request:
        tokens = np.frombuffer(b"".join(hashes), ">u2").astype(np.int32)
        assert len(tokens) == PAGE_TOKENS * len(hashes), "a hash has 32 bytes"
        return Request(request_id=f"pages {next(self._numbers)}", prompt_token_ids=tokens)

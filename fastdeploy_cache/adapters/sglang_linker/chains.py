"""Where pages lie in the chains by which they were cached. SGLang names a page by its hash alone, and our tree keeps
chains of pages: this knows which hash is where in which."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from fastdeploy_cache.adapters.sglang_linker.device_pools import PAGE_TOKENS
from fastdeploy_cache.request import Request

Hashes = Sequence[bytes]  # 32 bytes each


@dataclass(frozen=True, eq=False, slots=True)
class PageLink:
    """A page of a chain, behind another one: chains with the same front share its links."""

    page: bytes
    place: int
    previous: PageLink | None

    def pages(self) -> list[bytes]:
        """Those of the chain, up to this one."""
        pages, link = [self.page] * (self.place + 1), self.previous
        while link is not None:
            pages[link.place] = link.page
            link = link.previous
        return pages


class ChainPart(NamedTuple):
    """Pages [first, end) of a chain, which `request` names from its front."""

    request: Request
    first: int
    end: int
    front: PageLink | None  # the page before them


class PageChains:
    """A chain is the pages of one offload, or what a look-up found in storage. One thread.

    Which pages stand in front of a look-up's first is not told, so that a page which begins one has to be found by
    itself. What is forgotten here is found as the beginning of a chain at most.
    """

    def __init__(self, most: int) -> None:
        """`most`: pages that are remembered; those that were not asked for the longest go first. Links are at most
        three times as many."""
        self._most = most
        self._at: OrderedDict[bytes, PageLink] = OrderedDict()
        self._num_links = 0  # at most so many
        self._numbers = count(1)

    def __contains__(self, page: bytes) -> bool:
        """Whether it is remembered."""
        return page in self._at

    @property
    def num_links(self) -> int:
        """How many there are, of all pages that are remembered and of those in front of them."""
        seen = set[PageLink]()
        for link in self._at.values():
            at: PageLink | None = link
            while at is not None and at not in seen:
                seen.add(at)
                at = at.previous
        return len(seen)

    def part(self, hashes: Hashes, *, is_known: bool = False) -> ChainPart:
        """The chain on which the first of these pages lies, with the others behind it; of an unknown page, its own.

        `is_known`: with those alone that are known to lie on that chain. Storage may have more of it.
        """
        link = self._at.get(hashes[0])
        front = link.previous if link is not None else None
        if link is not None:
            self._at.move_to_end(hashes[0])
        if is_known:
            num = 1
            while num < len(hashes) and (behind := self._at.get(hashes[num])) is not None and behind.previous is link:
                link, num = behind, num + 1
            hashes = hashes[:num]
        place = front.place + 1 if front is not None else 0
        before = front.pages() if front is not None else []
        return ChainPart(self._request([*before, *hashes]), place, place + len(hashes), front)

    def fresh(self, hashes: Hashes) -> ChainPart:
        """A chain of these pages alone."""
        return ChainPart(self._request(hashes), 0, len(hashes), None)

    def note(self, part: ChainPart, hashes: Hashes) -> None:
        """These pages lie there."""
        front = part.front
        for place, page in enumerate(hashes, part.first):
            link = self._at.get(page)
            if link is None or link.previous is not front:
                link = self._at[page] = PageLink(page, place, front)
                self._num_links += 1
            self._at.move_to_end(page)
            front = link
        while len(self._at) > self._most:
            self._at.popitem(last=False)
        if self._num_links > 3 * self._most:
            self._forget()

    def _forget(self) -> None:
        """Links of chains that go through pages which lie elsewhere by now are no page's; others may be too many."""
        while (num_links := self.num_links) > 2 * self._most:
            for _ in range(len(self._at) // 2):
                self._at.popitem(last=False)
        self._num_links = num_links

    def note_again(self, part: ChainPart) -> None:
        """These pages lie there, wherever else they have been noted meanwhile."""
        names = np.frombuffer(part.request.tokens, np.int32).astype(">u2").tobytes()
        self.note(part, [names[32 * place : 32 * (place + 1)] for place in range(part.first, part.end)])

    def clear(self) -> None:
        """Nothing lies anywhere."""
        self._at.clear()

    def _request(self, hashes: Hashes) -> Request:
        tokens = np.frombuffer(b"".join(hashes), ">u2").astype(np.int32)
        assert len(tokens) == PAGE_TOKENS * len(hashes), "a hash has 32 bytes"
        return Request(request_id=f"pages {next(self._numbers)}", prompt_token_ids=tokens)

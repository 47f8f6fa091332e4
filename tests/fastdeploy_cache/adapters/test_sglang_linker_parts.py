"""Parts of our linker for SGLang by themselves: chains of pages, the ends of offloads, and the layer counter."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.adapters.sglang_linker.chains import ChainPart, PageChains
from fastdeploy_cache.adapters.sglang_linker.loads import LayerLoads
from fastdeploy_cache.adapters.sglang_linker.offloads import Offloads
from tests.rigs.original_surface import Surface, missing
from tests.rigs.stand_in_linker import keys_of

# What SGLang 0.5.23 uses of `layer_done_counter`: `managers/tp_worker.py`, the pools in `mem_cache`, and
# `runner/prefill_cuda_graph_runner.py`.
COUNTER: Surface = {"set_consumer": ("index",), "wait_until": ("layer",), "consumer_index": None, "num_layers": None}
KEYS = [bytes.fromhex(key) for key in keys_of(9)]
OTHERS = [bytes.fromhex(key) for key in keys_of(9, "another")]


def test_the_counter_has_what_sglang_reads() -> None:
    """Each name."""
    assert not missing(LayerLoads(4, 1.0), COUNTER)


def pages_of(part: ChainPart) -> list[bytes]:
    """That its request names."""
    hashes = np.frombuffer(part.request.tokens, np.int32).astype(">u2").tobytes()
    return [hashes[at : at + 32] for at in range(0, len(hashes), 32)]


def test_a_page_is_found_within_its_chain() -> None:
    """Also where another chain goes on behind the same front, and where what is known of one ends."""
    chains = PageChains(100)
    chains.note(chains.part(KEYS[:4]), KEYS[:4])
    part = chains.part(KEYS[2:], is_known=True)
    assert (part.first, part.end) == (2, 4)
    part = chains.part(KEYS[3:])
    assert (part.first, part.end, part.request.num_tokens) == (3, 9, 9 * 16)
    chains.note(part, KEYS[3:])
    assert chains.part(KEYS[6:], is_known=True)[1:3] == (6, 9)
    branch = [KEYS[1], *OTHERS[:2]]
    chains.note(chains.part(branch), branch)
    assert pages_of(chains.part(OTHERS[1:])) == [*KEYS[:2], *OTHERS]
    assert chains.part(OTHERS[5:], is_known=True)[1:3] == (0, 1), "it is not known"


def test_a_page_that_came_again_on_another_chain() -> None:
    """Those behind it in the first chain are still found there."""
    chains = PageChains(100)
    chains.note(chains.fresh(KEYS[:4]), KEYS[:4])
    chains.note(chains.fresh([OTHERS[0], KEYS[2]]), [OTHERS[0], KEYS[2]])
    assert chains.part(KEYS[2:4], is_known=True)[1:3] == (1, 2)
    assert chains.part(KEYS[3:4], is_known=True)[1:3] == (3, 4)
    assert pages_of(chains.part(KEYS[3:4])) == KEYS[:4] and pages_of(chains.part(KEYS[2:3])) == [OTHERS[0], KEYS[2]]


@pytest.mark.parametrize("seed", range(5))
def test_what_chains_remember_is_bounded(seed: int) -> None:
    """Whatever begins and ends where: pages by their number, and links by three times that."""
    draw, chains, keys = random.Random(seed), PageChains(60), [bytes([n]) * 32 for n in range(200)]
    for number in range(400):
        first = draw.randrange(150)
        tail = [bytes([draw.randrange(256), number % 256]) * 16 for _ in range(draw.randint(0, 2))]
        pages = [*keys[first : first + draw.randint(1, 40)], *tail]
        part = chains.fresh(pages) if draw.random() < 0.7 else chains.part(pages)
        chains.note(part, pages)
        assert len(chains._at) <= 60 and chains.num_links <= 180
        assert pages_of(chains.part(pages[-1:])) == pages_of(part), "the newest is there whole"


def test_ends_of_offloads_are_told_in_order() -> None:
    """One that ends before an older one waits for it."""
    offloads, ends = Offloads(), [SimpleNamespace(done=False, succeeded=number != 1) for number in range(3)]
    for each in ends:
        offloads.add(lambda found=each: ([found], True), ())  # type: ignore[misc]
    found = list[Any]()
    for number in (2, 1, 0):
        assert offloads.num_done() == 0
        ends[number].done = True
    while offloads.num_done():
        found.append(offloads.pop())
    assert found == [True, False, True]


def test_an_offload_begins_once_its_pages_are_written() -> None:
    """By CUDA's events, in order; once each, also where it has no memory."""
    offloads, begun, event = Offloads(), list[int](), SimpleNamespace(query=lambda: is_written)
    is_written = False

    def begin(number: int) -> Any:
        begun.append(number)
        return (), False

    offloads.add(lambda: begin(0), (event,))
    offloads.add(lambda: begin(1), ())
    assert not begun and not offloads.num_done()
    is_written = True
    assert offloads.num_done() == 2 and offloads.num_done() == 2 and begun == [0, 1]
    assert not offloads.pop() and not offloads.pop()

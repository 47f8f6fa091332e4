"""What links between instances reach, and how soon a prompt is there once it is computed. All in host memory."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fastdeploy_cache.launch.bench.peer_instances import Instances
from fastdeploy_cache.launch.bench.peer_memory import LinkedMemory, Way
from fastdeploy_cache.launch.bench.peer_rows import StateInstances
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout

PIECE_SIZES = tuple(kib * 2**10 for kib in (16, 64, 256, 1024, 4096))
_MAX_PIECES = 1024  # Mooncake loses some of more than 2048
_BLOCK_SIZE = 64
_NUM_LAYERS, _NUM_PARTS = 4, 2  # of the prompts that are received whole
_LEAST_PIECES = _NUM_LAYERS * _NUM_PARTS
# layers as an 8B model's, but few and so large: the bytes of one have to outweigh what each receive costs beside them
_MODEL = KVLayout(num_layers=8, num_kv_heads=8, head_dim=128, dtype="bfloat16")
_LEAST_LAYER_SECONDS = 0.005
_PAUSE_SECONDS = 0.1


class Row(NamedTuple):
    """Medians, in bytes per second. `floor` is a plain copy (shm: the faster of two), or the library alone; `each`
    (shm) a plain copy of the same pieces, one by one."""

    piece_bytes: int
    num_pieces: int
    floor: float
    link: float
    receive: float
    each: float | None = None


class Overlap(NamedTuple):
    """Medians, in seconds. `visible`: from the last layer computed to the end of the receive; `alone`: the same where
    that layer is all that is left to be sent; `whole`: receive of the prompt when all of it is computed already."""

    layer_bytes: int
    num_layers: int
    layer_seconds: float
    visible: float
    alone: float
    whole: float

    @property
    def num_layers_behind(self) -> float:
        """What `visible` is more than `alone`, by what sending a layer of the whole takes: how many layers were left
        to be sent, beside the last one, when that was computed."""
        return (self.visible - self.alone) * self.num_layers / self.whole


def medians(ways: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """The medians of what these ways return. Each round plays all of them in a random order, as each finds in the
    processor's caches what the one before it has left. The first round, which meets new memory, does not count."""
    order, rng = list(ways), random.Random(1)  # noqa: S311  nothing secret
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        rng.shuffle(order)
        for name in order:
            times[name].append(ways[name]())
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def link_rows(kind: str, memory_bytes: int, repeats: int) -> list[Row]:
    """Scattered pieces of each size, `memory_bytes` of them at most: by the link alone between two processes, and as a
    prompt that one instance receives from another.

    Raises:
        LinkMissingError: its library is not there.
        LaunchError, TransferError: it does not work.
    """
    memory = LinkedMemory(kind, 2 * max(memory_bytes, _LEAST_PIECES * max(PIECE_SIZES)))
    try:
        return [_row(kind, memory, piece_bytes, memory_bytes, repeats) for piece_bytes in PIECE_SIZES]
    finally:
        memory.close()


def _row(kind: str, memory: LinkedMemory, piece_bytes: int, memory_bytes: int, repeats: int) -> Row:
    num_blocks = max(1, min(memory_bytes // piece_bytes, _MAX_PIECES) // _LEAST_PIECES)
    num_pieces = num_blocks * _LEAST_PIECES
    layout = KVLayout(
        num_layers=_NUM_LAYERS, num_kv_heads=1, head_dim=piece_bytes // (2 * _BLOCK_SIZE), dtype="bfloat16"
    )
    instances = Instances(kind, layout, _BLOCK_SIZE, num_blocks)
    floors = ("plain", "own") if kind == "shm" else ("library",)
    names = (*floors, "link", *(("each",) if kind == "shm" else ()))
    ways = {name: partial(memory.seconds, Way(name, piece_bytes, num_pieces)) for name in names}
    try:
        seconds = medians({**ways, "receive": instances.whole_seconds}, repeats)
    finally:
        instances.close()
    seconds["floor"] = min(seconds[name] for name in floors)
    speeds = {name: piece_bytes * num_pieces / each for name, each in seconds.items()}
    return Row(piece_bytes, num_pieces, speeds["floor"], speeds["link"], speeds["receive"], speeds.get("each"))


def overlap(kind: str, memory_bytes: int, repeats: int) -> Overlap:
    """A prompt of 8 layers, of about so many bytes, that is sent while it is computed. A layer takes twice as long to
    compute as to send, and 5 ms at least."""
    layer_block_bytes = _MODEL.for_rank(1, _BLOCK_SIZE).layer_bytes
    instances = Instances(kind, _MODEL, _BLOCK_SIZE, max(1, memory_bytes // (layer_block_bytes * _MODEL.num_layers)))
    try:
        whole = medians({"whole": instances.whole_seconds}, 3)["whole"]
        layer_seconds = max(_LEAST_LAYER_SECONDS, 2 * whole / _MODEL.num_layers)
        found = medians(
            {
                "visible": lambda: instances.after_last_layer_seconds(layer_seconds),
                "alone": lambda: instances.after_last_layer_seconds(layer_seconds, _PAUSE_SECONDS),
                "whole": instances.whole_seconds,
            },
            repeats,
        )
    finally:
        instances.close()
    return Overlap(
        layer_bytes=instances.layer_bytes, num_layers=_MODEL.num_layers, layer_seconds=layer_seconds, **found
    )


def state_seconds(kind: str, repeats: int) -> tuple[int, float]:
    """Bytes of a hybrid model's state, and the median of the seconds from the last commit of its prompt to the end of
    `receive`."""
    instances = StateInstances(kind)
    try:
        return instances.state_bytes, medians({"state": instances.after_commit_seconds}, repeats)["state"]
    finally:
        instances.close()


def smallest_receive_seconds(kind: str, repeats: int) -> float:
    """The seconds that a receive of one block of 32 KiB takes: what it costs beside its bytes."""
    instances = Instances(kind, KVLayout(num_layers=1, num_kv_heads=1, head_dim=128), _BLOCK_SIZE, 1)
    try:
        return medians({"receive": instances.whole_seconds}, repeats)["receive"]
    finally:
        instances.close()

"""What is said of a namespace that was forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import RequestError, counted
from fastdeploy_cache.storage.forget import StorageForget
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig


@dataclass(frozen=True, kw_only=True)
class ForgetReport:
    """What has become of what a namespace had.

    Attributes:
        num_gpu_blocks, num_cpu_blocks: that were cached. None of them is found any more.
        num_held_blocks: that requests and callers hold, and that may have something of it, since they had the blocks
            before; also what others computed in a block that they have not filled. They are wiped when they are let go.
        num_requests: of the namespace, that run on. What they have and compute is wiped when they are released.
        num_waiting_blocks: that nobody holds, and that were not wiped when the time was over. Nobody gets those before
            that had something of it.
        num_stored_objects: that the store has removed, of all ranks.
        left: sentences, each of what may still have something of the namespace. None: nothing that this cache knows of.
    """

    num_gpu_blocks: int
    num_cpu_blocks: int
    num_held_blocks: int
    num_requests: int
    num_waiting_blocks: int
    num_stored_objects: int
    left: tuple[str, ...]


def check_namespace(namespace: str) -> None:
    """Raise `RequestError` where no request can have this namespace."""
    if not isinstance(namespace, str):
        raise RequestError(f"forget_namespace of {namespace!r}; give the text that its requests have")
    try:
        namespace.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"forget_namespace of {namespace!r}, which is no UTF-8 text: {error}") from error


def left_of(
    config: CacheConfig, storage: StorageConfig | None, stored: StorageForget, numbers: tuple[int, int, int]
) -> Iterator[str]:
    """What may still have something of a namespace that was forgotten. `storage`: the settings of the store, if any;
    `numbers`: requests, blocks that wait, and blocks that are held."""
    num_requests, num_waiting, num_held = numbers
    if num_waiting:
        yield f"not overwritten yet: {counted(num_waiting, 'block')}; the ranks will do it, and nobody gets them before"
    if num_requests:
        yield f"run on: {counted(num_requests, 'request')} of it; all that they have is overwritten when they end"
    if num_held:
        yield f"held by requests or callers: {counted(num_held, 'block')}, overwritten when they let them go"
    if not stored.done.is_set():
        what = "could not be asked" if stored.ask is not None else "has not answered"
        yield f"the store {what} in time; forget the namespace again"
    elif stored.why_not:
        yield f"the store: {stored.why_not}"
    if storage is not None and storage.kind == "file" and storage.keys_file is None:
        yield "places in the store's files that were freed before keep their bytes until they are written to again"
    if storage is not None and storage.kind != "file":
        yield f"other instances that use the {storage.kind} store may write there again what they have cached"
    if config.peer is not None:
        yield "other instances that have received blocks, or receive them now, keep what they have"
    if config.events is not None:
        yield "the publisher of events keeps its last messages, which have tokens, to send them again"

"""Errors of the transfer layer; the whole tree is drawn in `fastdeploy_cache.errors`."""

from ipc.errors import IPCError, NotEnoughMemoryError

__all__ = [
    "DeviceError",
    "IPCError",
    "LayoutError",
    "NotEnoughMemoryError",
    "PeerError",
    "PeerRefusedError",
    "RankStartError",
    "StorageError",
    "StorageGoneError",
    "StorageRefusedError",
    "TransferError",
]


class TransferError(Exception):
    """Base of every error that this package raises."""


class LayoutError(TransferError):
    """Sizes of a KV layout or of the transfer configuration that cannot be."""


class RankStartError(TransferError):
    """A rank did not become ready within its deadline; the message holds its exit code and the end of its log."""


class DeviceError(TransferError):
    """A copy cannot be done as asked: an id outside its pool, lists of different length."""


class PeerError(TransferError):
    """Another instance could not be reached, or cannot be served; nothing of it counts."""


class PeerRefusedError(PeerError):
    """What was asked of another instance can never be: the message has what both sides say."""


class StorageError(TransferError):
    """A store could not do what was asked; nothing of it counts."""


class StorageGoneError(StorageError):
    """A store cannot go on as it was opened (its folder has vanished, its client is dead): it has to be opened anew."""


class StorageRefusedError(StorageError):
    """A store cannot be opened as configured, and trying again will not help: the message says what to change."""

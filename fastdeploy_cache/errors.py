"""Every error of the project::

CacheError                          fastdeploy_cache
+-- ConfigError (ValueError)        an impossible or unknown setting
+-- RequestError (ValueError)       a request that cannot be served as given
|   +-- PromptTooLongError          needs more blocks than the GPU pool has
|   +-- UnknownRequestError         not matched, or released already
|   +-- CommitError                 more tokens than were given or allocated
+-- OutOfBlocksError                no room now; `.missing` and `.coming` say how much
+-- BlockOwnerError                 a block id given back by one who does not own it
+-- LifeCycleError                  asleep or paused where it must not be, or a change that came to no end in time
+-- ClosedError                     the manager is closed
TransferError                       transfer_manager
+-- LayoutError                     settings of a layout, of the ranks or of storage that cannot be
+-- RankStartError                  a rank did not become ready
+-- DeviceError                     a copy that cannot be done as asked
+-- LinkError                       bytes of another instance could not be read; `.reason`, `.may_write_later`
+-- StorageError                    a store failed; where it concerns a caller it is
|   +-- StorageRefusedError         it cannot be opened as configured
+-- PeerError                       nothing can be sent or received now
|   +-- PeerRefusedError            what was asked of another instance can never be
IPCError                            ipc
+-- NotEnoughMemoryError            pools larger than the memory available
+-- CodecError, QueueFullError, QueueDisconnectedError
MetricsError                        metrics
+-- PortInUseError
"""

from __future__ import annotations

from transfer_manager.errors import LayoutError, PeerError, PeerRefusedError, StorageRefusedError

__all__ = [
    "BlockOwnerError",
    "CacheError",
    "ClosedError",
    "CommitError",
    "ConfigError",
    "LayoutError",
    "LifeCycleError",
    "OutOfBlocksError",
    "PeerError",
    "PeerRefusedError",
    "PromptTooLongError",
    "RequestError",
    "StorageRefusedError",
    "UnknownRequestError",
]


class CacheError(Exception):
    """Base of every error that this package raises."""


class ConfigError(CacheError, ValueError):
    """An impossible or unknown setting; the message names it, its value and the remedy."""


class RequestError(CacheError, ValueError):
    """A request that cannot be served as given."""


class PromptTooLongError(RequestError):
    """The prompt needs more blocks than the GPU pool has."""


class UnknownRequestError(RequestError):
    """The request was never matched, or has been released."""


class CommitError(RequestError):
    """More tokens committed than the request has, or than its blocks hold."""


class OutOfBlocksError(CacheError):
    """An allocation that cannot be had now; nothing was changed."""

    def __init__(self, missing: int, coming: int) -> None:
        """`missing` are short when all evictable ones are taken; `coming` are held only by copies in flight."""
        super().__init__(
            f"{missing} blocks are missing ({coming} are held by copies in flight); "
            "release a request or wait for the copies, then allocate again"
        )
        self.missing = missing
        self.coming = coming


class BlockOwnerError(CacheError):
    """A block id was given back or handed on by one who does not own it."""


class LifeCycleError(CacheError):
    """The cache is in a state where this cannot be, or a change of it has not come to its end in time."""


class ClosedError(CacheError):
    """The manager has been closed."""

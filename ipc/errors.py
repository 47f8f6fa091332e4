"""Errors of the ipc layer; the whole tree is drawn in `fastdeploy_cache.errors`."""


class IPCError(Exception):
    """Base of every error that this package raises."""


class NotEnoughMemoryError(IPCError):
    """A shared segment would not fit in the memory that this process may use."""


class CodecError(IPCError):
    """Bytes that are no message of the expected type."""


class QueueFullError(IPCError):
    """The peer has not taken its earlier messages: not now."""


class QueueDisconnectedError(IPCError):
    """No peer is connected to the queue."""

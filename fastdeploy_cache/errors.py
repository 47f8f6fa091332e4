"""Every error that a user can see, in a leaf that each package may import.

CacheError
+-- ConfigError (ValueError)        an impossible or unknown setting
|   +-- UnknownVersionError *       a FastDeploy whose cache manager has calls that are not known here
+-- RequestError (ValueError)       a request that cannot be served as given
|   +-- PromptTooLongError          needs more blocks than the GPU pool has
|   +-- UnknownRequestError         not matched, or released already
|   |   +-- UnknownTaskError *      the same, of a task of FastDeploy's; a KeyError, too
|   +-- CommitError                 more tokens than were given or allocated, or fewer than were committed before
+-- OutOfBlocksError                no room now; `.missing` and `.coming` say how much
|   +-- NotEnoughBlocksError *      the same, for FastDeploy's callers; an AssertionError, too
+-- BlockOwnerError                 a block id given back by one who does not own it
+-- LifeCycleError                  asleep or paused where it must not be, or a change that came to no end in time
+-- ClosedError                     the manager is closed
+-- ControlError                    what was asked of a running cache from outside is refused, or has no answer
+-- TransferError                   the processes that move bytes
|   +-- LayoutError                 a KV layout that cannot be, or KV arrays that do not fit it or have no place here
|   +-- RankStartError              a rank did not become ready
|   |   +-- PeersLateError *        the ranks of a FastDeploy are ready, and their links to other instances are not
|   +-- DeviceError                 a copy that cannot be done as asked
|   +-- StorageError                a store failed; where it concerns a caller it is
|   |   +-- StorageGoneError        it has to be opened anew
|   |   +-- StorageRefusedError     it cannot be opened as configured
|   +-- PeerError                   nothing can be sent or received now
|       +-- PeerRefusedError        what was asked of another instance can never be
+-- IPCError                        shared memory, queues, signals and sockets
|   +-- NotEnoughMemoryError        pools larger than the memory available
|   +-- CodecError                  bytes that are no message of the expected type
|   +-- QueueFullError              not now
|   +-- QueueDisconnectedError      nobody is at the other end
+-- RecordingError                  a flight recording cannot be written, or be read
+-- MetricsError                    the metrics endpoint
|   +-- PortInUseError              it cannot listen where it should
+-- LaunchError                     a program cannot do what it was asked to
|   +-- ModelLoadError              the model cannot be loaded here
|   +-- TraceError *                a trace for `simulate` cannot be read
+-- GenerationError *               the reference engine could not produce an answer
    +-- GenerationTimeoutError *    it has not come in time, and still may
    +-- GenerationRefusedError *    it can never be had as asked
    +-- GenerationBusyError *       this client has as much under way as it may

Those with a star live with the adapter or the program that they belong to, below `fastdeploy_cache`:
- `adapters.fastdeploy.hook`: UnknownVersionError
- `adapters.fastdeploy.task`: UnknownTaskError, NotEnoughBlocksError
- `adapters.fastdeploy.current_cache`: PeersLateError
- `launch.simulator.trace`: TraceError
- `launch.reference_engine.generation`: GenerationError, GenerationTimeoutError, GenerationRefusedError,
  GenerationBusyError

What a package keeps to itself (an error that it catches again) is not here.
"""

from __future__ import annotations


def reason_of(error: Exception) -> str:
    """What it says; of an error of the system without its number and path, which our own words have already."""
    return getattr(error, "strerror", None) or str(error)


def counted(number: int, noun: str) -> str:
    """A number and what it counts, such as `1 rank` and `2 ranks`. The noun is given as for one."""
    if number == 1:
        return f"1 {noun}"
    ending = next((more for end, more in (("y", "ies"), ("x", "xes"), ("s", "ses")) if noun.endswith(end)), None)
    return f"{number} {noun}s" if ending is None else f"{number} {noun[:-1]}{ending}"


def named(noun: str, names: list[str] | list[int], one: str, more: str) -> str:
    """What is so of some, such as `rank 0 is` and `ranks 0, 1 and 2 are`: with `one` or `more` behind them."""
    *front, last = map(str, names)
    return f"{noun}s {', '.join(front)} and {last} {more}" if front else f"{noun} {last} {one}"


def duration(seconds: float) -> str:
    """A time in words: in the unit in which it is at least 2, of hours, minutes and seconds; below that in
    milliseconds, at least 1."""
    if seconds < 0.9995:
        return f"{max(1, round(seconds * 1000))} ms"
    size, unit = next((each for each in ((3600, "hour"), (60, "minute")) if seconds >= 2 * each[0]), (1, "second"))
    return counted(round(seconds / size), unit)


class CacheError(Exception):
    """Base of every error that the project raises."""


class ConfigError(CacheError, ValueError):
    """An impossible or unknown setting; the message names it, its value and the remedy."""


class RequestError(CacheError, ValueError):
    """A request that cannot be served as given."""


class PromptTooLongError(RequestError):
    """The prompt needs more blocks than the GPU pool has."""


class UnknownRequestError(RequestError):
    """The request was never matched, or has been released."""


class CommitError(RequestError):
    """More tokens committed than the request has or than its blocks hold, or fewer than were committed before."""


class OutOfBlocksError(CacheError):
    """An allocation that cannot be had now; nothing was changed."""

    def __init__(
        self,
        missing: int,
        coming: int,
        *,
        num_all: int | None = None,
        row: str | None = None,
        namespace: str | None = None,
    ) -> None:
        """`missing` are short when all evictable ones are taken; `coming` are held only by copies in flight.

        `num_all`: the blocks of the whole pool, where one caller would have more than these. `row`: the one whose units
        are short, where that is not the full one. `namespace`: whose tenant's share it is, where there are tenants.
        """
        remedy = "release a request, then try again"
        if num_all is not None and row is not None:
            remedy = "allocate fewer blocks at once, or commit what is computed, by which it gives units back; else "
            remedy += f"make its pool of {num_all} larger (num_gpu_units), or end this request"
        elif num_all is not None and namespace is not None:
            remedy = f"the share of the namespace {namespace!r} is {num_all}, so no wait can help: raise it (tenants), "
            remedy += "or end this request"
        elif num_all is not None:
            remedy = f"the whole pool has {num_all}, so no wait can help: make it larger, or end this request"
        elif coming >= missing:
            remedy = f"wait for the copies in flight, which hold {coming} (`wait_seconds`), or {remedy}"
        elif coming:
            remedy = f"copies in flight hold {coming} of them; {remedy}"
        what = counted(missing, "block") if row is None else f"{counted(missing, 'unit')} of the row {row!r}"
        super().__init__(f"{what} {'is' if missing == 1 else 'are'} missing; {remedy}")
        self.missing = missing
        self.row = row
        self.coming = coming


class BlockOwnerError(CacheError):
    """A block id was given back or handed on by one who does not own it."""


class LifeCycleError(CacheError):
    """The cache is in a state where this cannot be, or a change of it has not come to its end in time."""


class ClosedError(CacheError):
    """The manager has been closed."""


class ControlError(CacheError):
    """What an operator asks of a running cache is refused, or a cache that was asked does not answer."""


class RecordingError(CacheError):
    """A flight recording cannot be written, or be read; the message has the file and the reason."""


class TransferError(CacheError):
    """Base of every error of the transfer layer."""


class LayoutError(TransferError):
    """A KV layout that cannot be, or KV arrays that do not fit it or cannot be used here."""


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


class IPCError(CacheError):
    """Base of every error of this layer."""


class NotEnoughMemoryError(IPCError):
    """A shared segment would not fit in the memory that this process may use."""


class CodecError(IPCError):
    """Bytes that are no message of the expected type."""


class QueueFullError(IPCError):
    """The peer has not taken its earlier messages: not now."""


class QueueDisconnectedError(IPCError):
    """No peer is connected to the queue."""


class MetricsError(CacheError):
    """Base of every error of this layer."""


class PortInUseError(MetricsError):
    """The metrics endpoint cannot listen where it should."""


class LaunchError(CacheError):
    """A program cannot do what it was asked to; the message says what to do."""


class ModelLoadError(LaunchError):
    """The model cannot be loaded here: one line with what failed, the value seen and the remedy."""

"""The queue to one rank: bounded, never blocking for the engine, without a name, and gone without a trace."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from fastdeploy_cache.errors import CodecError, IPCError, QueueDisconnectedError, QueueFullError
from fastdeploy_cache.ipc import task_queue
from fastdeploy_cache.ipc.poller import Poller, Wakeup
from fastdeploy_cache.ipc.task_queue import RankQueue, TaskQueue
from tests.rigs.descriptors import descriptors_left
from tests.rigs.leaks import handles

SECONDS = 20.0
LARGE = b"\x00\x01" * 2_000_000  # more than the kernel takes at once


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes what a test opened."""
    with ExitStack() as stack:
        yield stack


def new_queue(opened: ExitStack, max_messages: int = 10, num_lanes: int = 1) -> TaskQueue:
    queue = TaskQueue(num_lanes, max_messages)
    opened.callback(queue.close)
    return queue


def new_ranks(opened: ExitStack, queue: TaskQueue) -> list[RankQueue]:
    """The other end of each lane, as a process has it that has inherited the descriptors."""
    ranks = [RankQueue(os.dup(fd)) for fd in queue.rank_fds]
    for rank in ranks:
        opened.callback(rank.close)
    queue.hand_over()
    return ranks


def new_rank(opened: ExitStack, queue: TaskQueue) -> RankQueue:
    (rank,) = new_ranks(opened, queue)
    return rank


def receive(queue: TaskQueue) -> bytes:
    """The next message, however many pieces it comes in."""
    poller = Poller()
    poller.register(queue.fd, "queue")
    while (message := queue.get()) is None:
        assert poller.wait(SECONDS) == ["queue"]
    return message


def is_quiet(queue: TaskQueue) -> bool:
    """Whether nobody would be woken by it."""
    poller = Poller()
    poller.register(queue.fd, "queue")
    return poller.wait(0) == []


@contextmanager
def running(target: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=target)
    thread.start()
    yield
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_messages_flow_in_order_both_ways(opened: ExitStack) -> None:
    """Whole messages, in the order in which they were put; an empty queue gives None at once."""
    queue = new_queue(opened)
    rank = new_rank(opened, queue)
    assert rank.get_now() is None
    for message in (b"one", b"", b"\x00" * 100_000):
        queue.put(message)
    assert [rank.get() for _ in range(2)] == [b"one", b""] and rank.get_now() == b"\x00" * 100_000
    assert rank.get_now() is None and is_quiet(queue)
    rank.put(b"done")
    assert receive(queue) == b"done" and queue.get() is None and is_quiet(queue)


def test_lanes_do_not_wait_for_each_other(opened: ExitStack) -> None:
    """What one lane has not read does not hold up the other, either way; each has its own messages."""
    queue = new_queue(opened, max_messages=1, num_lanes=2)
    first, second = new_ranks(opened, queue)
    queue.put(LARGE, 0)
    with pytest.raises(QueueFullError):
        queue.put(b"more", 0)
    queue.put(b"small", 1)
    assert second.get() == b"small"
    second.put(b"done")
    assert receive(queue) == b"done"
    with running(lambda: first.put(first.get())):
        assert receive(queue) == LARGE


def test_a_rank_that_does_not_read_fills_the_queue(opened: ExitStack) -> None:
    """The engine is told `full` instead of being blocked, and may go on once the rank reads again."""
    queue = new_queue(opened, max_messages=2)
    rank = new_rank(opened, queue)
    num_put = 0
    with pytest.raises(QueueFullError):
        for num_put in range(10_000):
            queue.put(num_put.to_bytes(4, "little") * 1000)
    got = []

    def read() -> None:
        got.extend(rank.get() for _ in range(num_put))
        rank.put(b"read all")

    with running(read):
        assert receive(queue) == b"read all", "what waits is sent on as the rank reads"
    assert got == [number.to_bytes(4, "little") * 1000 for number in range(num_put)], "what was accepted is delivered"
    queue.put(b"next")
    assert rank.get() == b"next" and is_quiet(queue)


def test_a_peer_that_is_gone_is_a_disconnect(opened: ExitStack) -> None:
    """After the peer closed, a task is refused; what it had said is still there, and then nobody is woken any more."""
    queue = new_queue(opened)
    rank = new_rank(opened, queue)
    queue.put(b"never read")
    for number in range(3):
        rank.put(b"%d" % number)
    rank.close()
    for _ in range(2):
        with pytest.raises(QueueDisconnectedError, match="lane 0"):
            queue.put(b"task")
    assert [receive(queue) for _ in range(3)] == [b"0", b"1", b"2"]
    while not is_quiet(queue):
        assert queue.get() is None
    with pytest.raises(QueueDisconnectedError):
        queue.put(b"task")


def test_a_peer_that_goes_while_tasks_wait_leaves_none_of_them(opened: ExitStack) -> None:
    """What it has not read is void, and the descriptor does not ask for its being sent for ever."""
    queue = new_queue(opened)
    rank = new_rank(opened, queue)
    queue.put(LARGE)
    rank.close()
    for _ in range(3):
        assert queue.get() is None
    assert is_quiet(queue)


def test_an_engine_that_is_gone_is_a_disconnect(opened: ExitStack) -> None:
    """What it had put is still read; after that neither direction waits for it."""
    queue = new_queue(opened)
    rank = new_rank(opened, queue)
    queue.put(b"last")
    queue.close()
    assert rank.get() == b"last"
    for verb in (rank.get, rank.get_now, lambda: rank.put(b"done")):
        with pytest.raises(QueueDisconnectedError):
            verb()


@pytest.mark.parametrize("num_bytes", [2**30 + 1, 2**40, 2**64 - 1])
def test_a_garbled_length_from_the_rank_ends_its_lane(opened: ExitStack, num_bytes: int) -> None:
    """It is told once, with what was seen; what came before it counts, and the other lane goes on."""
    queue = new_queue(opened, num_lanes=2)
    first, second = new_ranks(opened, queue)
    first.put(b"before")
    first._end.sendall(num_bytes.to_bytes(8, "little") + b"behind")
    with pytest.raises(CodecError, match=f"of {num_bytes} bytes is announced"):
        queue.get()
    assert queue.get() == b"before" and queue.get() is None and is_quiet(queue)
    with pytest.raises(QueueDisconnectedError):
        queue.put(b"task", 0)
    second.put(b"done")
    assert receive(queue) == b"done"
    queue.put(b"next", 1)
    assert second.get() == b"next"


def test_a_garbled_length_from_the_engine_is_no_wait(opened: ExitStack) -> None:
    """The rank reads what came before it, and then hears what was seen; whichever verb it uses."""
    for verb in (RankQueue.get, RankQueue.get_now):
        queue = new_queue(opened)
        rank = new_rank(opened, queue)
        queue.put(b"task")
        queue._lanes[0].end.sendall(b"\xff" * 8)
        queue.close()
        assert verb(rank) == b"task"
        with pytest.raises(CodecError, match="of 18446744073709551615 bytes is announced"):
            verb(rank)


def test_what_the_other_end_would_refuse_is_not_sent(opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends refuse a message that is too long, name its size, and go on; the longest that may be arrives."""
    monkeypatch.setattr(task_queue, "_MOST_BYTES", 1000)
    queue = new_queue(opened)
    rank = new_rank(opened, queue)
    for put in (queue.put, rank.put):
        with pytest.raises(IPCError, match="1001 bytes is not sent"):
            put(bytes(1001))
    queue.put(bytes(1000))
    rank.put(rank.get())
    assert receive(queue) == bytes(1000)


def test_two_queues_never_mix(opened: ExitStack) -> None:
    """Every incarnation's queue is its own."""
    queues = [new_queue(opened) for _ in range(3)]
    ranks = [new_rank(opened, queue) for queue in queues]
    for n in range(3):
        queues[n].put(b"task %d" % n)
    for n in (2, 0, 1):
        assert ranks[n].get() == b"task %d" % n
        ranks[n].put(b"done %d" % n)
    assert [receive(queue) for queue in queues] == [b"done 0", b"done 1", b"done 2"]
    assert all(queue.get() is None for queue in queues)


def test_it_has_no_name(opened: ExitStack) -> None:
    """Nobody else can reach it: its sockets are bound to nothing, and it keeps no end but its own."""
    queue = new_queue(opened, num_lanes=2)
    for fd in queue.rank_fds:
        with socket.socket(fileno=os.dup(fd)) as end:
            assert end.getsockname() == end.getpeername() == ""
    far = queue.rank_fds
    queue.hand_over()
    queue.hand_over()
    assert not set(far) & set(handles()) and len(far) == 2
    queue.close()
    queue.close()


def test_a_queue_that_cannot_be_made_is_an_error_and_leaves_nothing() -> None:
    """However many descriptors are missing: an error of the system that says so."""
    before = handles()
    for num_free in range(5):
        with descriptors_left(num_free), pytest.raises(OSError) as caught:
            TaskQueue(2, 10)
        assert caught.value.errno == errno.EMFILE
    assert handles() == before


def test_poller_tells_sources_apart(opened: ExitStack) -> None:
    """Queues and descriptors are waited for together, and only what is ready is reported."""
    first, second = (new_queue(opened) for _ in range(2))
    wakeup = Wakeup()
    opened.callback(wakeup.close)
    poller = Poller()
    for source, key in ((first.fd, 1), (second.fd, 2), (wakeup.fd, "wakeup")):
        poller.register(source, key)
    assert poller.wait(0) == []
    new_rank(opened, second).put(b"hello")
    assert poller.wait(SECONDS) == [2]
    assert second.get() == b"hello"
    wakeup.set()
    assert poller.wait(SECONDS) == ["wakeup"]
    poller.unregister(wakeup.fd)
    assert poller.wait(0) == []


def test_wakeup_ends_a_wait_from_another_thread(opened: ExitStack) -> None:
    """`set` before or during the wait ends it; `clear` forgets any number of earlier calls."""
    wakeup, poller = Wakeup(), Poller()
    opened.callback(wakeup.close)
    poller.register(wakeup.fd, "wakeup")
    thread = threading.Thread(target=wakeup.set)
    thread.start()
    assert poller.wait(SECONDS) == ["wakeup"]
    thread.join(SECONDS)
    wakeup.set()
    wakeup.set()
    wakeup.clear()
    wakeup.clear()
    assert poller.wait(0) == []


def test_wakeup_after_close_touches_no_stranger() -> None:
    """A late `set` from a thread that was still submitting does not write into a reused descriptor."""
    wakeup = Wakeup()
    wakeup.close()
    stranger = os.memfd_create("stranger")
    wakeup.set()
    wakeup.close()
    assert os.fstat(stranger).st_size == 0
    os.close(stranger)


def test_the_programs_default_timeout_is_not_the_queues(opened: ExitStack) -> None:
    """A user's `socket.setdefaulttimeout` is for sockets of the user's: a rank waits for its next task all the same."""
    socket.setdefaulttimeout(0.001)
    opened.callback(socket.setdefaulttimeout, None)
    queue = new_queue(opened)
    (rank,) = new_ranks(opened, queue)
    got = list[bytes]()
    thread = threading.Thread(target=lambda: got.append(rank.get()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), "it has not waited"
    queue.put(b"task")
    thread.join(SECONDS)
    assert got == [b"task"]

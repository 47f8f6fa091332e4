"""The queue to one rank: bounded, never blocking for the engine, private, and gone without a trace."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from fastdeploy_cache.errors import IPCError, QueueDisconnectedError, QueueFullError
from fastdeploy_cache.ipc.task_queue import Poller, RankQueue, TaskQueue, Wakeup, new_context

SECONDS = 20.0


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes what a test opened: first the queues, then the context."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def context(opened: ExitStack) -> zmq.Context[zmq.Socket[bytes]]:
    """The engine side's context."""
    made = new_context()
    opened.callback(made.destroy, linger=0)
    return made


def new_queue(opened: ExitStack, context: zmq.Context, max_messages: int = 10) -> TaskQueue:
    queue = TaskQueue(context, max_messages)
    opened.callback(queue.close)
    return queue


def new_rank(opened: ExitStack, queue: TaskQueue, greeting: bytes = b"ready", max_messages: int = 10) -> RankQueue:
    """A peer whose first message has arrived, as a rank's ready message does."""
    rank = RankQueue(queue.address, max_messages)
    opened.callback(rank.close)
    rank.put(greeting)
    assert receive(queue) == greeting
    return rank


def receive(queue: TaskQueue) -> bytes | None:
    poller = Poller()
    poller.register(queue, "queue")
    assert poller.wait(SECONDS) == ["queue"]
    return queue.get()


def test_put_without_a_peer_says_so(opened: ExitStack, context: zmq.Context) -> None:
    """A task for nobody is refused, not kept for whoever comes next."""
    queue = new_queue(opened, context)
    with pytest.raises(QueueDisconnectedError, match=queue.address):
        queue.put(b"task")


def test_messages_flow_in_order_both_ways(opened: ExitStack, context: zmq.Context) -> None:
    """Whole messages, in the order in which they were put; an empty queue gives None at once."""
    queue = new_queue(opened, context)
    rank = new_rank(opened, queue)
    for message in (b"one", b"", b"\x00" * 100_000):
        queue.put(message)
    assert [rank.get() for _ in range(3)] == [b"one", b"", b"\x00" * 100_000]
    rank.put(b"done")
    assert receive(queue) == b"done" and queue.get() is None


def test_a_rank_that_does_not_read_fills_the_queue(opened: ExitStack, context: zmq.Context) -> None:
    """The engine is told `full` instead of being blocked, and may go on once the rank reads again."""
    queue = new_queue(opened, context, max_messages=2)
    rank = new_rank(opened, queue, max_messages=2)
    num_put = 0
    with pytest.raises(QueueFullError):
        for num_put in range(10_000):
            queue.put(num_put.to_bytes(4, "little") * 1000)
    for number in range(num_put):
        assert rank.get() == number.to_bytes(4, "little") * 1000, "what was accepted is delivered"
    rank.put(b"read all")
    assert receive(queue) == b"read all"
    queue.put(b"next")
    assert rank.get() == b"next"


def test_a_peer_that_is_gone_is_a_disconnect(
    opened: ExitStack, context: zmq.Context, eventually: Callable[..., None]
) -> None:
    """After the peer closed, a task is refused with the disconnect error and not swallowed for ever."""
    queue = new_queue(opened, context)
    new_rank(opened, queue).close()

    def refused() -> bool:
        try:
            queue.put(b"task")
        except QueueDisconnectedError:
            return True
        return False

    eventually(refused)


def test_hide_removes_the_path_but_messages_flow(opened: ExitStack, context: zmq.Context) -> None:
    """After `hide` there is neither socket nor directory, and the connected peer can still talk."""
    queue = new_queue(opened, context)
    rank = new_rank(opened, queue)
    directory = Path(queue.address.removeprefix("ipc://")).parent
    assert directory.is_dir()
    queue.hide()
    assert not directory.exists()
    queue.hide()
    for number in range(5):
        queue.put(b"task %d" % number)
        assert rank.get() == b"task %d" % number
        rank.put(b"done %d" % number)
        assert receive(queue) == b"done %d" % number


def test_close_leaves_no_path(opened: ExitStack, context: zmq.Context) -> None:
    """A queue that never had a peer takes its directory with it; a second close is fine."""
    queue = new_queue(opened, context)
    directory = Path(queue.address.removeprefix("ipc://")).parent
    queue.close()
    queue.close()
    assert not directory.exists()


def test_two_queues_never_mix(opened: ExitStack, context: zmq.Context) -> None:
    """Every incarnation's queue is its own, though all peers carry the same name."""
    queues = [new_queue(opened, context) for _ in range(3)]
    ranks = [new_rank(opened, queue, b"ready %d" % n) for n, queue in enumerate(queues)]
    assert len({queue.address for queue in queues}) == 3
    for n in range(3):
        queues[n].put(b"task %d" % n)
    for n in (2, 0, 1):
        assert ranks[n].get() == b"task %d" % n
        ranks[n].put(b"done %d" % n)
    assert [receive(queue) for queue in queues] == [b"done 0", b"done 1", b"done 2"]
    assert all(queue.get() is None for queue in queues)


@pytest.mark.parametrize("name", ["x" * 90, "é" * 60])
def test_a_long_temporary_folder_works(
    name: str, opened: ExitStack, context: zmq.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Socket addresses hold 108 bytes; a longer TMPDIR (in bytes, not letters) does not stop the queue."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="t")) / name
    folder.mkdir()
    opened.callback(folder.parent.rmdir)
    opened.callback(folder.rmdir)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    queue = new_queue(opened, context)
    new_rank(opened, queue)


def test_the_directory_is_private(opened: ExitStack, context: zmq.Context) -> None:
    """No other user can reach the socket: its directory has mode 0700 and is ours."""
    queue = new_queue(opened, context)
    info = Path(queue.address.removeprefix("ipc://")).parent.stat()
    assert stat.S_IMODE(info.st_mode) == 0o700 and info.st_uid == os.getuid()


def test_a_queue_that_cannot_be_made_is_an_ipc_error(opened: ExitStack, tmp_path: Path) -> None:
    """No more sockets (descriptors run out): the kind of error that the supervisor expects, and no directory left."""
    context = zmq.Context()
    opened.callback(context.destroy, linger=0)
    context.set(zmq.MAX_SOCKETS, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        made = new_queue(opened, context)
        with pytest.raises(IPCError):
            new_queue(opened, context)
    assert [Path(made.address.removeprefix("ipc://")).parent] == list(tmp_path.iterdir())


def test_poller_tells_sources_apart(opened: ExitStack, context: zmq.Context) -> None:
    """Queues and descriptors are waited for together, and only what is ready is reported."""
    first, second = (new_queue(opened, context) for _ in range(2))
    wakeup = Wakeup()
    opened.callback(wakeup.close)
    poller = Poller()
    for source, key in ((first, 1), (second, 2), (wakeup.fd, "wakeup")):
        poller.register(source, key)
    assert poller.wait(0) == []
    rank = RankQueue(second.address, 10)
    opened.callback(rank.close)
    rank.put(b"hello")
    assert poller.wait(SECONDS) == [2]
    second.get()
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


def test_what_a_killed_engine_left_goes_with_the_next_start(
    opened: ExitStack, context: zmq.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However young: a folder that nobody locks is a dead engine's. Locked and foreign ones stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    in_use = Path(new_queue(opened, context).address.removeprefix("ipc://")).parent
    for name in ("fdc-left", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "queue").touch()
    second = Path(new_queue(opened, context).address.removeprefix("ipc://")).parent
    assert {path.name for path in tmp_path.iterdir()} == {in_use.name, second.name, "other"}


def test_a_folder_that_is_swept_before_it_is_locked_is_made_anew(
    opened: ExitStack, context: zmq.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine starts just between, and takes the folder for a dead one's: its owner notices."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make, made = tempfile.mkdtemp, list[str]()

    def make_and_lose_the_first(**where: str) -> str:
        path = make(**where)
        made.append(path)
        if len(made) == 1:
            Path(path).rmdir()
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose_the_first)
    folder = Path(new_queue(opened, context).address.removeprefix("ipc://")).parent
    assert str(folder) == made[1] and [path.name for path in tmp_path.iterdir()] == [folder.name]

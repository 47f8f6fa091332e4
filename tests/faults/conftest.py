"""Real ranks that are stopped and killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.rank.client import RankClient
from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient
from tests.ipc.conftest import eventually  # noqa: F401 (a fixture here too)
from tests.rigs.answers import Answers

LAYOUT = KVLayout(num_layers=3, num_kv_heads=6, head_dim=4, dtype="float16")
NUM_GPU, NUM_CPU, BLOCK_SIZE = 16, 24, 4
SECONDS = 30.0


@pytest.fixture
def new_client() -> Iterator[Callable[..., tuple[RankClient, Answers]]]:
    """Starts clients with short deadlines; `transfer` settings may be overridden."""
    clients: list[RankClient] = []

    def new(tp_size: int = 2, **transfer: object) -> tuple[RankClient, Answers]:
        settings = {"tp_size": tp_size, "task_timeout_seconds": 1.0, "restart_backoff_seconds": 0.01} | transfer
        config = TransferConfig(**settings)  # type: ignore[arg-type]
        answers = Answers()
        client = RankClient(config, LAYOUT.for_rank(tp_size, BLOCK_SIZE), NUM_GPU, NUM_CPU)
        clients.append(client)
        client.start(answers)
        return client, answers

    yield new
    for client in clients:
        client.stop()
        client.__dict__.clear()  # pytest still holds it when the leak fixture looks; views keep their mapping


@pytest.fixture
def rank_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes rank processes run the given code instead of theirs."""

    def replace(code: str) -> None:
        package = tmp_path / "fastdeploy_cache" / "transfer_manager"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return replace


def pids(client: TransferClient) -> list[int]:
    """The pid of every rank, all of which are up."""
    found = [status.pid for status in client.statuses()]
    assert all(found)
    return [pid for pid in found if pid is not None]


@contextlib.contextmanager
def watched(pid: int) -> Iterator[int]:
    """A pid descriptor: it stays with this very process, whoever gets its number later."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def is_gone(pidfd: int) -> bool:
    """Reaped: not even a zombie is left."""
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return True
    return False


def wait_exit(pidfd: int, seconds: float = SECONDS) -> bool:
    """Wait for the process to end (it may still be a zombie)."""
    return bool(select.select([pidfd], [], [], seconds)[0])

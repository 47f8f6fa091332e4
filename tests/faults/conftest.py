"""Real ranks that are stopped and killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.rank.client import RankClient
from tests.rigs.answers import Answers

LAYOUT = KVLayout(num_layers=3, num_kv_heads=6, head_dim=4, dtype="float16")
NUM_GPU, NUM_CPU, BLOCK_SIZE = 16, 24, 4


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

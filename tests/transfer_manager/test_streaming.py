"""What a rank that copies by the processor finds in its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.device.cpu import streaming_variables
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.rank.client import RankClient

OURS = "glibc.cpu.x86_non_temporal_threshold=20480"


@pytest.mark.parametrize(
    ("before", "added"),
    [
        ({}, {"GLIBC_TUNABLES": OURS}),
        ({"GLIBC_TUNABLES": ""}, {"GLIBC_TUNABLES": OURS}),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=1"}, {"GLIBC_TUNABLES": f"glibc.malloc.check=1:{OURS}"}),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x800000"}, {}),
    ],
)
def test_what_somebody_has_set_stays(before: dict[str, str], added: dict[str, str]) -> None:
    """Other tunables stand beside it, and a threshold of their own is theirs."""
    assert streaming_variables(before) == added


@pytest.mark.processes
def test_a_rank_has_it_and_the_rest_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel knows the process."""
    monkeypatch.setenv("FDC_TEST_WORD", "kept")
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8).for_rank(1, 4)
    client = RankClient(TransferConfig(), layout, 2, 2)
    try:
        client.start(lambda _: None)
        (status,) = client.statuses()
        variables = Path(f"/proc/{status.pid}/environ").read_bytes().split(b"\0")
    finally:
        client.stop()
    assert f"GLIBC_TUNABLES={OURS}".encode() in variables and b"FDC_TEST_WORD=kept" in variables

"""Which vLLM the connector takes."""

from __future__ import annotations

import pytest

from fastdeploy_cache.adapters.vllm.version import check_version
from fastdeploy_cache.errors import ConfigError


@pytest.mark.parametrize("version", ["0.28.1", "0.9.0rc1"])
def test_an_old_vllm_is_refused_by_name(version: str) -> None:
    """What the connector cannot work with says so at start, and not by a missing name later."""
    with pytest.raises(ConfigError, match=rf"this is vLLM {version}; the connector needs 0\.29 or newer"):
        check_version(version)


@pytest.mark.parametrize(
    ("version", "is_known"), [("0.29.0", True), ("0.33.2+cpu", True), ("0.34.0", False), ("dev", False)]
)
def test_a_new_vllm_is_tried(caplog: pytest.LogCaptureFixture, version: str, is_known: bool) -> None:
    """One that nobody has tried is served with a warning."""
    check_version(version)
    assert ("unknown_vllm" in caplog.text) is not is_known

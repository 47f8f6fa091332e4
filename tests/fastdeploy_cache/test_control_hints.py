"""Hints over the private socket: each gets through with its fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache.errors import ControlError
from fastdeploy_cache.insight.control.client import look
from fastdeploy_cache.insight.control.messages import Subject
from fastdeploy_cache.insight.control.server import ControlServer


class Noted:
    """Takes hints, and remembers them."""

    status = "running"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        answers = {"release_session": 3, "supersede": 4, "demote": 5, "prefetch": (1, 2, 3)}

        def take(*given: Any, **named: Any) -> Any:
            self.calls.append((name, *given, *named.values()))
            return answers[name]

        return take


def test_hints_get_through(tmp_path: Path) -> None:
    """By session or by tokens, in a namespace; with both, or with neither, nothing is done."""
    path, noted = tmp_path / "private" / "serve.sock", Noted()
    other: Any = noted
    server = ControlServer(path)
    server.start(Subject(other, other, other, other, noted, other))
    try:
        assert look(path, "release-session", 5, session="a") == {"num_blocks": 3}
        assert look(path, "supersede", 5, token_ids=[1, 2], num_tokens=1, namespace="n") == {"num_blocks": 4}
        assert look(path, "demote", 5, session="a") == {"num_blocks": 5}
        brought = look(path, "prefetch", 5, session="a", tier="cpu")
        assert brought == {"num_gpu_tokens": 1, "num_cpu_tokens": 2, "num_missing_tokens": 3}
        assert noted.calls == [
            ("release_session", "a", ""),
            ("supersede", [1, 2], 1, "n"),
            ("demote", "a", ""),
            ("prefetch", "a", "", "cpu"),
        ]
        for wrong in ({}, {"session": "a", "token_ids": [1]}):
            with pytest.raises(ControlError, match="one of them"):
                look(path, "demote", 5, **wrong)
        assert len(noted.calls) == 4
    finally:
        server.stop()

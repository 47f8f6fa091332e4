"""Hints in a request's `kv_hints`: what the vLLM connector does with them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.adapters.vllm.kv_hints import take_hints
from fastdeploy_cache.errors import RequestError
from tests.rigs.connector_half import SIZE, ConnectorHalf


class Noted:
    """Takes hints, and remembers them."""

    def __init__(self) -> None:
        self.taken: list[tuple[Any, ...]] = []

    def retain(self, prefix: Any, seconds: float, *, namespace: str = "") -> None:
        self.taken.append(("retain", prefix if isinstance(prefix, str) else list(prefix), seconds, namespace))

    def release_session(self, session_id: str, *, namespace: str = "") -> None:
        if session_id == "nobody":
            raise RequestError("session 'nobody' is not known")
        self.taken.append(("release", session_id, namespace))

    def supersede(self, prefix: Any, num_tokens: int, *, namespace: str = "") -> None:
        self.taken.append(("supersede", prefix, num_tokens, namespace))

    def prefetch(self, prefix: Any, *, namespace: str = "", tier: str = "gpu") -> None:
        self.taken.append(("prefetch", prefix, tier, namespace))


def envelope(*actions: tuple[str, dict[str, Any]], version: str = "1") -> Any:
    """As vLLM hands it on."""
    made = [
        SimpleNamespace(action_id=str(place), action_type=kind, action_version=version, payload=payload)
        for place, (kind, payload) in enumerate(actions)
    ]
    return SimpleNamespace(protocol_version="1", message_id="m", actions=made)


def test_each_action_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    """In their order, in the namespace of the request; what it is of is noted in it."""
    request, noted = Request(request_id="r", prompt_token_ids=[1, 2, 3], namespace="n"), Noted()
    said = envelope(
        ("session", {"session_id": "a", "will_go_on": 0.9, "tool_name": "grep", "tool_call_pending": True}),
        ("retain", {"seconds": 5}),
        ("retain", {"seconds": 5, "session_id": "b"}),
        ("supersede", {"session_id": "b", "num_tokens": 7}),
        ("prefetch", {"session_id": "c"}),
        ("release_session", {"session_id": "d"}),
    )
    with caplog.at_level(logging.INFO):
        take_hints(said, request, noted)
    assert (request.session_id, request.will_go_on, request.tool_name) == ("a", 0.9, "grep")
    assert request.tool_call_pending and not request.session_ended
    assert noted.taken == [
        ("retain", [1, 2, 3], 5, "n"),
        ("retain", "b", 5, "n"),
        ("supersede", "b", 7, "n"),
        ("prefetch", "c", "cpu", "n"),
        ("release", "d", "n"),
    ]
    assert "hint_not_taken" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("session", {"session_id": ""}),
        ("session", {"session_id": "a", "will_go_on": 2}),
        ("session", {}),
        ("retain", {"seconds": "long"}),
        ("supersede", {"session_id": "a", "num_tokens": -1}),
        ("prefetch", {"session_id": "a", "tier": "gpu"}),
        ("release_session", {"session_id": "nobody"}),
        ("release_session", None),
    ],
)
def test_what_is_wrong_is_logged_and_the_rest_is_taken(
    kind: str, payload: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A request is served whatever is said of it."""
    request, noted = Request(request_id="r", prompt_token_ids=[1, 2, 3]), Noted()
    with caplog.at_level(logging.INFO):
        take_hints(envelope((kind, payload), ("prefetch", {"session_id": "c"})), request, noted)
    assert noted.taken == [("prefetch", "c", "cpu", "")]
    assert f"hint_not_taken request=r type={kind}" in caplog.text
    assert not request.session_id


def test_what_is_anothers_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Another type or another version; and no envelope at all."""
    request, noted = Request(request_id="r", prompt_token_ids=[1]), Noted()
    with caplog.at_level(logging.INFO):
        take_hints(envelope(("route", {"anything": 1})), request, noted)
        take_hints(envelope(("prefetch", {"session_id": "c"}), version="2"), request, noted)
        take_hints(None, request, noted)
    assert not noted.taken and not caplog.text


def test_vllm_s_own_envelope_is_read() -> None:
    """Its structs, in its lane."""
    pytest.importorskip("vllm", reason="needs vLLM; CI runs this in vLLM's environment")
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    action = KvHintAction(action_id="1", action_type="session", action_version="1", payload={"session_id": "a"})
    request = Request(request_id="r", prompt_token_ids=[1])
    take_hints(KvHintsEnvelope(protocol_version="1", message_id="m", actions=[action]), request, Noted())
    assert request.session_id == "a"


def test_a_session_of_the_connector_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies are free when a later request says that it is over; before that they are found."""
    half = ConnectorHalf(monkeypatch, has_window=False)
    prompt = list(range(8 * SIZE))
    half.hints = envelope(("session", {"session_id": "a"}))
    half.serve(prompt, [1])
    assert half.serve([*prompt, 5], [1]) == 8 * SIZE
    before = half.half.cache.stats().cpu.num_free
    half.hints = envelope(("release_session", {"session_id": "a"}))
    half.serve([7] * 9, [1])
    half.hints = None
    assert half.half.cache.stats().cpu.num_free > before
    assert half.serve([*prompt, 5], [1]) < 8 * SIZE
    half.half.close()

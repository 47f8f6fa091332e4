"""Hints that come with a request of vLLM's: the actions of its `kv_hints` that are meant for this cache.

The envelope is that of `vllm.v1.kv_hints` (0.32): actions with `action_type`, `action_version` and a `payload`, whose
schema is that of whoever acts on it. Ours are those below, in version "1". What is another's is left alone, and what is
wrong is logged: a request is served whatever is said of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Protocol

import msgspec

from fastdeploy_cache.errors import CacheError
from fastdeploy_cache.ipc.codec import taken_apart
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.request import Request

logger = event_log(__name__)

_VERSION = "1"
_MOST_SECONDS = 3600.0
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class HintTaker(Protocol):
    """See `Sessions`."""

    def retain(self, prefix: Any, seconds: float, *, namespace: str = ...) -> object: ...
    def release_session(self, session_id: str, *, namespace: str = ...) -> object: ...
    def supersede(self, prefix: Any, num_tokens: int, *, namespace: str = ...) -> object: ...
    def prefetch(self, prefix: Any, *, namespace: str = ..., tier: Any = ...) -> object: ...


class _Action(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An action is applied: done, or noted in the request."""


class _Session(_Action, kw_only=True):
    """What session this request is of, and what becomes of it: see the attributes of `Request`."""

    session_id: _Name
    will_go_on: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    tool_name: str = ""
    tool_call_pending: bool = False
    session_ended: bool = False

    def apply(self, request: Request, sessions: HintTaker) -> None:  # noqa: ARG002 (see `_Action`)
        request.session_id, request.tool_name, request.will_go_on = self.session_id, self.tool_name, self.will_go_on
        request.tool_call_pending, request.session_ended = self.tool_call_pending, self.session_ended


class _Retain(_Action, kw_only=True):
    """Keep a session, or the prefix of this request."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=_MOST_SECONDS)]  # pins are few, and anybody may ask for one
    session_id: _Name | None = None

    def apply(self, request: Request, sessions: HintTaker) -> None:
        prefix = self.session_id or request.token_ids(0, request.num_tokens)
        sessions.retain(prefix, self.seconds, namespace=request.namespace)


class _ReleaseSession(_Action, kw_only=True):
    session_id: _Name

    def apply(self, request: Request, sessions: HintTaker) -> None:
        sessions.release_session(self.session_id, namespace=request.namespace)


class _Supersede(_Action, kw_only=True):
    session_id: _Name
    num_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0

    def apply(self, request: Request, sessions: HintTaker) -> None:
        sessions.supersede(self.session_id, self.num_tokens, namespace=request.namespace)


class _Prefetch(_Action, kw_only=True):
    """Bring a session to the CPU tier: the GPU's blocks are vLLM's."""

    session_id: _Name

    def apply(self, request: Request, sessions: HintTaker) -> None:
        sessions.prefetch(self.session_id, namespace=request.namespace, tier="cpu")


_KINDS: dict[str, type[_Action]] = {
    "session": _Session,
    "retain": _Retain,
    "release_session": _ReleaseSession,
    "supersede": _Supersede,
    "prefetch": _Prefetch,
}


def take_hints(envelope: Any, request: Request, sessions: HintTaker) -> None:
    """Do what the actions of an envelope say, in their order, and note in `request` what they say of it."""
    for action in getattr(envelope, "actions", None) or ():
        kind = _KINDS.get(action.action_type)
        if kind is None or action.action_version != _VERSION:
            continue
        try:
            hint: Any = msgspec.convert(action.payload, taken_apart(kind))
            hint.apply(request, sessions)
        except (msgspec.ValidationError, CacheError) as error:
            logger.info(
                "event=hint_not_taken request=%s type=%s error=%r", request.request_id, action.action_type, error
            )

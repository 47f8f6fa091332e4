"""What can be asked of a running cache over its private socket: each verb is a message with its fields."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_args

import msgspec

from fastdeploy_cache.errors import ControlError
from fastdeploy_cache.insight.control.pins import MAX_PIN_SECONDS, PinView
from fastdeploy_cache.insight.control.policy_change import PolicyView
from fastdeploy_cache.insight.control.verified import Verified
from fastdeploy_cache.insight.doctor.finding import Finding
from fastdeploy_cache.insight.looks.live_views import RanksView, RequestsView
from fastdeploy_cache.insight.looks.prefix_views import PrefixView, TreeView
from fastdeploy_cache.insight.what_if.what_if import WhatIfRate
from fastdeploy_cache.ipc.codec import taken_apart
from fastdeploy_cache.requests.explanation import Explanation

LIFE_VERBS = ("pause", "resume", "sleep", "wake", "clear", "update-weights")
MAX_SECONDS = 600.0  # that a verb may take
_ALL_REQUESTS = 10**6  # that are remembered
_ANSWER_ID = re.compile(r"^(chat)?cmpl-")  # before the request's name, in the body of an OpenAI-style answer
Tier = Literal["gpu", "cpu"]

_SECRET = ("namespace", "session", "token_ids")  # fields that no log has


class LifeVerbs(Protocol):
    """Stopping and going on: of a cache alone, or of an engine and its cache together. One call at a time."""

    @property
    def status(self) -> str: ...

    def pause(self, timeout_seconds: float) -> None: ...
    def resume(self, timeout_seconds: float) -> None: ...
    def sleep(self, timeout_seconds: float, tiers: Collection[Tier]) -> None: ...
    def wake(self, timeout_seconds: float) -> None: ...
    def clear(self, timeout_seconds: float) -> None: ...
    def update_weights(self, timeout_seconds: float, weights_id: str | None) -> None: ...


class OwnLife(LifeVerbs, Protocol):
    """The same of a cache alone, which can also forget a namespace."""

    def forget_namespace(self, namespace: str, timeout_seconds: float) -> Any: ...


class LookVerbs(Protocol):
    """See `Insight`."""

    def top(self, num_prefixes: int = ...) -> Sequence[PrefixView]: ...
    def tree(self, depth: int = ..., max_nodes: int = ...) -> TreeView: ...
    def requests(self, num_requests: int = ...) -> RequestsView: ...
    def ranks(self) -> RanksView: ...
    def what_if(self) -> Sequence[WhatIfRate]: ...
    def write_flight(self, path: str | None = ...) -> Path: ...


class TellVerbs(Protocol):
    """See `Seen`."""

    def explain_last(self, num_requests: int) -> Sequence[Explanation]: ...
    def examine(self) -> Sequence[Finding]: ...


class ActionVerbs(Protocol):
    """See `Control`."""

    def status(self) -> dict[str, Any]: ...
    def pins(self) -> Sequence[PinView]: ...
    def pin(self, prefix: str, seconds: float) -> PinView: ...
    def unpin(self, name: str) -> int: ...
    def policy(self) -> PolicyView: ...
    def set_policy(self, name: str) -> PolicyView: ...
    def restart_ranks(self, rank: int | None) -> Sequence[int]: ...
    def verify(self, *, checksums: bool = ...) -> Verified: ...


class HintVerbs(Protocol):
    """See `Sessions`."""

    def retain(self, prefix: str | list[int], seconds: float, *, namespace: str = ...) -> Any: ...
    def release_session(self, session_id: str, *, namespace: str = ...) -> int: ...
    def supersede(self, prefix: str | list[int], num_tokens: int, *, namespace: str = ...) -> int: ...
    def demote(self, prefix: str | list[int], *, namespace: str = ...) -> int: ...
    def prefetch(self, prefix: str | list[int], *, namespace: str = ..., tier: Tier = ...) -> tuple[int, int, int]: ...


class ForgetVerb(Protocol):
    """See `LifeCycle.forget_namespace`."""

    def __call__(self, namespace: str, timeout_seconds: float) -> Any: ...


@dataclass(frozen=True)
class Subject:
    """What the verbs act on and look at."""

    life: LifeVerbs
    insight: LookVerbs
    seen: TellVerbs
    control: ActionVerbs
    sessions: HintVerbs
    forget: ForgetVerb


class _Verb(msgspec.Struct, tag_field="verb", forbid_unknown_fields=True):
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)] = 30.0

    def apply(self, subject: Subject) -> Any:
        """Do it; what is found, or None for a verb whose answer is the status alone."""


class _Look(_Verb):
    """Changes nothing, and is answered also while something is being changed."""


class _Pause(_Verb, tag="pause"):
    def apply(self, subject: Subject) -> None:
        subject.life.pause(self.timeout_seconds)


class _Resume(_Verb, tag="resume"):
    def apply(self, subject: Subject) -> None:
        subject.life.resume(self.timeout_seconds)


class _Sleep(_Verb, tag="sleep"):
    tiers: Annotated[tuple[Tier, ...], msgspec.Meta(min_length=1)] = ("gpu", "cpu")

    def apply(self, subject: Subject) -> None:
        subject.life.sleep(self.timeout_seconds, self.tiers)


class _Wake(_Verb, tag="wake"):
    def apply(self, subject: Subject) -> None:
        subject.life.wake(self.timeout_seconds)


class _Clear(_Verb, tag="clear"):
    def apply(self, subject: Subject) -> None:
        subject.life.clear(self.timeout_seconds)


class _UpdateWeights(_Verb, tag="update-weights"):
    weights_id: str | None = None

    def apply(self, subject: Subject) -> None:
        subject.life.update_weights(self.timeout_seconds, self.weights_id)


class _Pin(_Verb, tag="pin", kw_only=True):
    name: str
    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_PIN_SECONDS)]

    def apply(self, subject: Subject) -> dict[str, Any]:
        return dataclasses.asdict(subject.control.pin(self.name, self.seconds))


class _Unpin(_Verb, tag="unpin", kw_only=True):
    name: str

    def apply(self, subject: Subject) -> dict[str, Any]:
        return {"num_blocks": subject.control.unpin(self.name)}


class _SetPolicy(_Verb, tag="set-policy", kw_only=True):
    name: str

    def apply(self, subject: Subject) -> dict[str, Any]:
        return dataclasses.asdict(subject.control.set_policy(self.name))


class _RestartRank(_Verb, tag="restart-rank"):
    rank: int | None = None

    def apply(self, subject: Subject) -> dict[str, Any]:
        return {"ranks": list(subject.control.restart_ranks(self.rank))}


class _Verify(_Verb, tag="verify"):
    checksums: bool = False

    def apply(self, subject: Subject) -> dict[str, Any]:
        return dataclasses.asdict(subject.control.verify(checksums=self.checksums))


class _Forget(_Verb, tag="forget", kw_only=True):
    namespace: str

    def apply(self, subject: Subject) -> dict[str, Any]:
        return dataclasses.asdict(subject.forget(self.namespace, self.timeout_seconds))


class _WriteFlight(_Verb, tag="write-flight"):
    file: str | None = None

    def apply(self, subject: Subject) -> dict[str, Any]:
        return {"file": str(subject.insight.write_flight(self.file))}


# -- hints


class _Hint(_Verb, kw_only=True):
    """A hint is of a `session`, or of a prefix by its `token_ids`."""

    session: str | None = None
    token_ids: Annotated[list[int], msgspec.Meta(min_length=1)] | None = None
    namespace: str = ""

    @property
    def prefix(self) -> str | list[int]:
        """What of these is given. Raises `ControlError`: both, or none."""
        if (self.session is None) == (self.token_ids is None):
            raise ControlError("give a session, or token_ids; one of them")
        return self.session if self.session is not None else self.token_ids or []


class _Retain(_Hint, tag="retain", kw_only=True):
    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_PIN_SECONDS)]

    def apply(self, subject: Subject) -> dict[str, Any]:
        found = subject.sessions.retain(self.prefix, self.seconds, namespace=self.namespace)
        return dataclasses.asdict(found)


class _ReleaseSession(_Verb, tag="release-session", kw_only=True):
    session: str
    namespace: str = ""

    def apply(self, subject: Subject) -> dict[str, Any]:
        return {"num_blocks": subject.sessions.release_session(self.session, namespace=self.namespace)}


class _Supersede(_Hint, tag="supersede", kw_only=True):
    num_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0

    def apply(self, subject: Subject) -> dict[str, Any]:
        return {"num_blocks": subject.sessions.supersede(self.prefix, self.num_tokens, namespace=self.namespace)}


class _Demote(_Hint, tag="demote"):
    def apply(self, subject: Subject) -> dict[str, Any]:
        return {"num_blocks": subject.sessions.demote(self.prefix, namespace=self.namespace)}


class _Prefetch(_Hint, tag="prefetch"):
    tier: Tier = "gpu"

    def apply(self, subject: Subject) -> dict[str, Any]:
        found = subject.sessions.prefetch(self.prefix, namespace=self.namespace, tier=self.tier)
        return dict(zip(("num_gpu_tokens", "num_cpu_tokens", "num_missing_tokens"), found, strict=True))


# -- looks


class _Status(_Look, tag="status"):
    def apply(self, subject: Subject) -> dict[str, Any]:
        return subject.control.status()


class _Top(_Look, tag="top"):
    num_prefixes: int = 20

    def apply(self, subject: Subject) -> list[dict[str, Any]]:
        return [each.as_dict() for each in subject.insight.top(self.num_prefixes)]


class _Tree(_Look, tag="tree"):
    depth: int = 8
    max_nodes: int = 200

    def apply(self, subject: Subject) -> dict[str, Any]:
        return subject.insight.tree(self.depth, self.max_nodes).as_dict()


class _Requests(_Look, tag="requests"):
    num_requests: int = 50

    def apply(self, subject: Subject) -> dict[str, Any]:
        return subject.insight.requests(self.num_requests).as_dict()


class _Ranks(_Look, tag="ranks"):
    def apply(self, subject: Subject) -> dict[str, Any]:
        return subject.insight.ranks().as_dict()


class _Pins(_Look, tag="pins"):
    def apply(self, subject: Subject) -> list[dict[str, Any]]:
        return [dataclasses.asdict(each) for each in subject.control.pins()]


class _Policy(_Look, tag="policy"):
    def apply(self, subject: Subject) -> dict[str, Any]:
        return dataclasses.asdict(subject.control.policy())


class _Explain(_Look, tag="explain", kw_only=True):
    request_id: str

    def apply(self, subject: Subject) -> list[dict[str, Any]]:
        last = subject.seen.explain_last(_ALL_REQUESTS)
        found = _named(self.request_id, last) or _named(_ANSWER_ID.sub("", self.request_id), last)
        if not found:
            text = f"no request {self.request_id!r} among the last {len(last)}; `explain --last 10` shows their ids"
            raise ControlError(text)
        return [_explained(each) for each in found]


class _ExplainLast(_Look, tag="explain-last"):
    num_requests: Annotated[int, msgspec.Meta(ge=1, le=100)] = 10

    def apply(self, subject: Subject) -> list[dict[str, Any]]:
        return [_explained(each) for each in subject.seen.explain_last(self.num_requests)]


class _Examine(_Look, tag="examine"):
    def apply(self, subject: Subject) -> list[dict[str, Any]]:
        return [{**dataclasses.asdict(each), "text": str(each)} for each in subject.seen.examine()]


class _WhatIf(_Look, tag="what-if"):
    def apply(self, subject: Subject) -> list[dict[str, Any]]:
        return [dataclasses.asdict(each) for each in subject.insight.what_if()]


def _named(name: str, requests: Sequence[Explanation]) -> list[Explanation]:
    # several prompts of one request of a server have its name, with a number behind it
    return [each for each in requests if name and name in (each.request_id, each.request_id.rpartition("-")[0])]


def _explained(explanation: Explanation) -> dict[str, Any]:
    return {**explanation.as_dict(), "text": str(explanation)}


Verb = (
    _Pause | _Resume | _Sleep | _Wake | _Clear | _UpdateWeights | _Pin | _Unpin | _SetPolicy | _RestartRank | _Verify
    | _Forget | _WriteFlight | _Retain | _ReleaseSession | _Supersede | _Demote | _Prefetch | _Status | _Top | _Tree
    | _Requests | _Ranks | _Pins | _Policy | _Explain | _ExplainLast | _Examine | _WhatIf
)  # fmt: skip


def decode(line: bytes) -> Verb:
    """The verb that a line of JSON asks for. Raises `msgspec.DecodeError` or `UnicodeDecodeError`."""
    verb: Verb = msgspec.json.decode(line, type=taken_apart(Verb))
    return verb


def shown(verb: Verb) -> str:
    """A verb as logs have it: without what it says of prompts, and of whom."""
    fields = {name: getattr(verb, name) for name in verb.__struct_fields__ if name not in _SECRET}
    return " ".join([str(verb.__struct_config__.tag), *(f"{name}={value!r}" for name, value in fields.items())])


def is_look(verb: Verb) -> bool:
    """Whether it changes nothing."""
    return isinstance(verb, _Look)


def known_verbs() -> str:
    """The verbs with their fields, in words."""
    names = []
    for verb in get_args(Verb):
        fields = [field for field in verb.__struct_fields__ if field != "timeout_seconds"]
        tag = str(verb.__struct_config__.tag)
        names.append(f"{tag} (with {', '.join(fields)})" if fields else tag)
    return f"the verbs are {', '.join(names)}; each takes timeout_seconds, above 0 and up to {MAX_SECONDS:.0f}"

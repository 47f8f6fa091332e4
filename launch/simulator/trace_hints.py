"""What requests of a trace say of themselves: `--hints` of `simulate`."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from fastdeploy_cache.books.leaves.policy import NO_SESSION, SessionHint
from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.simulator.trace import Trace, TraceRequest

_SURELY, _HARDLY = 4, 1  # quarters of a chance: see `SessionHint`


def with_hints(trace: Trace, names: Sequence[str], seed: int) -> Trace:
    """The trace with these hints and no other.

    `session`: its session ids, and how long its answers are. `will_go_on`: whether its last block will be used again,
    by the trace's own future; `will_go_on:0.2` says of a fifth of the requests, which are drawn, the contrary.

    Raises:
        LaunchError: a hint that there is not, or that the trace does not have.
    """
    hints: list[SessionHint | None] = [None] * len(trace.requests)
    for name in names:
        kind, _, share = name.partition(":")
        if name == "session":
            hints = [request.hint for request in trace.requests]
            if not any(hint is not None and hint.session for hint in hints):
                raise LaunchError("--hints session: no line of the trace has a session_id")
        elif kind != "will_go_on":
            raise LaunchError(f"--hints {name!r}; use session, will_go_on, or will_go_on:0.2 (a fifth of it is wrong)")
        going = _will_go_on(trace, _share_of(name, share), seed) if kind == "will_go_on" else []
        for place, is_going in enumerate(going):
            hint = hints[place] or NO_SESSION
            hints[place] = hint._replace(going=_SURELY if is_going else _HARDLY)
    requests = [dataclasses.replace(each, hint=hint) for each, hint in zip(trace.requests, hints, strict=True)]
    return dataclasses.replace(trace, requests=requests)


def _share_of(name: str, text: str) -> float:
    try:
        share = float(text or 0)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise LaunchError(f"--hints {name!r}; give a share from 0 to 1 behind the colon")
    return share


def _will_go_on(trace: Trace, wrong_share: float, seed: int) -> list[bool]:
    draw = random.Random(seed)  # noqa: S311 (a draw of a simulation)
    return [is_used != (draw.random() < wrong_share) for is_used in _is_used_again(trace.requests)]


def _is_used_again(requests: Sequence[TraceRequest]) -> list[bool]:
    """Say of each whether the last block of its prompt is in a later one."""
    seen, found = set[int](), list[bool]()
    for request in reversed(requests):
        found.append(bool(len(request.blocks)) and int(request.blocks[-1]) in seen)
        seen.update(request.blocks.tolist())
    return found[::-1]

"""What a request is called in all logs and in its answer, and the one line that says how it went."""

from __future__ import annotations

import contextlib
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from fastdeploy_cache.errors import CacheError
from fastdeploy_cache.launch.reference_engine.generation import Generation

logger = logging.getLogger(__name__)

ID_HEADER = "X-Request-Id"
LOGGED_STATUS = web.RequestKey("logged_status", str)  # what an answer is called in the log, instead of its status
REQUEST_ID = web.RequestKey("request_id", str)
FACTS = web.RequestKey("facts", dict[str, Any])  # what else the line says
GENERATIONS = web.RequestKey("generations", list[Generation])  # which say more

_SANE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_PROBES = ("/health", "/ready")  # asked for every few seconds


def request_id_of(request: web.BaseRequest) -> str:
    """The client's name for its request, where that is one, or else a new one."""
    given = request.headers.get(ID_HEADER, "")
    return given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex


def log_request(request: web.Request, status: object, begun: float) -> None:
    """The line of a request that began at this time of `time.monotonic` and is over."""
    facts: dict[str, Any] = {
        "event": "request",
        "method": request.method.encode("unicode_escape").decode(),
        "path": request.path_qs.encode("unicode_escape").decode(),
        "status": request.get(LOGGED_STATUS, status),
        "milliseconds": _milliseconds(time.monotonic() - begun),
        **request.get(FACTS, {}),
        **_facts_of(request.get(GENERATIONS, ())),
    }
    facts = {name: value for name, value in facts.items() if value is not None}
    level = logging.DEBUG if request.path in _PROBES else logging.INFO
    logger.log(level, " ".join(f"{name}=%s" for name in facts), *facts.values())


def _facts_of(generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens and times of an answer, or of a prompt that was computed for another instance, as far as it has come.

    Of several prompts tokens are sums, and times are of the slowest. Tokens that another instance sent are found on the
    GPU; they are counted as the peer's.
    """
    if not generations:
        return {}
    num_peer = sum(min(each.num_peer_tokens, each.num_gpu_tokens) for each in generations)
    matched = [each.matched - each.queued for each in generations if each.matched is not None]
    first = [each.first_token - each.queued for each in generations if each.first_token is not None]
    ends = [each.finish_reason or (each.cancel_reason if each.cancelled else None) for each in generations]
    return {
        "engine_request": generations[0].request.request_id,
        "prompts": len(generations) if len(generations) > 1 else None,
        "finish": ",".join(sorted({end for end in ends if end is not None})) or None,
        "prompt_tokens": sum(each.request.num_prompt_tokens for each in generations),
        "output_tokens": sum(len(each.output) for each in generations),
        "gpu_tokens": sum(each.num_gpu_tokens for each in generations) - num_peer,
        "cpu_tokens": sum(each.num_cpu_tokens for each in generations),
        "storage_tokens": sum(each.num_storage_tokens for each in generations),
        "peer_tokens": num_peer,
        "missed": _missed(generations) or None,
        "queue_milliseconds": _milliseconds(max(matched)) if matched else None,
        "first_token_milliseconds": _milliseconds(max(first)) if first else None,
    }


def _missed(generations: Sequence[Generation]) -> str:
    """Missed tokens by cause, of all prompts together; empty where that is not known (any more)."""
    counts: Counter[str] = Counter()
    for generation in generations:
        if generation.explain is not None:
            with contextlib.suppress(CacheError):  # it is not among the last requests, or the cache is closed
                counts.update({cause.value: count for cause, count in generation.explain().missed_tokens().items()})
    return ",".join(f"{cause}:{count}" for cause, count in counts.items())


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 1)

"""What a request is called in all logs and in its answer, and the one line that says how it went."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from aiohttp import web

from fastdeploy_cache.launch.reference_engine.generation import Generation

logger = logging.getLogger(__name__)

ID_HEADER = "X-Request-Id"
LOGGED_STATUS = web.RequestKey("logged_status", str)  # what an answer is called in the log, instead of its status
REQUEST_ID = web.RequestKey("request_id", str)
FACTS = web.RequestKey("facts", dict[str, Any])  # what else the line says
GENERATION = web.RequestKey("generation", Generation)  # which says more

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
        **(_facts_of(request[GENERATION]) if GENERATION in request else {}),
    }
    facts = {name: value for name, value in facts.items() if value is not None}
    level = logging.DEBUG if request.path in _PROBES else logging.INFO
    logger.log(level, " ".join(f"{name}=%s" for name in facts), *facts.values())


def _facts_of(generation: Generation) -> dict[str, Any]:
    """Tokens and times of an answer, or of a prompt that was computed for another instance, as far as it has come.

    Tokens that another instance sent are found on the GPU; they are counted as the peer's.
    """
    num_peer = min(generation.num_peer_tokens, generation.num_gpu_tokens)
    queued, matched, first = generation.queued, generation.matched, generation.first_token
    return {
        "engine_request": generation.request.request_id,
        "finish": generation.finish_reason or (generation.cancel_reason if generation.cancelled else None),
        "prompt_tokens": generation.request.num_prompt_tokens,
        "output_tokens": len(generation.output),
        "gpu_tokens": generation.num_gpu_tokens - num_peer,
        "cpu_tokens": generation.num_cpu_tokens,
        "storage_tokens": generation.num_storage_tokens,
        "peer_tokens": num_peer,
        "queue_milliseconds": None if matched is None else _milliseconds(matched - queued),
        "first_token_milliseconds": None if first is None else _milliseconds(first - queued),
    }


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 1)

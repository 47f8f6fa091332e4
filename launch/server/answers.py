"""Answers and errors as JSON, and as OpenAI's clients know them."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web


def success(content: dict[str, Any], status: int = 200) -> web.Response:
    """The whole answer."""
    body = json.dumps(content, ensure_ascii=False).encode(errors="replace")
    return web.Response(status=status, body=body, content_type="application/json")


def failure(
    status: int, message: str, *, field: str | None = None, code: str | None = None, ends: bool = False
) -> web.Response:
    """An error as OpenAI's clients know it. `ends`: the connection does, since its next request is not looked for."""
    response = success(error_of(status, message, field, code), status)
    if ends:
        response.force_close()
    return response


def error_of(status: int, message: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The content of such an error; `field` is the one of the request that it is about."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}

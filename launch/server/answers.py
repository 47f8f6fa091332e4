"""Answers and errors as JSON, and as OpenAI's clients know them."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web


def success(content: dict[str, Any], status: int = 200) -> web.Response:
    """The whole answer."""
    body = json.dumps(content, ensure_ascii=False).encode(errors="replace")
    return web.Response(status=status, body=body, content_type="application/json")


def failure(status: int, message: str, *, ends: bool = False) -> web.Response:
    """An error as OpenAI's clients know it. `ends`: the connection does, since its next request is not looked for."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    response = success({"error": {"message": message, "type": kind}}, status)
    if ends:
        response.force_close()
    return response

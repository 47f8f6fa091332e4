"""The lines of the log: their level and their format, by one setting each for a process and all that it starts."""

from __future__ import annotations

import datetime as dt
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fastdeploy_cache.errors import IPCError

LEVEL_VARIABLE, FORMAT_VARIABLE = "FASTDEPLOY_CACHE_LOG_LEVEL", "FASTDEPLOY_CACHE_LOG_FORMAT"
LEVELS, FORMATS = ("debug", "info", "warning", "error"), ("text", "json")

_REQUEST: ContextVar[str | None] = ContextVar("request", default=None)
_FACT = re.compile(r"^(\w+)=(.+)$", re.DOTALL)
_DIRECTIVE = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]")


def set_up_log(level: str | None = None, line_format: str | None = None) -> None:
    """Log to standard error. What is not given here is as the environment says, and what is given goes there.

    Processes that this one starts inherit the environment, and call this as well. Main thread, once.

    Raises:
        IPCError: a level or a format that is none.
    """
    level = _choose("log level", LEVEL_VARIABLE, level, LEVELS, "info")
    line_format = _choose("log format", FORMAT_VARIABLE, line_format, FORMATS, "text")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if line_format == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])


@contextmanager
def in_request(request: str) -> Iterator[None]:
    """Lines of this task, and of the threads that it asks, name this request."""
    token = _REQUEST.set(request)
    try:
        yield
    finally:
        _REQUEST.reset(token)


def current_request() -> str | None:
    """The request that lines name now."""
    return _REQUEST.get()


class TextLines(logging.Formatter):
    """`TIME LEVEL LOGGER event=... key=value ...`, with the request at the end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the base class's name)
        """The line without a traceback."""
        line, request = super().formatMessage(record), current_request()
        return line if request is None else f"{line} request={request}"


class JsonLines(logging.Formatter):
    """An object in each line: time (UTC), level, logger, pid, message, the message's facts by their names, the request
    and a traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        time = dt.datetime.fromtimestamp(record.created, dt.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if (request := current_request()) is not None:
            line["request"] = request
        for name, value in facts_of(record).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def facts_of(record: logging.LogRecord) -> dict[str, Any]:
    """What a message of the form `event=... key=%s ...` says, by key; looked for in the template, as a value may hold
    blanks."""
    if not isinstance(record.msg, str) or not isinstance(record.args, tuple | None):
        return {}
    values, facts = list(record.args or ()), dict[str, Any]()
    for word in record.msg.split():
        num_values = len(_DIRECTIVE.findall(word.replace("%%", "")))
        mine, values = tuple(values[:num_values]), values[num_values:]
        if found := _FACT.match(word):
            name, template = found.groups()
            is_whole = num_values == 1 and _DIRECTIVE.fullmatch(template) is not None
            facts[name] = mine[0] if is_whole and isinstance(mine[0], int | float | None) else template % mine
    return facts


def _choose(what: str, variable: str, given: str | None, known: tuple[str, ...], default: str) -> str:
    value = (given if given is not None else os.environ.get(variable) or default).lower()
    if value not in known:
        whence = "" if given is not None else f" by {variable}"
        raise IPCError(f"the {what} is {value!r}{whence}; use {', '.join(known[:-1])} or {known[-1]}")
    if given is not None:
        os.environ[variable] = value
    return value

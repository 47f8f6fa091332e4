"""The lines of the log: one level and one format for a process and what it starts, and the request that they are of."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from fastdeploy_cache.errors import IPCError
from fastdeploy_cache.ipc.log_lines import (
    FORMAT_VARIABLE,
    LEVEL_VARIABLE,
    JsonLines,
    TextLines,
    current_request,
    facts_of,
    in_request,
    set_up_log,
)


def record(message: Any, *values: Any, exc_info: Any = None) -> logging.LogRecord:
    return logging.LogRecord("a.logger", logging.WARNING, "file.py", 1, message, values, exc_info)


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        (record("event=up rank=%d seconds=%.2f", 3, 0.125), {"event": "up", "rank": 3, "seconds": 0.125}),
        (record("at=%s:%d error=%r", "host", 80, "a b=c"), {"at": "host:80", "error": "'a b=c'"}),
        (record("event=up name=%s last=%s", "two words", "end"), {"event": "up", "name": "two words", "last": "end"}),
        (record("event=up all=%s none=%s", True, None), {"event": "up", "all": True, "none": None}),
        (record("half=50%% of=%d", 7), {"half": "50%", "of": 7}),
        (record("of no form %s", 7), {}),
        (record(ValueError("an object")), {}),
    ],
)
def test_facts_are_those_of_the_template(line: logging.LogRecord, facts: dict[str, Any]) -> None:
    """Numbers stay numbers; what a value holds begins no fact of its own."""
    assert facts_of(line) == facts


def test_a_line_of_json_is_one_line() -> None:
    """It holds the message, its facts, the request and a traceback; a fact cannot pass for the level."""
    try:
        raise LookupError("two\nlines")
    except LookupError:
        line = record("event=up level=%s text=%s", "low", "a\nb\u4e2d", exc_info=sys.exc_info())
    with in_request("r-1"):
        text = JsonLines().format(line)
    assert "\n" not in text
    said = json.loads(text)
    assert (said["level"], said["logger"], said["pid"]) == ("warning", "a.logger", os.getpid())
    assert (said["event"], said["text"], said["request"]) == ("up", "a\nb\u4e2d", "r-1")
    assert said["time"].endswith("Z") and "LookupError" in said["traceback"]


def test_a_line_of_text_names_its_request() -> None:
    """At its end, and only in the request."""
    line = record("event=up rank=%d", 3)
    with in_request("r-1"), in_request("r-2"):
        assert TextLines().format(line).endswith(" WARNING a.logger event=up rank=3 request=r-2")
    assert TextLines().format(line).endswith(" event=up rank=3")
    assert current_request() is None


@pytest.mark.parametrize(
    ("level", "line_format", "words"),
    [("loud", None, "log level is 'loud'; use debug, info, warning or error"), (None, "xml", "use text or json")],
)
def test_what_is_none_is_refused(level: str | None, line_format: str | None, words: str) -> None:
    """With what is allowed; nothing has changed."""
    before = logging.getLogger().handlers[:]
    with pytest.raises(IPCError, match=words):
        set_up_log(level, line_format)
    assert logging.getLogger().handlers == before


PARENT = "from fastdeploy_cache.ipc.log_lines import set_up_log; import subprocess, sys; set_up_log({}); "
CHILD = "from fastdeploy_cache.ipc.log_lines import set_up_log; import logging; set_up_log(); logging.{}('event=up')"


def told(parent: str, log: str, environment: dict[str, str]) -> str:
    """What a process says that another one has started, which set up its log with these arguments."""
    code = PARENT.format(parent) + f"subprocess.run([sys.executable, '-c', {CHILD.format(log)!r}], check=True)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}, check=False
    )
    return result.stderr


@pytest.mark.processes
def test_children_log_as_their_parent_does() -> None:
    """What is given wins over the environment, and is inherited; what nobody gives is text from info on."""
    assert told("", "info", {}).endswith(" INFO root event=up\n") and told("", "debug", {}) == ""
    assert json.loads(told("'debug', 'json'", "debug", {}))["level"] == "debug"
    quiet = {LEVEL_VARIABLE: "ERROR", FORMAT_VARIABLE: "json"}
    assert told("", "warning", quiet) == "" and json.loads(told("", "error", quiet))["event"] == "up"
    assert json.loads(told("'warning'", "warning", quiet))["level"] == "warning"
    assert f"the log level is 'loud' by {LEVEL_VARIABLE}" in told("", "info", {LEVEL_VARIABLE: "loud"})

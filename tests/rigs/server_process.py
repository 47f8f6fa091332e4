"""A server process and a chat to ask it."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.rigs.command_line import CLI

CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 12}


class Server:
    """A server process and where it listens."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        command = [*CLI, "serve", "--port", "0", "--metrics-port", "0", *arguments]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        text = ""
        for line in self.process.stderr:  # ends with the process, at the latest
            text += line.decode()
            if found := re.search(r"event=serving url=(\S+) metrics=(\S+)", text):
                self.url, self.metrics_url = found.groups()
                return
        raise AssertionError(f"the server ended: {text}")

    def post(self, body: Any, request_id: str | None = None) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {} if request_id is None else {"X-Request-ID": request_id}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def get(self, url: str) -> bytes:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read()

    def rank_pids(self) -> list[int]:
        return [rank["pid"] for rank in json.loads(self.get(f"{self.url}/status"))["ranks"]]

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        assert self.process.stderr is not None
        self.rest = self.process.stderr.read().decode()  # returns when the process and all its ranks have ended
        self.process.stderr.close()
        return self.process.wait(timeout=30)

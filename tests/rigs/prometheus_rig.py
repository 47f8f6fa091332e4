"""A real Prometheus that scrapes each second, and what is asked of it."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.rigs.storage_servers import free_port

SECONDS = 90.0


class RealPrometheus:
    """Runs from `start` to `stop`, with its files in a folder of the test's."""

    def __init__(self, folder: Path, configuration: str) -> None:
        """`configuration`: as Prometheus reads it."""
        self._folder = folder
        (folder / "prometheus.yml").write_text(configuration)
        self._address = f"127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            *("prometheus", f"--config.file={self._folder / 'prometheus.yml'}"),
            *(f"--storage.tsdb.path={self._folder / 'data'}", f"--web.listen-address={self._address}"),
        ]
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=20)

    def ask(self, path: str, **parameters: str) -> Any:
        """What its API answers as data; an expression that it refuses fails the test with its words."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is starting
                raise
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def query(self, expression: str) -> list[float]:
        """The values that an expression has now."""
        result = self.ask("query", query=expression)["result"]
        return [float(sample["value"][1]) for sample in result]

    def num_scrapes(self) -> int:
        """How often the first target that is up has been scraped; 0 while it does not even listen."""
        try:
            return int(max(self.query("sum_over_time(up[5m])"), default=0.0))
        except OSError:  # as yet
            return 0

    def wait_for_scrapes(self, num_scrapes: int, meanwhile: Callable[[], None]) -> None:
        """Do `meanwhile` again and again until there were so many."""
        deadline = time.monotonic() + SECONDS
        while self.num_scrapes() < num_scrapes:
            assert time.monotonic() < deadline, (self._folder / "prometheus.log").read_text()
            meanwhile()

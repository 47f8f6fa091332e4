"""A real Chromium without a window, driven through its own driver over WebDriver's protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.rigs.storage_servers import free_port

START_SECONDS, ANSWER_SECONDS = 60.0, 60.0
_OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]


def missing() -> str | None:
    """Why no browser can be had here; None: one can."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs Debian's chromium and chromium-driver; {', '.join(lacking)} is not installed" if lacking else None


class Browser:
    """One window."""

    def __init__(self, session_url: str) -> None:
        self._url = session_url

    def open(self, url: str) -> None:
        """Go there and wait until it has loaded."""
        self._send("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function with this body returns in the page."""
        return self._send("execute/sync", {"script": script, "args": list(arguments)})

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._send("goog/cdp/execute", {"cmd": name, "params": parameters})

    def size(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """What the window, and the colours that its user prefers, are taken for."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def press(self, key: str) -> None:
        """A key on the keyboard, such as `Tab`, down and up again."""
        code = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39}[key]
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, file: Path) -> None:
        """A screenshot of the whole page, as PNG."""
        found = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def wait_for(self, script: str, seconds: float = 30.0) -> Any:
        """Run it until it returns something true; that."""
        deadline = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, f"the page never came to: {script}; problems: {self.problems()}"
            time.sleep(0.05)
        return found

    def problems(self) -> list[str]:
        """Errors in the console since this was asked last."""
        entries = self._send("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def _send(self, what: str, body: dict[str, Any]) -> Any:
        return _post(f"{self._url}/{what}", body)


@contextmanager
def browser() -> Iterator[Browser]:
    """A window that is closed again, with its processes."""
    port = free_port()  # with 0 it takes a port of 127.0.0.1, and ends where somebody has that of ::1
    command = ["chromedriver", f"--port={port}"]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert driver.stdout is not None
        said = ""
        for line in driver.stdout:
            said += line
            if "successfully on port" in line:
                break
        else:
            raise AssertionError(f"chromedriver has ended: {said}")
        base = f"http://127.0.0.1:{port}"
        wanted = {"goog:chromeOptions": {"args": _OPTIONS}, "goog:loggingPrefs": {"browser": "ALL"}}
        session = _post(f"{base}/session", {"capabilities": {"alwaysMatch": wanted}})
        url = f"{base}/session/{session['sessionId']}"
        try:
            yield Browser(url)
        finally:
            request = urllib.request.Request(url, method="DELETE")
            urllib.request.urlopen(request, timeout=ANSWER_SECONDS).close()
    finally:
        driver.terminate()
        driver.wait(timeout=20)
        if driver.stdout is not None:
            driver.stdout.close()


def _post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return json.load(answer)["value"]

"""A headless Chromium, driven over a pipe with its DevTools protocol: one page, no ports, no further packages.

https://chromedevtools.github.io/devtools-protocol/: messages are JSON, each ends with a zero byte; the browser reads
them from its descriptor 3 and writes to 4.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
    *("--disable-component-update", "--disable-extensions", "--disable-sync", "--no-first-run", "--hide-scrollbars"),
)
# Gives the pipes the numbers that the browser wants; first out of the way of each other.
LAUNCHER = """
import os, sys
from fcntl import F_DUPFD, fcntl
pipes = [fcntl(int(number), F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}


class Navigated(Exception):
    """The page gave way to another before it answered."""


class Browser:
    """`complaints` is what the page wrote to its console as an error: exceptions and breaches of its policy."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        assert CHROMIUM is not None, "Chromium is not installed"
        read_3, write_3 = os.pipe()
        read_4, write_4 = os.pipe()
        options = (*OPTIONS, f"--user-data-dir={folder}", "--remote-debugging-pipe")
        self._process = subprocess.Popen(
            [sys.executable, "-IS", "-c", LAUNCHER, str(read_3), str(write_4), CHROMIUM, *options],
            pass_fds=(read_3, write_4),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(read_3)
        os.close(write_4)
        self._to, self._from = os.fdopen(write_3, "wb"), os.fdopen(read_4, "rb")
        self._buffer = b""
        self._num_calls = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        try:
            self._open_tab(width, height, "dark" if dark else "light")
        except BaseException:
            self.close()
            raise

    def _open_tab(self, width: int, height: int, scheme: str) -> None:
        target = self._call("Target.createTarget", url="about:blank")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self.resize(width, height)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"])
        return result["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not self._holds(expression):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds} s: {expression}; {self.complaints}")
            time.sleep(0.02)

    def _holds(self, expression: str) -> bool:
        try:
            return bool(self.evaluate(expression))
        except Navigated:
            return False

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code, text = KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self._call("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)

    def screenshot(self) -> bytes:
        """PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._to.close()
        self._from.close()

    def _call(self, method: str, **params: Any) -> Any:
        self._num_calls += 1
        message: dict[str, Any] = {"id": self._num_calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            reply = self._receive()
            if reply.get("id") == self._num_calls:
                if "navigated" in reply.get("error", {}).get("message", ""):
                    raise Navigated
                assert "error" not in reply, reply
                return reply["result"]
            self._note(reply)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._from.fileno(), 1 << 16)
            assert data, "the browser is gone"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        reply: dict[str, Any] = json.loads(message)
        return reply

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])

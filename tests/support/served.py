"""`octavo serve` as a process on a real port of this machine, and what a test asks it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

TESTS = Path(__file__).parent.parent


class ServerProcess:
    """Runs `program`, which takes the arguments of `octavo serve`, on a free port; `lines` is what it said."""

    def __init__(self, *arguments: str, program: Sequence[str] = (sys.executable, "-m", "octavo", "serve")) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [*program, "--port", str(self.port), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), *filter(None, sys.path)))},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if "ready on" in line:
                self._ready.set()
        self._ready.set()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_until_ready(self) -> None:
        self._ready.wait(60)
        if "ready on" not in self.log:
            self.close()
            raise AssertionError(self.log)

    def post(self, path: str, *, timeout: float = 60, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout)

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/chat/completions", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str = "/v1/completions", **body: Any) -> contextlib.AbstractContextManager[httpx.Response]:
        return httpx.stream("POST", self.url + path, json={"stream": True, **body}, timeout=60)

    def chunks(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """The records of a whole stream."""
        with self.stream(path, **body) as response:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert response.status_code == 200 and events.pop() == "[DONE]", events
        return [json.loads(data) for data in events]

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"vllm:{name}{{")))

    def wait_until_idle(self) -> None:
        """No request runs or waits, and no block is held."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        deadline = time.monotonic() + 10
        while any(map(self.metric, names)):
            assert time.monotonic() < deadline, httpx.get(f"{self.url}/metrics").text
            time.sleep(0.02)

    def children(self) -> list[int]:
        """Its engine's process, and the one that stands by; the largest, which is the engine, first."""
        pid = self.process.pid
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return sorted(children, key=lambda child: -_resident(child))

    def end(self) -> int:
        """The exit code, which must come within some seconds."""
        code = self.process.wait(15)
        self._reader.join()
        return code

    def close(self) -> None:
        self.process.kill()
        self.end()
        assert self.process.stderr is not None
        self.process.stderr.close()


def _resident(pid: int) -> int:
    """Pages."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except FileNotFoundError:
        return 0

"""`octavo serve` as a process on a real port (its engine is scripted): port, signals, sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.errors import ConfigError
from octavo.server.serve import bind

HERE = Path(__file__).parent


class Server:
    def __init__(self, *options: str, step_seconds: float = 0.0, load_seconds: float = 0.0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, str(HERE / "scripted_server.py"), str(step_seconds), str(load_seconds)]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), *options],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE.parent), *sys.path))},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = f"http://127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if "ready on" in line:
                self._ready.set()
        self._ready.set()

    def wait_until_ready(self) -> None:
        assert self._ready.wait(30) and self.process.poll() is None, self.lines

    def complete(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"prompt": "a", **body}, timeout=30)

    def stream(self, **body: Any) -> contextlib.AbstractContextManager[httpx.Response]:
        body = {"prompt": "a", "stream": True, **body}
        return httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=30)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"vllm:{name}{{")))

    def end(self) -> int:
        """The exit code, within a few seconds."""
        code = self.process.wait(10)
        self._reader.join()
        return code

    def close(self) -> None:
        self.process.kill()
        self.end()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def start() -> Iterator[Any]:
    servers: list[Server] = []

    def make(*options: str, **pace: float) -> Server:
        servers.append(Server(*options, **pace))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def test_ops_2_a_client_that_comes_while_the_model_loads_is_answered_afterwards(start):
    server = start(load_seconds=1.0)
    deadline = time.monotonic() + 20
    while True:  # until the port is bound, which is before the model loads
        try:
            answer = httpx.get(f"{server.url}/health", timeout=20)
            break
        except httpx.ConnectError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert answer.status_code == 200
    assert server.complete(max_tokens=1).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    text = "".join(server.lines)
    assert "sampling defaults: neutral (a test)" in text and "memory: none" in text and server.url in text
    assert "Traceback" not in text


def test_ops_3_a_busy_port_is_noticed_before_the_model_loads(start):
    first = start()
    first.wait_until_ready()
    second = start("--port", str(first.port), load_seconds=20.0)
    assert second.end() not in (0, None)
    assert str(first.port) in "".join(second.lines) and "in use" in "".join(second.lines).lower()
    assert first.complete(max_tokens=1).status_code == 200


def test_a_wrong_host_is_a_config_error():
    with pytest.raises(ConfigError, match="--host"):
        bind("192.0.2.1", 8000)


def test_a_signal_lets_running_requests_finish(start):
    server = start(step_seconds=0.02)
    server.wait_until_ready()
    with server.stream(max_tokens=40) as response:
        events = response.iter_lines()
        next(events)
        server.process.send_signal(signal.SIGTERM)
        assert [line for line in events if line][-1] == "data: [DONE]"
    assert server.end() == 0
    assert "Traceback" not in "".join(server.lines)


def test_what_does_not_finish_in_time_ends_with_an_error_event(start):
    server = start("--shutdown-timeout", "0.2", step_seconds=0.02)
    server.wait_until_ready()
    with server.stream(max_tokens=4000) as response:
        events = response.iter_lines()
        next(events)
        server.process.send_signal(signal.SIGINT)
        last = [line for line in events if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert server.end() == 0
    assert "Traceback" not in "".join(server.lines)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_at_once(start, number, code):
    server = start(step_seconds=0.02)
    server.wait_until_ready()
    with server.stream(max_tokens=4000) as response:
        events = response.iter_lines()  # held, since its end would close the connection
        next(events)
        server.process.send_signal(signal.SIGTERM)
        while not any("shutting down" in line for line in server.lines):
            time.sleep(0.01)
        server.process.send_signal(number)
        assert server.end() == code


def test_a_signal_while_the_model_loads_ends_at_once(start):
    server = start(load_seconds=20.0)
    while True:
        try:
            socket.create_connection(("127.0.0.1", server.port)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0


def test_a_closed_connection_ends_its_request(start):
    server = start(step_seconds=0.02)
    server.wait_until_ready()
    with server.stream(max_tokens=4000) as response:
        events = response.iter_lines()  # held, since its end would close the connection
        next(events)
        assert server.metric("num_requests_running") == 1
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 4000}, timeout=0.2)
    deadline = time.monotonic() + 5
    while server.metric("num_requests_running") + server.metric("num_requests_waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_api_6_a_huge_body_gets_its_413(start):
    server = start()
    server.wait_until_ready()
    assert server.complete(prompt="a" * 65_000_000).status_code == 413
    assert server.complete(max_tokens=1).status_code == 200

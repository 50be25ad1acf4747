"""`octavo serve` as a process on a real port (its engine is scripted): port, signals, sockets."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.certificate import CERTIFICATE, KEY
from support.served import ServerProcess


@pytest.fixture
def start() -> Iterator[Any]:
    servers: list[ServerProcess] = []

    def make(*options: str, step_seconds: float = 0.0, load_seconds: float = 0.0) -> ServerProcess:
        script = str(Path(__file__).with_name("scripted_server.py"))
        program = (sys.executable, script, str(step_seconds), str(load_seconds))
        servers.append(ServerProcess(*options, program=program))
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
    server.complete(prompt="a", max_tokens=1)
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    for expected in ("sampling defaults: neutral (a test)", "memory: none", server.url):
        assert expected in server.log
    assert "Traceback" not in server.log


def test_ops_3_a_busy_port_is_noticed_before_the_model_loads(start):
    first = start()
    first.wait_until_ready()
    second = start("--port", str(first.port), load_seconds=20.0)
    assert second.end() not in (0, None)
    assert str(first.port) in second.log and "in use" in second.log
    first.complete(prompt="a", max_tokens=1)


def test_a_signal_lets_running_requests_finish(start):
    server = start(step_seconds=0.02)
    server.wait_until_ready()
    with server.stream(prompt="a", max_tokens=40) as response:
        events = response.iter_lines()
        next(events)
        server.process.send_signal(signal.SIGTERM)
        assert [line for line in events if line][-1] == "data: [DONE]"
    assert server.end() == 0
    assert "Traceback" not in server.log


def test_what_does_not_finish_in_time_ends_with_an_error_event(start):
    server = start("--shutdown-timeout", "0.2", step_seconds=0.02)
    server.wait_until_ready()
    with server.stream(prompt="a", max_tokens=4000) as response:
        events = response.iter_lines()
        next(events)
        server.process.send_signal(signal.SIGINT)
        last = [line for line in events if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert server.end() == 0
    assert "Traceback" not in server.log


def test_who_only_looks_on_does_not_hold_up_the_end(start):
    server = start()
    server.wait_until_ready()
    with httpx.stream("GET", f"{server.url}/live") as response:
        events = response.iter_lines()
        for _ in range(2):
            record = json.loads(next(line for line in events if line).removeprefix("data: "))
            assert record["model"] == "tiny" and record["requests"]["num_decode"] == 0
        server.process.send_signal(signal.SIGTERM)
        assert not any(events)
    assert server.end() == 0
    assert "shutting down: 0 requests" in server.log and "Traceback" not in server.log


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_at_once(start, number, code):
    server = start(step_seconds=0.02)
    server.wait_until_ready()
    with server.stream(prompt="a", max_tokens=4000) as response:
        events = response.iter_lines()  # held, since its end would close the connection
        next(events)
        server.process.send_signal(signal.SIGTERM)
        while "shutting down" not in server.log:
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
    with server.stream(prompt="a", max_tokens=4000) as response:
        events = response.iter_lines()  # held, since its end would close the connection
        next(events)
        assert server.metric("num_requests_running") == 1
    with pytest.raises(httpx.ReadTimeout):
        server.post("/v1/completions", prompt="a", max_tokens=4000, timeout=0.2)
    deadline = time.monotonic() + 5
    while server.metric("num_requests_running") + server.metric("num_requests_waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_api_6_a_huge_body_gets_its_413(start):
    server = start()
    server.wait_until_ready()
    assert server.post("/v1/completions", prompt="a" * 65_000_000).status_code == 413
    server.complete(prompt="a", max_tokens=1)


def test_tls(start, tmp_path):
    certfile, keyfile = tmp_path / "cert.pem", tmp_path / "key.pem"
    certfile.write_text(CERTIFICATE)
    keyfile.write_text(KEY)
    server = start("--ssl-certfile", str(certfile), "--ssl-keyfile", str(keyfile))
    server.wait_until_ready()
    url = server.url.replace("http:", "https:")
    assert f"ready on {url}" in server.log
    context = ssl.create_default_context(cafile=str(certfile))
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    with httpx.Client(verify=context) as client:
        answer = client.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/health")


def test_a_socket_in_the_file_system(start, tmp_path):
    path = tmp_path / "socket"
    server = start("--uds", str(path))
    server.wait_until_ready()
    assert f"ready on {path}" in server.log
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        answer = client.post("http://localhost/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert answer.status_code == 200
    second = start("--uds", str(path), load_seconds=20.0)
    assert second.end() == 2 and "a server listens there" in second.log
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert "curl http://localhost/v1/chat/completions" in server.log and f"--unix-socket {path} -d" in server.log
    assert not path.exists()


def test_keys_come_from_a_file_too(start, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("from-file\n")
    server = start("--api-key-file", str(keys), "--api-key", "from-option")
    server.wait_until_ready()
    for key, status in (("from-file", 200), ("from-option", 200), ("other", 401)):
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == status


def test_the_log_may_be_for_programs(start, tmp_path):
    server = start("--log-format", "json", "--log-level", "error")
    server.wait_until_ready()
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    second = start("--log-format", "json", "--uds", str(tmp_path / "none" / "socket"))
    assert second.end() == 2
    entries = [json.loads(line) for line in server.lines + second.lines]
    assert all(set(entry) == {"time", "level", "logger", "message"} for entry in entries)
    assert f"ready on {server.url}" in [entry["message"] for entry in entries]
    assert entries[-1]["level"] == "critical" and "none/socket cannot be used" in entries[-1]["message"]

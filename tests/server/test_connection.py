"""What a client does to its connection: heads without end, requests in pieces, answers that nobody reads."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from octavo.server.connection import MAX_HEAD_BYTES, MAX_HEADERS, WRITE_BUFFER_BYTES, Connection
from support.certificate import CERTIFICATE, KEY
from support.served import ServerProcess

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """One that waits for long, one that does not, one that does not and speaks TLS, and a slow one that does not."""
    certificate = tmp_path_factory.mktemp("tls") / "cert.pem"
    certificate.write_text(CERTIFICATE + KEY)
    script = (sys.executable, str(Path(__file__).with_name("scripted_server.py")))
    hasty = ("--client-timeout", "0.3")
    options = ((), hasty, (*hasty, "--ssl-certfile", str(certificate)), hasty)
    step_seconds = ("0", "0", "0", "0.02")
    all_four = [
        ServerProcess(*each, program=(*script, seconds, "0"))
        for each, seconds in zip(options, step_seconds, strict=True)
    ]
    for server in all_four:
        server.wait_until_ready()
    yield all_four
    for server in all_four:
        server.close()


@pytest.fixture
def patient(servers: list[ServerProcess]) -> ServerProcess:
    return servers[0]


@pytest.fixture
def hasty(servers: list[ServerProcess]) -> ServerProcess:
    return servers[1]


def connect(server: ServerProcess) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port))
    client.settimeout(10)
    return client


def answer(client: socket.socket) -> bytes:
    """All there is until the server closes."""
    received = b""
    try:
        while data := client.recv(1 << 16):
            received += data
    except (ConnectionResetError, ssl.SSLError):  # TLS misses its own end
        pass
    return received


def request(**body: object) -> bytes:
    data = json.dumps(body).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(data) + data


def assert_closed_after(client: socket.socket, seconds: float) -> None:
    began = time.monotonic()
    assert answer(client) == b""
    assert seconds * 0.8 < time.monotonic() - began


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1),
        b"GET /health HTTP/1.1\r\n" + b"a: " + b"b" * MAX_HEAD_BYTES + b"\r\n",
        b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n",
    ],
    ids=["many headers", "a large header", "a large path"],
)
def test_a_head_too_large_is_a_431(patient, head):
    with connect(patient) as client:
        client.sendall(head + b"\r\n")
        received = answer(client)
    status, _, body = received.partition(b"\r\n")[0], *received.partition(b"\r\n\r\n")[1:]
    assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert json.loads(body)["error"]["code"] == "head_too_large"


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0"


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET /", b"a" * 1000),
        (b"GET /health HTTP/1.1\r\na: b", b"a: b\r\n"),
        (b"GET /health HTTP/1.1\r\na: b", b"b" * 1000),
        (CHUNKED + b"\r\na: b", b"b" * 1000),
        (CHUNKED + b"\r\na: b", b"a: b\r\n"),
        (CHUNKED + b";a=", b"b" * 1000),
    ],
    ids=["path", "headers", "one header", "one trailer", "trailers", "chunk extension"],
)
def test_a_head_without_end_is_ended(patient, start, piece):
    with connect(patient) as client:
        client.sendall(start)
        sent = 0
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while sent < 64 * MAX_HEAD_BYTES:
                sent += client.send(piece)
                time.sleep(0.0005)
        assert sent < 4 * MAX_HEAD_BYTES


def test_as_many_headers_as_allowed_are_taken(patient):
    head = b"GET /health HTTP/1.1\r\nconnection: close\r\n" + b"a: b\r\n" * (MAX_HEADERS - 1)
    with connect(patient) as client:
        client.sendall(head + b"\r\n")
        assert answer(client).startswith(b"HTTP/1.1 200 OK")


def test_bodies_count_for_no_head(patient):
    """Several requests on one connection, each with a body larger than any head."""
    body = request(prompt=[5], max_tokens=1, user="u" * 4 * MAX_HEAD_BYTES)
    with connect(patient) as client:
        for _ in range(3):
            client.sendall(body)
            received = client.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 200 OK"), received
            while not received.endswith(b"}}}"):
                received += client.recv(1 << 16)


def test_what_is_no_http_is_a_400(patient):
    with connect(patient) as client:
        client.sendall(b"\x16\x03\x01 this is TLS\r\n\r\n")
        received = answer(client)
    assert received.startswith(b"HTTP/1.1 400 Bad Request")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("start", [b"", b"GET /hea", HEAD + b"content-length: 9\r\n\r\n{"], ids=["", "head", "body"])
def test_a_request_that_stops_in_the_middle_is_dropped(hasty, start):
    with connect(hasty) as client:
        client.sendall(start)
        assert_closed_after(client, 0.3)


def test_a_head_in_small_pieces_has_no_more_time(hasty):
    with connect(hasty) as client:
        client.sendall(b"GET /")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(100):
                client.sendall(b"x")
                time.sleep(0.05)


def test_a_body_in_small_pieces_has_all_the_time(hasty):
    whole = request(prompt=[5], max_tokens=1)
    with connect(hasty) as client:
        client.sendall(whole[:-9])
        for byte in whole[-9:]:
            time.sleep(0.1)
            client.sendall(bytes([byte]))
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_reader_that_stops_is_dropped(servers, tls):
    server = servers[1 + tls]
    with reader(server, tls) as client:
        client.sendall(request(prompt=[5], max_tokens=4000, stream=True, logprobs=5, ignore_eos=True))
        wait_until(lambda: "stopped reading its answer" in server.log)
        assert b"[DONE]" not in answer(client)


def test_the_request_of_a_reader_that_stops_ends(servers):
    server = servers[3]  # whose steps take long
    with reader(server, tls=False) as client:
        many = [[5]] * 512  # so that each step says much
        client.sendall(request(prompt=many, max_tokens=4000, stream=True, logprobs=5, ignore_eos=True))
        wait_until(lambda: "stopped reading its answer" in server.log)
        wait_until(lambda: "the client closed its connection" in server.log)
        wait_until(lambda: server.metric("num_requests_running") + server.metric("num_requests_waiting") == 0)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Unread(asyncio.Transport):
    """Keeps what is written, until somebody takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.data += data

    def get_write_buffer_size(self) -> int:
        return len(self.data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == WRITE_BUFFER_BYTES

    def is_closing(self) -> bool:
        return self.aborted

    def close(self) -> None:
        """Like a real one, it would first send what is left."""

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(("takes", "dropped"), [(0, True), (1, False), (1000, False)], ids=["none", "slow", "all"])
async def test_an_end_that_nobody_takes_is_dropped_though_nothing_waits_to_be_written(takes, dropped):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"an answer"})

    config = uvicorn.Config(app, lifespan="off", log_config=None)
    connection, transport = Connection(config, ServerState(), {}, patience=0.1), Unread()
    connection.connection_made(transport)
    connection.data_received(b"GET / HTTP/1.1\r\n\r\n")
    for _ in range(30):
        await asyncio.sleep(0.01)
        transport.data = transport.data[takes:]
    assert transport.aborted == dropped
    connection.connection_lost(None)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_slow_reader_gets_its_whole_answer(servers, tls):
    with reader(servers[1 + tls], tls) as client:
        client.sendall(request(prompt=[5], max_tokens=300, stream=True, logprobs=5, ignore_eos=True))
        received = b""
        while b"[DONE]" not in received:
            data = client.recv(4096)
            assert data, received[-200:]
            received += data
            time.sleep(0.002)


def reader(server: ServerProcess, tls: bool) -> socket.socket:
    """Its kernel takes little."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(10)
    client.connect(("127.0.0.1", server.port))
    return (
        ssl.create_default_context(cadata=CERTIFICATE).wrap_socket(client, server_hostname="localhost")
        if tls
        else client
    )

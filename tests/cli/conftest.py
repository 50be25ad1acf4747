"""A stand-in for a server: standard library only, scripted answers, and a record of what it was asked."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[tuple[str, dict[str, Any] | None, str | None]] = []  # (path, body, Authorization)
        self.words = ["Grass ", "is ", "grün 😀", "."]
        self.status = 200
        self.failure: str | None = None  # sent as an error event in the middle of a stream
        self.live: list[dict[str, Any]] = []  # the records of GET /live
        self.live_goes_on = threading.Event()  # before its stream ends
        self.live_goes_on.set()
        self.num_good = 0  # streams that end well before any fails
        self.counting = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may leave in the middle of an answer, when it has read an error event: nothing to print."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append((self.path, None, self.headers["Authorization"]))
        if self.path == "/live":
            self._stream(self._live())
        else:
            self._json({"object": "list", "data": [{"id": "fake"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.counting:  # a stream's number is its own, whatever arrives beside it
            self.server.requests.append((self.path, body, self.headers["Authorization"]))
            num_streams = sum(sent is not None for _, sent, _ in self.server.requests)
        if self.server.status != 200:
            self._json({"error": {"message": "max_tokens is -1; it must be at least 1", "type": "invalid_request"}})
            return
        self._stream(self._answer(num_streams))

    def _live(self) -> Iterator[str]:
        for record in self.server.live:
            yield f"data: {json.dumps(record)}\n\n"
        self.server.live_goes_on.wait()

    def _answer(self, num_streams: int) -> Iterator[str]:
        for i, word in enumerate(self.server.words):
            if self.server.failure and num_streams > self.server.num_good and i == 2:
                yield f"data: {json.dumps({'error': {'message': self.server.failure}})}\n\n"
                break
            text = {"delta": {"content": word}} if "chat" in self.path else {"text": word}
            yield f": a comment\ndata: {json.dumps({'choices': [{'index': 0, **text}]})}\r\n\r\n"
        last = {"delta": {}} if "chat" in self.path else {"text": ""}
        yield f"data: {json.dumps({'choices': [{'index': 0, 'finish_reason': 'stop', **last}]})}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': 7}})}\n\n"
        yield "data: [DONE]\n\n"

    def _stream(self, events: Iterable[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for text in events:
            data = text.encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _json(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.live_goes_on.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    with running(FakeServer()) as server:
        yield server


@pytest.fixture
def fake_server_at() -> Callable[[int], AbstractContextManager[FakeServer]]:
    """Makes one at a port (0: any)."""
    return lambda port: running(FakeServer(port))

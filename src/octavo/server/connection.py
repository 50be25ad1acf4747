"""A connection of the HTTP server: uvicorn's, with bounds on what a client may do before and beside its request.

Owns the size of a request's head (the body's is body.py's), the patience with a client that stops in the middle of a
request or of reading its answer, and the answer to what is no HTTP. Knows no route.

      connect ── head ──── body ──┐ answer ── idle ── head …
      patience:  [whole]   [each piece]   [each piece]   keep-alive is uvicorn's
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo.server.errors import openai_record

logger = logging.getLogger(__name__)

MAX_HEADERS = 256  # vLLM's bound; browsers behind chains of proxies send some 40
MAX_HEAD_BYTES = 64 * 1024  # request line and headers; common proxies allow 8 to 64 KiB
# Beyond the kernel's buffers: enough to send head and body, or the last events of a stream, at once, and else nothing
# that a client does not read.
WRITE_BUFFER_BYTES = 4096


class HeadTooLargeError(Exception):
    """Raised within the parser, which ends the reading of this head."""


class Connection(HttpToolsProtocol):
    """`patience` in seconds."""

    def __init__(self, *args: Any, patience: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._reading = Patience(self.loop, patience, self._give_up_reading)
        self._writing = Patience(self.loop, patience, self._give_up_writing)
        self._in_head = self._in_body = False
        self._head_bytes = 0  # of all headers so far, also those behind a body
        self._open_bytes = 0  # received since a head began or ended, or a piece of body came
        self._unread_bytes = 0  # of the answer, here, when the patience began
        self._head_too_large = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._reading.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading.end()
        self._writing.end()
        super().connection_lost(exc)

    # Reading

    def data_received(self, data: bytes) -> None:
        self._open_bytes += len(data)
        if self._in_body:
            self._reading.begin()
        super().data_received(data)
        if self._open_bytes > MAX_HEAD_BYTES and (self._in_head or self._in_body) and not self.transport.is_closing():
            self._head_too_large = True
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes, self._open_bytes = True, 0, 0
        self._reading.begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._check_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._check_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body, self._open_bytes = False, True, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._open_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._reading.end()
        super().on_message_complete()

    def _check_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._head_too_large = True
            raise HeadTooLargeError

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP, or too much of it, in the shape of all other errors; then the connection closes."""
        self._reading.end()
        status, code = 400, "invalid_http"
        if self._head_too_large:
            status, code = 431, "head_too_large"
            msg = f"the head of a request has at most {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes"
        body = msgspec.json.encode(openai_record(msg, status=status, code=code))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _give_up_reading(self) -> None:
        if self.flow.read_paused:  # it is we who do not read: an answer before this one is still on its way
            self._reading.begin()
            return
        logger.info("a client stopped in the middle of a request; its connection is closed", extra=self._about)
        self.transport.abort()

    @property
    def _about(self) -> dict[str, Any]:
        """Which request a line of the log is about, where that is known yet."""
        return {"request_id": None if self.cycle is None else self.cycle.scope.get("octavo.request_id")}

    # Writing

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writing.end()

    def on_response_complete(self) -> None:
        """An end that fits the buffer has paused nothing, and may still be there for ever."""
        super().on_response_complete()
        self._watch_writing()

    def _watch_writing(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._writing.begin()

    def _give_up_writing(self) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes == 0:
            return
        if num_bytes < self._unread_bytes:  # slow, but it reads
            self._watch_writing()
            return
        logger.info("a client stopped reading its answer; its connection is closed", extra=self._about)
        self.transport.abort()


class Patience:
    """Calls `give_up` where `seconds` pass between a beginning and its end, or the next beginning."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, give_up: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self.end()
        self._timer = self._loop.call_later(self._seconds, self._give_up)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

"""A connection of the HTTP server: uvicorn's, with bounds on what a client may do before and beside its request.

Owns the size of a request's head (the body's is body.py's), the number of requests that wait behind one, the patience
with a client that stops in the middle of a request or of reading its answer, the answer to what is no HTTP, and the
silence on offers of other protocols. Knows no route.

      connect ── head ──── body ──┐ answer ── idle ── head …
      patience:  [whole]   [each piece]   [each piece]   keep-alive is uvicorn's
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from octavo.server.errors import openai_record

logger = logging.getLogger(__name__)

MAX_HEADERS = 256  # vLLM's bound; browsers behind chains of proxies send some 40
MAX_HEAD_BYTES = 64 * 1024  # request line and headers; common proxies allow 8 to 64 KiB
# Beyond the kernel's buffers: enough to send head and body, or the last events of a stream, at once, and else nothing
# that a client does not read.
WRITE_BUFFER_BYTES = 4096
MAX_PIPELINED = 64  # requests behind the one that is answered; each costs some 4 KiB before it runs


class HeadTooLargeError(Exception):
    """Raised within the parser, which ends the reading of this head."""


class RefusedHeadError(Exception):
    """The same for a head that nothing is wrong with, but that is not taken."""


class Connection(HttpToolsProtocol):
    """`patience` in seconds."""

    def __init__(self, *args: Any, patience: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = DeafParser(self.parser, self._head_without_offer)  # type: ignore[assignment]  # in its place
        self._reading = Patience(self.loop, patience, self._give_up_reading)
        self._writing = Patience(self.loop, patience, self._give_up_writing)
        self._in_head = self._in_body = False
        self._head_bytes = 0  # of all headers so far, also those behind a body
        self._open_bytes = 0  # received since a head began or ended, or a piece of body came
        self._unread_bytes = 0  # of the answer, here, when the patience began
        self._head_too_large = False
        self._offers = False  # the head that is read has an offer of another protocol
        self._running: RequestResponseCycle | None = None  # the request that is answered; others may wait behind it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._reading.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading.end()
        self._writing.end()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:  # uvicorn tells the last one alone
            self._running.disconnected = True
            self._running.message_event.set()

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
        self._offers = self.parser.should_upgrade()
        if len(self.pipeline) >= MAX_PIPELINED or self.parser.get_method() == b"CONNECT":
            raise RefusedHeadError
        if self._offers:
            return
        # uvicorn keeps a date for all, which a timer has to renew, also in a server that nobody asks anything.
        self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        waits = self.cycle is not None and not self.cycle.response_complete
        super().on_headers_complete()
        if not waits:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        self._open_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offers:
            return
        self._in_body = False
        self._reading.end()
        super().on_message_complete()

    def _check_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            self._head_too_large = True
            raise HeadTooLargeError

    def _head_without_offer(self) -> bytes:
        """The head that was read last, as the parser may read it again."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [each.strip() for each in value.split(b",")]
                value = b", ".join(each for each in tokens if each.lower() not in (b"upgrade", b"http2-settings"))
            if name not in (b"upgrade", b"http2-settings"):
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP, or too much of it, in the shape of all other errors; then the connection closes. Where
        an answer is on its way, or an earlier request has none yet, nothing is said: it would be taken for that."""
        self._reading.end()
        if not self._may_answer():
            self.transport.close()
            return
        status, code = 400, "invalid_http"
        if self._head_too_large:
            status, code = 431, "head_too_large"
            msg = f"the head of a request has at most {MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes"
        body = msgspec.json.encode(openai_record(msg, status=status, code=code))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _may_answer(self) -> bool:
        if self.cycle is None or self.pipeline:
            return self.cycle is None
        return not self.cycle.response_started if self._in_body else self.cycle.response_complete

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
        """An end that fits the buffer has paused nothing, and may still be there for ever. What waits behind it is
        answered before more is read: else a client fills the memory with requests, and the loop with reading them."""
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()
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


class DeafParser:
    """httptools' parser ends where a client offers another protocol, and takes the body for a part of that. Java's
    client and curl offer HTTP/2 with whatever they send. A server may ignore an offer (RFC 9110, section 7.8): this one
    reads the head again without it, `head`, and goes on."""

    def __init__(self, parser: httptools.HttpRequestParser, head: Callable[[], bytes]) -> None:
        self._parser = parser
        self._head = head

    def feed_data(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = self._head() + data[offer.args[0] :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


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

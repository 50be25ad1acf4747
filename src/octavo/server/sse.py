"""Server-sent events: how a record becomes an event, and the response that sends them.

WHATWG HTML Living Standard, section "Server-sent events". Knows nothing of what the events mean.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import ClientGoneError, log_failure, record_of

if TYPE_CHECKING:
    from octavo.server.front import Front

DONE = b"data: [DONE]\n\n"

# Line ends to Python's str.splitlines and to many clients, though not to the standard: they travel escaped. Their
# bytes cannot be part of another character, since UTF-8 is self-synchronising.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


Failure = Callable[[Exception], bytes]  # the event that tells of an error


def event(record: dict[str, Any], name: str | None = None) -> bytes:
    data = msgspec.json.encode(record)
    if not data.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


class EventStream(Response):
    """200 with the events of a generator, of which the first is already there: whatever went wrong before it had a
    status line of its own. A later failure is one last event with an error object: of OpenAI's shape, unless `failure`
    makes another.
    """

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(
        self, front: Front, first: bytes, rest: AsyncGenerator[bytes, None], failure: Failure | None = None
    ) -> None:
        self.front = front
        self.first = first
        self.rest = rest
        self.failure = failure
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = b""
        try:
            await self.front.attend(self._send_events(send), receive)
        except Exception as error:
            log_failure(scope, error)
            if isinstance(error, ClientGoneError):
                return
            last = event(record_of(error, scope)) if self.failure is None else self.failure(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self.rest):
            await send({"type": "http.response.body", "body": self.first, "more_body": True})
            async for data in self.rest:
                await send({"type": "http.response.body", "body": data, "more_body": True})


async def open_stream(
    front: Front, events: AsyncGenerator[bytes, None], receive: Receive, failure: Failure | None = None
) -> Response:
    """The response of a stream, once its first event exists."""
    try:
        first = await front.attend(anext(events), receive)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(front, first, events, failure)

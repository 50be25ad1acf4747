"""The two ends of every route: from a request's body to a record, and from an answer to a response.

Knows no route: a route that generates brings an `Answer`, which makes the whole of it or its events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.body import read_json
from octavo.server.fields import Record, parse
from octavo.server.sse import Failure, open_stream

if TYPE_CHECKING:
    from octavo.server.front import Front

R = TypeVar("R", bound=Record)


class Answer(Protocol):
    """One of the two is asked for, once."""

    async def whole(self) -> dict[str, Any]: ...

    def events(self) -> AsyncGenerator[bytes, None]: ...


async def read(front: Front, request: Request, record: type[R]) -> R:
    """The body as a `record`. Raises InvalidRequestError, RequestTooLargeError, ClientGoneError."""
    body = await read_json(request, front.config.max_body_bytes)
    return parse(record, body, allow_unknown=front.config.allow_unknown_fields)


def json_response(record: Mapping[str, Any]) -> Response:
    return Response(msgspec.json.encode(record), media_type="application/json")


async def respond(
    front: Front, request: Request, answer: Answer, *, stream: bool, failure: Failure | None = None
) -> Response:
    """The answer, as long as its client is there. `failure`: as for EventStream."""
    if stream:
        return await open_stream(front, answer.events(), request.receive, failure)
    return json_response(await front.attend(answer.whole(), request.receive))

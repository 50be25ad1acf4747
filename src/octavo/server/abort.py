"""POST /abort_requests: ends live calls from outside, by their ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.exchange import json_response, read
from octavo.server.protocol import AbortRequest

if TYPE_CHECKING:
    from octavo.server.front import Front


async def abort(front: Front, request: Request) -> Response:
    """Ends live calls; the answer has the ids of those that were found.

    Where the server has keys, they are calls of the same key: no client ends another's.
    """
    asked = await read(front, request, AbortRequest)
    aborted = await front.abort(set(asked.request_ids), request.scope.get("octavo.key_name"))
    return json_response({"aborted": aborted})

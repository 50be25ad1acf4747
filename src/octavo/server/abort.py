"""POST /abort_requests: ends live calls from outside, by their ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.body import read_json
from octavo.server.fields import parse
from octavo.server.protocol import AbortRequest

if TYPE_CHECKING:
    from octavo.server.front import Front


async def abort(front: Front, request: Request) -> Response:
    """Ends live calls; the answer has the ids of those that were found.

    Where the server has keys, they are calls of the same key: no client ends another's.
    """
    body = await read_json(request, front.config.max_body_bytes)
    asked = parse(AbortRequest, body, allow_unknown=front.config.allow_unknown_fields)
    aborted = await front.abort(set(asked.request_ids), request.scope.get("octavo.key_name"))
    return Response(msgspec.json.encode({"aborted": aborted}), media_type="application/json")

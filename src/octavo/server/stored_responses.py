"""GET, DELETE /v1/responses/{id} and POST /v1/responses/{id}/cancel: what a client may do with a response that is kept.

Each key sees its own. How they come into the store: responses.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequestError, NotFoundError, refuse
from octavo.server.exchange import json_response

if TYPE_CHECKING:
    from octavo.server.front import Front
    from octavo.server.response_store import ResponseStore


async def retrieve(front: Front, request: Request) -> Response:
    """A stored response, as it was answered."""
    stream = request.query_params.get("stream", "false")
    if stream != "false":
        refuse("stream", stream, "false (only background responses can be streamed again, and octavo has none)")
    stored = _store(front).get(*_whose(request))
    return Response(stored.record, media_type="application/json")


async def delete(front: Front, request: Request) -> Response:
    """Forgets a stored response. Those that follow it keep the whole conversation."""
    response_id, key_name = _whose(request)
    _store(front).delete(response_id, key_name)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel(front: Front, request: Request) -> Response:
    """Refuses: only background responses could be cancelled.

    A call that runs ends when its client closes the connection, or by /abort_requests.
    """
    response_id, key_name = _whose(request)
    _store(front).get(response_id, key_name)
    raise InvalidRequestError(
        f"response_id is {response_id[:200]!r}, which has ended; only background responses can be cancelled, and "
        "octavo does not support these yet (a call that runs ends with its connection, or by /abort_requests)",
        param="response_id",
    )


def _store(front: Front) -> ResponseStore:
    if front.responses is None:
        raise NotFoundError("no responses are kept without --enable-responses-store", code="response_not_found")
    return front.responses


def _whose(request: Request) -> tuple[str, str | None]:
    return request.path_params["id"], request.scope.get("octavo.key_name")

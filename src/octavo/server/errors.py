"""Errors as OpenAI shapes them: {"error": {message, type, param, code}}, for every 4xx and 5xx. Anthropic's routes have
its shape: {"type": "error", "error": {type, message}, request_id}.

Owns the errors that only an HTTP front has, and the two forms in which an error leaves: a response, or the record of
the last event of a stream. Of the routes it knows only whose shape they speak.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from octavo.errors import OctavoError, QueueFullError

logger = logging.getLogger(__name__)

MAX_MESSAGE = 2000  # characters: a template or a client may put anything into a message

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    431: "RequestHeaderFieldsTooLargeError",
    499: "RequestAbortedError",
    503: "ServiceUnavailableError",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class AuthenticationError(OctavoError):
    status = 401
    code = "invalid_api_key"


class RequestTooLargeError(OctavoError):
    status = 413
    code = "request_too_large"


class ShuttingDownError(OctavoError):
    status = 503
    code = "shutting_down"


class ClientGoneError(OctavoError):
    """Nobody is left to answer; 499 is what access logs call it."""

    status = 499
    code = "client_gone"


class AbortedError(OctavoError):
    """Another call ended this one. The status is none that clients answer with another try."""

    status = 499
    code = "aborted"


def speaks_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_record(
    scope: Scope, message: str, *, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + " …"
    if speaks_anthropic(scope["path"]):
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        error = {"type": kind, "message": message}
        return {"type": "error", "error": error, "request_id": scope.get("octavo.request_id")}
    return openai_record(message, status=status, param=param, code=code)


def openai_record(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def record_of(error: Exception, scope: Scope) -> dict[str, Any]:
    """The record of any error. What octavo did not raise on purpose is for the log, not for the client."""
    if isinstance(error, OctavoError):
        return error_record(scope, error.message, status=error.status, param=error.param, code=error.code)
    message = "an internal error; the server's log has the details"
    return error_record(scope, message, status=500, code="internal_error")


def log_failure(scope: Scope, error: Exception) -> None:
    """A line for whatever did not end as it should; what the client did wrong is for debugging alone. Its message may
    quote the body, so that the line has the code and the field instead."""
    request_id = scope.get("octavo.request_id")
    about: dict[str, Any] = {"extra": {"request_id": request_id}}
    if not isinstance(error, OctavoError):
        logger.error("request %s: an unexpected error", request_id, exc_info=error, **about)
    elif isinstance(error, ClientGoneError):
        logger.info("request %s: %s", request_id, error.message, **about)
    elif error.status >= 500:
        logger.error("request %s: %s", request_id, error.message, **about)
    else:
        log_refusal(scope, error.status, error.code, error.param)


def log_refusal(scope: Scope, status: int, code: str | None, param: str | None = None) -> None:
    request_id = scope.get("octavo.request_id")
    field = "" if param is None or code == "unknown_field" else f" ({param})"  # an unknown one is the client's own text
    logger.debug("request %s: %d %s%s", request_id, status, code, field, extra={"request_id": request_id})


def error_response(error: OctavoError, scope: Scope) -> Response:
    headers = {}
    if isinstance(error, QueueFullError):
        headers["retry-after"] = str(error.retry_after)
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return _response(record_of(error, scope), error.status, headers)


async def on_octavo_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OctavoError)
    log_failure(request.scope, error)
    return error_response(error, request.scope)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or a method that the route lacks."""
    assert isinstance(error, HTTPException)
    message, code = {
        404: (f"no route {request.url.path}", "route_not_found"),
        405: (f"{request.url.path} does not take {request.method}", "method_not_allowed"),
    }.get(error.status_code, (error.detail, "http_error"))
    log_refusal(request.scope, error.status_code, code)
    headers = dict(error.headers or {})
    record = error_record(request.scope, message, status=error.status_code, code=code)
    return _response(record, error.status_code, headers)


async def on_unexpected_error(request: Request, error: Exception) -> Response:
    """Starlette answers outside of all middleware here, then raises the error again for uvicorn to log (logs.py)."""
    log_failure(request.scope, error)
    headers = {"x-request-id": request_id} if (request_id := request.scope.get("octavo.request_id")) else {}
    return _response(record_of(error, request.scope), 500, headers)


def _response(record: dict[str, Any], status: int, headers: dict[str, str]) -> Response:
    return Response(msgspec.json.encode(record), status, headers, media_type="application/json")

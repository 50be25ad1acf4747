"""A request's body, from the socket to a dict: Content-Type, Content-Encoding, size, JSON. Knows no field."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from octavo.errors import InvalidRequestError
from octavo.server.errors import ClientGoneError, RequestTooLargeError


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """Raises InvalidRequestError, or RequestTooLargeError as soon as the limit is passed."""
    content_type = request.headers.get("content-type", "application/json")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise InvalidRequestError(f"Content-Type is {content_type[:100]!r}; it must be 'application/json'")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise InvalidRequestError(f"Content-Encoding is {encoding[:100]!r}; a body must not be compressed")
    body = await _read(request, max_bytes)
    if not body:
        raise InvalidRequestError("the body is empty; it must be a JSON object", code="invalid_json")
    try:
        record = msgspec.json.decode(body)  # refuses NaN, 1e999, lone surrogates, and what is not UTF-8
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply", code="invalid_json") from None
    if not isinstance(record, dict):
        raise InvalidRequestError(f"the body is a JSON {_kind(record)}; it must be an object", code="invalid_json")
    return record


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = RequestTooLargeError(f"the body is larger than {max_bytes} bytes (--max-body-bytes)")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:19]) > max_bytes:
        raise too_large
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise too_large
            chunks.append(chunk)
    except ClientDisconnect:
        raise ClientGoneError("the client went away while sending its body") from None
    return b"".join(chunks)


def _kind(value: object) -> str:
    names: dict[type, str] = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")

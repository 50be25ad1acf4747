"""What holds for every route: the prefix of a proxy, the request id, the API key. Plain ASGI, outermost first."""

from __future__ import annotations

import hmac
import secrets
import uuid
from collections.abc import Sequence
from hashlib import blake2b

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.config import ServerConfig
from octavo.errors import InvalidRequestError, OctavoError
from octavo.server.errors import AuthenticationError, error_response, log_failure, speaks_anthropic
from octavo.server.protocol import MAX_ID_LENGTH

_OPEN_ROUTES = frozenset({"/", "/health", "/ready"})  # the page at / is the same for everybody; what it shows is not


def open_routes(config: ServerConfig) -> frozenset[str]:
    """Those that need no key, where there are keys."""
    return _OPEN_ROUTES if config.metrics_auth else _OPEN_ROUTES | {"/metrics"}


class RootPath:
    """Takes a proxy's prefix off the path, where the proxy has not."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            scope["path"] = scope["path"].removeprefix(self._prefix)
        await self.app(scope, receive, send)


class RequestId:
    """Echoes X-Request-Id, or gives one. The id stands in `scope["octavo.request_id"]`, and the answer's status, once
    there is one, in `scope["octavo.status"]`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get("x-request-id", "")
        is_too_long = len(wanted) > MAX_ID_LENGTH
        request_id = scope["octavo.request_id"] = uuid.uuid4().hex if is_too_long or not wanted else wanted

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                scope["octavo.status"] = message["status"]
            await send(message)

        if is_too_long:
            message = f"X-Request-Id is {len(wanted)} characters long; it must be at most {MAX_ID_LENGTH}"
            await send_error(InvalidRequestError(message, param="X-Request-Id"), scope, receive, send_with_id)
            return
        await self.app(scope, receive, send_with_id)


async def send_error(error: OctavoError, scope: Scope, receive: Receive, send: Send) -> None:
    log_failure(scope, error)
    await error_response(error, scope)(scope, receive, send)


class ApiKey:
    """Lets pass who sends `Authorization: Bearer KEY` with one of the keys; on Anthropic's routes, `x-api-key: KEY` as
    well. A name for the key stands in `scope["octavo.key_name"]`: the same for as long as the server runs, and nobody
    can tell the key from it."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_routes: frozenset[str]) -> None:
        self.app = app
        salt = secrets.token_bytes(16)
        hashes = {key.encode(): blake2b(key.encode(), key=salt, digest_size=8).hexdigest() for key in keys}
        self._names = {key: f"key-{digest}" for key, digest in hashes.items()}
        self._open_routes = open_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or scope["path"] in self._open_routes:
            await self.app(scope, receive, send)
        elif (name := self._key_name(scope)) is not None:
            scope["octavo.key_name"] = name
            await self.app(scope, receive, send)
        else:
            or_so = " or 'x-api-key: KEY'" if speaks_anthropic(scope["path"]) else ""
            allowed = f"'Authorization: Bearer KEY'{or_so}"
            error = AuthenticationError(f"the API key is missing or wrong; send it as {allowed}")
            await send_error(error, scope, receive, send)

    def _key_name(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        sent = [given] if scheme.lower() == "bearer" else []
        if speaks_anthropic(scope["path"]) and "x-api-key" in headers:
            sent.append(headers["x-api-key"])
        # Every key is compared, each in constant time: neither place nor content of a mismatch shows in the time.
        matches = [
            name
            for each in sent
            for key, name in self._names.items()
            if hmac.compare_digest(each.strip().encode("latin-1"), key)
        ]
        return matches[0] if matches else None

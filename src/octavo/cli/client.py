"""A small client of a running server: standard library only, JSON answers and server-sent events.

It knows HTTP and the shape of OpenAI's errors; what a body means is its callers' affair.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

from octavo.errors import OctavoError


class Client:
    """Talks to the server at `url` (with or without a closing /v1). One connection for each request, no proxies.
    `timeout`: seconds without a byte after which the server counts as gone."""

    def __init__(self, url: str, api_key: str | None = None, *, timeout: float | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OctavoError(f"{url!r} is not a URL of a server, such as http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._parts = parts
        self._timeout = timeout
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> Any:
        """The JSON answer of a GET. Raises OctavoError with the server's own message on an error status."""
        connection, response = self._open("GET", path, None)
        try:
            return json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise OctavoError(f"{self.url}{path} gave no JSON: {error}") from error
        finally:
            connection.close()

    def watch(self, path: str) -> Generator[dict[str, Any], None, None]:
        """The events of a GET as they come, until the iterator is closed."""
        return self._events("GET", path, None)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """POSTs `body` and yields the events of the answer as they come. Closing the iterator closes the connection,
        which makes the server drop the request."""
        return self._events("POST", path, body)

    def _events(self, method: str, path: str, body: dict[str, Any] | None) -> Generator[dict[str, Any], None, None]:
        connection, response = self._open(method, path, body)
        try:
            for data in _events(response):
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise OctavoError(_message(event, "the server reported an error"))
                yield event
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise OctavoError(f"the connection to {self.url} broke in the middle of an answer: {error}") from error
        finally:
            connection.close()

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout)
        headers = {**self._headers, "Content-Type": "application/json"} if body is not None else self._headers
        try:
            connection.request(method, self._prefix + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            otherwise = f"{self.url}{path} answered {response.status} {response.reason}"
            raise OctavoError(_message(_json(response.read()), otherwise))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            reason = getattr(error, "strerror", None) or error
            raise OctavoError(
                f"no server answers at {self.url} ({reason}); start one with `octavo serve`, or give its --url"
            ) from error
        except BaseException:
            connection.close()
            raise


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each server-sent event; lines that are not data (comments, names) pass."""
    lines: list[str] = []
    for raw in response:
        line = raw.decode().rstrip("\r\n")
        if line.startswith("data:"):
            lines.append(line[5:].removeprefix(" "))
        elif not line and lines:
            yield "\n".join(lines)
            lines.clear()
    if lines:
        yield "\n".join(lines)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _message(answer: Any, otherwise: str) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return error if isinstance(error, str) and error else otherwise

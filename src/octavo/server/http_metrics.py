"""Answers counted for /metrics, by route and status: what vLLM's server counts, under its names. Plain ASGI.

A path that is no route is counted as "none": what clients make up must not make labels.
"""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Receive, Scope, Send

NO_ROUTE = "none"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
SECONDS = (0.1, 0.5, 1.0)


class HttpMetrics:
    """The route's path stands in `scope["octavo.route"]`, the answer's status in `scope["octavo.status"]`: who has them
    writes them there, so that a stream's events do not pass through here one by one. Its time is that of the last."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self.app = app
        self._answers = Counter("http_requests", "Answers.", ("handler", "method", "status"), registry=registry)
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "From the head of a request to the end of its answer.",
            ("handler", "method"),
            buckets=SECONDS,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        try:
            await self.app(scope, receive, send)
        finally:
            handler = scope.get("octavo.route", NO_ROUTE)
            status = scope.get("octavo.status", 500)  # what Starlette answers where nothing else has
            method = scope["method"] if scope["method"] in METHODS else NO_ROUTE
            self._answers.labels(handler, method, f"{status // 100}xx").inc()
            self._seconds.labels(handler, method).observe(time.perf_counter() - start)

"""What load balancers and dashboards ask: GET /health, /ready, /version, /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.errors import EngineDeadError
from octavo.server.exchange import json_response

if TYPE_CHECKING:
    from octavo.server.front import Front

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def health(front: Front, request: Request) -> Response:
    """Whether the engine lives or will live again (while it is restarted, requests are taken, and wait)."""
    await front.llm.check_health()
    return Response()


async def ready(front: Front, request: Request) -> Response:
    """Whether a token can be made now: one is. Not while the engine is restarted."""
    if not await front.attend(front.llm.is_ready(), request.receive):
        raise EngineDeadError("the engine cannot make a token", code="not_ready")
    return Response()


async def version(front: Front, request: Request) -> Response:
    """octavo's version."""
    return json_response({"version": __version__})


async def metrics(front: Front, request: Request) -> Response:
    """Figures for Prometheus."""
    return Response(front.llm.metrics.render(), headers={"content-type": _METRICS_TYPE})

"""POST /reset_prefix_cache: calls after it find nothing cached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

if TYPE_CHECKING:
    from octavo.server.front import Front


async def reset(front: Front, request: Request) -> Response:
    """Forgets what is cached.

    At any time: what runs goes on. There is no body, neither asked nor answered."""
    await front.llm.reset_prefix_cache()
    return Response()

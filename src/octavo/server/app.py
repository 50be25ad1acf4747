"""The HTTP application: the route table, and what stands around it. Knows no engine beyond AsyncLLM."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.errors import OctavoError
from octavo.server import anthropic_messages, cache, chat, completions, models, probes, responses, tokenize
from octavo.server.errors import on_http_error, on_octavo_error, on_unexpected_error
from octavo.server.front import Front
from octavo.server.middleware import OPEN_ROUTES, ApiKey, RequestId

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.config import ServerConfig

Handler = Callable[[Front, Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/completions", completions.create),
    ("POST", "/v1/chat/completions", chat.create),
    ("POST", "/v1/responses", responses.create),
    ("POST", "/v1/messages", anthropic_messages.create),
    ("POST", "/v1/messages/count_tokens", anthropic_messages.count_tokens),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{id:path}", models.get_model),
    ("POST", "/tokenize", tokenize.tokenize),
    ("POST", "/detokenize", tokenize.detokenize),
    ("POST", "/reset_prefix_cache", cache.reset),
    ("GET", "/health", probes.health),
    ("GET", "/ready", probes.ready),
    ("GET", "/version", probes.version),
    ("GET", "/metrics", probes.metrics),
)


def create_app(llm: AsyncLLM, config: ServerConfig) -> Starlette:
    """An ASGI application; `app.state.front` is what its handlers share."""
    front = Front(llm, config)
    app = Starlette(
        routes=[Route(path, _endpoint(handler, front), methods=[method]) for method, path, handler in ROUTES],
        middleware=_middleware(config),
        exception_handlers={
            OctavoError: on_octavo_error,
            HTTPException: on_http_error,
            Exception: on_unexpected_error,
        },
    )
    app.router.redirect_slashes = False  # a redirected POST loses its body with many clients
    app.state.front = front
    return app


def _endpoint(handler: Handler, front: Front) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(front, request)

    return endpoint


def _middleware(config: ServerConfig) -> list[Middleware]:
    """Outermost first."""
    stack = [Middleware(RequestId)]
    if config.allowed_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=["GET", "POST", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        )
    if config.api_key:
        open_routes = OPEN_ROUTES if config.metrics_auth else OPEN_ROUTES | {"/metrics"}
        stack.append(Middleware(ApiKey, config.api_key, open_routes))
    return stack

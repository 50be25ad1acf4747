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
from octavo.server import (
    abort,
    anthropic_messages,
    cache,
    chat,
    completions,
    docs,
    embeddings,
    live,
    models,
    openapi,
    page,
    probes,
    responses,
    tokenize,
)
from octavo.server.errors import on_http_error, on_octavo_error, on_unexpected_error
from octavo.server.front import Front
from octavo.server.middleware import OPEN_ROUTES, ApiKey, RequestId, RootPath
from octavo.server.openapi import Handler, Operation
from octavo.server.protocol import AbortRequest, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from octavo.server.protocol_anthropic import CountTokensRequest, MessagesRequest
from octavo.server.protocol_embeddings import EmbeddingsRequest
from octavo.server.protocol_responses import ResponsesRequest

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.config import ServerConfig

ROUTES = (
    Operation("POST", "/v1/completions", completions.create, CompletionRequest),
    Operation("POST", "/v1/chat/completions", chat.create, ChatRequest),
    Operation("POST", "/v1/responses", responses.create, ResponsesRequest),
    Operation("POST", "/v1/messages", anthropic_messages.create, MessagesRequest),
    Operation("POST", "/v1/messages/count_tokens", anthropic_messages.count_tokens, CountTokensRequest),
    Operation("POST", "/v1/embeddings", embeddings.create, EmbeddingsRequest),
    Operation("GET", "/v1/models", models.list_models),
    Operation("GET", "/v1/models/{id:path}", models.get_model),
    Operation("POST", "/tokenize", tokenize.tokenize, TokenizeRequest),
    Operation("POST", "/detokenize", tokenize.detokenize, DetokenizeRequest),
    Operation("POST", "/abort_requests", abort.abort, AbortRequest),
    Operation("POST", "/reset_prefix_cache", cache.reset, answer=None),
    Operation("GET", "/health", probes.health, answer=None),
    Operation("GET", "/ready", probes.ready, answer=None),
    Operation("GET", "/version", probes.version),
    Operation("GET", "/metrics", probes.metrics, answer="text/plain"),
    Operation("GET", "/live", live.watch, answer="text/event-stream"),
    Operation("GET", "/", page.show, answer="text/html"),
    Operation("GET", "/openapi.json", openapi.document),
    Operation("GET", "/docs", docs.page, answer="text/html"),
)


def create_app(llm: AsyncLLM, config: ServerConfig) -> Starlette:
    """An ASGI application; `app.state.front` is what its handlers share."""
    front = Front(llm, config)
    app = Starlette(
        routes=[Route(each.path, _endpoint(each.handler, front), methods=[each.method]) for each in ROUTES],
        middleware=_middleware(config),
        exception_handlers={
            OctavoError: on_octavo_error,
            HTTPException: on_http_error,
            Exception: on_unexpected_error,
        },
    )
    app.router.redirect_slashes = False  # a redirected POST loses its body with many clients
    app.state.front = front
    app.state.operations = ROUTES
    return app


def _endpoint(handler: Handler, front: Front) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(front, request)

    return endpoint


def _middleware(config: ServerConfig) -> list[Middleware]:
    """Outermost first."""
    stack = [Middleware(RootPath, config.root_path)] if config.root_path else []
    stack.append(Middleware(RequestId))
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

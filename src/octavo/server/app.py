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
    answers,
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
    stored_responses,
    tokenize,
)
from octavo.server.errors import on_http_error, on_octavo_error, on_unexpected_error
from octavo.server.front import Front
from octavo.server.http_metrics import HttpMetrics
from octavo.server.middleware import ApiKey, RequestId, RootPath, open_routes
from octavo.server.openapi import Operation
from octavo.server.protocol import AbortRequest, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from octavo.server.protocol_anthropic import CountTokensRequest, MessagesRequest
from octavo.server.protocol_embeddings import EmbeddingsRequest
from octavo.server.protocol_responses import ResponsesRequest

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.config import ServerConfig

ROUTES = (
    Operation("POST", "/v1/completions", completions.create, CompletionRequest, answers.Completion, answers.Completion),
    Operation("POST", "/v1/chat/completions", chat.create, ChatRequest, answers.ChatCompletion, answers.ChatChunk),
    Operation(
        "POST", "/v1/responses", responses.create, ResponsesRequest, answers.ResponseRecord, answers.ResponseEvent
    ),
    Operation("POST", "/v1/responses/{id:path}/cancel", stored_responses.cancel),
    Operation("GET", "/v1/responses/{id:path}", stored_responses.retrieve, answer=answers.ResponseRecord),
    Operation("DELETE", "/v1/responses/{id:path}", stored_responses.delete, answer=answers.DeletedResponse),
    Operation(
        "POST", "/v1/messages", anthropic_messages.create, MessagesRequest, answers.Message, answers.MessageEvent
    ),
    Operation(
        "POST", "/v1/messages/count_tokens", anthropic_messages.count_tokens, CountTokensRequest, answers.TokenCount
    ),
    Operation("POST", "/v1/embeddings", embeddings.create, EmbeddingsRequest, answers.Embeddings),
    Operation("GET", "/v1/models", models.list_models, answer=answers.ModelList),
    Operation("GET", "/v1/models/{id:path}", models.get_model, answer=answers.ModelCard),
    Operation("POST", "/tokenize", tokenize.tokenize, TokenizeRequest, answers.Tokens),
    Operation("POST", "/detokenize", tokenize.detokenize, DetokenizeRequest, answers.Text),
    Operation("POST", "/abort_requests", abort.abort, AbortRequest, answers.Aborted),
    Operation("POST", "/reset_prefix_cache", cache.reset),
    Operation("GET", "/health", probes.health),
    Operation("GET", "/ready", probes.ready),
    Operation("GET", "/version", probes.version, answer=answers.Version),
    Operation("GET", "/metrics", probes.metrics, answer="text/plain"),
    Operation("GET", "/live", live.watch, answer="text/event-stream"),
    Operation("GET", "/", page.show, answer="text/html"),
    Operation("GET", "/openapi.json", openapi.document, answer="application/json"),
    Operation("GET", "/docs", docs.page, answer="text/html"),
)


def create_app(llm: AsyncLLM, config: ServerConfig) -> Starlette:
    """An ASGI application; `app.state.front` is what its handlers share."""
    front = Front(llm, config)
    app = Starlette(
        routes=[Route(each.path, _endpoint(each, front), methods=[each.method]) for each in ROUTES],
        middleware=_middleware(llm, config),
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


def _endpoint(operation: Operation, front: Front) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        request.scope["octavo.route"] = operation.path
        return await operation.handler(front, request)

    return endpoint


def _middleware(llm: AsyncLLM, config: ServerConfig) -> list[Middleware]:
    """Outermost first."""
    stack = [Middleware(RootPath, config.root_path)] if config.root_path else []
    stack += [Middleware(HttpMetrics, llm.metrics.registry), Middleware(RequestId)]
    if config.allowed_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        )
    if config.api_key:
        stack.append(Middleware(ApiKey, config.api_key, open_routes(config)))
    return stack

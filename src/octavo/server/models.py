"""GET /v1/models and /v1/models/{id}: each name the model answers to, and the sampling defaults in force."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from octavo.server import answers
from octavo.server.exchange import json_response

if TYPE_CHECKING:
    from octavo.server.front import Front


async def list_models(front: Front, request: Request) -> Response:
    """The names that the model answers to."""
    models = [_record(front, name) for name in front.model_names]
    return json_response({"object": "list", "data": models})


async def get_model(front: Front, request: Request) -> Response:
    """The model under one of its names."""
    name = front.check_model(request.path_params["id"])
    return json_response(_record(front, name))


def _record(front: Front, name: str) -> answers.ModelCard:
    llm = front.llm
    return {
        "id": name,
        "object": "model",
        "created": front.started,
        "owned_by": "octavo",
        "root": llm.config.model,
        "parent": None,
        "max_model_len": llm.info.max_model_len,
        "default_sampling_params": {"values": llm.default_sampling_params, "origin": llm.default_sampling_origin},
    }

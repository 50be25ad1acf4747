"""POST /v1/embeddings: a vector for each input, from the model's hidden states.

Owns the shape of the answer. Each input is a request of its own to the engine; how they are pooled is decided there.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from octavo.errors import InvalidRequestError
from octavo.pooling import EmbeddingRequestOutput, PoolingParams
from octavo.server.errors import AbortedError
from octavo.server.exchange import json_response, read
from octavo.server.front import LiveCall, engine_request_ids
from octavo.server.generation import Usage, renamed
from octavo.server.messages import chat_prompt
from octavo.server.prompts import read_prompts
from octavo.server.protocol_embeddings import EmbeddingsRequest
from octavo.server.request_log import logged

if TYPE_CHECKING:
    from octavo.server.front import Front


async def create(front: Front, request: Request) -> Response:
    """Turns inputs into vectors."""
    asked = await read(front, request, EmbeddingsRequest)
    model = front.check_model(asked.model)
    params = PoolingParams(
        pooling_type=asked.pooling_type,
        normalize=asked.normalize,
        use_activation=asked.use_activation,
        dimensions=asked.dimensions,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
    )
    prompts = await _prompts(front, asked)
    front.admit(asked.priority, sum(map(len, prompts)))
    work = _embed_all(front, asked, prompts, params, request.scope)
    outputs = await front.attend(work, request.receive)
    return json_response(_answer(asked, model, outputs))


async def _prompts(front: Front, asked: EmbeddingsRequest) -> list[list[int]]:
    if (asked.input is None) == (asked.messages is None):
        raise InvalidRequestError("give one of input and messages", param="input")
    if asked.messages is not None:
        return [await chat_prompt(front, asked, add_special_tokens=asked.add_special_tokens or False)]
    add_special_tokens = True if asked.add_special_tokens is None else asked.add_special_tokens
    prompts = await read_prompts(front, "input", asked.input, add_special_tokens=add_special_tokens)
    return [prompt.token_ids for prompt in prompts]


async def _embed_all(
    front: Front, asked: EmbeddingsRequest, prompts: list[list[int]], params: PoolingParams, scope: Scope
) -> list[EmbeddingRequestOutput]:
    """In the order of the prompts. Where one fails or nobody waits any more, all the others are aborted."""
    key_name = scope.get("octavo.key_name")
    wanted = asked.request_id or scope.get("octavo.request_id")
    fields: dict[str, Any] = {
        "priority": asked.priority,
        "cache_salt": asked.cache_salt,
        "user": asked.user or key_name,
    }
    names = ["input"] if len(prompts) == 1 else [f"input[{index}]" for index in range(len(prompts))]

    async def embed(index: int, request_id: str) -> EmbeddingRequestOutput:
        with renamed(prompt=names[index]):
            outputs = front.llm.encode(prompts[index], params, request_id, **fields)
            if front.tracer is not None:
                outputs = front.tracer.follow(outputs, scope, request_id, params)
            async with aclosing(outputs):
                async for output in outputs:
                    return output
        raise AbortedError("the request was aborted")

    call = LiveCall(wanted=wanted, num_prompts=len(prompts), key_name=key_name)
    with front.call_id("embd-", call) as call_id, logged(front, scope, call_id, prompts, params, Usage()):
        tasks = [
            asyncio.create_task(embed(index, request_id))
            for index, request_id in enumerate(engine_request_ids(call_id, len(prompts)))
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _answer(asked: EmbeddingsRequest, model: str, outputs: list[EmbeddingRequestOutput]) -> dict[str, Any]:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(output.outputs.embedding, asked)}
            for index, output in enumerate(outputs)
        ],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _encoded(embedding: list[float], asked: EmbeddingsRequest) -> list[float] | str:
    if asked.encoding_format == "float":
        return embedding
    return base64.b64encode(array("f", embedding).tobytes()).decode()  # little-endian, as all that octavo runs on

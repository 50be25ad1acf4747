"""POST /v1/embeddings: a vector for each input, from the model's hidden states.

Owns the shape of the answer. Each input is a request of its own to the engine; how they are pooled is decided there.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequestError
from octavo.pooling import PoolingParams
from octavo.request import RequestOutput
from octavo.server.engine_call import EngineCall
from octavo.server.errors import AbortedError
from octavo.server.exchange import json_response, read
from octavo.server.generation import renamed
from octavo.server.messages import chat_prompt
from octavo.server.prompts import read_prompts
from octavo.server.protocol_embeddings import EmbeddingsRequest
from octavo.server.tools import chat_tools

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
    call = EmbeddingsCall(
        front=front, asked=asked, scope=request.scope, model=model, prompts=prompts, params=params, user=asked.user
    )
    embeddings = await front.attend(_embeddings(call), request.receive)
    return json_response(_answer(call, embeddings, asked.encoding_format))


async def _prompts(front: Front, asked: EmbeddingsRequest) -> list[list[int]]:
    if (asked.input is None) == (asked.messages is None):
        raise InvalidRequestError("give one of input and messages", param="input")
    if asked.messages is not None:
        return [
            await chat_prompt(
                front, asked, chat_tools(front, asked), add_special_tokens=asked.add_special_tokens or False
            )
        ]
    add_special_tokens = True if asked.add_special_tokens is None else asked.add_special_tokens
    prompts = await read_prompts(front, "input", asked.input, add_special_tokens=add_special_tokens)
    return [prompt.token_ids for prompt in prompts]


@dataclass(slots=True, kw_only=True)
class EmbeddingsCall(EngineCall[PoolingParams]):
    async def _outputs_of(self, prompt_index: int, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        name = "input" if len(self.prompts) == 1 else f"input[{prompt_index}]"
        prompt = self.prompts[prompt_index]
        with renamed(prompt=name):
            request = self.front.llm.encode_bytes(prompt, self.params, request_id, **self._engine_fields)
            async with aclosing(request) as outputs:
                async for output in outputs:
                    yield output


async def _embeddings(call: EmbeddingsCall) -> list[bytes]:
    """Of each prompt, float32. Where one fails or nobody waits any more, all the others are aborted."""
    found: dict[int, bytes] = {}  # by prompt
    with call.open("embd-"):
        async with aclosing(call.outputs()) as outputs:
            async for prompt_index, output in outputs:
                if output.embedding is None:
                    raise AbortedError("the request was aborted")
                found[prompt_index] = output.embedding
    return [found[prompt_index] for prompt_index in range(len(call.prompts))]


def _answer(call: EmbeddingsCall, embeddings: list[bytes], encoding_format: str) -> dict[str, Any]:
    num_tokens = call.usage.prompt_tokens
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(embedding, encoding_format)}
            for index, embedding in enumerate(embeddings)
        ],
        "model": call.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _encoded(embedding: bytes, encoding_format: str) -> list[float] | str:
    return array("f", embedding).tolist() if encoding_format == "float" else base64.b64encode(embedding).decode()

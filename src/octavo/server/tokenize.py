"""POST /tokenize and /detokenize: what the engine would see of a prompt or of messages, and back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequestError
from octavo.server import answers
from octavo.server.exchange import json_response, read
from octavo.server.generation import LONG_TEXT, beside, encode
from octavo.server.messages import chat_prompt
from octavo.server.protocol import DetokenizeRequest, TokenizeRequest
from octavo.server.tools import chat_tools

if TYPE_CHECKING:
    from octavo.server.front import Front


async def tokenize(front: Front, request: Request) -> Response:
    """The token ids of a prompt or of messages."""
    asked = await read(front, request, TokenizeRequest)
    front.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequestError("give one of prompt and messages", param="prompt")
    if asked.prompt is not None:
        add_special_tokens = True if asked.add_special_tokens is None else asked.add_special_tokens
        (token_ids,) = await encode(front, [asked.prompt], add_special_tokens=add_special_tokens)
    else:
        tools = chat_tools(front, asked)
        token_ids = await chat_prompt(front, asked, tools, add_special_tokens=asked.add_special_tokens or False)
    record: answers.Tokens = {
        "count": len(token_ids),
        "max_model_len": front.llm.info.max_model_len,
        "tokens": token_ids,
    }
    if asked.return_token_strs:
        record["token_strs"] = [front.llm.tokenizer.token_text(token_id) for token_id in token_ids]
    return json_response(record)


async def detokenize(front: Front, request: Request) -> Response:
    """The text of token ids."""
    asked = await read(front, request, DetokenizeRequest)
    front.check_model(asked.model)
    high = front.llm.tokenizer.vocab_size
    for token_id in asked.tokens:
        if not 0 <= token_id < high:
            raise InvalidRequestError(f"tokens has the id {token_id}; ids must be in [0, {high - 1}]", param="tokens")
    decode = partial(front.llm.tokenizer.decode, asked.tokens, skip_special_tokens=False)
    text = await beside(decode, is_long=len(asked.tokens) >= LONG_TEXT)
    return json_response({"prompt": text})

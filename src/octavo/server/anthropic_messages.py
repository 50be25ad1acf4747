"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, streamed or not.

Owns the shape of its answers and events: a content block for each part of the answer. A final message of the assistant
is continued.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.request import CompletionOutput, RequestOutput, SamplingParams
from octavo.server import answers
from octavo.server.answers_tools import ToolUseBlock
from octavo.server.anthropic_conversation import anthropic_tools, input_of, plain_conversation
from octavo.server.errors import AbortedError, record_of
from octavo.server.exchange import json_response, read, respond
from octavo.server.generation import Call, beside, renamed, sampling_params
from octavo.server.messages import is_long, template_prompt
from octavo.server.protocol_anthropic import (
    ConversationFields,
    CountTokensRequest,
    MessagesRequest,
)
from octavo.server.sse import event
from octavo.server.tool_calls import AnswerReader, Part
from octavo.server.tools import Tools
from octavo.text.chat_template import template_variables

if TYPE_CHECKING:
    from octavo.server.front import Front

_NAMES = {"stop": "stop_sequences", "prompt": "messages"}  # SamplingParams' word -> Anthropic's


async def create(front: Front, request: Request) -> Response:
    """Answers a conversation, in Anthropic's shape."""
    asked = await read(front, request, MessagesRequest)
    model = front.check_model(asked.model)
    tools = anthropic_tools(front, asked)
    params = _params(front, asked, tools)
    prompt = await _prompt(front, asked, tools)
    answer = _Answer(
        Call(
            front=front,
            asked=asked,
            tools=tools,
            scope=request.scope,
            model=model,
            prompts=[prompt],
            params=params,
            user=None if asked.metadata is None else asked.metadata.user_id,
        )
    )
    return await respond(front, request, answer, stream=asked.stream, failure=answer.failure)


async def count_tokens(front: Front, request: Request) -> Response:
    """How many tokens a conversation has, as /v1/messages would see it."""
    asked = await read(front, request, CountTokensRequest)
    front.check_model(asked.model)
    prompt = await _prompt(front, asked, anthropic_tools(front, asked))
    return json_response({"input_tokens": len(prompt)})


def _params(front: Front, asked: MessagesRequest, tools: Tools) -> SamplingParams:
    decided: dict[str, Any] = {"max_tokens": asked.max_tokens, "stop": asked.stop_sequences, **tools.sampling}
    if asked.temperature is not None:
        decided["temperature"] = asked.temperature
    with renamed(**_NAMES):
        return sampling_params(front, asked, **decided)


async def _prompt(front: Front, asked: ConversationFields, tools: Tools) -> list[int]:
    convert = partial(plain_conversation, asked, allow_unknown=front.config.allow_unknown_fields)
    messages = await beside(convert, is_long=is_long(front, [{"content": asked.system}, *asked.messages]))
    continued = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return await template_prompt(
        front,
        messages,
        template_variables(asked.chat_template_kwargs),
        tools=tools,
        add_generation_prompt=not continued,
        continue_final_message=continued,
    )


class _Answer:
    """One message: no content block where the model says nothing."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._reader = AnswerReader(call.tools, "toolu_")
        self._has_begun = False
        self._open: Part | None = None

    async def whole(self) -> dict[str, Any]:
        call = self._call
        with call.open("msg_"), renamed(**_NAMES):
            async with aclosing(call.outputs()) as outputs:
                async for _, output in outputs:
                    last = output
            (sample,) = last.outputs
            self._reader.take(sample)
            content = [_block(part) for part in self._reader.parts]
            ended = {"content": content, **_stop(sample), "usage": self._usage(), **call.timings_extra()}
            return {**self._message(last), **ended}

    async def events(self) -> AsyncGenerator[bytes, None]:
        call = self._call
        with call.open("msg_"), renamed(**_NAMES):
            async with aclosing(call.outputs()) as outputs:
                async for _, output in outputs:
                    last = output
                    for data in self._news(output):
                        yield data
            stop = _stop(last.outputs[0])
            for data in self._close():
                yield data
            yield _event("message_delta", delta=stop, usage=self._usage(), **call.timings_extra())
            yield _event("message_stop")

    def _news(self, output: RequestOutput) -> Iterator[bytes]:
        """The events of an output; that of the beginning before the first."""
        if not self._has_begun:
            self._has_begun = True
            yield _event("message_start", message=self._message(output))
        if output.prompt_progress is not None:  # in an event that every client lets pass
            yield _event("ping", **self._call.progress_extra(0, output.prompt_progress))
        for sample in output.outputs:
            for news in self._reader.take(sample):
                part = news.part
                if news.is_new:
                    yield from self._close()
                    self._open = part
                    yield _event("content_block_start", index=part.position, content_block=_empty_block(part))
                if news.text:
                    yield _event("content_block_delta", index=part.position, delta=_delta(part, news.text))

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._open.position)

    def failure(self, error: Exception) -> bytes:
        return event(record_of(error, self._call.scope), "error")

    def _message(self, output: RequestOutput) -> answers.Message:
        """As it begins."""
        return {
            "id": self._call.call_id,
            "type": "message",
            "role": "assistant",
            "model": self._call.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
            "seed": output.seed,
        }

    def _usage(self) -> answers.MessageUsage:
        """In Anthropic's words, input tokens are those that no cache had."""
        usage = self._call.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _stop(sample: CompletionOutput) -> dict[str, Any]:
    """Why it ended. Raises AbortedError: the API has no word for that."""
    if sample.finish_reason == "abort":
        raise AbortedError("the request was aborted")
    if sample.finish_reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if sample.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(sample.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _block(part: Part) -> answers.TextBlock | ToolUseBlock:
    if part.name is None:
        return {"type": "text", "text": part.text, "citations": None}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": input_of(part.text)}


def _empty_block(part: Part) -> dict[str, Any]:
    """As it begins."""
    if part.name is None:
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}


def _delta(part: Part, text: str) -> dict[str, Any]:
    if part.name is None:
        return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)

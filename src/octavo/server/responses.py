"""POST /v1/responses: OpenAI's Responses API, streamed or not. Nothing is stored: whoever goes on sends it all again.

Owns the shape of a response and of its events. Its output is one message with one part, the text.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.request import CompletionOutput
from octavo.server.body import read_json
from octavo.server.errors import AbortedError, record_of
from octavo.server.fields import parse
from octavo.server.generation import Call, beside, renamed, sampling_params
from octavo.server.messages import check_tools, is_long, template_prompt
from octavo.server.protocol_responses import ResponsesRequest
from octavo.server.response_items import input_messages
from octavo.server.sse import event, open_stream
from octavo.text.chat_template import template_variables

if TYPE_CHECKING:
    from octavo.server.front import Front

_NAMES = {"max_tokens": "max_output_tokens", "prompt": "input"}  # SamplingParams' word -> the Responses API's
_PLACE = {"output_index": 0, "content_index": 0}  # of the text


async def create(front: Front, request: Request) -> Response:
    """Answers a text or a conversation, in the shape of OpenAI's Responses API."""
    body = await read_json(request, front.config.max_body_bytes)
    asked = parse(ResponsesRequest, body, allow_unknown=front.config.allow_unknown_fields)
    model = front.check_model(asked.model)
    with renamed(**_NAMES):
        params = sampling_params(front, asked, max_tokens=asked.max_output_tokens)
    check_tools(asked)
    read = partial(input_messages, asked, allow_unknown=front.config.allow_unknown_fields)
    items = asked.input if isinstance(asked.input, list) else []
    messages = await beside(read, is_long=is_long(front, items, "input"))
    prompt = await template_prompt(front, messages, template_variables(asked.chat_template_kwargs))
    front.admit(asked.priority, len(prompt))
    answer = _Answer(
        asked,
        Call(
            front=front,
            asked=asked,
            scope=request.scope,
            model=model,
            prompts=[prompt],
            params=params,
            user=asked.user,
        ),
    )
    if asked.stream:
        return await open_stream(front, answer.events(), request.receive, answer.failure)
    whole = await front.attend(answer.whole(), request.receive)
    return Response(msgspec.json.encode(whole), media_type="application/json")


class _Answer:
    def __init__(self, asked: ResponsesRequest, call: Call) -> None:
        self._asked = asked
        self._call = call
        self._num_events = 0
        self._seed: int | None = None
        self._text = ""  # so far

    async def whole(self) -> dict[str, Any]:
        with self._call.open("resp_"), renamed(**_NAMES):
            async with aclosing(self._samples()) as samples:
                async for sample in samples:
                    last = sample
            return self._ended(_status(last))

    async def events(self) -> AsyncGenerator[bytes, None]:
        with self._call.open("resp_"), renamed(**_NAMES):
            opened = False
            async with aclosing(self._samples()) as samples:
                async for sample in samples:
                    if not opened:
                        opened = True
                        for data in self._opening():
                            yield data
                    if sample.text:
                        fields = {"item_id": self._item_id, **_PLACE, "delta": sample.text, "logprobs": []}
                        yield self._event("response.output_text.delta", **fields)
            status = _status(sample)
            for data in self._closing(status):
                yield data

    def failure(self, error: Exception) -> bytes:
        message = record_of(error, self._call.scope)["error"]["message"]
        response = self._response("failed", error={"code": "server_error", "message": message})
        return self._event("response.failed", response=response)

    async def _samples(self) -> AsyncGenerator[CompletionOutput, None]:
        async with aclosing(self._call.outputs()) as outputs:
            async for _, output in outputs:
                (sample,) = output.outputs
                self._seed = output.seed
                self._text += sample.text
                yield sample

    def _opening(self) -> list[bytes]:
        in_progress = self._response("in_progress")
        item = self._item("in_progress", [])
        return [
            self._event("response.created", response=in_progress),
            self._event("response.in_progress", response=in_progress),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", item_id=self._item_id, **_PLACE, part=_part("")),
        ]

    def _closing(self, status: str) -> list[bytes]:
        place = {"item_id": self._item_id, **_PLACE}
        item = self._item(status, [_part(self._text)])
        return [
            self._event("response.output_text.done", **place, text=self._text, logprobs=[]),
            self._event("response.content_part.done", **place, part=_part(self._text)),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{status}", response=self._ended(status)),
        ]

    def _event(self, kind: str, **fields: Any) -> bytes:
        record = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event(record, kind)

    @property
    def _item_id(self) -> str:
        return "msg_" + self._call.call_id.removeprefix("resp_")

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _ended(self, status: str) -> dict[str, Any]:
        return self._response(
            status,
            completed_at=int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            output=[self._item(status, [_part(self._text)])],
            usage=self._usage(),
        )

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        """The record of every stage; `fields` beat what holds before the end."""
        asked, params = self._asked, self._call.params
        return {
            "id": self._call.call_id,
            "object": "response",
            "created_at": self._call.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self._call.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
            "metadata": asked.metadata or {},
            "seed": self._seed,
            **fields,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._call.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(sample: CompletionOutput) -> str:
    """How it ended. Raises AbortedError."""
    if sample.finish_reason == "abort":
        raise AbortedError("the request was aborted")
    return "incomplete" if sample.finish_reason == "length" else "completed"

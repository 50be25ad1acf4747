"""POST /v1/responses: OpenAI's Responses API, streamed or not.

Owns the shape of a response and the order of its events; its output is response_output.py's. Whoever goes on sends it
all again or, where responses are kept (response_store.py), names the last one.
"""

from __future__ import annotations

import reprlib
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequestError
from octavo.request import CompletionOutput, RequestOutput
from octavo.server import answers
from octavo.server.errors import AbortedError, record_of
from octavo.server.exchange import read, respond
from octavo.server.generation import Call, beside, renamed, sampling_params
from octavo.server.messages import is_long, template_prompt
from octavo.server.protocol_responses import ResponsesRequest
from octavo.server.response_items import input_messages, with_instructions
from octavo.server.response_output import ResponseOutput
from octavo.server.response_store import Messages, ResponseStore, Turn
from octavo.server.response_tools import response_tools
from octavo.server.sse import event
from octavo.text.chat_template import template_variables

if TYPE_CHECKING:
    from octavo.server.front import Front

_NAMES = {"max_tokens": "max_output_tokens", "prompt": "input"}  # SamplingParams' word -> the Responses API's


async def create(front: Front, request: Request) -> Response:
    """Answers a text or a conversation, in the shape of OpenAI's Responses API."""
    asked = await read(front, request, ResponsesRequest)
    model = front.check_model(asked.model)
    tools, names = response_tools(front, asked)
    with renamed(**_NAMES):
        params = sampling_params(front, asked, max_tokens=asked.max_output_tokens, **tools.sampling)
    convert = partial(input_messages, asked.input, allow_unknown=front.config.allow_unknown_fields)
    items = asked.input if isinstance(asked.input, list) else []
    given = await beside(convert, is_long=is_long(front, items, "input"))
    memory = _Memory.of(front, asked, given, request.scope.get("octavo.key_name"))
    messages = with_instructions(asked.instructions, memory.conversation)
    prompt = await template_prompt(front, messages, _template_variables(asked), tools=tools)
    call = Call(
        front=front,
        asked=asked,
        tools=tools,
        scope=request.scope,
        model=model,
        prompts=[prompt],
        params=params,
        user=asked.user,
    )
    answer = _Answer(asked, call, memory, ResponseOutput(tools, names))
    return await respond(front, request, answer, stream=asked.stream, failure=answer.failure)


def _template_variables(asked: ResponsesRequest) -> dict[str, Any]:
    variables = template_variables(asked.chat_template_kwargs)
    if asked.reasoning is not None and asked.reasoning.effort is not None:
        variables.setdefault("reasoning_effort", asked.reasoning.effort)
    return variables


@dataclass(slots=True, kw_only=True)
class _Memory:
    """What a call goes on from, and what is kept of it. `store` is None where nothing is to be."""

    store: ResponseStore | None
    before: Turn | None
    messages: Messages  # of `input`
    key_name: str | None

    @classmethod
    def of(cls, front: Front, asked: ResponsesRequest, messages: Messages, key_name: str | None) -> _Memory:
        """Raises InvalidRequestError, and NotFoundError for a `previous_response_id` that is not kept."""
        store, before = front.responses, None
        if store is None and (asked.store or asked.previous_response_id is not None):
            name = "store" if asked.store else "previous_response_id"
            value = asked.store or asked.previous_response_id
            raise InvalidRequestError(
                f"{name} is {reprlib.repr(value)}, but this server keeps no responses (--enable-responses-store)",
                param=name,
            )
        if store is not None and asked.previous_response_id is not None:
            before = store.get(asked.previous_response_id, key_name, param="previous_response_id").turn
        return cls(store=None if asked.store is False else store, before=before, messages=messages, key_name=key_name)

    @property
    def conversation(self) -> Messages:
        return self.messages if self.before is None else [*self.before.conversation(), *self.messages]

    def keep(self, record: dict[str, Any], output: dict[str, Any]) -> None:
        if self.store is not None:
            messages = [*self.messages, output]
            self.store.add(record["id"], record, messages, self.before, self.key_name)


class _Answer:
    def __init__(self, asked: ResponsesRequest, call: Call, memory: _Memory, output: ResponseOutput) -> None:
        self._asked = asked
        self._call = call
        self._memory = memory
        self._output = output
        self._num_events = 0
        self._seed: int | None = None

    async def whole(self) -> dict[str, Any]:
        with self._call.open("resp_"), renamed(**_NAMES):
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    last = output
            status = _status(last.outputs[0])
            for _ in (*self._output.take(last.outputs[0]), *self._output.end(status)):
                pass
            return self._ended(status)

    async def events(self) -> AsyncGenerator[bytes, None]:
        with self._call.open("resp_"), renamed(**_NAMES):
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    last = output
                    for data in self._news(output):
                        yield data
            status = _status(last.outputs[0])
            for kind, fields in self._output.end(status):
                yield self._event(kind, **fields)
            yield self._event(f"response.{status}", response=self._ended(status))

    def _news(self, output: RequestOutput) -> Iterator[bytes]:
        """The events of an output; those of the beginning before the first."""
        if self._num_events == 0:
            in_progress = self._response("in_progress")
            yield self._event("response.created", response=in_progress)
            yield self._event("response.in_progress", response=in_progress)
        if output.prompt_progress is not None:
            progress = self._call.progress_extra(0, output.prompt_progress)
            yield self._event("response.in_progress", response=self._response("in_progress"), **progress)
        for sample in output.outputs:
            for kind, fields in self._output.take(sample):
                yield self._event(kind, **fields)

    def failure(self, error: Exception) -> bytes:
        message = record_of(error, self._call.scope)["error"]["message"]
        response = self._response("failed", error={"code": "server_error", "message": message})
        return self._event("response.failed", response=response)

    async def _outputs(self) -> AsyncGenerator[RequestOutput, None]:
        self._output.response_id = self._call.call_id
        async with aclosing(self._call.outputs()) as outputs:
            async for _, output in outputs:
                self._seed = output.seed
                yield output

    def _event(self, kind: str, **fields: Any) -> bytes:
        record = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event(record, kind)

    def _ended(self, status: str) -> dict[str, Any]:
        """The last record; it is kept before a client may ask for it."""
        record = self._response(
            status,
            completed_at=int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            output=self._output.items(status),
            usage=self._usage(),
            **self._call.timings_extra(),
        )
        self._memory.keep(record, self._output.message())
        return record

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
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "reasoning": {"effort": None if asked.reasoning is None else asked.reasoning.effort, "summary": None},
            "store": self._memory.store is not None,
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

    def _usage(self) -> answers.ResponseUsage:
        usage = self._call.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _status(sample: CompletionOutput) -> str:
    """How it ended. Raises AbortedError."""
    if sample.finish_reason == "abort":
        raise AbortedError("the request was aborted")
    return "incomplete" if sample.finish_reason == "length" else "completed"

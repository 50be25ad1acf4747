"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, streamed or not.

Owns how its messages become plain ones, and the shape of its answers and events. A final message of the assistant is
continued. Of content blocks octavo knows text alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import refuse
from octavo.request import CompletionOutput, RequestOutput, SamplingParams
from octavo.server import answers
from octavo.server.errors import AbortedError, record_of
from octavo.server.exchange import json_response, read, respond
from octavo.server.fields import mapping, parse
from octavo.server.generation import Call, beside, renamed, sampling_params
from octavo.server.messages import is_long, template_prompt
from octavo.server.protocol_anthropic import (
    AnthropicMessage,
    AnthropicText,
    ConversationFields,
    CountTokensRequest,
    MessagesRequest,
)
from octavo.server.sse import event
from octavo.text.chat_template import template_variables

if TYPE_CHECKING:
    from octavo.server.front import Front

_NAMES = {"stop": "stop_sequences", "prompt": "messages"}  # SamplingParams' word -> Anthropic's


async def create(front: Front, request: Request) -> Response:
    """Answers a conversation, in Anthropic's shape."""
    asked = await read(front, request, MessagesRequest)
    model = front.check_model(asked.model)
    params = _params(front, asked)
    prompt = await _prompt(front, asked)
    user = None if asked.metadata is None else asked.metadata.user_id
    answer = _Answer(
        Call(front=front, asked=asked, scope=request.scope, model=model, prompts=[prompt], params=params, user=user)
    )
    return await respond(front, request, answer, stream=asked.stream, failure=answer.failure)


async def count_tokens(front: Front, request: Request) -> Response:
    """How many tokens a conversation has, as /v1/messages would see it."""
    asked = await read(front, request, CountTokensRequest)
    front.check_model(asked.model)
    prompt = await _prompt(front, asked)
    return json_response({"input_tokens": len(prompt)})


def _params(front: Front, asked: MessagesRequest) -> SamplingParams:
    decided: dict[str, Any] = {"max_tokens": asked.max_tokens, "stop": asked.stop_sequences}
    if asked.temperature is not None:
        decided["temperature"] = asked.temperature
    with renamed(**_NAMES):
        return sampling_params(front, asked, **decided)


async def _prompt(front: Front, asked: ConversationFields) -> list[int]:
    _check_tools(asked)
    convert = partial(plain_conversation, asked, allow_unknown=front.config.allow_unknown_fields)
    messages = await beside(convert, is_long=is_long(front, [{"content": asked.system}, *asked.messages]))
    continued = messages[-1]["role"] == "assistant"
    return await template_prompt(
        front,
        messages,
        template_variables(asked.chat_template_kwargs),
        add_generation_prompt=not continued,
        continue_final_message=continued,
    )


def _check_tools(asked: ConversationFields) -> None:
    """Until octavo can call tools, only a call that asks for none passes."""
    choice = (asked.tool_choice or {}).get("type")
    if choice not in (None, "none", "auto"):
        refuse("tool_choice", asked.tool_choice, "of type none or auto (octavo does not support forced tool calls yet)")
    if asked.tools and choice != "none":
        allowed = "empty unless tool_choice is {'type': 'none'} (octavo does not support tool calls yet)"
        refuse("tools", asked.tools, allowed)


def plain_conversation(asked: ConversationFields, *, allow_unknown: bool) -> list[dict[str, Any]]:
    """In OpenAI's shape, with the system prompt first. Neighbours of one role are one turn, as the API defines it."""
    messages: list[dict[str, Any]] = []
    if asked.system is not None and (system := _texts("system", asked.system, allow_unknown)):
        messages.append({"role": "system", "content": system})
    for i, given in enumerate(asked.messages):
        place = f"messages[{i}]"
        message = parse(AnthropicMessage, given, allow_unknown=allow_unknown, path=f"{place}.")
        content = _texts(f"{place}.content", message.content, allow_unknown)
        if not content and not (message.role == "assistant" and i == len(asked.messages) - 1):
            refuse(f"{place}.content", message.content, "not empty, but for a final message of the assistant")
        if messages and messages[-1]["role"] == message.role:
            messages[-1]["content"] += content
        else:
            messages.append({"role": message.role, "content": content})
    return messages


def _texts(place: str, content: Any, allow_unknown: bool) -> list[dict[str, Any]]:
    """The parts of a string or of a list of blocks."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        refuse(place, content, "a string or a list of content blocks")
    parts = []
    for j, given in enumerate(content):
        block = mapping(f"{place}[{j}]", given)
        if block.get("type") != "text":
            allowed = "'text' (octavo does not support other content blocks yet)"
            refuse(f"{place}[{j}].type", block.get("type"), allowed)
        text = parse(AnthropicText, block, allow_unknown=allow_unknown, path=f"{place}[{j}].").text
        parts.append({"type": "text", "text": text})
    return parts


class _Answer:
    """One message: a content block of text, or none where the model says nothing."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._has_begun = self._has_text = False

    async def whole(self) -> dict[str, Any]:
        call = self._call
        with call.open("msg_"), renamed(**_NAMES):
            async with aclosing(call.outputs()) as outputs:
                async for _, output in outputs:
                    last = output
            (sample,) = last.outputs
            content = [{"type": "text", "text": sample.text, "citations": None}] if sample.text else []
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
            if self._has_text:
                yield _event("content_block_stop", index=0)
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
            if sample.text:
                if not self._has_text:
                    self._has_text = True
                    yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
                yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": sample.text})

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
    if sample.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(sample.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sample.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)

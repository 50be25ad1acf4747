"""POST /v1/chat/completions, streamed or not.

Owns the shape of a chat completion and of its chunks: a whole answer is one piece for each choice, a stream is many,
after a chunk that only names the role.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from octavo.errors import InvalidRequestError, refuse
from octavo.request import BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from octavo.server import answers
from octavo.server.answers_tools import ChatCall, ChatCallDelta
from octavo.server.beams import beam_search_params
from octavo.server.exchange import read, respond
from octavo.server.generation import Call, check_stream, sampling_params
from octavo.server.logprobs import Position, TokenNames, chat_logprobs, prompt_logprobs
from octavo.server.messages import chat_prompt
from octavo.server.protocol import ChatRequest, StreamOptions
from octavo.server.sse import DONE, event
from octavo.server.tool_calls import AnswerReader, Part, PartNews
from octavo.server.tools import Tools, chat_tools

if TYPE_CHECKING:
    from octavo.server.front import Front


async def create(front: Front, request: Request) -> Response:
    """Answers a conversation."""
    asked = await read(front, request, ChatRequest)
    model = front.check_model(asked.model)
    check_stream(asked)
    tools = chat_tools(front, asked, parallel=asked.parallel_tool_calls)
    params = _params(front, asked, tools)
    prompt = await chat_prompt(front, asked, tools, add_special_tokens=asked.add_special_tokens)
    beams = beam_search_params(asked, params, front.llm.info.max_model_len - len(prompt))
    if beams is not None and tools.calling is not None:
        refuse("use_beam_search", True, "false where tools may be called")
    answer = _Answer(front, asked, model, prompt, params, beams, tools, request.scope)
    return await respond(front, request, answer, stream=asked.stream)


def _params(front: Front, asked: ChatRequest, tools: Tools) -> SamplingParams:
    max_logprobs = front.llm.config.max_logprobs
    if asked.top_logprobs is not None:
        if not asked.logprobs:
            raise InvalidRequestError(
                f"top_logprobs is {asked.top_logprobs}; it must be absent unless logprobs is true", param="top_logprobs"
            )
        if max_logprobs != -1 and asked.top_logprobs > max_logprobs:
            refuse("top_logprobs", asked.top_logprobs, f"an integer in [0, {max_logprobs}] (--max-logprobs)")
    return sampling_params(
        front,
        asked,
        max_tokens=asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        **tools.sampling,
    )


class _Answer:
    def __init__(
        self,
        front: Front,
        asked: ChatRequest,
        model: str,
        prompt: list[int],
        params: SamplingParams,
        beams: BeamSearchParams | None,
        tools: Tools,
        scope: Scope,
    ) -> None:
        self._asked = asked
        self._role = front.config.response_role
        self._names = TokenNames(front.llm.tokenizer, as_token_ids=asked.return_tokens_as_token_ids)
        self._call = Call(
            front=front,
            asked=asked,
            scope=scope,
            model=model,
            prompts=[prompt],
            params=params,
            beams=beams,
            tools=tools,
            user=asked.user,
        )
        self._choices = [_Choice(asked, self._names, tools, index) for index in range(params.n)]

    async def whole(self) -> dict[str, Any]:
        call = self._call
        pieces: dict[int, dict[str, Any]] = {}  # by the choice's index
        with call.open("chatcmpl-"):
            async with aclosing(call.outputs()) as outputs:
                async for _, output in outputs:
                    for sample in output.outputs:
                        piece = self._choices[sample.index].piece("message", sample, self._role)
                        if piece is not None:
                            pieces[sample.index] = piece
            return self._envelope(
                "chat.completion",
                [pieces[index] for index in sorted(pieces)],
                seed=output.seed,
                usage=call.usage.record(),
                **call.timings_extra(),
                **self._prompt_extras(output),
            )

    async def events(self) -> AsyncGenerator[bytes, None]:
        call, options = self._call, self._asked.stream_options or StreamOptions()
        with call.open("chatcmpl-"):
            opened = False
            async with aclosing(call.outputs()) as outputs:
                async for _, output in outputs:
                    extras = {"usage": call.usage.record()} if options.continuous else {}
                    if not opened:
                        opened = True
                        for choice in self._choices:
                            more = {**extras, **self._prompt_extras(output)} if choice.index == 0 else extras
                            yield event(self._chunk([choice.opening(self._role)], seed=output.seed, **more))
                    if output.prompt_progress is not None:
                        yield event(self._chunk([], **call.progress_extra(0, output.prompt_progress)))
                    for sample in output.outputs:
                        piece = self._choices[sample.index].piece("delta", sample)
                        if piece is not None:
                            yield event(self._chunk([piece], **extras))
            if extras := call.closing_extras(self._asked):
                yield event(self._chunk([], **extras))
            yield DONE

    def _prompt_extras(self, output: RequestOutput) -> dict[str, Any]:
        """vLLM's, about the prompt: they stand beside the choices."""
        extras: dict[str, Any] = {}
        if self._asked.return_token_ids:
            extras["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None and not self._asked.stream:
            extras["prompt_logprobs"] = prompt_logprobs(self._names, output.prompt_logprobs)
        return extras

    def _chunk(self, choices: list[dict[str, Any]], **extras: Any) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk", choices, **extras)

    def _envelope(self, kind: str, choices: list[dict[str, Any]], **extras: Any) -> dict[str, Any]:
        return {
            "id": self._call.call_id,
            "object": kind,
            "created": self._call.created,
            "model": self._call.model,
            "choices": choices,
            **extras,
        }


class _Choice:
    """One sample's share of the answer, in one piece or in many. Tokens without news wait for the next with some."""

    def __init__(self, asked: ChatRequest, names: TokenNames, tools: Tools, index: int) -> None:
        self.index = index
        self._asked = asked
        self._names = names
        self._reader = AnswerReader(tools, "call_")
        self._finished = False
        self._held_ids: list[int] = []
        self._held_positions: list[Position] = []

    def opening(self, role: str) -> dict[str, Any]:
        delta = {"role": role, "content": ""}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, part: str, sample: CompletionOutput, role: str | None = None) -> dict[str, Any] | None:
        """The choice's record for these news, with what is said under `part`: a whole message where there is a `role`,
        else more of one. None where there is nothing to show yet."""
        finished = sample.finish_reason is not None
        self._held_ids += sample.token_ids
        if self._asked.logprobs:
            self._held_positions += zip(sample.token_ids, sample.logprobs or (), strict=True)
        news = [] if self._finished else self._reader.take(sample)
        if self._finished or not (news or finished):
            return None
        self._finished = finished
        piece: dict[str, Any] = {
            "index": self.index,
            part: _delta(news) if role is None else _message(role, self._reader),
            "logprobs": self._logprobs_record(),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if self._asked.return_token_ids:
            piece["token_ids"] = self._held_ids
        self._held_ids, self._held_positions = [], []
        return piece

    def _logprobs_record(self) -> dict[str, Any] | None:
        if not self._asked.logprobs:
            return None
        return chat_logprobs(self._names, self._held_positions, self._asked.top_logprobs or 0)


def _message(role: str, reader: AnswerReader) -> answers.ChatMessage:
    message: answers.ChatMessage = {"role": role, "content": reader.text}
    if calls := reader.calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = [_call(call, call.text) for call in calls]
    return message


def _delta(news: Sequence[PartNews]) -> answers.ChatDelta:
    delta: answers.ChatDelta = {}
    text = "".join(each.text for each in news if each.part.name is None)
    calls = [_call_delta(each) for each in news if each.part.name is not None]
    if text or not calls:
        delta["content"] = text
    if calls:
        delta["tool_calls"] = calls
    return delta


def _call_delta(news: PartNews) -> ChatCallDelta:
    if not news.is_new:
        return {"index": news.part.index, "function": {"arguments": news.text}}
    call = _call(news.part, news.text)
    return {"index": news.part.index, "id": call["id"], "type": call["type"], "function": {**call["function"]}}


def _call(call: Part, arguments: str) -> ChatCall:
    return {"id": call.id, "type": "function", "function": {"name": call.name or "", "arguments": arguments}}

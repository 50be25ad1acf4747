"""POST /v1/completions: prompts as text or token ids, one or many; echo; scoring; streamed or not.

Owns the shape of a completion and of its chunks: a whole answer is one piece for each choice, a stream is many.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from octavo.errors import refuse
from octavo.request import BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams
from octavo.server.beams import beam_search_params
from octavo.server.exchange import read, respond
from octavo.server.generation import Call, check_stream, sampling_params
from octavo.server.logprobs import CompletionLogprobs, Position, TokenNames, prompt_logprobs
from octavo.server.prompts import GivenPrompt, read_prompts
from octavo.server.protocol import CompletionRequest, StreamOptions
from octavo.server.sse import DONE, event

if TYPE_CHECKING:
    from octavo.server.front import Front

MAX_CHOICES = 2048  # of all prompts together; each is a request to the engine


async def create(front: Front, request: Request) -> Response:
    """Completes prompts, or scores them."""
    asked = await read(front, request, CompletionRequest)
    model = front.check_model(asked.model)
    check_stream(asked)
    params = _params(front, asked)
    prompts = await read_prompts(front, "prompt", asked.prompt, add_special_tokens=asked.add_special_tokens)
    if len(prompts) * params.n > MAX_CHOICES:
        refuse("n", params.n, f"at most {MAX_CHOICES // len(prompts)} for {len(prompts)} prompts")
    room = front.llm.info.max_model_len - max(len(prompt.token_ids) for prompt in prompts)
    beams = beam_search_params(asked, params, room)
    answer = _Answer(front, asked, model, prompts, params, beams, request.scope)
    return await respond(front, request, answer, stream=asked.stream)


def _params(front: Front, asked: CompletionRequest) -> SamplingParams:
    params = sampling_params(front, asked)
    if asked.best_of is not None and asked.best_of != params.n:
        refuse("best_of", asked.best_of, f"equal to n, {params.n} (octavo returns every sample it makes)")
    if asked.echo and params.logprobs is not None:
        params.prompt_logprobs = _at_least(params.prompt_logprobs, params.logprobs)
    return params


def _at_least(given: int | None, wanted: int) -> int:
    """-1 asks for all, which no number exceeds."""
    return -1 if -1 in (given, wanted) else max(given or 0, wanted)


class _Answer:
    """A call and its choices, which are numbered prompt by prompt: prompt * n + sample."""

    def __init__(
        self,
        front: Front,
        asked: CompletionRequest,
        model: str,
        prompts: list[GivenPrompt],
        params: SamplingParams,
        beams: BeamSearchParams | None,
        scope: Scope,
    ) -> None:
        self._asked = asked
        self._call = Call(
            front=front,
            asked=asked,
            scope=scope,
            model=model,
            prompts=[prompt.token_ids for prompt in prompts],
            params=params,
            beams=beams,
            user=asked.user,
        )
        self._choices = [
            _Choice(front, asked, params, prompt, index * params.n + sample)
            for index, prompt in enumerate(prompts)
            for sample in range(params.n)
        ]

    async def whole(self) -> dict[str, Any]:
        call = self._call
        pieces: dict[int, dict[str, Any]] = {}  # by the choice's index
        seeds: dict[int, int | None] = {}  # by the prompt's
        with call.open("cmpl-"):
            async with aclosing(call.outputs()) as outputs:
                async for prompt_index, output in outputs:
                    seeds[prompt_index] = output.seed
                    for choice, piece in self._pieces(prompt_index, output):
                        pieces[choice.index] = piece
            if len(seeds) > 1:
                for index, piece in pieces.items():
                    piece["seed"] = seeds[index // call.params.n]
            return self._envelope(
                [pieces[index] for index in sorted(pieces)],
                seed=seeds[0],
                usage=call.usage.record(),
                **call.timings_extra(),
            )

    async def events(self) -> AsyncGenerator[bytes, None]:
        call, options = self._call, self._asked.stream_options or StreamOptions()
        with call.open("cmpl-"):
            async with aclosing(call.outputs()) as outputs:
                async for prompt_index, output in outputs:
                    if output.prompt_progress is not None:
                        yield event(self._envelope([], **call.progress_extra(prompt_index, output.prompt_progress)))
                    for choice, piece in self._pieces(prompt_index, output):
                        extras: dict[str, Any] = {"seed": output.seed} if choice.num_pieces == 1 else {}
                        if options.continuous:
                            extras["usage"] = call.usage.record()
                        yield event(self._envelope([piece], **extras))
            if extras := call.closing_extras(self._asked):
                yield event(self._envelope([], **extras))
            yield DONE

    def _pieces(self, prompt_index: int, output: RequestOutput) -> list[tuple[_Choice, dict[str, Any]]]:
        found = []
        for sample in output.outputs:
            choice = self._choices[prompt_index * self._call.params.n + sample.index]
            piece = choice.piece(output, sample)
            if piece is not None:
                found.append((choice, piece))
        return found

    def _envelope(self, choices: list[dict[str, Any]], **extras: Any) -> dict[str, Any]:
        return {
            "id": self._call.call_id,
            "object": "text_completion",
            "created": self._call.created,
            "model": self._call.model,
            "choices": choices,
            **extras,
        }


class _Choice:
    """One sample's share of the answer, in one piece or in many. Tokens without text wait for the next with some."""

    def __init__(
        self, front: Front, asked: CompletionRequest, params: SamplingParams, prompt: GivenPrompt, index: int
    ) -> None:
        self.index = index
        self.num_pieces = 0
        self._asked = asked
        self._params = params
        self._prompt = prompt
        self._names = TokenNames(front.llm.tokenizer, as_token_ids=asked.return_tokens_as_token_ids)
        self._logprobs: CompletionLogprobs | None = None
        if params.logprobs is not None:
            self._logprobs = CompletionLogprobs(
                self._names,
                params.logprobs,
                skip_special_tokens=params.skip_special_tokens,
                from_prompt=asked.echo,
            )
        self._finished = False
        self._held_ids: list[int] = []
        self._held_positions: list[Position] = []

    def piece(self, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any] | None:
        """The choice's record for these news; None where there is nothing to show yet."""
        first, finished = self.num_pieces == 0, sample.finish_reason is not None
        self._held_ids += sample.token_ids
        if self._logprobs is not None:
            self._held_positions += zip(sample.token_ids, sample.logprobs or (), strict=True)
        echoes = first and self._asked.echo
        if self._finished or not (sample.text or finished or echoes):
            return None
        self.num_pieces += 1
        self._finished = finished
        piece: dict[str, Any] = {
            "index": self.index,
            "text": self._echo(output) + sample.text if echoes else sample.text,
            "logprobs": self._logprobs_record(output, echoes),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if "prompt_logprobs" in self._asked.sampling:
            piece["prompt_logprobs"] = prompt_logprobs(self._names, output.prompt_logprobs or [])
        if self._asked.return_token_ids:
            piece["token_ids"] = self._held_ids
            if first:
                piece["prompt_token_ids"] = output.prompt_token_ids
        self._held_ids, self._held_positions = [], []
        return piece

    def _echo(self, output: RequestOutput) -> str:
        """The prompt as it was given, or the text of what is left of it."""
        if self._prompt.text is not None and len(output.prompt_token_ids) == len(self._prompt.token_ids):
            return self._prompt.text
        skip_special_tokens = self._params.skip_special_tokens
        return self._names.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def _logprobs_record(self, output: RequestOutput, echoes: bool) -> dict[str, list[Any]] | None:
        if self._logprobs is None:
            return None
        positions = self._held_positions
        if echoes:
            prompt = list(zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True))
            positions = prompt + positions
        return self._logprobs.record(positions)

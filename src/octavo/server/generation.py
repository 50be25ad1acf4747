"""What completions and chat share: from a parsed body to SamplingParams, and from a call to its outputs and usage.

Owns the defaults under a request's own fields, the merge of several prompts into one stream of outputs, and the usage
record. Knows neither the shape of a choice nor HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidRequestError
from octavo.request import BeamSearchParams, RequestOutput, SamplingParams
from octavo.server.protocol import GenerationFields

if TYPE_CHECKING:
    from octavo.server.front import Front

LONG_TEXT = 16 * 1024  # characters: from here on, tokenising takes milliseconds and leaves the event loop


async def encode(front: Front, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    """The token ids of each text."""

    def encode_all() -> list[list[int]]:
        return [front.llm.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    if sum(map(len, texts)) < LONG_TEXT:
        return encode_all()
    return await asyncio.to_thread(encode_all)


def sampling_params(front: Front, asked: GenerationFields, **decided: Any) -> SamplingParams:
    """The server's defaults, under the request's own fields, under what its route decided."""
    kind = "delta" if asked.stream else "final_only"
    return SamplingParams(**{**front.llm.default_sampling_params, **asked.sampling, **decided, "output_kind": kind})


def check_stream(asked: GenerationFields) -> None:
    """The rules between a stream and other fields."""
    if asked.stream_options is not None and not asked.stream:
        raise InvalidRequestError(
            "stream_options is set; it must be absent unless stream is true", param="stream_options"
        )
    if asked.stream and asked.sampling.get("prompt_logprobs") is not None:
        raise InvalidRequestError(
            "prompt_logprobs is set; it must be absent when stream is true", param="prompt_logprobs"
        )


@dataclass(slots=True, kw_only=True)
class Call:
    """One body on its way through the engine: a request for each prompt, all with the same params."""

    front: Front
    asked: GenerationFields
    model: str
    call_id: str
    created: int  # seconds since the epoch
    prompts: list[list[int]]
    params: SamplingParams
    beams: BeamSearchParams | None  # a search instead of samples
    user: str | None  # whom a fair share counts it to
    usage: Usage = field(default_factory=lambda: Usage())

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, output), as they come. Closing the generator aborts all that still runs."""
        if len(self.prompts) == 1:
            async with aclosing(self._request(0)) as outputs:
                async for output in outputs:
                    self.usage.count(0, output)
                    yield 0, output
            return
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(index, queue)) for index in range(len(self.prompts))]
        try:
            num_running = len(tasks)
            while num_running:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_running -= 1
                    continue
                self.usage.count(index, item)
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, index: int, queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]]) -> None:
        try:
            async with aclosing(self._request(index)) as outputs:
                async for output in outputs:
                    queue.put_nowait((index, output))
        except Exception as error:
            queue.put_nowait((index, error))
        else:
            queue.put_nowait((index, None))

    def _request(self, index: int) -> AsyncGenerator[RequestOutput, None]:
        llm, prompt, params = self.front.llm, self.prompts[index], self.params
        request_id = self.call_id if len(self.prompts) == 1 else f"{self.call_id}-{index}"
        asked: dict[str, Any] = {
            "priority": self.asked.priority,
            "cache_salt": self.asked.cache_salt,
            "user": self.user,
        }
        if self.beams is None:
            return llm.generate(prompt, params, request_id, **asked)
        return llm.beam_search(
            prompt, self.beams, request_id, num_beams=params.n, output_kind=params.output_kind, **asked
        )


class Usage:
    """Token counts of a call so far; those of a prompt are counted once, whatever n is."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[int, int] = {}  # by prompt
        self._cached_tokens: dict[int, int] = {}
        self._completion_tokens = 0

    def count(self, prompt_index: int, output: RequestOutput) -> None:
        self._prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        if output.num_cached_tokens is not None:
            self._cached_tokens[prompt_index] = output.num_cached_tokens
        self._completion_tokens += sum(len(sample.token_ids) for sample in output.outputs)

    def record(self) -> dict[str, Any]:
        prompt_tokens = sum(self._prompt_tokens.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
        }

"""What all routes that generate share: from a parsed body to SamplingParams, and from a call to its outputs and counts.

Owns the defaults under a request's own fields, the merge of several prompts into one stream of outputs, and the usage
record. Knows neither the shape of an answer nor HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Scope

from octavo.errors import InvalidRequestError
from octavo.request import BeamSearchParams, PromptProgress, RequestOutput, SamplingParams
from octavo.server import answers
from octavo.server.front import Front, LiveCall, engine_request_ids
from octavo.server.protocol import CallFields, GenerationFields
from octavo.server.request_log import logged
from octavo.server.timings import Timings

T = TypeVar("T")

LONG_TEXT = 16 * 1024  # characters: from here on, tokenising takes milliseconds and leaves the event loop


async def encode(front: Front, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    """The token ids of each text."""

    def encode_all() -> list[list[int]]:
        return [front.llm.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    return await beside(encode_all, is_long=sum(map(len, texts)) >= LONG_TEXT)


async def beside(work: Callable[[], T], *, is_long: bool) -> T:
    """What it returns. Long work leaves the event loop, which has others to serve."""
    return await asyncio.to_thread(work) if is_long else work()


def sampling_params(front: Front, asked: CallFields, **decided: Any) -> SamplingParams:
    """The server's defaults, under the request's own fields, under what its route decided."""
    kind = "delta" if asked.stream else "final_only"
    return SamplingParams(**{**front.llm.default_sampling_params, **asked.sampling, **decided, "output_kind": kind})


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """Complaints about the fields of SamplingParams `names` are about the fields that a route has for them."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param in names:
            error.message = error.message.replace(error.param, names[error.param], 1)
            error.param = names[error.param]
        raise


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
    asked: CallFields
    scope: Scope
    model: str
    prompts: list[list[int]]
    params: SamplingParams
    beams: BeamSearchParams | None = None  # a search instead of samples
    user: str | None = None  # whom a fair share counts it to; None: to the key's holder
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch
    call_id: str = ""  # while it is open
    usage: Usage = field(default_factory=lambda: Usage())
    timings: Timings = field(default_factory=Timings)

    @contextmanager
    def open(self, prefix: str) -> Iterator[None]:
        """While it is open it has an id, under which others can abort it."""
        live = LiveCall(
            wanted=self.asked.request_id or self.scope.get("octavo.request_id"),
            num_prompts=len(self.prompts),
            key_name=self.scope.get("octavo.key_name"),
        )
        with (
            self.front.call_id(prefix, live) as self.call_id,
            logged(self.front, self.scope, self.call_id, self.prompts, self.params, self.usage),
        ):
            yield

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, output), as they come. Closing the generator aborts all that still runs."""
        if len(self.prompts) == 1:
            async with aclosing(self._request(0)) as outputs:
                async for output in outputs:
                    self._count(0, output)
                    yield 0, output
            return
        # Short: while nobody takes from it, the news of several steps become one output.
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(len(self.prompts))
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
                self._count(index, item)
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def closing_extras(self, asked: GenerationFields) -> dict[str, Any]:
        """What a stream's last chunk, which has no choices, is to tell; none is sent where that is nothing."""
        extras: dict[str, Any] = {}
        if asked.stream_options is not None and asked.stream_options.include_usage:
            extras["usage"] = self.usage.record()
        return extras | self.timings_extra()

    def timings_extra(self) -> dict[str, Any]:
        """`timings`, for those who asked."""
        num_samples = len(self.prompts) * self.params.n
        return {"timings": self.timings.record(self.usage, num_samples)} if self.asked.timings else {}

    def progress_extra(self, prompt_index: int, progress: PromptProgress) -> dict[str, Any]:
        """`prompt_progress`, in llama.cpp's words; which prompt it is, where there are several."""
        record: answers.PromptProgress = {
            "total": progress.num_prompt_tokens,
            "cache": progress.num_cached_tokens,
            "processed": progress.num_computed_tokens,
            "time_ms": round(1000 * progress.seconds, 3),
        }
        if len(self.prompts) > 1:
            record["prompt_index"] = prompt_index
        return {"prompt_progress": record}

    def _count(self, index: int, output: RequestOutput) -> None:
        self.usage.count(index, output)
        self.timings.count(output)

    async def _pump(self, index: int, queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]]) -> None:
        try:
            async with aclosing(self._request(index)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
        except Exception as error:
            await queue.put((index, error))
        else:
            await queue.put((index, None))

    def _request(self, index: int) -> AsyncGenerator[RequestOutput, None]:
        request_id = engine_request_ids(self.call_id, len(self.prompts))[index]
        outputs = self._outputs_of(self.prompts[index], request_id)
        tracer = self.front.tracer
        return outputs if tracer is None else tracer.follow(outputs, self.scope, request_id, self.params)

    def _outputs_of(self, prompt: list[int], request_id: str) -> AsyncGenerator[RequestOutput, None]:
        llm, params = self.front.llm, self.params
        asked: dict[str, Any] = {
            "priority": self.asked.priority,
            "cache_salt": self.asked.cache_salt,
            "user": self.user or self.scope.get("octavo.key_name"),
        }
        if self.beams is None:
            report_progress = self.asked.stream and self.asked.return_progress
            return llm.generate(prompt, params, request_id, report_progress=report_progress, **asked)
        return llm.beam_search(
            prompt, self.beams, request_id, num_beams=params.n, output_kind=params.output_kind, **asked
        )


class Usage:
    """Token counts of a call so far; those of a prompt are counted once, whatever n is."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[int, int] = {}  # by prompt
        self._cached_tokens: dict[int, int] = {}
        self.completion_tokens = 0

    def count(self, prompt_index: int, output: RequestOutput) -> None:
        self._prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        if output.num_cached_tokens is not None:
            self._cached_tokens[prompt_index] = output.num_cached_tokens
        for sample in output.outputs:
            self.completion_tokens += len(sample.token_ids)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompt_tokens.values())

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached_tokens.values())

    def record(self) -> answers.Usage:
        """OpenAI's, of completions and chat."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

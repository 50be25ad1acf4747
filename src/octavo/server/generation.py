"""What all routes that generate share: from a parsed body to SamplingParams, and a call with them.

Owns the defaults under a request's own fields, what a call asks of the engine, and what it tells beside its answer
(timings, progress). Knows neither the shape of an answer nor HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from octavo.errors import InvalidRequestError
from octavo.request import BeamSearchParams, PromptProgress, RequestOutput, SamplingParams
from octavo.server import answers
from octavo.server.engine_call import EngineCall
from octavo.server.front import Front
from octavo.server.protocol import CallFields, GenerationFields
from octavo.server.timings import Timings
from octavo.server.tools import NO_TOOLS, Tools

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
class Call(EngineCall[SamplingParams]):
    """One that generates: samples, or the best of a beam search."""

    asked: CallFields
    tools: Tools = NO_TOOLS
    beams: BeamSearchParams | None = None  # a search instead of samples
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch
    timings: Timings = field(default_factory=Timings)

    @property
    def num_samples(self) -> int:
        return self.params.n

    def closing_extras(self, asked: GenerationFields) -> dict[str, Any]:
        """What a stream's last chunk, which has no choices, is to tell; none is sent where that is nothing."""
        extras: dict[str, Any] = {}
        if asked.stream_options is not None and asked.stream_options.include_usage:
            extras["usage"] = self.usage.record()
        return extras | self.timings_extra()

    def timings_extra(self) -> dict[str, Any]:
        """`timings`, for those who asked."""
        num_samples = len(self.prompts) * self.num_samples
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

    def _count(self, prompt_index: int, output: RequestOutput) -> None:
        self.usage.count(prompt_index, output)
        self.timings.count(output)

    def _outputs_of(self, prompt_index: int, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        llm, params, prompt = self.front.llm, self.params, self.prompts[prompt_index]
        if self.beams is None:
            report_progress = self.asked.stream and self.asked.return_progress
            return llm.generate(
                prompt,
                params,
                request_id,
                report_progress=report_progress,
                calls_tools=None if self.tools.calling is None else self.tools.calls_tools,
                **self._engine_fields,
            )
        return llm.beam_search(
            prompt,
            self.beams,
            request_id,
            num_beams=params.n,
            output_kind=params.output_kind,
            **self._engine_fields,
        )

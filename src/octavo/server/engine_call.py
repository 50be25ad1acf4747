"""A call on its way through the engine: a request for each of its prompts, and their outputs as one stream.

Owns the call's id, its lines in the log, its spans, and its token counts. What its requests ask of the engine, its
subclasses decide (generation.py, embeddings.py). Knows neither the shape of an answer nor HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from starlette.types import Scope

from octavo.pooling import PoolingParams
from octavo.request import RequestOutput, SamplingParams
from octavo.server import answers
from octavo.server.front import Front, LiveCall, engine_request_ids
from octavo.server.protocol import EngineFields
from octavo.server.request_log import logged

P = TypeVar("P", SamplingParams, PoolingParams)


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


@dataclass(slots=True, kw_only=True)
class EngineCall(Generic[P]):
    """All its requests have the same params."""

    front: Front
    asked: EngineFields
    scope: Scope
    model: str
    prompts: list[list[int]]
    params: P
    user: str | None = None  # whom a fair share counts it to; None: to the key's holder
    call_id: str = ""  # while it is open
    coming: set[int] = field(default_factory=set)  # prompts that were admitted, and are not on their way yet
    usage: Usage = field(default_factory=Usage)

    @contextmanager
    def open(self, prefix: str) -> Iterator[None]:
        """While it is open it has an id, under which others can abort it. Raises what `Front.admit` does."""
        self.front.admit(self.asked.priority, sum(map(len, self.prompts)))
        live = LiveCall(
            wanted=self.asked.request_id or self.scope.get("octavo.request_id"),
            num_prompts=len(self.prompts),
            key_name=self.scope.get("octavo.key_name"),
        )
        self._expect(range(len(self.prompts)))
        try:
            with self.front.call_id(prefix, live) as self.call_id, logged(self):
                yield
        finally:
            self._expect_no_more(tuple(self.coming))

    def _expect(self, prompts: Iterable[int]) -> None:
        """Whoever asks to be admitted beside this call has to know of them already."""
        for prompt in prompts:
            self.coming.add(prompt)
            self.front.coming.add(self.num_samples, len(self.prompts[prompt]))

    def _expect_no_more(self, prompts: Iterable[int]) -> None:
        for prompt in prompts:
            self.coming.remove(prompt)
            self.front.coming.add(-self.num_samples, -len(self.prompts[prompt]))

    @property
    def num_samples(self) -> int:
        """Of each prompt."""
        return 1

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

    def _count(self, prompt_index: int, output: RequestOutput) -> None:
        self.usage.count(prompt_index, output)

    async def _pump(self, index: int, queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]]) -> None:
        try:
            async with aclosing(self._request(index)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
        except Exception as error:
            await queue.put((index, error))
        else:
            await queue.put((index, None))

    def _request(self, prompt_index: int) -> AsyncGenerator[RequestOutput, None]:
        self._expect_no_more((prompt_index,))  # from here to its registration, nobody else has a turn
        request_id = engine_request_ids(self.call_id, len(self.prompts))[prompt_index]
        outputs = self._outputs_of(prompt_index, request_id)
        tracer = self.front.tracer
        return outputs if tracer is None else tracer.follow(outputs, self.scope, request_id, self.params)

    def _outputs_of(self, prompt_index: int, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        """What the engine makes of that prompt; closing the generator aborts it."""
        raise NotImplementedError

    @property
    def _engine_fields(self) -> dict[str, Any]:
        """What every request of it says to the engine besides params."""
        return {
            "priority": self.asked.priority,
            "cache_salt": self.asked.cache_salt,
            "user": self.user or self.scope.get("octavo.key_name"),
        }

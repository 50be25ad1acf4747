"""Answers from a model of one's own, without a server: AsyncLLM driven from plain, blocking code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any

from octavo.async_llm import AsyncLLM
from octavo.cli.terminal import Piece
from octavo.config import EngineConfig
from octavo.request import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.input_processor import Prompt
    from octavo.request import RequestOutput


class LocalSource:
    """A Source (see sources.py). Loads the model at once; raises ConfigError and CheckpointError."""

    def __init__(self, model: str) -> None:
        self._runner = asyncio.Runner()
        try:
            self._llm: AsyncLLM = self._runner.run(AsyncLLM.start(EngineConfig(model=model)))
        except BaseException:
            self._runner.close()
            raise
        self.where = f"{model}, {self._llm.info.dtype}"

    def chat(self, messages: list[dict[str, str]], sampling: dict[str, Any]) -> Iterator[Piece]:
        from octavo.text.chat_template import encode_chat, require_chat_template

        text = require_chat_template(self._llm.chat_template).render(messages, add_generation_prompt=True)
        prompt = encode_chat(self._llm.tokenizer, text)
        return self._pieces(prompt, {"max_tokens": None, **sampling})  # as the chat route: up to the context's end

    def complete(self, prompt: str, sampling: dict[str, Any]) -> Iterator[Piece]:
        return self._pieces(prompt, sampling)

    def close(self) -> None:
        self._runner.run(self._llm.close())
        self._runner.close()

    def _pieces(self, prompt: Prompt, sampling: dict[str, Any]) -> Iterator[Piece]:
        params = SamplingParams(**{**self._llm.default_sampling_params, **sampling, "output_kind": "delta"})
        outputs = self._llm.generate(prompt, params)
        num_tokens = 0
        try:
            while (output := self._runner.run(_next(outputs))) is not None:
                sample = output.outputs[0]
                num_tokens += len(sample.token_ids)
                yield Piece(sample.text, num_tokens, sample.finish_reason)
        finally:
            # Also after Ctrl-C, which asyncio.Runner turns into a cancellation: this is what aborts the request.
            self._runner.run(outputs.aclose())


async def _next(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(outputs, None)

"""LLM: offline inference in the caller's own process and thread.

Owns the loop that steps the engine until a batch is done. No process, no thread, no signal handler is made, so it needs
no `__main__` guard and works in a notebook. One thread at a time may use it.
"""

from __future__ import annotations

import dataclasses
import difflib
import gc
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from octavo.config import EngineConfig
from octavo.engine.front_end import load_front_end
from octavo.engine.input_processor import InputProcessor, ProcessedRequest, Prompt, repeatable_seeds
from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.engine.pooling import as_embedding_output
from octavo.errors import ConfigError, InvalidRequestError, OctavoError, RequestFailedError
from octavo.pooling import EmbeddingRequestOutput, PoolingParams
from octavo.request import (
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
    RequestOutput,
    SamplingParams,
)

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DRAW_SECONDS = 0.1  # between two pictures of the progress bar

Conversation: TypeAlias = Sequence[Mapping[str, Any]]


class LLM:
    """A model, ready to generate.

    `options` are any further fields of EngineConfig. Requests without a seed get one that depends on `seed` and on
    their number alone, so a script gives the same answers each time it runs. Raises ConfigError and CheckpointError.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        dtype: str = "auto",
        max_model_len: int | Literal["auto"] | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float | None = None,
        quantization: str | None = None,
        seed: int = 0,
        enforce_eager: bool = False,
        **options: Any,
    ) -> None:
        from octavo.engine.build import build_engine

        _check_options(options)
        self.config = EngineConfig(
            model=str(model),
            tokenizer=tokenizer,
            dtype=dtype,
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            quantization=quantization,
            seed=seed,
            enforce_eager=enforce_eager,
            **options,
        )
        self._front_end = load_front_end(self.config)
        self._engine: Engine | None = build_engine(self.config)
        self.info = self._engine.info
        self._request_numbers = itertools.count()
        self._outputs = OutputProcessor(self._front_end.tokenizer)
        self._inputs = InputProcessor(
            self._front_end.tokenizer,
            self.info,
            eos_token_ids=self._front_end.eos_token_ids,
            max_logprobs=self.config.max_logprobs,
            next_seed=partial(next, repeatable_seeds(seed)),
            pooling_defaults=self._front_end.pooling_defaults,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many: strings, lists of token ids, or dicts with one of these under "prompt" or
        "prompt_token_ids". One SamplingParams serves all; a list has one for each; none means the model's defaults.

        The outputs stand in the order of the prompts. A request that fails inside the engine has the finish reason
        "error" and says why in `error`; a wrong one raises InvalidRequestError before any has run. A progress bar is
        shown on a terminal unless `use_tqdm` is false. Ctrl-C ends the batch and leaves the LLM usable.
        """
        batch = _as_batch(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_for_each("sampling_params", sampling_params, len(batch))
        priorities = _one_for_each("priority", 0 if priority is None else priority, len(batch))
        processed = [
            self._inputs.process(str(next(self._request_numbers)), prompt, each, priority=rank)
            for prompt, each, rank in zip(batch, params, priorities, strict=True)
        ]
        return self._run(processed, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
    ) -> list[BeamSearchOutput]:
        """The `params.beam_width` likeliest continuations of each prompt that a beam search finds, best first.

        Prompts are searched side by side. Raises what `generate` does, and RequestFailedError where a search failed.
        """
        processed = [
            self._inputs.process_beams(str(next(self._request_numbers)), prompt, params)
            for prompt in _as_batch(prompts)
        ]
        outputs = self._run(processed, use_tqdm)
        tokenizer, skip = self._front_end.tokenizer, params.skip_special_tokens
        return [as_beam_search_output(output, tokenizer, skip_special_tokens=skip) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt, in their order: `.outputs.embedding`, a list of floats, or `.outputs.data`, a
        NumPy array. Prompts and params as in `generate`. Raises InvalidRequestError before any has run, and
        RequestFailedError where one failed."""
        batch = _as_batch(prompts)
        processed = [
            self._inputs.process_pooling(str(next(self._request_numbers)), prompt, params)
            for prompt, params in zip(batch, _one_for_each("pooling_params", pooling_params, len(batch)), strict=True)
        ]
        outputs = self._run(processed, use_tqdm)
        for output in outputs:
            if output.error is not None:
                raise RequestFailedError(output.error)
        return [as_embedding_output(output) for output in outputs]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        pooling_task: Literal["embed"] = "embed",
    ) -> list[EmbeddingRequestOutput]:
        """vLLM's other name for `embed`, which is the one task that there is."""
        if pooling_task != "embed":
            raise InvalidRequestError(f"pooling_task is {pooling_task!r}; it must be 'embed'", param="pooling_task")
        return self.embed(prompts, use_tqdm=use_tqdm, pooling_params=pooling_params)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The next turn of one conversation or of many, each a list of messages ({"role": …, "content": …}).

        Without `sampling_params` an answer may take the rest of the context. Raises ChatTemplateError, and else what
        `generate` does.
        """
        from octavo.text.chat_template import (
            encode_chat,
            load_chat_template,
            require_chat_template,
            template_variables,
        )

        tokenizer, template = self._front_end.tokenizer, self._front_end.chat_template
        if chat_template is not None:
            template = load_chat_template(chat_template, tokenizer)
        template = require_chat_template(template)
        texts = [
            template.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **template_variables(chat_template_kwargs),
            )
            for conversation in _as_conversations(messages)
        ]
        prompts = [{"prompt": text, "prompt_token_ids": encode_chat(tokenizer, text)} for text in texts]
        if sampling_params is None:
            sampling_params = dataclasses.replace(self.get_default_sampling_params(), max_tokens=None)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        return self._front_end.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """A new SamplingParams with the model's own defaults (`generation_config`)."""
        return SamplingParams(**self._front_end.sampling_defaults.values)

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached: no later request shares what was computed before. Always true."""
        self._live_engine().reset_prefix_cache()
        return True

    def close(self) -> None:
        """Free the weights and the KV cache now. May be called twice; generating afterwards raises OctavoError."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        del engine
        gc.collect()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise OctavoError("this LLM is closed")
        return self._engine

    def _run(self, processed: list[ProcessedRequest], show_progress: bool) -> list[RequestOutput]:
        engine = self._live_engine()
        try:
            requests = [self._outputs.add(each) for each in processed]
            for each in processed:
                for sample in each.for_engine:
                    engine.add_request(sample)
            with _Progress(len(requests), enabled=show_progress) as progress:
                while self._outputs.num_unfinished:
                    news = self._outputs.process(engine.step())
                    engine.abort(news.to_abort)
                    num_finished = len({id(s.request) for s in news.finished if s.request.finished})
                    progress.advance(num_finished, news.num_output_tokens)
        except BaseException:  # Ctrl-C too. What lives now is this call's alone
            engine.abort(self._outputs.drop_all())
            raise
        return [_final_output(request) for request in requests]


def _final_output(request: RequestState) -> RequestOutput:
    if request.error is not None:
        logger.error(
            "request %s failed: %s", request.request_id, request.error, extra={"request_id": request.request_id}
        )
    output = request.take_output()
    assert output is not None  # it is finished, and nobody has asked before
    return output


def as_beam_search_output(
    output: RequestOutput, tokenizer: Tokenizer, *, skip_special_tokens: bool
) -> BeamSearchOutput:
    if output.error is not None:
        raise RequestFailedError(output.error)
    sequences = []
    for beam in output.outputs:
        assert beam.score is not None and beam.cumulative_logprob is not None
        tokens = [*output.prompt_token_ids, *beam.token_ids]
        text = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        sequences.append(BeamSearchSequence(text, tokens, beam.cumulative_logprob, beam.score, beam.finish_reason))
    return BeamSearchOutput(sequences)


def _check_options(options: Mapping[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    for name in options:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1, cutoff=0)
            raise ConfigError(f"LLM has no option {name!r}; the nearest is {nearest[0]!r}", param=name)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(
            f"prompts is a {type(prompts).__name__}; it must be a prompt or a list of prompts", param="prompts"
        )
    if prompts and isinstance(prompts[0], Integral):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    if not messages or isinstance(messages[0], Mapping):
        return [cast("Conversation", messages)]
    return list(cast("Sequence[Conversation]", messages))


def _one_for_each(name: str, value: Any, num_prompts: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InvalidRequestError(f"{name} has {len(value)} entries for {num_prompts} prompts", param=name)
    return list(value)


class _Progress:
    """A bar on stderr: finished requests, tokens per second. Nothing is drawn where nobody could watch it move."""

    def __init__(self, num_requests: int, *, enabled: bool) -> None:
        self._bar: Any = None
        if not enabled:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if not console.is_terminal:
            return
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[rate]}"))
        # Drawn from our own loop: rich would start a thread.
        self._bar = Progress(TextColumn("generating"), *columns, console=console, auto_refresh=False)
        self._task = self._bar.add_task("", total=num_requests, rate="")
        self._num_tokens = 0
        self._drawn = 0.0  # time.monotonic(), seconds

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._start = time.monotonic()
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._draw(time.monotonic())
            self._bar.stop()

    def advance(self, num_finished: int, num_tokens: int) -> None:
        if self._bar is None:
            return
        self._num_tokens += num_tokens
        if num_finished:
            self._bar.advance(self._task, num_finished)
        now = time.monotonic()
        if now - self._drawn >= DRAW_SECONDS:
            self._draw(now)

    def _draw(self, now: float) -> None:
        self._drawn = now
        rate = self._num_tokens / max(now - self._start, 1e-9)
        self._bar.update(self._task, rate=f"{rate:.1f} tok/s")
        self._bar.refresh()

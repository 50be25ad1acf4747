"""AsyncLLM: many callers, one engine, every answer a stream.

Owns the bond between callers and engine: it hands requests over, reads the engine's replies in one task, and wakes the
callers. It does no HTTP and computes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.engine.front_end import FrontEnd, load_front_end
from octavo.engine.input_processor import CallsTools, InputProcessor, ProcessedRequest, Prompt
from octavo.engine.output_processor import OutputProcessor, RequestState
from octavo.engine.pooling import as_embedding_output
from octavo.engine.slow_readers import is_far_behind
from octavo.engine.step_news import StepNews
from octavo.errors import EngineDeadError, RequestFailedError
from octavo.pooling import EmbeddingRequestOutput, PoolingParams
from octavo.request import BeamSearchParams, OutputKind, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from octavo.engine.client import EngineClient
    from octavo.engine.messages import EngineInfo, Picture, SchedulerStats
    from octavo.engine.metrics import Metrics
    from octavo.text.chat_template import ChatTemplate
    from octavo.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PROBE_ID = "ready"
FRESH_SECONDS = 1.0  # a token as young as this proves that the engine makes tokens


class AsyncLLM:
    """Made by `await AsyncLLM.start(config)`, ended by `await llm.close()`; belongs to one event loop.

    config: EngineConfig       as given                        tokenizer: Tokenizer
    info: EngineInfo           what the engine became          chat_template: ChatTemplate | None
    metrics: Metrics           the figures for /metrics        model_config: dict, as in config.json
    default_sampling_params    the fields of SamplingParams that the model's folder gives other defaults, and …
    default_sampling_origin    … where these come from
    """

    def __init__(self, config: EngineConfig, client: EngineClient, front_end: FrontEnd, metrics: Metrics) -> None:
        """Takes a started client over; callers use `start`."""
        self.config = config
        self.info: EngineInfo = client.info
        self.tokenizer: Tokenizer = front_end.tokenizer
        self.chat_template: ChatTemplate | None = front_end.chat_template
        self.model_config: dict[str, Any] = front_end.model_config
        self.default_sampling_params: dict[str, Any] = dict(front_end.sampling_defaults.values)
        self.default_sampling_origin = front_end.sampling_defaults.origin
        self.metrics: Metrics = metrics
        self._client = client
        self._inputs = InputProcessor(
            front_end.tokenizer,
            client.info,
            eos_token_ids=front_end.eos_token_ids,
            max_logprobs=config.max_logprobs,
            pooling_defaults=front_end.pooling_defaults,
        )
        self._outputs = OutputProcessor(front_end.tokenizer)
        self._streams: dict[str, _Stream] = {}  # by the caller's request id
        self._death: EngineDeadError | None = None
        self._dead = asyncio.Event()
        self._last_token_time = 0.0  # time.monotonic(), seconds
        self._reader = asyncio.create_task(self._read(), name="octavo-engine-replies")

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        client: EngineClient | None = None,
        *,
        model_name: str | None = None,
        log_options: tuple[str, str] | None = None,
    ) -> AsyncLLM:
        """Start the engine (if no `client` is given, in a process of its own, which is started again when it dies or
        hangs) and read the tokenizer meanwhile.

        `model_name` is the metrics' label. `log_options`, of the engine's process: log_format and log_level, as in
        ServerConfig; None: its warnings go to stderr as they are. Raises ConfigError, CheckpointError, EngineDeadError;
        nothing is left then.
        """
        if client is None:
            from octavo.engine.client import ENGINE_COMMAND, ProcessClient
            from octavo.engine.supervisor import SupervisedClient

            make_client = partial(ProcessClient, command=(*ENGINE_COMMAND, *(log_options or ())))
            client = supervised = SupervisedClient(config, make_client=make_client)
            supervised.launch()  # before the first await: the caller's own imports may go on beside it
        tasks = starting, loading = (
            asyncio.create_task(client.start()),
            asyncio.create_task(asyncio.to_thread(load_front_end, config)),
        )
        try:
            await asyncio.sleep(0)  # the tasks begin …
            from octavo.engine.metrics import Metrics  # … and this import goes on beside them

            # The first failure counts: a wrong name is known before the engine has loaded anything.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in (loading, starting):
                if task.done():
                    task.result()
            await starting
            return cls(config, client, await loading, Metrics(model_name or config.model, client.info))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await client.close()
            raise

    @property
    def stats(self) -> SchedulerStats:
        return self._client.stats

    @property
    def picture(self) -> Picture | None:
        """The last one that was asked for and has come."""
        return self._client.picture

    def request_picture(self) -> None:
        """Never waits. It comes with the engine's next step, or at once where there is none."""
        self._client.request_picture()

    @property
    def alive(self) -> bool:
        """Whether requests are taken; also while an engine that died is started again."""
        return self._death is None and self._client.alive

    @property
    def restarting(self) -> bool:
        """Whether requests wait for an engine that is started again."""
        return self._client.restarting

    async def check_health(self) -> None:
        """Raises EngineDeadError where no request will ever run again. Has an idle engine looked after, so that the
        next call knows of one that is stopped or stuck; a request or `is_ready` does that too."""
        if not self.alive:
            raise self._death or EngineDeadError("the engine is dead")
        self._client.look_after()

    async def wait_until_dead(self) -> EngineDeadError:
        """Returns when no request will ever run again: why."""
        await self._dead.wait()
        assert self._death is not None
        return self._death

    @property
    def num_unfinished(self) -> int:
        """Samples (a request with n counts n times) that run, wait, or are on their way to the engine."""
        return self._outputs.num_unfinished

    @property
    def num_unanswered_tokens(self) -> int:
        """Prompt tokens of the requests of which nothing has come yet: they wait, or their prompt is being computed."""
        requests = (stream.request for stream in self._streams.values())
        return sum(
            len(request.prompt_token_ids)
            for request in requests
            if not any(sample.token_ids for sample in request.samples)
        )

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        user: str | None = None,
        report_progress: bool = False,
        calls_tools: CallsTools | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request, by `sampling_params.output_kind`; the last one has `finished`.

        Closing or cancelling the generator aborts the request. An id that is in use is replaced by a new one. A slow
        reader gets several steps in one output; while it does not read at all, its request pauses. `user` is whom the
        policy `fair` counts it to. With `report_progress` there are outputs before the first token, one whenever more
        of the prompt has been computed; the last of them may come with that token. `calls_tools` says of the text of a
        sample that stops whether it calls tools. Raises InvalidRequestError, RequestFailedError, EngineDeadError.
        """
        return self._follow(
            lambda: self._inputs.process(
                self._free_id(request_id),
                prompt,
                sampling_params,
                priority=priority,
                cache_salt=cache_salt,
                user=user,
                reports_progress=report_progress,
                calls_tools=calls_tools,
            )
        )

    def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        num_beams: int | None = None,
        output_kind: OutputKind = "final_only",
        priority: int = 0,
        cache_salt: str | None = None,
        user: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same for a beam search. It has one output, at its end: the best `num_beams` of the beams (default: all),
        best first, as a request's samples."""
        return self._follow(
            lambda: self._inputs.process_beams(
                self._free_id(request_id),
                prompt,
                params,
                num_beams=num_beams,
                output_kind=output_kind,
                priority=priority,
                cache_salt=cache_salt,
                user=user,
            )
        )

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        user: str | None = None,
    ) -> AsyncGenerator[EmbeddingRequestOutput, None]:
        """The one output of a request for an embedding; none where it was aborted. All else as `generate`."""
        request = self.encode_bytes(
            prompt, pooling_params, request_id, priority=priority, cache_salt=cache_salt, user=user
        )
        async with contextlib.aclosing(request) as outputs:
            async for output in outputs:
                if output.embedding is not None:
                    yield as_embedding_output(output)

    def encode_bytes(
        self, prompt: Prompt, pooling_params: PoolingParams | None, request_id: str | None, **fields: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same as an output of `generate`, with its times: `embedding` has the float32 values. That of an aborted
        request has none. `fields` are the keywords of `encode`."""
        return self._follow(
            lambda: self._inputs.process_pooling(self._free_id(request_id), prompt, pooling_params, **fields)
        )

    async def _follow(self, process: Callable[[], ProcessedRequest]) -> AsyncGenerator[RequestOutput, None]:
        """Nothing happens until somebody asks for the first output."""
        if self._death is not None:
            raise EngineDeadError(self._death.message)
        processed = process()
        stream = self._streams[processed.request_id] = _Stream(self._outputs.add(processed))
        try:
            for sample in processed.for_engine:
                self._client.add_request(sample)
            while True:
                await stream.wait()
                self._raise_failure(stream.request)
                output = stream.request.take_output()
                if stream.is_paused:
                    self._resume(stream)
                if output is not None:
                    yield output
                    if output.finished:
                        return
        finally:
            del self._streams[processed.request_id]
            self._end(stream.request)

    async def abort(self, request_id: str) -> None:
        """End a request now: its generator yields a last output with the finish reason "abort". Unknown ids pass."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._end(stream.request)
            stream.ring()

    async def reset_prefix_cache(self) -> bool:
        """Forget all that is cached: no later request shares what was computed before. Those that run go on, with the
        same bytes. Always true. Raises EngineDeadError."""
        if self._death is not None:
            raise EngineDeadError(self._death.message)
        self._client.reset_prefix_cache()
        return True

    async def is_ready(self, timeout: float = 10.0) -> bool:
        """Whether a token can be made, shown by making one (it counts in the metrics); `timeout` in seconds."""
        if not self.alive or self._client.restarting:
            return False
        if time.monotonic() - self._last_token_time < FRESH_SECONDS:
            return True
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind="final_only")
        try:
            async with asyncio.timeout(timeout), contextlib.aclosing(self.generate([0], params, PROBE_ID)) as outputs:
                async for output in outputs:
                    return output.outputs[0].finish_reason in ("stop", "length")
        except (TimeoutError, RequestFailedError, EngineDeadError):
            pass
        return False

    async def close(self) -> None:
        """End the engine; what still runs ends with EngineDeadError. May be called twice."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._die("octavo is closed")
        await self._client.close()

    def _free_id(self, wanted: str | None) -> str:
        """`wanted`, or a new id made from it where it is in use."""
        request_id = wanted or uuid.uuid4().hex
        while request_id in self._streams:
            request_id = f"{wanted or 'request'}-{uuid.uuid4().hex}"
        return request_id

    def _end(self, request: RequestState) -> None:
        news = self._outputs.abort(request)
        if news.to_abort:
            self.metrics.observe_finished(news.finished)
            self._client.abort(news.to_abort)

    def _raise_failure(self, request: RequestState) -> None:
        if request.error is not None:
            raise RequestFailedError(request.error)
        if self._death is not None and not request.finished:
            raise EngineDeadError(self._death.message)

    async def _read(self) -> None:
        """The one reader of the engine's replies, for as long as the engine lives."""
        try:
            while True:
                deltas = await self._client.receive()
                news = self._outputs.process(deltas)
                if news.to_abort:
                    self._client.abort(news.to_abort)
                self.metrics.observe_step(news, self._client.stats)
                self._wake(news)
        except EngineDeadError as error:
            logger.error("%s", error)
            self._die(error.message)
        except Exception as error:  # a fault of ours must not leave callers waiting for ever
            logger.exception("reading the engine's replies failed")
            self._die(f"reading the engine's replies failed: {type(error).__name__}: {error}")

    def _wake(self, news: StepNews) -> None:
        if news.num_output_tokens:
            self._last_token_time = time.monotonic()
        for request in news.updated:
            if stream := self._streams.get(request.request_id):
                if stream.has_news and not request.finished and is_far_behind(request):
                    stream.is_paused = True
                    self._client.abort(self._outputs.pause(request))
                stream.ring()

    def _resume(self, stream: _Stream) -> None:
        """Its caller reads again."""
        stream.is_paused = False
        for sample in self._outputs.resume(stream.request):
            self._client.add_request(sample)

    def _die(self, message: str) -> None:
        self._death = self._death or EngineDeadError(message)
        self._dead.set()
        for stream in self._streams.values():
            stream.ring()


class _Stream:
    """A request and the bell that wakes its caller: an asyncio.Event for one who waits, at half the cost."""

    def __init__(self, request: RequestState) -> None:
        self.request = request
        self.has_news = False  # that the caller has not taken
        self.is_paused = False  # the engine does not have it, since the caller does not read
        self._waiting: asyncio.Future[None] | None = None

    def ring(self) -> None:
        self.has_news = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self) -> None:
        """Until it has rung since the last time."""
        if not self.has_news:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self.has_news = False

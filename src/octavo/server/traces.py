"""OpenTelemetry: a span for each request, sent to a collector (`--otlp-traces-endpoint`; `pip install octavo[otel]`).

Owns what is in a span. Its times are those that the engine gives with every request anyway; nothing is measured for it.
A span is made when its request has ended, and sent by a thread of the SDK, in batches: the event loop only puts it into
a queue, and where nobody takes it out, new spans are dropped. Names and attributes are vLLM's, and OpenTelemetry's for
generative models where vLLM has none. Nothing of a prompt or an answer is in them.

    llm_request   arrival ──────────────────────────────────────────── end       (of the caller's trace, if it has one)
      queue       arrival ── first step
      prefill                first step ── first token
      decode                               first token ─────────────── end

The SDK's own environment variables hold: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS …
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from octavo import __version__
from octavo.errors import ConfigError, InvalidRequestError, OctavoError
from octavo.pooling import PoolingParams
from octavo.request import RequestMetrics, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from starlette.types import Scope

logger = logging.getLogger(__name__)

TRACES_PATH = "/v1/traces"  # of OTLP over HTTP
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
CLOSE_SECONDS = 3.0  # for what is still to be sent when the server ends

Interval = tuple[str, float, float]  # name, begin, end: time.time(), seconds


def check_traces(endpoint: str | None) -> None:
    """Raises ConfigError where traces are wanted and the SDK is not installed."""
    if endpoint is not None and not all(is_installed(name) for name in PACKAGES):
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint!r}, but OpenTelemetry is not installed: pip install 'octavo[otel]'",
            param="otlp_traces_endpoint",
        )


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even what it is a part of
        return False


class Tracer:
    """Belongs to one server; ended by `close`."""

    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "octavo", "service.version": __version__}))
        exporter: Any = ReportingExporter(OTLPSpanExporter(endpoint=with_path(endpoint)), endpoint)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    async def follow(
        self,
        outputs: AsyncGenerator[RequestOutput, None],
        scope: Scope,
        request_id: str,
        params: SamplingParams | PoolingParams,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same outputs; and when they end, however that is, a span. A request that is refused has none."""
        span = RequestSpan(request_id, params)
        is_refused = False
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    span.count(output)
                    yield output
        except InvalidRequestError:  # too long, say, which is seen on the way to the engine
            is_refused = True
            raise
        except Exception as error:
            span.failure = error
            raise
        finally:
            if not is_refused:
                self._emit(span, scope)

    def close(self) -> None:
        """Send what is left, as far as that is done in CLOSE_SECONDS."""
        ending = threading.Thread(target=self._provider.shutdown, name="octavo-traces-end", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)

    def _emit(self, finished: RequestSpan, scope: Scope) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        begin, end = finished.begin, finished.end
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=nanoseconds(begin),
        )
        if span.is_recording():
            span.set_attributes({"gen_ai.response.model": self._model, **finished.attributes()})
            if finished.failure is not None:
                span.set_status(Status(StatusCode.ERROR, error_type(finished.failure)))
            context = set_span_in_context(span)
            for name, its_begin, its_end in finished.phases():
                child = self._tracer.start_span(name, context=context, start_time=nanoseconds(its_begin))
                child.end(nanoseconds(its_end))
        span.end(nanoseconds(end))


class RequestSpan:
    """What is known of a request on its way."""

    def __init__(self, request_id: str, params: SamplingParams | PoolingParams) -> None:
        self.failure: Exception | None = None
        self._request_id = request_id
        self._params = params
        self._created = time.time()
        self._metrics: RequestMetrics | None = None
        self._num_prompt_tokens: int | None = None
        self._num_cached_tokens: int | None = None
        self._num_completion_tokens = 0
        self._seed: int | None = None
        self._finish_reasons: dict[int, str] = {}  # by sample

    def count(self, output: RequestOutput) -> None:
        self._metrics, self._seed = output.metrics, output.seed
        self._num_prompt_tokens = len(output.prompt_token_ids)
        self._num_cached_tokens = output.num_cached_tokens
        for sample in output.outputs:
            self._num_completion_tokens += len(sample.token_ids)
            if sample.finish_reason is not None:
                self._finish_reasons[sample.index] = sample.finish_reason

    @property
    def begin(self) -> float:
        return self._created if self._metrics is None else self._metrics.arrival_time

    @property
    def end(self) -> float:
        """Now, unless it was before: a reader may be slower than the engine."""
        finished = None if self._metrics is None else self._metrics.finished_time
        return max(self.begin, finished or time.time())

    def phases(self) -> Iterator[Interval]:
        """Those that began. The times come from two processes; none of them ends before it begins."""
        metrics, begin, end = self._metrics, self.begin, self.end
        reached = (None, None) if metrics is None else (metrics.first_scheduled_time, metrics.first_token_time)
        for name, until in zip(("queue", "prefill"), reached, strict=True):
            if until is None:
                yield name, begin, end
                return
            until = max(begin, min(until, end))
            yield name, begin, until
            begin = until
        yield "decode", begin, end

    def attributes(self) -> dict[str, Any]:
        seconds = {name: end - begin for name, begin, end in self.phases()}
        num_samples = 1 if isinstance(self._params, PoolingParams) else self._params.n
        found = {
            "gen_ai.request.id": self._request_id,
            **self._asked(),
            "gen_ai.usage.prompt_tokens": self._num_prompt_tokens,
            "gen_ai.usage.completion_tokens": self._num_completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": self._num_cached_tokens,
            "gen_ai.response.finish_reasons": [self._finish_reasons.get(i, "abort") for i in range(num_samples)],
            "gen_ai.latency.e2e": self.end - self.begin,
            "gen_ai.latency.time_in_queue": seconds["queue"],
            "gen_ai.latency.time_in_model_prefill": seconds.get("prefill"),
        }
        if "decode" in seconds:
            found |= {
                "gen_ai.latency.time_to_first_token": seconds["queue"] + seconds["prefill"],
                "gen_ai.latency.time_in_model_decode": seconds["decode"],
                "gen_ai.latency.time_in_model_inference": seconds["prefill"] + seconds["decode"],
            }
        if self.failure is not None:
            found |= {"error.type": error_type(self.failure), "gen_ai.response.finish_reasons": ["error"]}
        return {name: value for name, value in found.items() if value is not None}

    def _asked(self) -> dict[str, Any]:
        if isinstance(self._params, PoolingParams):
            return {"gen_ai.operation.name": "embeddings"}
        return {
            "gen_ai.request.n": self._params.n,
            "gen_ai.request.max_tokens": self._params.max_tokens,
            "gen_ai.request.temperature": self._params.temperature,
            "gen_ai.request.top_p": self._params.top_p,
            "gen_ai.request.seed": self._seed,
        }


class ReportingExporter:
    """An exporter of the SDK that says once when nobody takes the spans, and once when somebody does again. The SDK's
    own lines, some for each batch, are for debugging."""

    def __init__(self, exporter: Any, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._works = True
        if not logger.isEnabledFor(logging.DEBUG):
            logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[Any]) -> Any:
        result = self._exporter.export(spans)
        works = result.name == "SUCCESS"
        if works != self._works:
            self._works = works
            if works:
                logger.warning("traces are sent to %s again", self._endpoint)
            else:
                logger.warning("traces cannot be sent to %s: they are dropped until they can", self._endpoint)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


def error_type(error: Exception) -> str:
    """Its code, as clients get it; a message may quote the body."""
    return (error.code if isinstance(error, OctavoError) else None) or type(error).__name__


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def with_path(endpoint: str) -> str:
    """As it is, unless it names a host alone."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + TRACES_PATH

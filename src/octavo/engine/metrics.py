"""The figures of /metrics, under vLLM's names, so that its dashboards work unchanged.

Owns a registry of its own and how steps and finished requests become figures; it does no timing itself. One engine,
"0"; a sample of a request with n > 1 counts as a request, as in vLLM.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from octavo.engine.messages import EngineInfo, SchedulerStats
from octavo.engine.output_processor import SampleState, StepNews
from octavo.request import FinishReason

ENGINE = "0"

# vLLM's buckets: where its dashboards put their quantiles.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SMALL_COUNTS = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50)

MAX_RECENT = 1000  # first tokens whose times are remembered one by one
MAX_WAITING = 1000  # figures not yet counted: some milliseconds of work


class Metrics:
    def __init__(self, model_name: str, info: EngineInfo) -> None:
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        self._labels = {"model_name": model_name, "engine": ENGINE}
        self._stats = self._counted = SchedulerStats()  # the newest, and those in the figures
        # What each step adds waits in lists until somebody asks, or until they are long: the histograms and their locks
        # would take longer than all the rest of a step here.
        self._new_step_tokens: list[int] = []
        self._new_inter_token: list[float] = []
        self._num_new_tokens = 0
        self.num_generation_tokens = 0  # since the start
        self._recent_first_tokens: deque[tuple[float, float]] = deque(maxlen=MAX_RECENT)  # when, how long after arrival
        counts = one_two_five(info.max_model_len)
        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting to be run.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 1 is all.")
        self._cache_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._cache_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._external_queries = self._counter(
            "external_prefix_cache_queries", "Tokens not in the prefix cache, looked up on disk."
        )
        self._external_hits = self._counter("external_prefix_cache_hits", "Tokens found on disk.")
        self._preemptions = self._counter("num_preemptions", "Preemptions by the engine.")
        self._swaps = self._counter("num_swaps", "Preemptions that kept what was computed in the swap space.")
        self._restarts = self._counter("engine_restarts", "Times that the engine's process was started again.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = {
            reason: self._counter("request_success", "Finished requests.", {"finished_reason": reason})
            for reason in FinishReason
        }
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens computed in a step.", STEP_TOKENS)
        self._request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", counts)
        self._request_tokens = self._histogram("request_generation_tokens", "Tokens generated for a request.", counts)
        self._params_n = self._histogram("request_params_n", "The parameter n.", SMALL_COUNTS)
        self._params_max_tokens = self._histogram("request_params_max_tokens", "The parameter max_tokens.", counts)
        self._request_preemptions = self._histogram(
            "request_num_preemptions", "Preemptions that a request suffered.", PREEMPTIONS
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_SECONDS
        )
        self._inter_token = self._histogram("inter_token_latency_seconds", "From a token to the next.", TOKEN_SECONDS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean time for a token after the first.", TOKEN_SECONDS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", REQUEST_SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to the first step.", REQUEST_SECONDS)
        self._inference = self._histogram(
            "request_inference_time_seconds", "From the first step to the last token.", REQUEST_SECONDS
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", REQUEST_SECONDS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", REQUEST_SECONDS
        )
        self._gauge("cache_config_info", "The engine's cache, in labels.", info.cache_config).set(1)

    def observe_step(self, news: StepNews, stats: SchedulerStats) -> None:
        """One reply of the engine."""
        if stats.num_steps > self._stats.num_steps:
            self._new_step_tokens.append(stats.step_tokens)
        self._stats = stats
        self._num_new_tokens += news.num_output_tokens
        self.num_generation_tokens += news.num_output_tokens
        self._new_inter_token += news.inter_token_latencies
        for seconds in news.times_to_first_token:
            self._first_token.observe(seconds)
            self._recent_first_tokens.append((time.monotonic(), seconds))
        if news.num_prompt_tokens:
            self._prompt_tokens.inc(news.num_prompt_tokens)
        if news.finished:
            self.observe_finished(news.finished)
        if len(self._new_step_tokens) + len(self._new_inter_token) >= MAX_WAITING:
            self._settle()

    def _settle(self) -> None:
        """Count what has waited."""
        last, stats = self._counted, self._stats
        self._counted = stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_cache_usage)
        self._cache_queries.inc(stats.prefix_cache_queries - last.prefix_cache_queries)
        self._cache_hits.inc(stats.prefix_cache_hits - last.prefix_cache_hits)
        self._external_queries.inc(stats.external_prefix_cache_queries - last.external_prefix_cache_queries)
        self._external_hits.inc(stats.external_prefix_cache_hits - last.external_prefix_cache_hits)
        self._preemptions.inc(stats.num_preemptions - last.num_preemptions)
        self._swaps.inc(stats.num_swaps - last.num_swaps)
        self._restarts.inc(stats.num_restarts - last.num_restarts)
        self._generation_tokens.inc(self._num_new_tokens)
        for tokens in self._new_step_tokens:
            self._step_tokens.observe(tokens)
        for seconds in self._new_inter_token:
            self._inter_token.observe(seconds)
        self._num_new_tokens, self._new_step_tokens, self._new_inter_token = 0, [], []

    def observe_finished(self, samples: Sequence[SampleState]) -> None:
        for sample in samples:
            assert sample.finish_reason is not None and sample.finished_time is not None
            source, num_tokens = sample.source, len(sample.token_ids)
            self._success[sample.finish_reason].inc()
            self._request_prompt_tokens.observe(len(source.prompt_token_ids))
            self._request_tokens.observe(num_tokens)
            self._request_preemptions.observe(sample.num_preemptions)
            if source.sample_index == 0 and source.pooling is None:
                self._params_n.observe(source.params.n)
            if source.params.max_tokens is not None and source.pooling is None:
                self._params_max_tokens.observe(source.params.max_tokens)
            self._e2e.observe(max(0.0, sample.finished_time - source.arrival_time))
            self._observe_phases(sample, num_tokens)

    def _observe_phases(self, sample: SampleState, num_tokens: int) -> None:
        scheduled, first, last = sample.first_scheduled_time, sample.first_token_time, sample.last_token_time
        if scheduled is None:
            return
        # The times come from two processes; a clock that is set back must not give less than nothing.
        self._queue.observe(max(0.0, scheduled - sample.source.arrival_time))
        if first is None or last is None:
            return
        self._prefill.observe(max(0.0, first - scheduled))
        self._decode.observe(max(0.0, last - first))
        self._inference.observe(max(0.0, last - scheduled))
        if num_tokens > 1:
            self._per_token.observe(max(0.0, last - first) / (num_tokens - 1))

    def mean_first_token(self, within: float) -> float | None:
        """Seconds from arrival to the first token, over those that came in the last `within` seconds, as far as they
        are remembered. None: there were none."""
        since = time.monotonic() - within
        recent = [seconds for when, seconds in self._recent_first_tokens if when >= since]
        return sum(recent) / len(recent) if recent else None

    def render(self) -> bytes:
        """Prometheus' text format."""
        self._settle()
        return generate_latest(self._registry)

    def _gauge(self, name: str, help: str, labels: dict[str, str] | None = None) -> Gauge:
        gauge: Gauge = self._labelled(Gauge, name, help, labels)
        return gauge

    def _counter(self, name: str, help: str, labels: dict[str, str] | None = None) -> Counter:
        counter: Counter = self._labelled(Counter, name, help, labels)
        return counter

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        histogram: Histogram = self._labelled(Histogram, name, help, None, buckets=buckets)
        return histogram

    def _labelled(self, kind: Any, name: str, help: str, labels: dict[str, str] | None, **options: Any) -> Any:
        """The child with our labels' values; the metric itself is made where `name` is new."""
        labels = self._labels | (labels or {})
        metric = self._metrics.get(name)
        if metric is None:
            metric = kind(f"vllm:{name}", help, labels.keys(), registry=self._registry, **options)
            self._metrics[name] = metric
        return metric.labels(**labels)


def one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 … up to `limit`."""
    series: list[int] = []
    power = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * power > limit:
                return series
            series.append(mantissa * power)
        power *= 10

"""The figures of /metrics, under vLLM's names, so that its dashboards work unchanged.

Owns a registry of its own and how steps and finished requests become figures; it does no timing itself. One engine,
"0"; a sample of a request with n > 1 counts as a request, as in vLLM. Of vLLM's names those are missing that would
always be zero here: they are of things that octavo does not have.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from octavo.core.store import StoreCounts
from octavo.engine.messages import EngineInfo, SchedulerStats
from octavo.engine.output_processor import SampleState
from octavo.engine.step_news import StepNews
from octavo.request import FinishReason

ENGINE = "0"
DISK = {"tier": "1:fs"}  # vLLM's name for a file system behind memory

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
        self.registry = CollectorRegistry()
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
        self._make_gauges(info)
        self._make_counters()
        self._make_disk_figures()
        self._make_histograms(one_two_five(info.max_model_len))
        ProcessCollector(registry=self.registry)

    def _make_gauges(self, info: EngineInfo) -> None:
        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting to be run.")
        # None is deferred: who waits for another to compute an equal prompt would else wait for capacity.
        self._waiting_for_capacity, _ = (
            self._gauge("num_requests_waiting_by_reason", "The same, by what they wait for.", {"reason": reason})
            for reason in ("capacity", "deferred")
        )
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 1 is all.")
        self._gauge("cache_config_info", "The engine's cache, in labels.", info.cache_config).set(1)

    def _make_counters(self) -> None:
        self._cache_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self._cache_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._external_queries = self._counter(
            "external_prefix_cache_queries", "Tokens not in the prefix cache, looked up on disk."
        )
        self._external_hits = self._counter("external_prefix_cache_hits", "Tokens found on disk.")
        self._preemptions = self._counter("num_preemptions", "Preemptions by the engine.")
        self._swaps = self._counter("num_swaps", "Preemptions that kept what was computed in the swap space.")
        self._restarts = self._counter("engine_restarts", "Times that the engine's process was started again.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self._prompt_tokens_from = {
            source: self._counter("prompt_tokens_by_source", "The same, by where their KV is from.", {"source": source})
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        }
        self._cached_tokens = self._counter("prompt_tokens_cached", "Of these, those found in a cache.")
        self._cached_tokens_from = {
            source: self._counter("prompt_tokens_cached_by_source", "The same, by where they lay.", {"source": source})
            for source in ("device", "disk")
        }
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = {
            reason: self._counter("request_success", "Finished requests.", {"finished_reason": reason})
            for reason in FinishReason
        }
        rejections = Counter(
            "vllm:admission_rejections",
            "Calls refused for want of room.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._rejections = {
            reason: rejections.labels(self._labels["model_name"], reason)
            for reason in ("max_num_queued_reqs", "max_num_queued_tokens")
        }

    def _make_disk_figures(self) -> None:
        self._disk_queries = self._counter("kv_offload_tiering_chunk_queries", "KV blocks asked of the disk.", DISK)
        self._disk_hits = self._counter("kv_offload_tiering_chunk_hits", "KV blocks read from disk.", DISK)
        self._disk_read = self._counter("kv_offload_tiering_read_bytes", "Bytes of KV blocks read from disk.", DISK)
        self._disk_written = self._counter("kv_offload_tiering_write_bytes", "… and written there.", DISK)
        self._disk_dropped = self._counter(
            "kv_offload_tiering_backpressure_blocks_dropped",
            "KV blocks that were to be written and were not: the disk is too slow, or cannot be written.",
            DISK,
        )
        self._disk_used = self._gauge("kv_offload_tiering_used_bytes", "Size of all files in the folder.", DISK)

    def _make_histograms(self, counts: Sequence[float]) -> None:
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens computed in a step.", STEP_TOKENS)
        self._request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", counts)
        self._request_tokens = self._histogram("request_generation_tokens", "Tokens generated for a request.", counts)
        self._request_max_tokens = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest of a request's n samples.", counts
        )
        self._request_computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were in no cache.", counts
        )
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
            self._count_prompts(news.num_prompt_tokens, news.num_cached_tokens, news.num_stored_tokens)
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
        self._waiting_for_capacity.set(stats.num_waiting)
        self._kv_usage.set(stats.kv_cache_usage)
        self._cache_queries.inc(stats.prefix_cache_queries - last.prefix_cache_queries)
        self._cache_hits.inc(stats.prefix_cache_hits - last.prefix_cache_hits)
        self._external_queries.inc(stats.external_prefix_cache_queries - last.external_prefix_cache_queries)
        self._external_hits.inc(stats.external_prefix_cache_hits - last.external_prefix_cache_hits)
        self._preemptions.inc(stats.num_preemptions - last.num_preemptions)
        self._swaps.inc(stats.num_swaps - last.num_swaps)
        self._restarts.inc(stats.num_restarts - last.num_restarts)
        self._generation_tokens.inc(self._num_new_tokens)
        self._settle_disk(stats.store or StoreCounts(), last.store or StoreCounts())
        for tokens in self._new_step_tokens:
            self._step_tokens.observe(tokens)
        for seconds in self._new_inter_token:
            self._inter_token.observe(seconds)
        self._num_new_tokens, self._new_step_tokens, self._new_inter_token = 0, [], []

    def _settle_disk(self, counts: StoreCounts, last: StoreCounts) -> None:
        self._disk_queries.inc(counts.num_hits + counts.num_misses - last.num_hits - last.num_misses)
        self._disk_hits.inc(counts.num_hits - last.num_hits)
        self._disk_read.inc(counts.num_read_bytes - last.num_read_bytes)
        self._disk_written.inc(counts.num_written_bytes - last.num_written_bytes)
        self._disk_dropped.inc(counts.num_dropped - last.num_dropped)
        self._disk_used.set(counts.num_bytes)

    def _count_prompts(self, num_tokens: int, num_cached: int, num_stored: int) -> None:
        """Of requests that got their first token."""
        self._prompt_tokens.inc(num_tokens)
        self._cached_tokens.inc(num_cached)
        self._prompt_tokens_from["local_compute"].inc(num_tokens - num_cached)
        self._prompt_tokens_from["local_cache_hit"].inc(num_cached - num_stored)
        self._prompt_tokens_from["external_kv_transfer"].inc(num_stored)
        self._cached_tokens_from["device"].inc(num_cached - num_stored)
        self._cached_tokens_from["disk"].inc(num_stored)

    def count_rejection(self, reason: str) -> None:
        """A call that found no room: `max_num_queued_reqs` or `max_num_queued_tokens`."""
        self._rejections[reason].inc()

    def observe_finished(self, samples: Sequence[SampleState]) -> None:
        for sample in samples:
            assert sample.finish_reason is not None and sample.finished_time is not None
            source, num_tokens = sample.source, len(sample.token_ids)
            self._success[sample.finish_reason].inc()
            self._request_prompt_tokens.observe(len(source.prompt_token_ids))
            self._request_tokens.observe(num_tokens)
            self._request_preemptions.observe(sample.num_preemptions)
            # The other samples of a prompt find all of it computed.
            num_computed = max(0, len(source.prompt_token_ids) - (sample.request.num_cached_tokens or 0))
            self._request_computed_tokens.observe(num_computed if source.sample_index == 0 else 0)
            if source.sample_index == 0 and source.pooling is None:
                self._params_n.observe(source.params.n)
            if source.params.max_tokens is not None and source.pooling is None:
                self._params_max_tokens.observe(source.params.max_tokens)
            self._e2e.observe(max(0.0, sample.finished_time - source.arrival_time))
            self._observe_phases(sample, num_tokens)
        for request in {id(sample.request): sample.request for sample in samples}.values():
            if request.finished:
                self._request_max_tokens.observe(max(len(sample.token_ids) for sample in request.samples))

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
        return generate_latest(self.registry)

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
            metric = kind(f"vllm:{name}", help, labels.keys(), registry=self.registry, **options)
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

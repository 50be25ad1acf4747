"""The figures of /metrics: their values after known steps. Names, types and labels are test_metric_names.py's."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from octavo.core.store import StoreCounts
from octavo.engine.input_processor import InputProcessor
from octavo.engine.messages import EngineInfo, SchedulerStats, TokenDelta
from octavo.engine.metrics import Metrics, one_two_five
from octavo.engine.output_processor import OutputProcessor, StepNews
from octavo.request import FinishReason, SamplingParams
from support.front import small_tokenizer

INFO = EngineInfo(
    64, 13, 4, 64, "float32", "none", 1, "no memory", 8, cache_config={"block_size": "4", "num_gpu_blocks": "64"}
)
LABELS = {"model_name": "m", "engine": "0"}


def figures(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of an engine by name and the labels beyond model_name and engine."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if not sample.labels.items() >= LABELS.items():
                continue
            extra = frozenset((name, value) for name, value in sample.labels.items() if name not in LABELS)
            found[sample.name, extra] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return figures(metrics)[f"vllm:{name}", frozenset(labels.items())]


def test_the_mean_first_token_is_that_of_a_while(monkeypatch):
    metrics = Metrics("m", INFO)
    assert metrics.mean_first_token(60.0) is None
    for now, seconds in ((0.0, 9.0), (50.0, 1.0), (100.0, 2.0)):
        monkeypatch.setattr("octavo.engine.metrics.time.monotonic", lambda now=now: now)
        metrics.observe_step(StepNews(times_to_first_token=[seconds], num_output_tokens=3), SchedulerStats())
    assert metrics.mean_first_token(60.0) == 1.5
    assert metrics.mean_first_token(10.0) == 2.0
    assert metrics.num_generation_tokens == 9


def test_every_reason_is_there_from_the_start():
    metrics = Metrics("m", INFO)
    for reason in FinishReason:
        assert value(metrics, "request_success_total", finished_reason=reason) == 0


def test_counters_go_on_when_an_engine_takes_anothers_place():
    metrics = Metrics("m", INFO)
    metrics.observe_step(
        StepNews(), SchedulerStats(num_running=2, prefix_cache_queries=50, num_preemptions=3, num_steps=9)
    )
    earlier = SchedulerStats(prefix_cache_queries=50, num_preemptions=3, num_steps=9, num_restarts=1)
    later = SchedulerStats(num_running=1, prefix_cache_queries=7, prefix_cache_hits=5, num_steps=1, step_tokens=6)
    metrics.observe_step(StepNews(), later.following(earlier))
    assert value(metrics, "engine_restarts_total") == 1
    assert value(metrics, "prefix_cache_queries_total") == 57 and value(metrics, "prefix_cache_hits_total") == 5
    assert value(metrics, "num_preemptions_total") == 3 and value(metrics, "num_requests_running") == 1
    assert value(metrics, "iteration_tokens_total_count") == 2


def test_stats_become_gauges_and_counters():
    metrics = Metrics("m", INFO)
    metrics.observe_step(StepNews(), SchedulerStats(3, 2, 0.5, 100, 40, 1, 7, 30))
    metrics.observe_step(StepNews(), SchedulerStats(1, 0, 0.25, 150, 60, 1, 8, 5))
    metrics.observe_step(StepNews(), SchedulerStats(0, 0, 0.0, 150, 60, 1, 8, 5))  # an abort: no step
    assert value(metrics, "num_requests_running") == value(metrics, "num_requests_waiting") == 0
    assert value(metrics, "kv_cache_usage_perc") == 0
    assert value(metrics, "prefix_cache_queries_total") == 150
    assert value(metrics, "prefix_cache_hits_total") == 60
    assert value(metrics, "num_preemptions_total") == 1
    assert value(metrics, "iteration_tokens_total_count") == 2
    assert value(metrics, "iteration_tokens_total_sum") == 35
    assert value(metrics, "cache_config_info", block_size="4", num_gpu_blocks="64") == 1


def test_figures_that_nobody_asks_for_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("octavo.engine.metrics.MAX_WAITING", 5)
    metrics = Metrics("m", INFO)
    for i in range(23):
        metrics.observe_step(StepNews(inter_token_latencies=[0.5]), SchedulerStats(num_steps=i + 1, step_tokens=2))
        assert len(metrics._new_step_tokens) < 5
    assert value(metrics, "iteration_tokens_total_sum") == 46
    assert value(metrics, "inter_token_latency_seconds_count") == 23


def run(metrics: Metrics, *deltas: dict[str, Any], **params: Any) -> OutputProcessor:
    outputs = OutputProcessor(small_tokenizer())
    inputs = InputProcessor(small_tokenizer(), INFO, eos_token_ids=[], max_logprobs=5)
    outputs.add(inputs.process("r", [1, 2, 3], SamplingParams(**params)))
    for delta in deltas:
        metrics.observe_step(outputs.process([TokenDelta(**delta)]), SchedulerStats())
    return outputs


def test_a_request():
    metrics = Metrics("m", INFO)
    first = {
        "request_id": "r#0",
        "token_ids": [1],
        "first_scheduled_time": 1.0,
    }  # a clock was set back
    last = {"request_id": "r#0", "token_ids": [2, 3], "finish_reason": FinishReason.LENGTH, "num_preemptions": 2}
    run(metrics, first, last, max_tokens=3)
    assert value(metrics, "prompt_tokens_total") == 3
    assert value(metrics, "generation_tokens_total") == 3
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    for name, total in {
        "request_prompt_tokens": 3,
        "request_generation_tokens": 3,
        "request_params_n": 1,
        "request_params_max_tokens": 3,
        "request_num_preemptions": 2,
        "request_queue_time_seconds": 0,
    }.items():
        assert (value(metrics, f"{name}_count"), value(metrics, f"{name}_sum")) == (1, total), name
    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
    ):
        assert value(metrics, f"{name}_count") == 1, name


def test_a_request_that_never_ran():
    metrics = Metrics("m", INFO)
    run(metrics, {"request_id": "r#0", "finish_reason": FinishReason.ERROR, "error": "boom"})
    assert value(metrics, "request_success_total", finished_reason="error") == 1
    assert value(metrics, "e2e_request_latency_seconds_count") == 1
    assert value(metrics, "request_queue_time_seconds_count") == 0
    assert value(metrics, "time_to_first_token_seconds_count") == 0


def test_where_a_prompts_tokens_are_from():
    metrics = Metrics("m", INFO)
    stats = SchedulerStats(external_prefix_cache_hits=80)  # also for those who have said something long ago
    metrics.observe_step(StepNews(num_prompt_tokens=9, num_cached_tokens=4), stats)
    metrics.observe_step(StepNews(num_prompt_tokens=20, num_cached_tokens=12, num_stored_tokens=8), stats)
    metrics.observe_step(StepNews(num_prompt_tokens=5, num_cached_tokens=4), stats)
    assert value(metrics, "prompt_tokens_total") == 34 and value(metrics, "prompt_tokens_cached_total") == 20
    by_source = {"local_compute": 14, "local_cache_hit": 12, "external_kv_transfer": 8}
    for source, number in by_source.items():
        assert value(metrics, "prompt_tokens_by_source_total", source=source) == number
    for source, number in {"device": 12, "disk": 8}.items():
        assert value(metrics, "prompt_tokens_cached_by_source_total", source=source) == number


def test_the_disk_tier():
    metrics = Metrics("m", INFO)
    first = SchedulerStats(store=StoreCounts(3, 1, 300, 500, 2, 800))
    metrics.observe_step(StepNews(), first)
    metrics.observe_step(StepNews(), SchedulerStats(store=StoreCounts(4, 1, 400, 500, 2, 700)))
    # Another engine in its place begins to count anew, and finds the folder as it is.
    metrics.observe_step(StepNews(), SchedulerStats(store=StoreCounts(0, 1, 0, 100, 0, 750)).following(first))
    names = ("chunk_queries_total", "chunk_hits_total", "read_bytes_total", "write_bytes_total", "used_bytes")
    found = [value(metrics, f"kv_offload_tiering_{name}", tier="1:fs") for name in names]
    assert found == [5, 3, 300, 600, 750]
    assert value(metrics, "kv_offload_tiering_backpressure_blocks_dropped_total", tier="1:fs") == 2


def test_refusals_are_counted_by_their_reason():
    metrics = Metrics("m", INFO)
    for reason in ("max_num_queued_reqs", "max_num_queued_tokens", "max_num_queued_reqs"):
        metrics.count_rejection(reason)
    text = metrics.render().decode()
    assert 'vllm:admission_rejections_total{model_name="m",reason="max_num_queued_reqs"} 2.0\n' in text
    assert 'vllm:admission_rejections_total{model_name="m",reason="max_num_queued_tokens"} 1.0\n' in text


def test_samples_count_as_requests_and_n_once():
    metrics = Metrics("m", INFO)
    ends = [{"request_id": f"r#{i}", "token_ids": [1], "finish_reason": FinishReason.STOP} for i in range(3)]
    run(metrics, *ends, n=3)
    assert value(metrics, "request_success_total", finished_reason="stop") == 3
    assert (value(metrics, "request_params_n_count"), value(metrics, "request_params_n_sum")) == (1, 3)


def test_the_longest_sample_counts_when_the_last_has_ended():
    metrics = Metrics("m", INFO)
    first = {"request_id": "r#1", "token_ids": [1, 2, 3], "num_cached_tokens": 2, "finish_reason": FinishReason.STOP}
    name = "request_max_num_generation_tokens"
    outputs = run(metrics, first, n=2)
    assert value(metrics, f"{name}_count") == 0
    last = TokenDelta("r#0", [1], num_cached_tokens=2, finish_reason=FinishReason.STOP)
    metrics.observe_step(outputs.process([last]), SchedulerStats())
    assert (value(metrics, f"{name}_count"), value(metrics, f"{name}_sum")) == (1, 3)
    # One sample computes the prompt, as far as it was not cached.
    name = "request_prefill_kv_computed_tokens"
    assert (value(metrics, f"{name}_count"), value(metrics, f"{name}_sum")) == (2, 1)


def test_buckets_of_counts():
    assert one_two_five(8192) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
    assert one_two_five(1) == [1]

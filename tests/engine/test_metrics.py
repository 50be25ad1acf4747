"""The figures of /metrics: names, types, labels and values after known steps."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

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
    """Every sample by name and the labels beyond model_name and engine."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels.items() >= LABELS.items()
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


@pytest.mark.parametrize(
    ("name", "type"),
    [
        ("num_requests_running", "gauge"),
        ("num_requests_waiting", "gauge"),
        ("kv_cache_usage_perc", "gauge"),
        ("cache_config_info", "gauge"),
        ("prefix_cache_queries_total", "counter"),
        ("prefix_cache_hits_total", "counter"),
        ("num_preemptions_total", "counter"),
        ("engine_restarts_total", "counter"),
        ("prompt_tokens_total", "counter"),
        ("generation_tokens_total", "counter"),
        ("request_success_total", "counter"),
        ("request_prompt_tokens", "histogram"),
        ("request_generation_tokens", "histogram"),
        ("iteration_tokens_total", "histogram"),
        ("time_to_first_token_seconds", "histogram"),
        ("inter_token_latency_seconds", "histogram"),
        ("request_time_per_output_token_seconds", "histogram"),
        ("e2e_request_latency_seconds", "histogram"),
        ("request_queue_time_seconds", "histogram"),
        ("request_inference_time_seconds", "histogram"),
        ("request_prefill_time_seconds", "histogram"),
        ("request_decode_time_seconds", "histogram"),
        ("request_params_n", "histogram"),
        ("request_params_max_tokens", "histogram"),
        ("request_num_preemptions", "histogram"),
    ],
)
def test_names_and_types(name, type):
    assert f"# TYPE vllm:{name} {type}\n" in Metrics("m", INFO).render().decode()


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


def test_samples_count_as_requests_and_n_once():
    metrics = Metrics("m", INFO)
    ends = [{"request_id": f"r#{i}", "token_ids": [1], "finish_reason": FinishReason.STOP} for i in range(3)]
    run(metrics, *ends, n=3)
    assert value(metrics, "request_success_total", finished_reason="stop") == 3
    assert (value(metrics, "request_params_n_count"), value(metrics, "request_params_n_sum")) == (1, 3)


def test_buckets_of_counts():
    assert one_two_five(8192) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
    assert one_two_five(1) == [1]

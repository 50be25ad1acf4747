"""vLLM's list of metrics, line by line: what octavo exports of it, with type, labels, buckets; and what not, and why.

The list is that of vLLM 0.33. A name that is in neither table here is one that nobody has decided on.
"""

from __future__ import annotations

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.messages import EngineInfo
from octavo.engine.metrics import Metrics

MAX_MODEL_LEN = 8192
INFO = EngineInfo(
    MAX_MODEL_LEN, 13, 4, 64, "float32", "none", 1, "", 8, cache_config={"block_size": "4", "num_gpu_blocks": "64"}
)
COUNTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
SECONDS = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
TOKEN_SECONDS = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
FIRST_TOKEN_SECONDS = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
]

# Name: its further labels, and the values of each that are there from the start.
GAUGES = {
    "num_requests_running": {},
    "num_requests_waiting": {},
    "num_requests_waiting_by_reason": {"reason": {"capacity", "deferred"}},
    "kv_cache_usage_perc": {},
    "cache_config_info": {"block_size": {"4"}, "num_gpu_blocks": {"64"}},
}
COUNTERS = {
    "prefix_cache_queries": {},
    "prefix_cache_hits": {},
    "external_prefix_cache_queries": {},
    "external_prefix_cache_hits": {},
    "num_preemptions": {},
    "prompt_tokens": {},
    "prompt_tokens_by_source": {"source": {"local_compute", "local_cache_hit", "external_kv_transfer"}},
    "prompt_tokens_cached": {},
    "prompt_tokens_cached_by_source": {"source": {"device", "disk"}},
    "generation_tokens": {},
    "request_success": {"finished_reason": {"stop", "length", "abort", "error", "tool_calls"}},
    "admission_rejections": {"reason": {"max_num_queued_reqs", "max_num_queued_tokens"}},
    **{
        f"kv_offload_tiering_{name}": {"tier": {"1:fs"}}
        for name in ("chunk_queries", "chunk_hits", "read_bytes", "write_bytes", "backpressure_blocks_dropped")
    },
}
HISTOGRAMS = {
    "request_prompt_tokens": COUNTS,
    "request_generation_tokens": COUNTS,
    "iteration_tokens_total": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
    "request_max_num_generation_tokens": COUNTS,
    "request_params_n": [1, 2, 5, 10, 20],
    "request_params_max_tokens": COUNTS,
    "time_to_first_token_seconds": FIRST_TOKEN_SECONDS,
    "inter_token_latency_seconds": TOKEN_SECONDS,
    "request_time_per_output_token_seconds": TOKEN_SECONDS,
    "e2e_request_latency_seconds": SECONDS,
    "request_queue_time_seconds": SECONDS,
    "request_inference_time_seconds": SECONDS,
    "request_prefill_time_seconds": SECONDS,
    "request_decode_time_seconds": SECONDS,
    "request_num_preemptions": [0, 1, 2, 5, 10, 20, 50],
    "request_prefill_kv_computed_tokens": COUNTS,
}
OWN_GAUGES = {"kv_offload_tiering_used_bytes": {"tier": {"1:fs"}}}
OWN_COUNTERS = {"num_swaps": {}, "engine_restarts": {}}

# What there is not, by the reason; some names stand for all that begin so.
NOT_EXPORTED = {
    "nothing is fetched from other machines": """
        num_requests_kv_fetch_by_stage nixl_ mooncake_ hf3fs_ umbp_transfer_ hisparse_""",
    "it does not sleep": "engine_sleep_state sleep_mode_ rl_weight_update_",
    "no adapters": "lora_requests_info",
    "models read text alone": "mm_cache_queries mm_cache_hits",
    "no speculation": "spec_decode_ diffusion_",
    "not there by default either": "kv_block_ estimated_ corrupted_requests",
    "no such feature": "watermark_requests tool_call_parser_ websocket_",
    "the tier of vLLM in main memory; the swap space is counted as num_swaps": """
        kv_offload_load_ kv_offload_store_ kv_offload_lookup_ kv_offload_allocation_failure kv_offload_stores_skipped
        kv_offload_cpu_ kv_offload_config_info kv_offload_total_ kv_offload_size simple_kv_offload_""",
    "blocks are read when they are needed, without jobs": """
        kv_offload_tiering_lookup_ kv_offload_tiering_read_time kv_offload_tiering_write_time
        kv_offload_tiering_promotion_ kv_offload_tiering_cascade_ kv_offload_tiering_primary_
        kv_offload_tiering_active_ kv_offload_tiering_backpressure_store_latency_ema
        kv_offload_tiering_backpressure_stores_dropped""",
}


def families() -> dict[str, Metric]:
    """Those of vLLM's prefix, by name as Prometheus' parser has it: without the _total of a counter."""
    found = text_string_to_metric_families(Metrics("m", INFO).render().decode())
    return {
        family.name.removeprefix("vllm:"): family
        for family in found
        if family.name.startswith("vllm:") and not family.name.endswith("_created")
    }


def labels(family: Metric) -> dict[str, set[str]]:
    """The values of each label beyond model_name and engine."""
    found: dict[str, set[str]] = {}
    for sample in family.samples:
        assert sample.labels["model_name"] == "m"
        assert sample.labels.get("engine", "0") == "0"
        for name in sample.labels.keys() - {"model_name", "engine", "le"}:
            found.setdefault(name, set()).add(sample.labels[name])
    return found


def test_every_name_is_decided_on() -> None:
    decided = {*GAUGES, *COUNTERS, *HISTOGRAMS, *OWN_GAUGES, *OWN_COUNTERS}
    assert set(families()) == decided
    missing = [name for names in NOT_EXPORTED.values() for name in names.split()]
    assert not [name for name in decided for prefix in missing if name.startswith(prefix)]


@pytest.mark.parametrize("kind", ["gauge", "counter"])
def test_types_and_labels(kind) -> None:
    wanted = {**GAUGES, **OWN_GAUGES} if kind == "gauge" else {**COUNTERS, **OWN_COUNTERS}
    found = families()
    for name, further in wanted.items():
        assert found[name].type == kind, name
        assert labels(found[name]) == further, name
        suffix = "_total" if kind == "counter" else ""
        assert {sample.name for sample in found[name].samples} == {f"vllm:{name}{suffix}"}
        has_engine = {"engine" in sample.labels for sample in found[name].samples}
        assert has_engine == {name != "admission_rejections"}, name  # as in vLLM: no engine has seen these


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms_and_their_buckets(name) -> None:
    family = families()[name]
    assert family.type == "histogram" and labels(family) == {}
    bounds = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
    assert bounds == [*HISTOGRAMS[name], float("inf")]


def test_the_process_is_watched_too() -> None:
    text = Metrics("m", INFO).render().decode()
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"):
        assert f"\n{name} " in text

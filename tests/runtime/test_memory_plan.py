"""The memory plan: what fits, what is refused, and that the numbers in the message are the ones that then work."""

from __future__ import annotations

import re

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.models.config import ModelConfig
from octavo.ops import cgroup
from octavo.runtime.memory import (
    DEFAULT_KV_LIMIT,
    GiB,
    available_memory,
    kv_block_bytes,
    plan_memory,
    total_memory,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}


def plan(model=LLAMA, *, available=8 * GiB, total=128 * GiB, **options):
    return plan_memory(
        EngineConfig(**options),
        ModelConfig.from_hf(model),
        "bfloat16",
        weights=300 * 2**20,
        workspace=100 * 2**20,
        available=available,
        total=total,
    )


def test_block_bytes():
    # 30 layers, keys and values, 16 tokens, 3 heads of 64, 2 bytes
    assert kv_block_bytes(ModelConfig.from_hf(LLAMA), 16, "bfloat16") == 30 * 2 * 16 * 3 * 64 * 2
    assert kv_block_bytes(ModelConfig.from_hf(LLAMA), 32, "float32") == 30 * 2 * 32 * 3 * 64 * 4
    assert kv_block_bytes(ModelConfig.from_hf(LLAMA), 16, "int8") == 30 * 2 * 16 * 3 * (64 + 4)
    odd = ModelConfig.from_hf(LLAMA | {"head_dim": 40})  # keys in whole steps of a tile, values in whole vectors
    assert kv_block_bytes(odd, 16, "bfloat16") == 30 * 16 * 3 * (64 + 48) * 2


def test_default_takes_most_of_little_memory_but_never_more_than_the_limit():
    small, large = plan(available=2 * GiB), plan(available=100 * GiB)
    spent = small.weights + small.workspace + small.num_blocks * small.block_bytes
    assert 0.9 * 2 * GiB < spent <= 0.92 * 2 * GiB
    assert large.num_blocks == DEFAULT_KV_LIMIT // large.block_bytes
    assert plan(available=100 * GiB, gpu_memory_utilization=0.5).num_blocks * large.block_bytes > 49 * GiB


def test_the_line_tells_what_fits():
    text = str(plan(kv_cache_memory_bytes=368640 * 1000, max_model_len=4000))
    assert "1,000 blocks of 16: 16,000 tokens, 4.0 requests of 4,000" in text
    assert "weights 0.29 GiB" in text and "workspace 100.0 MiB" in text


def test_ops_4_a_context_that_does_not_fit_is_refused_with_one_that_does():
    with pytest.raises(ConfigError, match="max_model_len is 8192: its KV cache needs") as error:
        plan(kv_cache_memory_bytes=10 * 2**20)
    assert "10.0 MiB are available" in str(error.value)
    longest = int(re.search(r"longest that fits is (\d+)", str(error.value))[1])
    assert plan(kv_cache_memory_bytes=10 * 2**20, max_model_len=longest).max_model_len == longest
    with pytest.raises(ConfigError):
        plan(kv_cache_memory_bytes=10 * 2**20, max_model_len=longest + 1)
    assert plan(kv_cache_memory_bytes=10 * 2**20, max_model_len="auto").max_model_len == longest


def test_an_explicit_number_of_blocks_starts_anyway():
    forced = plan(num_gpu_blocks_override=3, kv_cache_memory_bytes=1)
    assert (forced.num_blocks, forced.max_model_len) == (3, 8192)


def test_no_room_at_all_is_refused():
    with pytest.raises(ConfigError, match=r"0\.0 MiB are available"):
        plan(available=300 * 2**20)


@pytest.mark.parametrize(
    ("rope", "default", "longest"),
    [
        (None, 8192, 8192),
        ({"rope_type": "linear", "factor": 4.0}, 32768, 32768),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384, 16384),
    ],
)
def test_rope_scaling_stretches_the_limit(rope, default, longest):
    model = LLAMA | ({"rope_scaling": rope} if rope else {})
    assert plan(model).max_model_len == default
    assert plan(model, max_model_len=longest).max_model_len == longest
    with pytest.raises(ConfigError, match=f"max_model_len is {longest + 1}; the model's own limit is {longest}"):
        plan(model, max_model_len=longest + 1)


def test_a_group_limits_the_memory(monkeypatch):
    free, total = available_memory(), total_memory()
    limits = [cgroup.MemoryLimit(3000, 1000), cgroup.MemoryLimit(2000, 1500)]
    monkeypatch.setattr(cgroup, "memory_limits", lambda: limits)
    assert (available_memory(), total_memory()) == (1000, 2000)
    monkeypatch.setattr(cgroup, "memory_limits", lambda: [cgroup.MemoryLimit(2**60, 2**60)])
    assert total_memory() >= total and available_memory() < 2**50 and free > 64 * 2**20


@pytest.mark.parametrize(
    ("given", "named"),
    [({"kv_cache_memory_bytes": 17 * GiB}, "17.00 GiB"), ({"num_gpu_blocks_override": 60_000}, "20.60 GiB")],
)
def test_a_cache_larger_than_the_machine_is_refused_by_its_option(given, named):
    (param, value) = next(iter(given.items()))
    with pytest.raises(ConfigError, match=f"{param} is {value}, a KV cache of {named}; there are 16.00 GiB") as error:
        plan(total=16 * GiB, available=2 * GiB, **given)
    assert error.value.param == param
    # What is free at the moment does not count, so that an engine comes back whatever has come meanwhile.
    assert plan(total=32 * GiB, available=2 * GiB, **given).num_blocks


def test_available_memory_is_plausible():
    assert 64 * 2**20 < available_memory() < 2**50


def test_the_swap_space_is_memory_too_unless_it_is_a_file():
    block = kv_block_bytes(ModelConfig.from_hf(LLAMA), 16, "bfloat16")
    options = {"gpu_memory_utilization": 0.9, "swap_space": 1}
    without, inside, file = plan(gpu_memory_utilization=0.9), plan(**options), plan(**options, swap_dir="swap")
    assert (without.num_slots, inside.num_slots, file.num_slots) == (0, GiB // block, GiB // block)
    assert (without.tiers, inside.tiers, file.tiers) == (0, GiB, 0)
    assert file.num_blocks == without.num_blocks
    assert inside.num_blocks == pytest.approx(without.num_blocks - GiB / block, abs=1)
    assert "tiers behind the KV cache 1.00 GiB" in str(inside)


def test_a_swap_space_below_one_block_is_refused():
    with pytest.raises(ConfigError, match=r"swap_space is 0\.0001 GiB; a KV block takes 0\.4 MiB"):
        plan(swap_space=0.0001)

"""Rope tables of every type against transformers' own rope functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.models.config import ModelConfig
from octavo.models.rope import rope_frequencies, rope_table

LENGTH = 8192
PAIRS = 32
LONG = [1.0 + 0.11 * i for i in range(PAIRS)]
SHORT = [1.0 + 0.01 * i for i in range(PAIRS)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}

CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default, large base": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "yarn, all its fields": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 2048,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "long_factor": LONG,
        "short_factor": SHORT,
        "original_max_position_embeddings": 2048,
    },
    "longrope, no factor": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": LONG,
        "short_factor": SHORT,
        "original_max_position_embeddings": 1024,
    },
}


def configs(rope: dict[str, Any], max_positions: int = 4096) -> tuple[ModelConfig, LlamaConfig]:
    hf = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=2 * PAIRS,
        max_position_embeddings=max_positions,
        rope_parameters=dict(rope),
        architectures=["LlamaForCausalLM"],
    )
    return ModelConfig.from_hf(hf.to_dict()), hf


def transformers_frequencies(config: LlamaConfig, length: int) -> tuple[torch.Tensor, float]:
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [1000, LENGTH])
def test_equals_transformers(name: str, length: int) -> None:
    config, hf = configs(CASES[name])
    expected_frequencies, expected_scale = transformers_frequencies(hf, length)
    frequencies, scale = rope_frequencies(config, length)
    assert scale == pytest.approx(expected_scale, rel=1e-12)
    # transformers' powers are not always correctly rounded: its last bit is the only freedom.
    np.testing.assert_array_max_ulp(frequencies, expected_frequencies.numpy(), maxulp=1)

    positions = torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * torch.from_numpy(frequencies)
    expected = torch.cat([angles.cos() * scale, angles.sin() * scale], dim=1).numpy()
    table = rope_table(config, length)
    assert table.shape == (length, 2 * PAIRS) and table.dtype == np.float32
    np.testing.assert_allclose(table, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["default", "default, large base", "linear", "llama3", "yarn", "longrope"])
def test_usual_checkpoints_have_the_same_frequencies_to_the_bit(name: str) -> None:
    config, hf = configs(CASES[name])
    np.testing.assert_array_equal(rope_frequencies(config, LENGTH)[0], transformers_frequencies(hf, LENGTH)[0].numpy())


def test_longrope_takes_the_long_set_where_the_length_exceeds_the_trained_one() -> None:
    config, _ = configs(CASES["longrope"])
    short, long = rope_frequencies(config, 2048)[0], rope_frequencies(config, 2049)[0]
    np.testing.assert_allclose(short / long, np.array(LONG) / np.array(SHORT), rtol=1e-6)


def test_dynamic_is_fixed_by_the_length() -> None:
    config, _ = configs(CASES["dynamic"])
    plain, _ = configs(CASES["default"])
    np.testing.assert_array_equal(rope_table(config, 4096), rope_table(plain, 4096))
    longer = rope_table(config, LENGTH)
    assert np.abs(longer[:4096] - rope_table(plain, 4096)).max() > 0.1


def test_the_old_spelling_is_the_same() -> None:
    new, _ = configs(CASES["llama3"])
    old = ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 256,
            "num_attention_heads": 4,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
            "rope_theta": 500000.0,
            "rope_scaling": {"type": "llama3", **LLAMA3},
        }
    )
    assert old.rope == new.rope

"""config.json's words: defaults, spellings, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import CheckpointError
from octavo.models.config import ModelConfig
from octavo.models.llama import Llama
from octavo.models.registry import model_class

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LONGROPE = {"rope_type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**BASE, **changes})


def test_defaults() -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.q_size, config.kv_size) == (4, 16, 64, 64)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 2048)
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    assert (config.rope.type, config.rope.theta, config.rope.rotary_dim) == ("default", 10000.0, 16)
    assert config.sliding_window is None


def test_explicit_nulls_are_absent() -> None:
    config = read(head_dim=None, num_key_value_heads=None, rope_scaling=None, sliding_window=None)
    assert config == read()


def test_rope_spellings() -> None:
    assert read(rope_theta=5e5).rope.theta == 5e5
    assert read(rope_theta=1.0, rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope.theta == 5e5
    old = read(rope_scaling={"type": "linear", "factor": 2})
    assert (old.rope.type, old.rope.factor) == ("linear", 2.0)
    assert read(rope_scaling={**LONGROPE, "type": "su", "rope_type": None}).rope.type == "longrope"


def test_trained_length() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read(rope_parameters=rope).rope.original_max_position_embeddings == 512
    # Phi-3 writes it beside the rope parameters, and there it comes first.
    top = read(rope_parameters=rope, original_max_position_embeddings=1024)
    assert top.rope.original_max_position_embeddings == 1024
    assert read(rope_scaling={"type": "linear", "factor": 2.0}).rope.original_max_position_embeddings == 2048
    assert read(rope_parameters={**rope, "factor": None}, max_position_embeddings=4096).rope.factor == 8.0


def test_partial_rotary() -> None:
    assert read(partial_rotary_factor=0.5).rope.rotary_dim == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "architectures is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a positive whole number"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4; it must be a multiple of num_key_value_heads, 3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; it must be a number"),
        ({"rope_scaling": {"type": "xpos"}}, "rope type 'xpos' is not known; known: default, linear, dynamic, llama3"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one for each layer type"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs factor, which is missing"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope type 'llama3' needs low_freq_factor"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor has 1 values; a head has 8 pairs to turn"),
        ({"head_dim": 15}, "15 columns of a head would turn"),
        ({"layer_types": ["linear_attention"]}, "layer_types has 'linear_attention'"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(**changes)


MISTRAL = {"architectures": ["MistralForCausalLM"], "sliding_window": 256}


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        (MISTRAL, 256),
        ({**MISTRAL, "sliding_window": None}, None),
        ({**MISTRAL, "layer_types": ["full_attention"] * 2}, None),
        ({**MISTRAL, "layer_types": ["full_attention", "sliding_attention"]}, 256),
        ({**MISTRAL, "use_sliding_window": False}, None),
        ({"sliding_window": 256}, None),  # Llama has none
    ],
)
def test_the_window_in_effect(changes: dict[str, Any], window: int | None) -> None:
    config = read(**changes)
    assert config.sliding_window == window
    config.check_max_model_len(256)
    if window is None:
        config.check_max_model_len(257)
    else:
        with pytest.raises(CheckpointError, match="sliding_window is 256 tokens, less than max_model_len, 257"):
            config.check_max_model_len(257)


def test_registry() -> None:
    assert model_class("LlamaForCausalLM") is Llama
    with pytest.raises(CheckpointError, match="'BertModel' is not known; known: LlamaForCausalLM, MistralForCausalLM"):
        model_class("BertModel")

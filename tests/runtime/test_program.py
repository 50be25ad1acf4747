"""The traced program: which instructions it consists of, and that it computes what eager execution does."""

from __future__ import annotations

import numpy as np
import pytest

from support.checkpoints import tiny_llama
from support.engines import all_logits, make_engine

FUSED_LAYER = [
    "rms_norm",
    "linear",
    "rope_write_kv",
    "attention",
    "linear_add",
    "rms_norm",
    "linear_silu_mul",
    "linear_add",
]


def ops_of(engine):
    return [instruction.op for instruction in engine.runner.executor.instructions()]


def test_a_layer_is_eight_instructions(tmp_path):
    engine = make_engine(tiny_llama(tmp_path, layers=3))
    assert ops_of(engine) == ["embedding", *FUSED_LAYER * 3, "take_rows", "rms_norm", "linear"]
    names = [instruction.name for instruction in engine.runner.executor.instructions()]
    assert "layers.2.gate_up" in names and "lm_head" in names


def test_halves_that_are_no_whole_panels_are_not_fused(tmp_path):
    model = tiny_llama(tmp_path, intermediate_size=40)
    engine = make_engine(model)
    assert "linear_silu_mul" not in ops_of(engine) and "silu_mul" in ops_of(engine)
    tokens = list(range(3, 40))
    assert np.array_equal(all_logits(engine, tokens), all_logits(make_engine(model, enforce_eager=True), tokens))


@pytest.mark.parametrize("overrides", [{}, {"tie": True}, {"attention_bias": True, "mlp_bias": True}, {"heads": 8}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_program_and_eager_agree_to_the_bit(tmp_path, dtype, overrides):
    model = tiny_llama(tmp_path, dtype=dtype, **overrides)
    tokens = [(i * 37) % 500 + 3 for i in range(200)]  # several chunks of logits
    assert np.array_equal(
        all_logits(make_engine(model), tokens), all_logits(make_engine(model, enforce_eager=True), tokens)
    )

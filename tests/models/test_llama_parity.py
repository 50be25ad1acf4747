"""The reference's logits against transformers in float32, for every variety of checkpoint that Llama serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from support.checkpoints import chain_llama, tiny_llama, write_gguf
from support.logits import model_logits, reference_logits, transformers_logits
from support.smollm2 import smol_tokenizer, smollm2_model

TOKENS = np.random.default_rng(7).integers(0, 379, 40).tolist()
PAIRS = 8  # of tiny_llama's heads of 16 columns
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0 + i for i in range(PAIRS)],
    "short_factor": [1.0 + 0.1 * i for i in range(PAIRS)],
}

FOLDERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie": True},
    "one kv head": {"kv_heads": 1},
    "as many kv heads": {"kv_heads": 4},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "heads wider than hidden": {"head_dim": 32},
    "padded vocabulary": {"vocab": 500},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "sharded": {"max_shard_size": 100_000},
    "mistral": {"architecture": "mistral", "sliding_window": None},
    "mistral, window of the whole context": {"architecture": "mistral", "sliding_window": 512},
    "rope linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "rope dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    "rope llama3": {"rope_parameters": LLAMA3},
    "rope yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    # transformers picks the set by the prompt's length, octavo by max_model_len: 40 tokens exceed 16, and 512 too.
    "rope longrope, long": {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 16}},
    "rope longrope, short": {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 512}},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folder(name: str, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", **FOLDERS[name])
    expected, logits = transformers_logits(folder, TOKENS), reference_logits(folder, TOKENS)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    best = np.sort(expected, axis=1)
    assert np.median(best[:, -1] - best[:, -2]) > 0.1, "the fixture's logits are too close to test anything"


def test_dynamic_rope_beyond_the_trained_length(tmp_path: Path) -> None:
    """transformers recomputes the base for a prompt of 40; octavo fixes it for max_model_len = 40."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    folder = tiny_llama(tmp_path / "model", rope_parameters=rope, max_position_embeddings=20)
    logits = reference_logits(folder, TOKENS, max_model_len=40)
    np.testing.assert_allclose(logits, transformers_logits(folder, TOKENS), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_bfloat16_is_close_to_float32(smollm2_hf: Path) -> None:
    """Only the inputs of matrix products are rounded: the next-token distributions hardly move."""
    text = "Once upon a time there was a small engine. It ran on water and old songs, and nobody knew why it never"
    tokens = smol_tokenizer()(text).input_ids
    expected = log_softmax(transformers_logits(smollm2_hf, tokens))
    ours = log_softmax(reference_logits(smollm2_hf, tokens, "bfloat16"))
    divergence = np.sum(np.exp(expected) * (expected - ours), axis=1)
    assert 0 < divergence.mean() < 5e-4


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("name", "options", "metadata"),
    [
        ("plain", {}, {}),
        ("tied", {"tie": True}, {}),
        ("attention bias", {"attention_bias": True}, {}),
        (
            "linear",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        ),
        (
            "yarn",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
            },
        ),
    ],
)
@pytest.mark.parametrize("tokenizer", ["bpe", "spm"])
def test_gguf_equals_the_folder_it_came_from(
    name: str, options: dict[str, Any], metadata: dict[str, Any], tokenizer: str, tmp_path: Path
) -> None:
    folder = tiny_llama(tmp_path / "model", **options)
    gguf = write_gguf(tmp_path / "model.gguf", folder, tokenizer=tokenizer, metadata=metadata)
    np.testing.assert_array_equal(reference_logits(gguf, TOKENS), reference_logits(folder, TOKENS))


@pytest.mark.parametrize("type", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_gguf_of_every_type(type: str, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", hidden=256, layers=1)
    gguf = write_gguf(tmp_path / "model.gguf", folder, type)
    np.testing.assert_allclose(reference_logits(gguf, TOKENS), transformers_logits(gguf, TOKENS), rtol=0, atol=2e-4)


def test_gguf_of_mixed_types(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", hidden=256, layers=1, tie=True)
    gguf = write_gguf(tmp_path / "model.gguf", folder, {"token_embd": "Q8_0", "ffn_down": "Q6_K", "attn_": "Q5_0"})
    np.testing.assert_allclose(reference_logits(gguf, TOKENS), transformers_logits(gguf, TOKENS), rtol=0, atol=2e-4)


@pytest.mark.slow
def test_smollm2_gguf(smollm2_gguf: Path) -> None:
    tokens = smol_tokenizer()("The capital of France is").input_ids
    logits = reference_logits(smollm2_gguf, tokens)
    np.testing.assert_allclose(logits, model_logits(smollm2_model(), tokens), rtol=0, atol=1e-3)
    assert smol_tokenizer().decode(logits[-1].argmax()) == " Paris"


def test_chain_says_its_script(tmp_path: Path) -> None:
    folder = chain_llama(tmp_path / "chain", ["Q", "Hello", " world", " how"], alts={"Hello": " how"})
    ids = [smol_tokenizer().encode(piece)[0] for piece in ["Q", "Hello", " world", " how"]]
    logits = reference_logits(folder, ids, "bfloat16")
    assert logits.argmax(axis=1).tolist() == [*ids[1:], 2]
    second, best = np.sort(logits, axis=1)[:, -2:].T
    np.testing.assert_allclose(best, 80, rtol=0, atol=1e-3)
    np.testing.assert_allclose(second, [0, 79, 0, 0], rtol=0, atol=1e-3)

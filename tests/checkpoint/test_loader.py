"""Loading a model: what is missing, mis-shaped, unused or extra, and that nothing is packed before all is checked."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoint.base import Checkpoint, open_checkpoint
from octavo.checkpoint.loader import load_model, weight_bytes
from octavo.errors import CheckpointError
from octavo.models.config import ModelConfig
from octavo.ops.api import TensorSource
from octavo.ops.reference import ReferenceBackend, ReferenceMatrix
from octavo.quant.formats import MatrixFormat, WeightFormats
from support.checkpoints import tiny_llama, tiny_model, write_gguf
from support.logits import reference_logits

TOKENS = [5, 9, 300, 17, 42]
Tensors = dict[str, torch.Tensor]


def edit(folder: Path, change: Callable[[Tensors], None]) -> Path:
    """Change the tensors of a folder on disk."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path, **changes: Any) -> Any:
    checkpoint = open_checkpoint(folder)
    config = ModelConfig.from_hf({**checkpoint.config, **changes})
    return load_model(checkpoint, config, Untouchable(), WeightFormats.plain("float32"), 64)


class Untouchable(ReferenceBackend):
    """A backend that must not be asked for anything: the checks come before the work."""

    def matrix(self, *_: Any, **__: Any) -> ReferenceMatrix:
        raise AssertionError("packed before all tensors were checked")

    def vector(self, source: TensorSource) -> Any:
        raise AssertionError("packed before all tensors were checked")


def test_load_2_an_untied_model_without_lm_head(tmp_path: Path) -> None:
    folder = edit(tiny_llama(tmp_path / "model"), lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight, which LlamaForCausalLM needs"):
        load(folder)


def test_load_2_a_tied_model_ignores_a_head_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_llama(tmp_path / "model", tie=True)
    expected = reference_logits(folder, TOKENS)
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": torch.randn(512, 64)}))
    with caplog.at_level(logging.WARNING, "octavo"):
        logits = reference_logits(folder, TOKENS)
    np.testing.assert_array_equal(logits, expected)
    (record,) = caplog.records
    assert "lm_head.weight" in record.getMessage()


def test_a_tied_model_shares_one_matrix(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama(tmp_path / "model", tie=True))
    config = ModelConfig.from_hf(checkpoint.config)
    model: Any = load_model(checkpoint, config, ReferenceBackend(), WeightFormats.plain("bfloat16"), 64)
    assert model.lm_head is model.embed


def test_load_4_extra_tensors_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_llama(tmp_path / "model")
    expected = reference_logits(folder, TOKENS)

    def change(tensors: Tensors) -> None:
        tensors["foo.bar"] = torch.randn(3)
        tensors["empty"] = torch.zeros(0)
        tensors["position_ids"] = torch.arange(4)
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.randn(8)

    edit(folder, change)
    with caplog.at_level(logging.WARNING, "octavo"):
        logits = reference_logits(folder, TOKENS)
    np.testing.assert_array_equal(logits, expected)
    (record,) = caplog.records
    message = record.getMessage()
    assert "empty, foo.bar, position_ids" in message and "inv_freq" not in message and "\n" not in message


def test_a_usual_checkpoint_loads_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference_logits(tiny_llama(tmp_path / "model"), TOKENS)
    assert not caplog.records


def test_missing_tensors_are_named_in_order(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", layers=11)

    def change(tensors: Tensors) -> None:
        for layer in range(11):
            del tensors[f"model.layers.{layer}.input_layernorm.weight"]

    edit(folder, change)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(8)]
    assert f"lacks {', '.join(names)} and 3 more, which" in str(caught.value)


def test_missing_biases_are_named(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", layers=1)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.0\.self_attn\.k_proj\.bias, "):
        load(folder, attention_bias=True)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.embed_tokens.weight", (511, 64), [512, 64]),
        ("model.layers.1.self_attn.k_proj.weight", (64, 64), [32, 64]),
        ("model.layers.0.mlp.down_proj.weight", (192, 64), [64, 192]),
        ("model.norm.weight", (65,), [64]),
        ("model.layers.0.input_layernorm.weight", (64, 1), [64]),
    ],
)
def test_a_wrong_shape_is_named(name: str, shape: tuple[int, ...], wanted: list[int], tmp_path: Path) -> None:
    folder = edit(tiny_llama(tmp_path / "model"), lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert f"{name} has shape {list(shape)}; config.json asks for {wanted}" in str(caught.value)


def test_an_unknown_type_is_named(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)

    folder = edit(tiny_llama(tmp_path / "model"), change)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has type F8_E4M3; octavo reads F32, F16, "):
        load(folder)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="architecture 'FooForCausalLM' is not known"):
        load(tiny_llama(tmp_path / "model"), architectures=["FooForCausalLM"])


def test_a_window_that_would_be_needed_is_refused(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", architecture="mistral", sliding_window=32)
    with pytest.raises(CheckpointError, match="sliding_window is 32 tokens, less than max_model_len, 64"):
        load(folder)


def test_a_gguf_with_a_tensor_of_another_shape(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", layers=1)
    path = write_gguf(tmp_path / "x.gguf", folder, metadata={"llama.feed_forward_length": 200})
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight has shape \[192, 64\]; .* \[200, 64\]"):
        load(path)


@pytest.mark.parametrize("tie", [True, False])
def test_dummy_weights(tie: bool, tmp_path: Path) -> None:
    tiny_model(tie=tie, attention_bias=True).config.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(text))
    checkpoint = open_checkpoint(tmp_path, "dummy")
    config = ModelConfig.from_hf(checkpoint.config)
    models: list[Any] = [
        load_model(checkpoint, config, ReferenceBackend(), WeightFormats.plain("float32"), 64, seed=seed)
        for seed in (0, 0, 1)
    ]
    first, again, other = (model.layers[0].qkv.values for model in models)
    assert first.shape == (128, 64)
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and (first != models[0].layers[1].qkv.values).any()
    assert (models[0].lm_head is models[0].embed) == tie
    assert models[0].norm.tolist() == [1.0] * 64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"tie": True}, {"attention_bias": True, "mlp_bias": True}])
def test_weight_bytes(dtype: Any, options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(**options)
    size = 4 if dtype == "float32" else 2
    expected = sum(p.numel() * (size if p.ndim == 2 else 4) for p in model.parameters())
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    checkpoint = Checkpoint(tmp_path, "config", config, {}, {})
    assert weight_bytes(checkpoint, ModelConfig.from_hf(config), WeightFormats.plain(dtype)) == expected


def test_weight_bytes_of_float32_products(tmp_path: Path) -> None:
    """Values of bfloat16 stay as they are where a whole matrix has such: q with k and v, gate with up."""
    folder = tiny_llama(tmp_path / "model")

    def size(types: str | dict[str, str]) -> int:
        checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", folder, types))
        return weight_bytes(checkpoint, ModelConfig.from_hf(checkpoint.config), WeightFormats.plain("float32"))

    matrices = sum(p.numel() for p in tiny_model().parameters() if p.ndim == 2)
    layers, rows, columns = 2, 64 + 32 + 32, 64
    assert size("F32") - size("BF16") == 2 * matrices
    assert size({"attn_k": "F32", "": "BF16"}) - size("BF16") == 2 * layers * rows * columns


def test_weight_bytes_of_a_matrix_that_must_be_unpacked(tmp_path: Path) -> None:
    """With 16 rows of k, the types of k and v change within a panel of 32 rows."""
    folder = tiny_llama(tmp_path / "model", kv_heads=1)
    formats = WeightFormats(*[MatrixFormat("int8", "blocks")] * 2)

    def size(types: dict[str, str]) -> int:
        checkpoint = open_checkpoint(write_gguf(tmp_path / "x.gguf", folder, types))
        return weight_bytes(checkpoint, ModelConfig.from_hf(checkpoint.config), formats)

    layers, rows, columns = 2, 64 + 16 + 16, 64
    added = size({"attn_k": "Q8_0", "attn_": "Q4_0"}) - size({"attn_": "Q4_0"})
    assert added == layers * rows * columns * (16 - 4.5) / 8

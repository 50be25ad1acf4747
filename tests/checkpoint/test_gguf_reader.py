"""The GGUF reader: metadata as the gguf package reads it, the translation to Hugging Face's words, broken files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from octavo.checkpoint.base import open_checkpoint
from octavo.checkpoint.gguf import open_gguf, read_metadata
from octavo.errors import CheckpointError
from octavo.models.config import ModelConfig
from octavo.models.rope import rope_frequencies
from support.checkpoints import tiny_llama, write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("folder"), layers=1, tie=True)


@pytest.fixture(scope="module")
def small(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", model)


@pytest.mark.parametrize("tokenizer", ["bpe", "spm"])
def test_metadata_equals_the_gguf_package(tokenizer: str, model: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", model, tokenizer=tokenizer)
    metadata = read_metadata(path)
    expected = gguf.GGUFReader(path)
    keys = [key for key in expected.fields if not key.startswith("GGUF.")]
    assert list(metadata) == keys
    for key in keys:
        value = metadata[key]
        value = value.tolist() if isinstance(value, np.ndarray) else value
        assert value == expected.fields[key].contents(), key
    assert isinstance(metadata["tokenizer.ggml.token_type"], np.ndarray)


def test_every_metadata_type(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    numbers = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 2**31, "int32": -(2**30)}
    numbers |= {"uint64": 2**63, "int64": -(2**62), "float32": 0.5, "float64": 0.1}
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(name, value)
    writer.add_bool("bool", True)
    writer.add_string("string", "naïve 日本語")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("bools", [True, False])
    writer.add_array("strings", ["", "a", "ď"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_metadata(tmp_path / "x.gguf")
    assert {name: metadata[name] for name in numbers} == numbers
    assert (metadata["bool"], metadata["string"]) == (True, "naïve 日本語")
    assert metadata["ints"].tolist() == [1, -2, 3]
    assert metadata["floats"].tolist() == [0.5, 1.5]
    assert metadata["bools"].tolist() == [True, False]
    assert metadata["strings"] == ["", "a", "ď"]


def test_config_of_smollm2(smollm2_gguf: Path) -> None:
    checkpoint = open_checkpoint(smollm2_gguf)
    assert (checkpoint.format, checkpoint.dtype) == ("gguf", "bfloat16")
    config = ModelConfig.from_hf(checkpoint.config)
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("LlamaForCausalLM", 49152, 576)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.intermediate_size, config.max_position_embeddings) == (1536, 8192)
    assert config.tie_word_embeddings and config.rms_norm_eps == pytest.approx(1e-5)
    assert (config.rope.type, config.rope.theta, config.rope.rotary_dim) == ("default", 100000.0, 64)
    assert (checkpoint.config["bos_token_id"], checkpoint.config["eos_token_id"]) == (1, 2)
    types = {source.type for source in checkpoint.tensors.values()}
    assert types == {"Q4_1", "Q8_0", "F32"}
    assert open_checkpoint(smollm2_gguf, "dummy").tensors == {}


def test_names(small: Path) -> None:
    layer = "model.layers.0."
    expected = {"model.embed_tokens.weight", "model.norm.weight"} | {
        f"{layer}{part}.weight"
        for part in (
            *(f"self_attn.{x}_proj" for x in "qkvo"),
            *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
            "input_layernorm",
            "post_attention_layernorm",
        )
    }
    assert set(open_gguf(small).tensors) == expected


def test_float32_files_stay_float32(small: Path, model: Path, tmp_path: Path) -> None:
    assert open_gguf(small).dtype == "float32"
    assert open_gguf(write_gguf(tmp_path / "half.gguf", model, {"attn_q": "F16"})).dtype == "bfloat16"


def test_several_end_tokens(model: Path, tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    path = write_gguf(tmp_path / "x.gguf", model, metadata=extra)
    assert open_gguf(path).config["eos_token_id"] == [2, 0]


def test_alignment_and_version_2(small: Path, model: Path, tmp_path: Path) -> None:
    """The data begin at a multiple of general.alignment; version 2 differs from 3 in its number only."""
    expected = {name: source.data.tobytes() for name, source in open_gguf(small).tensors.items()}
    wide = tmp_path / "wide.gguf"
    write_gguf(wide, model, metadata={"general.alignment": 32})
    content = bytearray(wide.read_bytes())
    content[4:8] = struct.pack("<I", 2)
    old = tmp_path / "old.gguf"
    old.write_bytes(content)
    assert {name: source.data.tobytes() for name, source in open_gguf(old).tensors.items()} == expected

    writer = gguf.GGUFWriter(tmp_path / "aligned.gguf", "llama")
    writer.add_custom_alignment(256)
    for key, value in read_metadata(small).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and key.startswith("llama."):
            getattr(writer, "add_float32" if isinstance(value, float) else "add_uint32")(key, value)
    for tensor in gguf.GGUFReader(small).tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    aligned = open_gguf(tmp_path / "aligned.gguf")
    assert {name: source.data.tobytes() for name, source in aligned.tensors.items()} == expected


def test_rope_freqs_divide_the_frequencies(small: Path, model: Path, tmp_path: Path) -> None:
    """llama.cpp writes Llama 3's scaling as one divisor per pair."""
    divisors = np.array([1, 1, 1, 2, 4, 8, 8, 8], np.float32)
    path = tmp_path / "x.gguf"
    _rewrite(small, path, {"rope_freqs.weight": divisors})
    config, plain = (ModelConfig.from_hf(open_gguf(p).config) for p in (path, small))
    scaled, scale = rope_frequencies(config, 4096)
    assert scale == 1.0
    np.testing.assert_allclose(scaled, rope_frequencies(plain, 4096)[0] / divisors, rtol=1.2e-7)


def test_partial_rotary(model: Path, tmp_path: Path) -> None:
    """Only the columns that turn were moved by the converter's order; the rest of a head stays in place."""
    path = write_gguf(tmp_path / "x.gguf", model, metadata={"llama.rope.dimension_count": 8})
    checkpoint = open_gguf(path)
    order = checkpoint.tensors["model.layers.0.self_attn.k_proj.weight"].row_order
    assert order is not None
    assert order[:16].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, *range(8, 16)]
    assert ModelConfig.from_hf(checkpoint.config).rope.rotary_dim == 8


def _rewrite(source: Path, path: Path, extra: dict[str, Any], architecture: str = "llama") -> None:
    """Copy the llama.* keys and the tensors, with `extra` tensors, under another architecture name if asked."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in read_metadata(source).items():
        if key.startswith("llama."):
            key = key.replace("llama.", f"{architecture}.")
            getattr(writer, "add_float32" if isinstance(value, float) else "add_uint32")(key, value)
    for tensor in gguf.GGUFReader(source).tensors:
        writer.add_tensor(tensor.name, tensor.data)
    for name, values in extra.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_an_unknown_architecture_is_named(small: Path, tmp_path: Path) -> None:
    _rewrite(small, tmp_path / "x.gguf", {}, "starcoder")
    with pytest.raises(CheckpointError, match="architecture 'starcoder' is not known; known: llama"):
        open_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "spiral"}, "rope scaling 'spiral' is not known; known: none, linear, yarn"),
        ({"llama.expert_count": 8}, "mixtures of experts are not known"),
        ({"general.alignment": 0}, "general.alignment is 0"),
    ],
)
def test_metadata_that_cannot_be_served(metadata: dict[str, Any], message: str, model: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", model, metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        open_gguf(path)


def _patched(path: Path, target: Path, old: bytes, new: bytes) -> Path:
    content = path.read_bytes()
    assert content.count(old) == 1
    target.write_bytes(content.replace(old, new))
    return target


def test_a_missing_key_is_named(small: Path, tmp_path: Path) -> None:
    path = _patched(small, tmp_path / "x.gguf", b"llama.block_count", b"llama.block_kount")
    with pytest.raises(CheckpointError, match=r"the metadata key llama\.block_count is missing"):
        open_gguf(path)


def test_missing_embeddings_are_named(small: Path, tmp_path: Path) -> None:
    path = _patched(small, tmp_path / "x.gguf", b"token_embd.weight", b"token_emb_.weight")
    with pytest.raises(CheckpointError, match=r"the tensor token_embd\.weight is missing"):
        open_gguf(path)


@pytest.mark.parametrize(("number", "shown"), [(10, "Q2_K"), (77, "number 77")])
def test_an_unknown_tensor_type_is_named(number: int, shown: str, small: Path, tmp_path: Path) -> None:
    name = b"blk.0.ffn_down.weight"
    shape = struct.pack("<IQQ", 2, 192, 64)
    old, new = (name + shape + struct.pack("<I", type) for type in (0, number))
    path = _patched(small, tmp_path / "x.gguf", old, new)
    with pytest.raises(CheckpointError, match=rf"blk\.0\.ffn_down\.weight has type {shown}; octavo reads F32, "):
        open_gguf(path)


def test_truncated_files(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    path = tmp_path / "x.gguf"
    path.write_bytes(content[:-200])
    with pytest.raises(CheckpointError, match=r"the file is cut short: \S+ ends at byte"):
        open_gguf(path)
    path.write_bytes(content[:5000])
    for reader in (open_gguf, read_metadata):
        with pytest.raises(CheckpointError, match="the file is cut short in its header"):
            reader(path)
    for nothing in (b"", b"GGML" + content[4:]):
        path.write_bytes(nothing)
        with pytest.raises(CheckpointError, match=r"x\.gguf"):
            open_gguf(path)


@pytest.mark.parametrize(("version", "shown"), [(struct.pack("<I", 1), "1"), (struct.pack(">I", 3), "50331648")])
def test_other_versions(version: bytes, shown: str, small: Path, tmp_path: Path) -> None:
    content = bytearray(small.read_bytes())
    content[4:8] = version
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"GGUF version {shown}; octavo reads 2 and 3"):
        open_gguf(tmp_path / "x.gguf")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    where=st.integers(4, 2**30),
    value=st.sampled_from([0, 1, 8, 9, 255, 2**31, 2**63, 2**64 - 1]),
    cut=st.integers(0, 1) | st.integers(0, 2**20),
)
@example(where=599, value=2**63, cut=0)  # the length of a string that is skipped, beyond what an offset can be
def test_any_damage_is_a_checkpoint_error_or_harmless(
    tmp_path: Path, tiny_file: bytes, where: int, value: int, cut: int
) -> None:
    content = bytearray(tiny_file)
    position = where % (len(content) - 8)
    content[position : position + 8] = struct.pack("<Q", value)
    path = tmp_path / "x.gguf"
    path.write_bytes(content[: len(content) - cut % len(content)])
    for reader in (open_gguf, read_metadata):
        try:
            reader(path)
        except CheckpointError as error:
            assert str(path) in str(error)


@pytest.fixture(scope="module")
def tiny_file(small: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A header of two kilobytes, so that random damage hits something."""
    path = tmp_path_factory.mktemp("tiny") / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in read_metadata(small).items():
        if key.startswith("llama."):
            getattr(writer, "add_float32" if isinstance(value, float) else "add_uint32")(key, value)
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight"):
        writer.add_tensor(name, np.zeros((16, 16), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()

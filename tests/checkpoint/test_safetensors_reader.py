"""The safetensors reader: what it reads, and one clear line for every way a file can be broken."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from octavo.checkpoint.base import open_checkpoint
from octavo.checkpoint.safetensors import INDEX, read_file, read_folder
from octavo.errors import CheckpointError
from octavo.ops.decode import decode
from support.checkpoints import tiny_llama


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(3, 5),
        "half": torch.randn(4).to(torch.float16),
        "brain": torch.randn(2, 2, 2).to(torch.bfloat16),
        "double": torch.randn(2, dtype=torch.float64),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(2.5),
        "ids": torch.arange(3),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_file(tmp_path / "x.safetensors")
    assert set(found) == set(tensors)
    assert found["ids"].type == "I64"
    for name in set(tensors) - {"ids"}:
        assert found[name].shape == tuple(tensors[name].shape)
        np.testing.assert_array_equal(decode(found[name]), tensors[name].float().numpy())


def test_tensors_at_odd_addresses(tmp_path: Path) -> None:
    values = np.array([1.5, -2.5], "<f4").tobytes()
    path = write(tmp_path / "x.safetensors", {"a": entry(1, 9)}, b"!" + values)
    assert decode(read_file(path)["a"]).tolist() == [1.5, -2.5]


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{not json}", b"", "the header is not a safetensors header"),
        (b"[]", b"", "the header is not a safetensors header"),
        (b"\xff\xfe\xfd", b"", "the header is not a safetensors header"),
        ({"a": 7}, b"", "the header is not a safetensors header"),
        ({"a": {"dtype": "F32"}}, b"", "the header is not a safetensors header"),
        ({"a": entry(0, 8, shape=(-2,))}, bytes(8), "the header is not a safetensors header"),
        ({"a": {**entry(0, 8), "data_offsets": [0]}}, bytes(8), "the header is not a safetensors header"),
        ({"a": {**entry(0, 8), "shape": ["2"]}}, bytes(8), "the header is not a safetensors header"),
        ({"a": entry(0, 8)}, bytes(7), "the file is cut short: a ends at byte 8 of 7 bytes"),
        ({"a": entry(0, 2**62)}, bytes(8), "the file is cut short: a ends at byte 4611686018427387904"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "b lies at bytes 4 to 12, which overlaps"),
        ({"a": entry(8, 0)}, bytes(8), "a lies at bytes 8 to 0"),
        ({"a": entry(0, 8, shape=(3,))}, bytes(8), r"a has 8 bytes, which does not fit F32 \[3\]"),
    ],
)
def test_broken_files(header: Any, data: bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_file(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 1000])
def test_load_4_absurd_header_lengths(length: int, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": entry(0, 8)}, bytes(8), length=length)
    with pytest.raises(CheckpointError, match=f"the header is said to have {length} bytes"):
        read_file(path)


@pytest.mark.parametrize("content", [b"", b"1234", b"\x00" * 8])
def test_files_that_are_hardly_there(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_file(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 200), byte=st.integers(0, 255), cut=st.integers(0, 60))
def test_any_damage_is_a_checkpoint_error_or_harmless(tmp_path: Path, position: int, byte: int, cut: int) -> None:
    path = write(tmp_path / "x.safetensors", {"a": entry(0, 8), "b": entry(8, 12, "BF16")}, bytes(12))
    content = bytearray(path.read_bytes())
    content[position % len(content)] = byte
    path.write_bytes(content[: len(content) - cut])
    try:
        tensors = read_file(path)
    except CheckpointError:
        return
    assert all(len(source.data) <= 12 for source in tensors.values())


def sharded(tmp_path: Path) -> Path:
    folder = tiny_llama(tmp_path / "model", max_shard_size=100_000)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


def test_load_3_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"{victim.name} is missing, which {INDEX} names"):
        read_folder(folder)


def test_the_index_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = sharded(tmp_path)
    expected = read_folder(folder)
    save_file({"model.norm.weight": torch.zeros(64), "other": torch.zeros(1)}, folder / "stray.safetensors")
    index = json.loads((folder / INDEX).read_text())
    dropped = "model.layers.0.input_layernorm.weight"  # a small one: its file holds others too
    file = index["weight_map"].pop(dropped)
    assert file in index["weight_map"].values()
    (folder / INDEX).write_text(json.dumps(index))
    with caplog.at_level(logging.WARNING, "octavo"):
        found = read_folder(folder)
    assert set(found) == set(expected) - {dropped}
    assert decode(found["model.norm.weight"]).any(), "the stray file's zeros were taken"
    (record,) = caplog.records
    assert "stray.safetensors" in record.getMessage() and f"{file}:{dropped}" in record.getMessage()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"weight_map": 3}'])
def test_a_broken_index(content: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match="holds no readable weight_map"):
        read_folder(tmp_path)


def test_a_tensor_that_the_index_puts_elsewhere(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"b": "x.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"x\.safetensors lacks the tensor b"):
        read_folder(tmp_path)


def test_folders_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \.safetensors file"):
        read_folder(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "weights.safetensors")
    assert set(read_folder(tmp_path)) == {"a"}
    save_file({"b": torch.zeros(2)}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"has 2 \.safetensors files but no model\.safetensors\.index\.json"):
        read_folder(tmp_path)
    save_file({"c": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert set(read_folder(tmp_path)) == {"c"}


@pytest.mark.parametrize(("dtype", "auto"), [("float32", "float32"), ("float16", "bfloat16"), ("bfloat16", "bfloat16")])
def test_open_checkpoint(dtype: str, auto: str, tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", dtype=dtype)
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.format, checkpoint.path, checkpoint.dtype) == ("safetensors", folder, auto)
    assert checkpoint.config["hidden_size"] == 64
    assert checkpoint.generation_config["eos_token_id"] == 2
    dummy = open_checkpoint(folder, "dummy")
    assert (dummy.format, dummy.tensors, dummy.dtype) == ("config", {}, auto)
    with pytest.raises(CheckpointError, match="is not a gguf checkpoint, which load_format asks for"):
        open_checkpoint(folder, "gguf")


def test_config_json_must_be_there_and_be_an_object(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: holds no JSON object"):
        open_checkpoint(tmp_path)

"""The fingerprint of KV blocks changes with everything that may change their bytes, and with nothing else."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.weight_files import EDGE_BYTES
from octavo.errors import CheckpointError
from octavo.models.config import ModelConfig
from octavo.ops import isa
from octavo.quant.formats import MatrixFormat, WeightFormats
from octavo.runtime.fingerprint import fingerprint

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
MODEL = ModelConfig.from_hf(HF_CONFIG)
DYNAMIC = ModelConfig.from_hf(HF_CONFIG | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})


def checkpoint(path: Path, format: str = "safetensors") -> Checkpoint:
    return Checkpoint(path, format, {}, {}, {})


def of(source: Checkpoint, model: ModelConfig = MODEL, **changed) -> bytes:
    options = {
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "formats": WeightFormats.plain("bfloat16"),
        "block_size": 16,
        "max_model_len": 512,
        "variant": isa.choose(),
        "seed": 0,
    }
    return fingerprint(source, model, **(options | changed))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (path / name).write_bytes(os.urandom(3 * EDGE_BYTES))
    return path


def test_every_option_that_changes_the_bytes_counts(folder: Path) -> None:
    int8 = MatrixFormat("int8", "blocks")
    source = checkpoint(folder)
    different = [
        of(source),
        of(source, dataclasses.replace(MODEL, rms_norm_eps=1e-5)),
        of(source, DYNAMIC),
        of(source, DYNAMIC, max_model_len=1024),
        of(source, dtype="float32"),
        of(source, kv_dtype="int8"),
        of(source, formats=WeightFormats(int8, int8)),
        of(source, formats=WeightFormats(int8, MatrixFormat("int8", "int8"))),
        of(source, block_size=32),
    ]
    assert len(set(different)) == len(different) and {len(each) for each in different} == {32}


def test_what_does_not_change_the_bytes_does_not_count(folder: Path, tmp_path: Path) -> None:
    known = of(checkpoint(folder))
    assert of(checkpoint(folder), seed=1, max_model_len=128) == known  # the rope table is only shorter
    (folder / "tokenizer.json").write_text("{}")
    moved = shutil.copytree(folder, tmp_path / "elsewhere")  # keeps the times
    assert of(checkpoint(moved)) == known


def test_the_weights_count(folder: Path) -> None:
    known = {of(checkpoint(folder))}
    path = folder / "b.safetensors"
    info, data = path.stat(), bytearray(path.read_bytes())

    def is_new() -> bool:
        found = of(checkpoint(folder))
        known.add(found)
        return len(known) == num_known + 1

    for offset in (0, len(data) - 1):  # at the ends, even where size and times are as before
        num_known = len(known)
        data[offset] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
        assert is_new(), f"byte {offset}"
    changes = (
        lambda: os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1)),
        lambda: path.rename(folder / "c.safetensors"),
        lambda: (folder / "model.safetensors.index.json").write_text("{}"),
        lambda: (folder / "a.safetensors").unlink(),
    )
    for number, change in enumerate(changes):
        num_known = len(known)
        change()
        assert is_new(), f"change {number}"


def test_one_file(folder: Path) -> None:
    first, second = (of(checkpoint(folder / name, "gguf")) for name in ("a.safetensors", "b.safetensors"))
    assert first != second
    with pytest.raises(CheckpointError, match=r"none\.gguf: cannot be read"):
        of(checkpoint(folder / "none.gguf", "gguf"))


def test_random_weights_are_known_by_their_seed(folder: Path) -> None:
    dummy = checkpoint(folder, "config")
    assert of(dummy) != of(dummy, seed=1)
    (folder / "a.safetensors").unlink()  # not read
    assert of(dummy) == of(dummy)


def test_the_build_counts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "kernels.so"
    monkeypatch.setattr(isa, "load", lambda variant: SimpleNamespace(__file__=str(module)))
    found = set()
    for build in (b"one", b"two"):
        module.write_bytes(build)
        found |= {of(checkpoint(folder), variant=variant) for variant in ("x86_v3", "x86_v4")}
    assert len(found) == 4

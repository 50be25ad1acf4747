"""`octavo bench kernels` on a tiny model: which kernels at which sizes, and what is counted of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.bench.kernels import Measurement, drift, matrix_shapes
from octavo.cli.main import main
from octavo.cli.profile import Shape, batch_of
from octavo.models.config import ModelConfig
from octavo.ops import isa
from octavo.runtime.memory import kv_block_bytes
from support.checkpoints import tiny_llama

SIZES = ["--num-tokens", "1,80", "--num-requests", "1,2", "--context-len", "40", "--prefill-len", "20"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder, dtype="bfloat16", tie=True)
    return str(folder)


def test_kernels(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernels.json"
    words = [*SIZES, "--num-iters", "2", "--max-model-len", "128", "--output-json", str(file)]
    assert main(["bench", "kernels", tiny, *words]) == 0
    record = json.loads(file.read_text())
    found = {(each["kernel"], each["rows"]): each for each in record["products"]}
    layers = ("qkv", "attention_out", "gate_up", "down")
    # The head computes 64 rows at a time at most.
    assert list(found) == [(name, rows) for name in layers for rows in (1, 80)] + [("lm_head", 1), ("lm_head", 64)]
    gate_up = found["gate_up", 80]
    bits = gate_up["bytes"] * 8 / (384 * 64)
    assert 12 < bits < 13 if isa.choose() in isa.COMPACTS else bits == 16
    assert (gate_up["shape"], gate_up["size"]) == ("384 × 64", f"{bits:.2f} bits")
    assert gate_up["flops"] == 2 * 384 * 64 * 80
    decode, both, prefill = record["attention"]
    assert [each["size"] for each in record["attention"]] == ["1 × 40", "2 × 40", "1 × 20"]
    model = ModelConfig.from_hf(json.loads(Path(tiny, "config.json").read_text()))
    assert decode["bytes"] == 40 / 16 * kv_block_bytes(model, 16, "bfloat16") / model.num_layers
    assert decode["flops"] == 40 * 4 * 4 * 16 and both["flops"] == 2 * decode["flops"]
    assert prefill["flops"] == 4 * 4 * 16 * sum(range(1, 21))
    assert gate_up["dtype"] == "bfloat16"
    assert set(record["limits"]) == {"before", "after"} and record["limits"]["before"]["bandwidth"] > 1e8
    assert all(each["seconds"] > 0 and each["share_of_limit"] > 0 for each in [*found.values(), decode, prefill])
    out = capsys.readouterr().out
    assert out.startswith("limits before: ") and "limits after: " in out and "% of limit" in out


def test_share_is_of_the_nearer_limit() -> None:
    limits = {"bandwidth": 100.0, "bfloat16": 1000.0}
    measured = Measurement("k", "", "", rows=1, dtype="bfloat16", seconds=2.0, bytes=100, flops=500)
    assert measured.share(limits) == 0.5
    assert Measurement("k", "", "", 1, "bfloat16", 2.0, bytes=100, flops=1500).share(limits) == 0.75


def test_drift_of_the_limits() -> None:
    assert drift({"bandwidth": 20.0, "int8": 100.0}, {"bandwidth": 25.0, "int8": 90.0}) == pytest.approx(0.2)


def test_shapes_of_tied_embeddings(tiny: str) -> None:
    shapes = matrix_shapes(ModelConfig.from_hf(json.loads(Path(tiny, "config.json").read_text())))
    assert shapes["lm_head"] == shapes["embed"] == (512, 64)
    assert shapes["qkv"] == (64 + 2 * 32, 64) and shapes["down"] == (64, 192)


def test_scattered_blocks() -> None:
    batch = batch_of(Shape(num_requests=2, num_tokens=3, context_len=40), 16, 100, shuffle=True)
    assert sorted(batch.block_tables.ravel().tolist()) == list(range(6))
    assert batch.block_tables.ravel().tolist() != list(range(6))
    for request in range(2):
        last_block = batch.block_tables[request, 2]
        slots = batch.slot_mapping[3 * request : 3 * request + 3]
        assert slots.tolist() == [last_block * 16 + 5, last_block * 16 + 6, last_block * 16 + 7]


def test_too_many_rows(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", tiny, "--num-tokens", "1,4096", "--max-model-len", "64"]) == 2
    assert capsys.readouterr().err == "octavo: error: --num-tokens is 4096; it must be in [1, 64]\n"
    assert main(["bench", "kernels", tiny, "--num-iters", "0"]) == 2
    assert capsys.readouterr().err == "octavo: error: --num-iters is 0; it must be at least 1\n"

"""`octavo bench sharing` on a tiny model: what is counted is exact, whatever the times are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from support.checkpoints import tiny_llama


def test_sharing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = tmp_path / "model", tmp_path / "sharing.json"
    model.mkdir()
    tiny_llama(model, max_position_embeddings=512)
    sizes = {
        "system-len": 100,
        "question-len": 5,
        "num-questions": 3,
        "answer-len": 4,
        "num-prompts": 2,
        "input-len": 64,
        "output-len": 20,
        "width": 3,
        "rounds": 1,
    }
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    assert main(["bench", "sharing", str(model), *flags, "--output-json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert set(figures["prefix"]) == {"cold", "warm", "ratio"}
    assert all(value > 0 for row in figures["prefix"].values() for value in row.values())
    separate, sampled, searched = figures["samples"].values()
    assert [run["output_tokens"] for run in (separate, sampled, searched)] == [2 * 3 * 20] * 3
    # 64 tokens are 4 blocks, 19 computed answers 2 more: all of them for each request, or the 4 once for each prompt.
    assert separate["peak_blocks"] == 6 * (4 + 2)
    assert sampled["peak_blocks"] == 2 * (4 + 3 * 2)
    assert searched["peak_blocks"] <= sampled["peak_blocks"]
    out = capsys.readouterr().out
    assert "2 requests with n = 3" in out and "times the throughput" in out

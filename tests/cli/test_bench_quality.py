"""`octavo bench quality`: the arithmetic on distributions known by hand, and whole runs on a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from octavo.cli.bench.quality import QUESTIONS, Text, chunks, diverge, reference_config
from octavo.cli.main import main
from octavo.config import EngineConfig
from support.checkpoints import tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder, dtype="bfloat16")
    return str(folder)


def logits(*probabilities: list[float]) -> np.ndarray:
    """Rows of logits; each has its own constant, which must not matter."""
    return np.array([np.log(row) + 3 * i for i, row in enumerate(probabilities)], np.float32)


def test_divergence_known_by_hand() -> None:
    reference = logits([0.5, 0.25, 0.25], [0.8, 0.1, 0.1])
    found = diverge(reference, logits([0.25, 0.5, 0.25], [0.8, 0.1, 0.1]), [1, 0])
    # 0.5 log(0.5 / 0.25) + 0.25 log(0.25 / 0.5)
    assert found.kl == pytest.approx([0.25 * math.log(2), 0], abs=1e-6)
    assert found.same_top.tolist() == [False, True]
    assert found.surprise == pytest.approx([-math.log(2), 0], abs=1e-6)
    figures = found.figures()
    assert figures["mean_kl"] == pytest.approx(0.125 * math.log(2), abs=1e-6)
    assert figures["max_kl"] == pytest.approx(0.25 * math.log(2), abs=1e-6)
    assert (figures["positions"], figures["top1_agreement"]) == (2, 0.5)
    assert figures["perplexity_ratio"] == pytest.approx(1 / math.sqrt(2))


def test_divergence_of_equal_logits_is_exactly_zero() -> None:
    rows = np.random.default_rng(0).normal(0, 5, (4, 100)).astype(np.float32)
    found = diverge(rows, rows.copy(), [0, 1, 2, 3])
    assert not found.kl.any() and not found.surprise.any() and found.same_top.all()


def test_steps_of_a_text() -> None:
    text = Text(list(range(100, 107)), first=2)
    assert text.targets == [103, 104, 105, 106]
    steps = list(chunks(text, block_size=16, max_tokens=4))
    assert [step.token_ids.tolist() for step in steps] == [[100, 101, 102, 103], [104, 105]]
    assert [step.positions.tolist() for step in steps] == [[0, 1, 2, 3], [4, 5]]
    assert [step.logit_rows.tolist() for step in steps] == [[2, 3], [0, 1]]
    assert [step.seq_lens.tolist() for step in steps] == [[4], [6]]


def test_reference_has_nothing_quantised() -> None:
    config = reference_config(EngineConfig(model="m", dtype="bfloat16", kv_cache_dtype="bfloat16", max_model_len=99))
    assert config == EngineConfig(model="m", dtype="float32", max_model_len=99)


def test_quality(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "quality.json"
    sizes = ["--output-len", "5", "--sampled-len", "4", "--max-num-batched-tokens", "16"]
    assert main(["bench", "quality", tiny, *sizes, "--compare", "dtype=float32", "--output-json", str(file)]) == 0
    record = json.loads(file.read_text())
    rounded, exact = record["settings"]["as given"], record["settings"]["dtype=float32"]
    for name, length in (("greedy", 5), ("sampled", 4)):
        assert 0 < exact[name]["positions"] <= length * len(QUESTIONS)
        assert exact[name]["mean_kl"] == exact[name]["max_kl"] == 0
        assert exact[name]["top1_agreement"] == exact[name]["perplexity_ratio"] == 1
        assert 1e-8 < rounded[name]["mean_kl"] < 1e-2
        assert rounded[name]["mean_kl"] < rounded[name]["max_kl"]
    assert record["engine"]["model"] == tiny and record["octavo"] and record["machine"]["cpus_online"] > 0
    assert record["command"].startswith("octavo bench quality ")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["as", "as", "dtype=float32", "dtype=float32"]


def test_wrong_flag_of_a_setting_is_named(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quality", tiny, "--compare", "dtipe=float32"]) == 2
    assert "unknown option --dtipe; did you mean --dtype?" in capsys.readouterr().err

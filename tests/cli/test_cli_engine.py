"""The subcommands that run an engine themselves, on a tiny model: benchmarks, inspect, chat without a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.bench.report import percentiles
from octavo.cli.inspect import find_repeat
from octavo.cli.main import main
from octavo.cli.profile import Shape
from support.checkpoints import tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder)
    return str(folder)


def test_latency(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [
        "--batch-size",
        "3",
        "--input-len",
        "5",
        "--output-len",
        "4",
        "--num-iters-warmup",
        "1",
        "--num-iters",
        "2",
    ]
    assert main(["bench", "latency", tiny, *sizes, "--output-json", str(tmp_path / "out.json")]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    assert len(figures["latencies"]) == 2 and min(figures["latencies"]) > 0
    assert figures["avg_latency"] == pytest.approx(sum(figures["latencies"]) / 2)
    assert figures["output_tokens_per_second"] == pytest.approx(12 / figures["percentiles"]["50"])
    assert figures["engine"]["model"] == tiny
    out = capsys.readouterr().out
    assert "3 × (5 tokens in, 4 out), 2 times" in out
    assert f"output tokens per second, by the median: {figures['output_tokens_per_second']:.1f}" in out


def test_throughput(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--num-prompts", "5", "--input-len", "6", "--output-len", "3", "--max-num-seqs", "2"]
    assert main(["bench", "throughput", tiny, *sizes, "--output-json", str(tmp_path / "out.json")]) == 0
    figures = json.loads((tmp_path / "out.json").read_text())
    assert (figures["num_requests"], figures["total_num_tokens"]) == (5, 5 * (6 + 3))
    assert figures["tokens_per_second"] == pytest.approx(45 / figures["elapsed_time"])
    assert figures["output_tokens_per_second"] == pytest.approx(15 / figures["elapsed_time"])
    assert 0 < figures["time_to_first_token"]["mean"] < figures["latency"]["mean"] <= figures["elapsed_time"]
    assert "seconds to the first token" in capsys.readouterr().out


def test_inspect(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads(Path(tiny, "config.json").read_text())
    assert main(["inspect", tiny, "--max-model-len", "64"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out and f"hidden {config['hidden_size']}" in out and "memory" in out
    for op in ("embedding", "rms_norm", "attention", "silu_mul", "take_rows"):
        assert op in out
    assert main(["inspect", tiny, "--max-model-len", "64", "--full"]) == 0
    full = capsys.readouterr().out
    assert f"layers.{config['num_hidden_layers'] - 1}.down" in full


def test_profile(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--num-requests", "2", "--num-tokens", "3", "--context-len", "20", "--num-iters", "2"]
    assert main(["inspect", tiny, "--profile", *shape]) == 0
    out = capsys.readouterr().out
    assert "2 × 3 tokens at a context of 20" in out and "limits of this machine" in out
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("total", "attention"))] == [
        "attention",
        "total",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num-tokens", "9", "--context-len", "0"], "--context-len is 0; it must be in [1, 512]"),
        (["--num-tokens", "9", "--context-len", "8"], "--num-tokens is 9; it must be in [1, 8]"),
        (["--enforce-eager"], "--profile times the native program, which --enforce-eager does without"),
    ],
)
def test_profile_of_an_impossible_step(
    tiny: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", tiny, "--profile", *words]) == 2
    assert capsys.readouterr().err == f"octavo: error: {said}\n"


def test_chat_and_complete_without_a_server(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", tiny, "--temperature", "0", "--max-tokens", "4"]
    assert main(["complete", "The quick", *words]) == 0
    first = capsys.readouterr().out
    assert main(["complete", "The quick", *words]) == 0
    assert capsys.readouterr().out == first != "\n"
    assert main(["chat", "Hello", "--system", "Be kind.", *words]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_missing_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "x", "--model", str(tmp_path / "none.gguf")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("octavo: error: ") and captured.err.count("\n") == 1


def test_percentiles() -> None:
    values = [float(i) for i in range(101)]
    assert percentiles(values) == {"10": 10.0, "25": 25.0, "50": 50.0, "75": 75.0, "90": 90.0, "99": 99.0}
    assert set(percentiles([2.0]).values()) == {2.0}


@pytest.mark.parametrize(
    ("lines", "found"),
    [("", (0, 0, 1)), ("abc", (0, 0, 1)), ("xabababy", (1, 2, 3)), ("aab", (0, 1, 2)), ("xyabcabcabz", (2, 3, 2))],
)
def test_repeated_layers_are_found(lines: str, found: tuple[int, int, int]) -> None:
    assert find_repeat(lines) == found


def test_tokens_attended_to() -> None:
    assert Shape(num_requests=2, num_tokens=3, context_len=5).num_attended == 2 * (3 + 4 + 5)

"""`octavo bench serve` against the real server and against one that fails; the sums on outcomes known by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.bench.outcomes import Outcome, sum_up
from octavo.cli.main import main
from support.checkpoints import tiny_llama
from support.served import ServerProcess

OBJECTIVES = "ttft:MILLISECONDS, tpot:MILLISECONDS, e2el:MILLISECONDS"
SIZES = ["--random-input-len", "6", "--random-output-len", "5", "--num-prompts", "7", "--max-concurrency", "3"]


def test_load_on_the_real_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llama(tmp_path / "tiny")
    file = tmp_path / "serve.json"
    server = ServerProcess(str(tmp_path / "tiny"), "--served-model-name", "m", "--num-gpu-blocks-override", "64")
    try:
        server.wait_until_ready()
        words = ["--base-url", server.url, "--tokenizer", str(tmp_path / "tiny"), "--output-json", str(file)]
        assert main(["bench", "serve", *SIZES, *words, "--ignore-eos", "--request-rate", "200"]) == 0
        assert server.metric("generation_tokens_total") == 8 * 5  # the trial too
    finally:
        server.close()
    figures = json.loads(file.read_text())
    assert (figures["completed"], figures["failed"], figures["model_id"]) == (7, 0, "m")
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (7 * 6, 7 * 5)
    assert figures["output_throughput"] == pytest.approx(35 / figures["duration"])
    assert 0 < figures["median_ttft_ms"] <= figures["median_e2el_ms"] < 1e3 * figures["duration"]
    assert figures["median_itl_ms"] <= figures["p99_itl_ms"]
    out = capsys.readouterr().out
    # What scripts look for in the output of `vllm bench serve`.
    assert re.search(r"Successful requests: +7$", out, re.M)
    assert re.search(r"Maximum request concurrency: +3$", out, re.M)
    for name in ("Output token throughput (tok/s):", "Mean TTFT (ms):", "P99 TTFT (ms):", "Mean TPOT (ms):"):
        assert re.search(rf"^{re.escape(name)} +[\d.]+$", out, re.M)


def test_request_that_is_sent(fake_server: Any) -> None:
    assert main(["bench", "serve", "--base-url", fake_server.url, *SIZES, "--api-key", "key"]) == 0
    models, *requests = fake_server.requests
    assert models[0] == "/v1/models" and len(requests) == 1 + 7
    prompts = [body.pop("prompt") for _, body, _ in requests]
    assert {len(prompt) for prompt in prompts} == {6} and len(set(map(tuple, prompts))) == 8
    assert {(path, key) for path, _, key in requests} == {("/v1/completions", "Bearer key")}
    assert requests[-1][1] == {
        "model": "fake",
        "max_tokens": 5,
        "temperature": 0.0,
        "ignore_eos": False,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_failed_requests_are_counted_and_named(fake_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.failure, fake_server.num_good = "out of paper", 3
    assert main(["bench", "serve", "--base-url", fake_server.url, *SIZES]) == 1
    captured = capsys.readouterr()
    assert re.search(r"Failed requests: +5$", captured.out, re.M)
    assert re.search(r"Successful requests: +2$", captured.out, re.M)
    assert captured.err == "5 × out of paper\n"


def test_server_that_refuses_the_trial(fake_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.status = 400
    assert main(["bench", "serve", "--base-url", fake_server.url, "--model", "m", *SIZES]) == 1
    message = "the first request, a trial, failed: max_tokens is -1; it must be at least 1"
    assert capsys.readouterr() == ("", f"octavo: error: {message}\n")


def test_sums() -> None:
    outcomes = [
        Outcome(input_len=4, output_len=3, ttft=0.1, gaps=[0.02, 0.04]),
        Outcome(input_len=4, output_len=1, ttft=0.3),
        Outcome(input_len=4, output_len=2, ttft=0.2, error="broken"),
    ]
    figures = sum_up(outcomes, duration=2.0)
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (8, 4)
    assert (figures["request_throughput"], figures["output_throughput"]) == (1.0, 2.0)
    assert figures["total_token_throughput"] == 6.0
    assert figures["mean_ttft_ms"] == figures["median_ttft_ms"] == pytest.approx(200)
    assert figures["std_ttft_ms"] == pytest.approx(100) and figures["p99_ttft_ms"] == pytest.approx(298)
    assert figures["mean_tpot_ms"] == pytest.approx(30)
    assert figures["median_e2el_ms"] == pytest.approx(230)


def test_goodput_counts_the_answers_that_meet_every_objective() -> None:
    outcomes = [
        Outcome(output_len=3, ttft=0.1, gaps=[0.02, 0.04]),  # 30 ms a token
        Outcome(output_len=3, ttft=0.1, gaps=[0.04, 0.06]),
        Outcome(output_len=1, ttft=0.3),
        Outcome(output_len=3, ttft=0.1, gaps=[0.02, 0.02], error="broken"),
    ]
    assert sum_up(outcomes, 2.0, objectives={"ttft": 200, "tpot": 40})["request_goodput"] == 0.5
    assert sum_up(outcomes, 2.0, objectives={"e2el": 300})["request_goodput"] == 1.5
    assert "request_goodput" not in sum_up(outcomes, 2.0)


def test_chosen_figures(fake_server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--goodput",
        "ttft:60000",
        "e2el:0.0001",
        "--percentile-metrics",
        "ttft",
        "--metric-percentiles",
        "50,99.9",
    ]
    file = tmp_path / "figures.json"
    assert main(["bench", "serve", "--base-url", fake_server.url, *SIZES, *words, "--output-json", str(file)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^Request goodput \(req/s\): +0.00$", out, re.M)
    assert "P99.9 TTFT (ms):" in out and "P50 TTFT (ms):" in out and "TPOT" not in out
    figures = json.loads(file.read_text())
    assert figures["goodput"] == {"ttft": 60000.0, "e2el": 0.0001} and "p99.9_itl_ms" in figures


def test_prompts_of_a_file(fake_server: Any, tmp_path: Path) -> None:
    lines = [{"prompt": "one", "output_tokens": 3}, {"prompt": "two"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "3"]
    assert main(["bench", "serve", "--base-url", fake_server.url, *words]) == 0
    sent = [(body["prompt"], body["max_tokens"]) for _, body, _ in fake_server.requests[1:]]
    assert sorted(sent) == [("one", 3), ("one", 3), ("two", 256), ("two", 256)]


def test_host_and_port(fake_server: Any) -> None:
    assert main(["bench", "serve", "--port", fake_server.url.rpartition(":")[2], *SIZES]) == 0
    assert len(fake_server.requests) == 1 + 1 + 7


def test_chat(fake_server: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n')
    words = ["--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "1", "--output-len", "4"]
    assert main(["bench", "serve", "--base-url", fake_server.url, "--backend", "openai-chat", *words]) == 0
    path, body, _ = fake_server.requests[-1]
    assert path == "/v1/chat/completions" and body["max_tokens"] == 4
    assert body["messages"] == [{"role": "user", "content": "one"}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0; it must be at least 1"),
        (["--max-concurrency", "0"], "--max-concurrency is 0; it must be at least 1"),
        (["--request-rate", "0"], "--request-rate is 0.0; it must be above 0 (inf: all at once)"),
        (["--burstiness", "0"], "--burstiness is 0.0; it must be above 0"),
        (["--random-range-ratio", "1"], "--random-range-ratio is 1.0; it must be at least 0 and below 1"),
        (["--base-url", "x", "--port", "1"], "--base-url is 'x'; it must be absent with --host or --port"),
        (["--output-len", "0"], "--output-len is 0; it must be at least 1"),
        (
            ["--goodput", "ttft"],
            "--goodput has 'ttft'; allowed: ttft:MILLISECONDS, tpot:MILLISECONDS, e2el:MILLISECONDS",
        ),
        (
            ["--goodput", "itl:5"],
            "--goodput has 'itl:5'; allowed: ttft:MILLISECONDS, tpot:MILLISECONDS, e2el:MILLISECONDS",
        ),
        (
            ["--dataset-name", "custom"],
            "--dataset-name is 'custom'; --dataset-path goes with custom and sharegpt alone, and they with it",
        ),
        (
            ["--dataset-path", "x"],
            "--dataset-name is 'random'; --dataset-path goes with custom and sharegpt alone, and they with it",
        ),
    ],
)
def test_wrong_options(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *words]) == 2
    assert capsys.readouterr().err == f"octavo: error: {said}\n"

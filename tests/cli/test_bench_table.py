"""`octavo bench table`: figures of engines as Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main


def write(path: Path, figures: Any) -> str:
    path.write_text(json.dumps(figures))
    return str(path)


def test_one_file_of_several_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(
        tmp_path / "served.json",
        {
            "fast": {"start_s": 0.5, "c1_out_tok_s": 150.4, "c16_tpot_ms": 20.0, "c1_ok": 6},
            "slow": {"start_s": 100, "c1_out_tok_s": 50.0},
        },
    )
    assert main(["bench", "table", file, "--against", "slow"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| | fast | slow |",
        "|---|---:|---:|",
        "| start to first token, s | 0.50 (0.01 ×) | 100 |",
        "| 1 user, output tokens/s | 150 (3.01 ×) | 50.0 |",
        "| 16 users, time per output token, ms | 20.0 |  |",
    ]


def test_rounds_become_medians_and_answers_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = ["x" * 40 + "a", "y"]
    files = [
        write(tmp_path / "exact.json", {"rows8_tok_s": 10.0, "answers": answers}),
        *(
            write(tmp_path / f"other.{i}.json", {"rows8_tok_s": speed, "answers": ["x" * 40 + "b", "z"]})
            for i, speed in enumerate((1.0, 3.0, 2.0))
        ),
    ]
    assert main(["bench", "table", *files]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| | exact | other |",
        "|---|---:|---:|",
        "| 8 at once, output tokens/s | 10.0 | 2.00 |",
        "| answers that begin as the first's | 2/2 | 1/2 |",
    ]


def test_what_octavo_bench_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"command": "octavo bench serve", "machine": {"cpu": "x"}, "output_throughput": 1234.5, "failed": 0}
    assert main(["bench", "table", write(tmp_path / "octavo.json", figures)]) == 0
    assert capsys.readouterr().out == "| | octavo |\n|---|---:|\n| output tokens/s | 1,234 |\n"


def test_files_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table", write(tmp_path / "a.json", {"start_s": 1}), "--against", "b"]) == 2
    assert capsys.readouterr().err == "octavo: error: --against is b; there are: a\n"
    for empty in ([], {}):
        assert main(["bench", "table", write(tmp_path / "empty.json", empty)]) == 2
        assert "empty.json holds no figures by name" in capsys.readouterr().err

"""benchmarks/offline.py: what it measures, on an engine that only takes notes; and that its table can be made."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from octavo.cli.main import main

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "offline.py"


class Notes:
    def __init__(self) -> None:
        self.work: list[tuple[int, int]] = []  # prompts, tokens each

    def complete(self, prompts: Sequence[str], length: int) -> None:
        assert len(set(prompts)) == len(prompts)
        self.work.append((len(prompts), length))

    def answer(self, question: str, length: int) -> str:
        return f"{length} words on: {question}"

    def count(self, text: str) -> int:
        return len(text.split())


@pytest.fixture(scope="module")
def offline() -> ModuleType:
    spec = importlib.util.spec_from_file_location("offline", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_work_of_an_engine(offline: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Notes()
    figures = offline.measure(engine, [1, 4], rounds=2)
    assert engine.work == [(1, 1), (1, 128), (1, 128), (4, 128), (4, 128), (8, 1)]
    assert list(figures) == ["start_s", "rows1_tok_s", "rows4_tok_s", "prefill_tok_s", "answers"]
    assert len(figures["answers"]) == 16 and figures["answers"][0].startswith("24 words on: What is the capital")
    (tmp_path / "notes.json").write_text(json.dumps(figures))
    assert main(["bench", "table", str(tmp_path / "notes.json")]) == 0
    names = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert names == [
        "| start to first token, s",
        "| 1 at once, output tokens/s",
        "| 4 at once, output tokens/s",
        "| prompts, tokens/s",
        "| answers that begin as the first's",
    ]


def test_questions_are_those_of_bench_quality(offline: ModuleType) -> None:
    from octavo.cli.bench.quality import QUESTIONS

    assert offline.QUESTIONS == QUESTIONS

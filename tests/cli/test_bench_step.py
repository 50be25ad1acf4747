"""`octavo bench step`: whole runs on a tiny model, and the clock by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from octavo.cli.bench.common import engine_of, make_llm, parse_counts
from octavo.cli.bench.step import NATIVE, OUTPUT, PYTHON, WARMUP, Enough, StepClock, clocks_on, sum_up
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from support.checkpoints import tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama(folder)
    return str(folder)


def test_step(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    sizes = ["--num-requests", "1,3", "--context-len", "20,30", "--num-steps", "4"]
    assert main(["bench", "step", tiny, *sizes, "--output-json", str(file)]) == 0
    points = json.loads(file.read_text())["points"]
    assert [(p["context_len"], p["num_requests"]) for p in points] == [(20, 1), (20, 3), (30, 1), (30, 3)]
    for point in points:
        assert point["num_steps"] == 4
        assert all(point["phases"][phase] > 0 for phase in (*PYTHON, *NATIVE, OUTPUT))
        assert 0 < max(point["python"], point["native"]) < point["step"] < point["step_and_output"]
    out = capsys.readouterr().out
    assert "1 × 20" in out and "program and sampler" in out and "tokens/s" in out


def test_clocks_are_taken_away(tiny: str) -> None:
    with make_llm(EngineConfig(model=tiny)) as llm:
        engine = engine_of(llm)
        with clocks_on(llm, StepClock(1, 1), every_phase=True):
            assert engine.step.__name__ == "timed_step" and engine.scheduler.schedule.__name__ == "timed_call"
        assert engine.step.__name__ == "step" and engine.scheduler.schedule.__name__ == "schedule"


class FakeScheduler:
    def __init__(self) -> None:
        self.running: list[int] = []
        self.step_tokens = 0


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakeEngine:
    """Each step takes a size, (requests that run, tokens), and a while."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        self.scheduler = FakeScheduler()
        self.clock = FakeClock()
        self._sizes = iter(sizes)
        self.inner: Callable[[], None] = lambda: None

    def step(self) -> None:
        num_running, self.scheduler.step_tokens = next(self._sizes)
        self.scheduler.running = [0] * num_running
        self.inner()
        self.clock.advance(5)


def test_time_of_an_inner_phase_is_not_the_outer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, engine = StepClock(1, 1), FakeEngine((1, 1))
    monkeypatch.setattr("octavo.cli.bench.step.time.perf_counter", lambda: engine.clock.now)
    engine.inner = clock.timed(NATIVE[0], lambda: engine.clock.advance(20))
    clock.timed_step(cast("Engine", engine))()
    clock.timed(OUTPUT, lambda: engine.clock.advance(10))()
    [phases] = clock.steady
    assert (phases[NATIVE[0]], phases["rest"], phases[OUTPUT]) == (20, 5, 10)
    figures = sum_up(clock.steady, clock.steady)
    assert figures["step"] == pytest.approx(phases[NATIVE[0]] + phases["rest"])
    assert figures["python"] == pytest.approx(phases["rest"]) and figures["phases"]["update"] == 0
    assert figures["step_and_output"] == pytest.approx(figures["step"] + phases[OUTPUT])


def test_steady_steps_are_those_of_decodes_alone() -> None:
    decodes = [(2, 2)] * (WARMUP + 1)
    clock, engine = StepClock(2, 1), FakeEngine((1, 9), (2, 5), *decodes, (2, 7), (2, 2))
    step = clock.timed_step(cast("Engine", engine))
    for _ in range(2 + len(decodes)):
        step()
    assert len(clock.steady) == len(decodes)
    with pytest.raises(Enough):
        step()


def test_context_that_is_full(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-requests", "1", "--context-len", "20", "--num-steps", "50", "--max-model-len", "64"]
    assert main(["bench", "step", tiny, *words]) == 1
    assert "1 requests decoded together in 42 steps only" in capsys.readouterr().err


def test_too_many_requests(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", tiny, "--num-requests", "9", "--max-num-seqs", "4"]) == 2
    assert "--num-requests is 9; at most 4 run (--max-num-seqs)" in capsys.readouterr().err


def test_lists_of_counts() -> None:
    assert parse_counts("1,8, 1k") == (1, 8, 1000)

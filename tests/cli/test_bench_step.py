"""`octavo bench step`: whole runs on a tiny model, and the clock by itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.cli.bench.common import engine_of, make_llm, parse_counts
from octavo.cli.bench.step import NATIVE, OUTPUT, PYTHON, StepClock, clocks_on, sum_up
from octavo.cli.main import main
from octavo.config import EngineConfig
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
    assert "1 × 20" in out and "native run" in out and "tokens/s" in out


def test_clocks_are_taken_away(tiny: str) -> None:
    with make_llm(EngineConfig(model=tiny)) as llm:
        engine = engine_of(llm)
        with clocks_on(llm, every_phase=True):
            assert engine.step.__name__ == "timed_step" and engine.scheduler.schedule.__name__ == "timed_call"
        assert engine.step.__name__ == "step" and engine.scheduler.schedule.__name__ == "schedule"


class FakeScheduler:
    def __init__(self) -> None:
        self.running: list[int] = []
        self.step_tokens = 0


class FakeEngine:
    """Each step takes a size, (requests that run, tokens), and a while."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        self.scheduler = FakeScheduler()
        self._sizes = iter(sizes)
        self.inner: Callable[[], None] = lambda: None

    def step(self) -> None:
        num_running, self.scheduler.step_tokens = next(self._sizes)
        self.scheduler.running = [0] * num_running
        self.inner()
        time.sleep(0.005)


def test_time_of_an_inner_phase_is_not_the_outer_ones() -> None:
    clock, engine = StepClock(), FakeEngine((1, 1))
    engine.inner = clock.timed("native run", lambda: time.sleep(0.02))
    clock.timed_step(engine)()  # type: ignore[arg-type]
    [phases] = clock.steps
    assert phases["native run"] >= 0.02 and 0.005 <= phases["rest"] < 0.02
    figures = sum_up(clock.steps, clock.steps)
    assert figures["step"] == pytest.approx(phases["native run"] + phases["rest"])
    assert figures["python"] == pytest.approx(phases["rest"]) and figures["phases"]["sample"] == 0


def test_steady_steps_are_those_of_decodes_alone() -> None:
    clock, engine = StepClock(), FakeEngine((1, 9), (2, 2), (1, 1), (2, 7))
    step = clock.timed_step(engine)  # type: ignore[arg-type]
    for _ in range(4):
        step()
    assert clock.steady(2) == [clock.steps[1]] and clock.steady(1) == [clock.steps[2]]


def test_too_many_requests(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", tiny, "--num-requests", "9", "--max-num-seqs", "4"]) == 2
    assert "--num-requests is 9; at most 4 run (--max-num-seqs)" in capsys.readouterr().err


def test_lists_of_counts() -> None:
    assert parse_counts("1,8, 1k") == (1, 8, 1000)

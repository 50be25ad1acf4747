"""Faults of an engine process, at a chosen moment: what its next lives are to suffer stands in a file.

`strike` carries one out, in whatever engine. FaultyEngine is the one of `fake_runner` with such a file, StruckRunner
goes around the runner of a real one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.core.plan import EvictBlock, StepPlan, StepResult
from octavo.engine.engine import Engine, Runner
from octavo.engine.messages import TokenDelta
from octavo.errors import CheckpointError
from support.fake_runner import FakeRunner

EVERY_TIME = -1
LONG_STEP_SECONDS = 0.5


class Stuck(BaseException):
    """The engine goes on, but its requests do not: `num_tokens` are computed in each step, for nothing."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens = num_tokens


@dataclass
class Fault:
    """Strikes before the step that would compute output token `at` (None: any) of the request `when`, or at the
    engine's "start"; `times` times, in all lives together, and one fault at a time. `decoding`: not where that step
    computes a prompt."""

    when: str
    at: int | None = None
    # "die", "hang" or "raise" (a step fails); at the start also "error" and "none"; in a step "long", "stall", "circle"
    kind: str = "die"
    times: int = 1
    decoding: bool = False


def write_faults(path: Path, faults: Sequence[Fault]) -> Path:
    """In one piece: others read the file at any moment."""
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(json.dumps([dataclasses.asdict(fault) for fault in faults]))
    return whole.replace(path)


def strike(path: Path, when: str, at: int | None = None, *, is_decode: bool = False) -> None:
    faults = [Fault(**fault) for fault in json.loads(path.read_text())]
    for fault in faults:
        if fault.times and fault.when == when and fault.at in (None, at) and is_decode >= fault.decoding:
            fault.times -= fault.times > 0
            write_faults(path, faults)
            match fault.kind:
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hang":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "raise":
                    raise RuntimeError("the step is struck")
                case "error":
                    raise CheckpointError("the file is gone")
                case "long":
                    time.sleep(LONG_STEP_SECONDS)
                case "stall":
                    raise Stuck(0)
                case "circle":
                    raise Stuck(7)
            return


class FaultyRunner(FakeRunner):
    def __init__(self, block_size: int, faults: Path) -> None:
        super().__init__(block_size)
        self.faults = faults

    def execute(self, plan: StepPlan) -> StepResult:
        for row in plan.scheduled:
            for request in (row.request, *row.forks):
                strike(self.faults, request.request_id, request.num_output_tokens, is_decode=row.num_tokens == 1)
        return super().execute(plan)


class StruckRunner:
    """A real runner, with faults."""

    def __init__(self, runner: Runner, faults: Path) -> None:
        self.runner = runner
        self.faults = faults

    def execute(self, plan: StepPlan) -> StepResult:
        for row in plan.scheduled:
            name = row.request.request_id.removeprefix("cmpl-").partition("#")[0]  # the id that a client gave
            strike(self.faults, name, row.request.num_output_tokens, is_decode=row.num_tokens == 1)
        return self.runner.execute(plan)

    def close(self, evictions: Sequence[EvictBlock]) -> None:
        self.runner.close(evictions)


class FaultyEngine(Engine):
    def __init__(self, engine: Engine, faults: Path) -> None:
        super().__init__(engine.scheduler, FaultyRunner(engine.info.block_size, faults), engine.info)
        self.stuck: Stuck | None = None

    def step(self) -> list[TokenDelta]:
        try:
            if self.stuck is None:
                return super().step()
        except Stuck as stuck:
            self.stuck = stuck
        time.sleep(0.002)
        self.scheduler.num_steps += 1
        self.scheduler.step_tokens = self.stuck.num_tokens
        return []

"""Faults of an engine process, at a chosen moment: what its next lives are to suffer stands in a file."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.core.plan import StepPlan, StepResult
from octavo.errors import CheckpointError
from support.fake_runner import FakeRunner

EVERY_TIME = -1


@dataclass
class Fault:
    """Strikes before the step that would compute output token `at` (None: any) of the request `when`, or at the
    engine's "start"; `times` times, in all lives together, and one fault at a time. `decoding`: not where that step
    computes a prompt."""

    when: str
    at: int | None = None
    kind: str = "die"  # or "hang", or "raise" (a step fails); at the start also "error" and "none"
    times: int = 1
    decoding: bool = False


def write_faults(path: Path, faults: Sequence[Fault]) -> Path:
    path.write_text(json.dumps([dataclasses.asdict(fault) for fault in faults]))
    return path


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

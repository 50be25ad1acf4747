"""The soak in small: benchmarks/soak.py finds nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoints import tiny_llama, tiny_tokenizer

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"


@pytest.mark.slow
def test_a_few_hundred_requests_leave_nothing(tmp_path):
    model = tiny_llama(tmp_path, vocab=len(tiny_tokenizer()))
    options = ["--requests", "300", "--stopped-readers", "32", "--client-timeout", "2", "--max-idle-cpu", "1"]
    engine_options = ["--max-model-len", "512", "--num-gpu-blocks-override", "128"]
    finished = subprocess.run(
        [sys.executable, str(SOAK), str(model), *options, *engine_options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    record = json.loads(finished.stdout)
    assert record["faults"] == [] and sum(record["requests"]["counted"].values()) > 200

"""The exit codes of `octavo serve`, as docs/deploy.md lists them. Those of signals are test_server_process.py's, that
of an engine which is given up is test_crash_with_model.py's."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {"architectures": ["NoSuchForCausalLM"], "model_type": "none", "vocab_size": 8}


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "octavo", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--no-such-option",), "--no-such-option"),
        (("--max-num-seqs", "many"), "max-num-seqs"),
        (("--swap-space", "-1"), "swap_space is -1"),
        (("--api-key-file", "/nowhere/keys"), "/nowhere/keys"),
        (("--config", "/nowhere/options.yaml"), "/nowhere/options.yaml"),
        (("--ssl-certfile", "/nowhere/cert.pem"), "/nowhere/cert.pem"),
        (("--tool-call-parser", "hermse"), "hermes, llama3_json"),
        (("--uds", "/nowhere/socket"), "/nowhere/socket"),
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_2_what_no_new_start_puts_right(tmp_path, arguments, words):
    done = serve(str(tmp_path), *arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_2_a_busy_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = serve(str(tmp_path), "--port", str(other.getsockname()[1]))
    assert done.returncode == 2 and "in use" in done.stderr


@pytest.mark.parametrize("kind", ["nothing", "architecture"])
def test_1_a_model_that_cannot_be_served(tmp_path: Path, kind):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if kind == "architecture":
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = serve(str(tmp_path), "--port", str(port))
    assert done.returncode == 1 and done.stderr.startswith("octavo: error: ") and "Traceback" not in done.stderr

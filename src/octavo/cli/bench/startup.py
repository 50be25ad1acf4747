"""`octavo bench startup`: from the start of a process to the first token, without a server and with one.

Every round is a fresh process. The files of model and libraries are in the system's cache after the first, which
is not counted. Where packed weights are kept, the first leaves a copy of them, and each round starts twice: with it and
without.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO

from octavo.cli.bench.common import make_parser, options_of, parse
from octavo.cli.bench.report import show_table, write_json
from octavo.cli.client import Client
from octavo.cli.flags import flag_name
from octavo.config import EngineConfig, packed_cache_folder
from octavo.errors import OctavoError

PYTHON = (sys.executable, "-P")  # -P: nothing is imported from the current folder
SERVER_EXIT_SECONDS = 30


def run(argv: list[str]) -> int:
    parser = make_parser(
        "startup",
        "From the start of a process to the first token, without a server and with one.",
        (("--num-iters", 5, "measured rounds"),),
    )
    args, config = parse(parser, argv, {"num_iters": 1})
    configs = {"": config}
    if packed_cache_folder(config) is not None:
        configs[", no copy"] = dataclasses.replace(config, enable_packed_cache=False)
    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(1 + args.num_iters):
        for suffix, each in configs.items():
            for kind, start in (("offline", start_offline), ("served", start_server)):
                rounds.setdefault(kind + suffix, []).append(start(each))
    figures = {kind: sum_up(parts[1:]) for kind, parts in rounds.items()}
    rows = [
        (kind, part, *(f"{f(seconds):.3f}" for f in (statistics.median, min, max)))
        for kind, parts in rounds.items()
        for part in parts[0]
        for seconds in [[each[part] for each in parts[1:]]]
    ]
    show_table(f"{config.model}, {args.num_iters} times, seconds", ("", "part", "median", "least", "most"), rows, 2)
    write_json(args, figures, config)
    return 0


def start_offline(config: EngineConfig) -> dict[str, float]:
    """Seconds of each part, in a process that makes an LLM."""
    began = time.monotonic()
    words = [*PYTHON, "-m", "octavo.cli.bench.first_token", json.dumps(options_of(config))]
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode != 0:
        raise OctavoError(f"the process failed: {_last_line(result.stderr)}")
    said = json.loads(result.stdout)
    print(f"weights: {said['loading']}")
    return parts_of(began, said["done"])


def start_server(config: EngineConfig) -> dict[str, float]:
    """Seconds of each part, with `octavo serve` and one client that asks as soon as it is ready."""
    began = time.monotonic()
    words = [*PYTHON, "-m", "octavo", "serve", config.model, *engine_flags(config), "--port", "0"]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        url = wait_until_ready(server.stderr)
        done = {"ready": time.monotonic()}
        client = Client(url)
        body = {"prompt": "Hi", "max_tokens": 1, "temperature": 0, "stream": True}
        next(client.stream("/v1/completions", body))
        done["first token"] = time.monotonic()
    finally:
        server.terminate()
        try:
            server.communicate(timeout=SERVER_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.communicate()
    return parts_of(began, done)


def wait_until_ready(log: IO[str]) -> str:
    """The URL of a server that writes to `log`. Raises OctavoError with its last words if it ends before."""
    said = ""
    for line in log:
        said += line
        if match := re.search(r"ready on (\S+?);", line):
            return match[1]
    raise OctavoError(f"the server failed: {_last_line(said)}")


def engine_flags(config: EngineConfig) -> list[str]:
    """The command line that says what `config` does, the model apart."""
    words = []
    for field in dataclasses.fields(config):
        value, flag = getattr(config, field.name), flag_name(field.name)
        if field.name == "model" or value == field.default:
            continue
        words.append(f"{flag}={value}" if not isinstance(value, bool) else flag if value else f"--no-{flag[2:]}")
    return words


def parts_of(began: float, done: dict[str, float]) -> dict[str, float]:
    """From the moments at which parts were done, in order, to the seconds of each and of all."""
    starts = [began, *done.values()]
    parts = {name: end - start for (name, end), start in zip(done.items(), starts, strict=False)}
    return {**parts, "all": starts[-1] - began}


def sum_up(rounds: Sequence[dict[str, float]]) -> dict[str, object]:
    """The medians of all parts, and the rounds themselves; seconds."""
    medians = {part: statistics.median(each[part] for each in rounds) for part in rounds[0]}
    return {"median": medians, "rounds": list(rounds)}


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"

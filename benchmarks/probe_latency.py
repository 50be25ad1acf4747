#!/usr/bin/env python3
"""How soon a loaded server answers its probes: /health and /metrics beside long prompts and running streams.

    octavo serve MODEL --max-model-len 8192 --port 8001
    python benchmarks/probe_latency.py --port 8001 [--streams 16] [--prompt-len 8000] [--prompts 3] [--output-json FILE]

While --streams answers are streamed, one prompt of --prompt-len tokens after the other is computed. As long as that
takes, each probe is asked every 20 ms, on a new connection, as probes do. Milliseconds, and the seconds until each long
prompt had its first token.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from octavo.cli.bench.report import percentile

PROBES = ("/health", "/metrics")
PAUSE_SECONDS = 0.02


def post(port: int, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(response.read().decode())
    return response


def keep_streaming(port: int, prompt: list[int], over: threading.Event) -> None:
    while not over.is_set():
        response = post(port, {"prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True})
        while not over.is_set() and response.readline():
            pass
        response.close()


def keep_asking(port: int, path: str, seconds: list[float], over: threading.Event) -> None:
    while not over.is_set():
        began = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        connection.close()
        seconds.append(time.perf_counter() - began)
        if response.status != 200:
            raise SystemExit(f"{path}: {response.status}")
        time.sleep(PAUSE_SECONDS)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    numbers, over = random.Random(0), threading.Event()

    def prompt(length: int) -> list[int]:
        return [numbers.randrange(1000, 4000) for _ in range(length)]

    seconds: dict[str, list[float]] = {path: [] for path in PROBES}
    streams = [
        threading.Thread(target=keep_streaming, args=(args.port, prompt(32), over), daemon=True)
        for _ in range(args.streams)
    ]
    for thread in streams:
        thread.start()
    time.sleep(2.0)  # until all run
    probing = [
        threading.Thread(target=keep_asking, args=(args.port, path, seconds[path], over), daemon=True)
        for path in PROBES
    ]
    for thread in probing:
        thread.start()
    first_tokens = []
    for _ in range(args.prompts):
        began = time.perf_counter()
        post(args.port, {"prompt": prompt(args.prompt_len), "max_tokens": 1}).read()
        first_tokens.append(time.perf_counter() - began)
    over.set()
    for thread in (*probing, *streams):
        thread.join()
    figures: dict[str, Any] = {
        "streams": args.streams,
        "prompt_len": args.prompt_len,
        "first_token_seconds": [round(each, 2) for each in first_tokens],
    }
    for path, values in seconds.items():
        figures[path] = {
            "count": len(values),
            "median_ms": 1e3 * statistics.median(values),
            "p99_ms": 1e3 * percentile(values, 99),
            "max_ms": 1e3 * max(values),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=8000)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--output-json", type=Path)
    args = parser.parse_args()
    figures = json.dumps(measure(args), indent=2)
    print(figures)
    if args.output_json is not None:
        args.output_json.write_text(figures + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What the API server's own process costs, without a model: CPU time for a streamed token.

    python benchmarks/api_cost.py MODEL [--streams 16] [--rate 1000] [--seconds 10] [--endpoint chat] [--profile FILE]

MODEL gives the tokenizer and nothing else: the engine's process is a stand-in that says the tokens of a fixed text, one
for each stream in a step, at --rate tokens a second over all streams. Everything else is as served: the supervisor, the
messages between the processes, detokenising, JSON, events, sockets; a third process reads the streams. The figures are
the API process's user and system time between two moments at which all streams run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

TEXT = "The lighthouse keeper wrote down the wind, the sea and the hour, as he did each night, and put the pen away.\n"
SETTLE_SECONDS = 2.0
ENGINE_ROLE = "--engine"  # the first argument of the stand-in's process; what follows is the server's
TICKS = os.sysconf("SC_CLK_TCK")


class PacedEngine:
    """The stand-in, as engine/process.py sees an engine."""

    def __init__(self, config: Any) -> None:
        from octavo.engine.front_end import load_front_end
        from octavo.engine.messages import EngineInfo

        front_end = load_front_end(config)
        self._text = front_end.tokenizer.encode(TEXT, add_special_tokens=False)
        vocab_size = front_end.tokenizer.vocab_size
        self.info = EngineInfo(100_000, vocab_size, 16, 100_000, "none", "none", 1, "no memory", 1000)
        self._num_said: dict[str, int] = {}
        self._num_steps = 0
        self._rate = float(os.environ["API_COST_RATE"])
        self._next_step = time.monotonic()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._num_said)

    def add_request(self, source: Any) -> None:
        self._num_said[source.request_id] = 0

    def abort(self, request_ids: list[str]) -> list[Any]:
        for request_id in request_ids:
            self._num_said.pop(request_id, None)
        return []

    def step(self) -> list[Any]:
        from octavo.engine.messages import TokenDelta

        self._next_step = max(time.monotonic(), self._next_step + len(self._num_said) / self._rate)
        time.sleep(max(0.0, self._next_step - time.monotonic()))
        self._num_steps += 1
        deltas = [TokenDelta(i, [self._text[n % len(self._text)]]) for i, n in self._num_said.items()]
        for request_id in self._num_said:
            self._num_said[request_id] += 1
        return deltas

    def stats(self) -> Any:
        from octavo.engine.messages import SchedulerStats

        num_running = len(self._num_said)
        return SchedulerStats(num_running=num_running, num_steps=self._num_steps, step_tokens=num_running)

    def reset_prefix_cache(self) -> None:
        pass

    def close(self) -> None:
        pass


def run_engine() -> int:
    from octavo.engine.process import run

    return run(PacedEngine)


def run_server(model: str, port: int, profile: str | None) -> int:
    """`octavo serve` with the stand-in."""
    from octavo.cli.main import main
    from octavo.engine import client

    client.ENGINE_COMMAND = (sys.executable, __file__, ENGINE_ROLE)
    serve = ["serve", model, "--port", str(port)]
    if profile is None:
        return main(serve)
    import cProfile

    return cProfile.runctx("main(serve)", {"main": main, "serve": serve}, {}, profile) or 0


def run_reader(port: int, streams: int, endpoint: str) -> int:
    """Opens the streams and reads whatever comes, until it is killed."""
    import selectors

    body: dict[str, Any] = {"stream": True, "max_tokens": 90_000, "ignore_eos": True}
    if endpoint == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Tell me a story."}]
    else:
        path, body["prompt"] = "/v1/completions", "Once upon a time"
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + data)
        selector.register(connection, selectors.EVENT_READ)
    num_events = 0
    while True:
        for key, _ in selector.select():
            received = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            if not received:
                raise SystemExit("a stream ended")
            num_events += received.count(b"data: ")
        print(num_events, flush=True)


def cpu_seconds(pid: int) -> tuple[float, float]:
    """In user code and in the system's."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return int(fields[11]) / TICKS, int(fields[12]) / TICKS


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    me = (sys.executable, __file__)
    options = ["--port", str(port), "--streams", str(args.streams), "--endpoint", args.endpoint]
    if args.profile:
        options += ["--profile", args.profile]
    environment = os.environ | {"API_COST_RATE": str(args.rate)}
    serve = [*me, "--role", "server", *options, args.model]
    server = subprocess.Popen(serve, env=environment, stderr=subprocess.DEVNULL)
    reader = None
    try:
        wait_for(port)
        reader = subprocess.Popen([*me, "--role", "reader", *options, ""], stdout=subprocess.PIPE, text=True)
        assert reader.stdout is not None
        begin = wait_until(reader.stdout, SETTLE_SECONDS, server.pid)
        end = wait_until(reader.stdout, args.seconds, server.pid)
    finally:
        for process in (reader, server):
            if process is not None:
                process.send_signal(signal.SIGTERM if process is server else signal.SIGKILL)
                process.wait()
    seconds, user, system, tokens = (last - first for first, last in zip(begin, end, strict=True))
    return {
        "streams": args.streams,
        "endpoint": args.endpoint,
        "tokens_per_second": tokens / seconds,
        "user_microseconds_per_token": user / tokens * 1e6,
        "system_microseconds_per_token": system / tokens * 1e6,
        "core_at_1000_tokens_per_second": (user + system) / tokens * 1000,
    }


def wait_for(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            time.sleep(1.0)  # it listens before it is ready
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server does not start")


def wait_until(events: Any, seconds: float, pid: int) -> tuple[float, float, float, int]:
    """After so many seconds: the time, the server's CPU times, events read so far."""
    until = time.monotonic() + seconds
    for line in events:
        if time.monotonic() >= until:
            return time.monotonic(), *cpu_seconds(pid), int(line)
    raise SystemExit("the streams ended")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1000.0, help="tokens a second, over all streams")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="chat")
    parser.add_argument("--profile", metavar="FILE", help="cProfile's figures of the API process (they slow it down)")
    parser.add_argument("--role", choices=("server", "reader"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    if sys.argv[1:2] == [ENGINE_ROLE]:
        return run_engine()
    args = parser.parse_args()
    match args.role:
        case "server":
            return run_server(args.model, args.port, args.profile)
        case "reader":
            return run_reader(args.port, args.streams, args.endpoint)
    print(json.dumps(measure(args), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

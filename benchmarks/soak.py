#!/usr/bin/env python3
"""A server under thousands of short requests, of which some are cut off: does anything grow, and do the counts agree?

    PYTHON soak.py MODEL [--requests 20000] [--disconnects 0.2] [--stopped-readers 200] [options of octavo serve]

Starts `octavo serve`, which its clients (soak_load.py) talk to. Give it a KV pool that the warm-up fills
(--num-gpu-blocks-override). Four parts:

    warm-up      a tenth as many requests, and the stopped readers: what is made once is made, all blocks were used
    requests     short ones of many kinds, streamed and not; a share of the clients leaves, at once or in mid-stream
    stopped      clients that ask for long streams with logprobs and then read nothing, beside others that read. They
                 must cost little, and be dropped after --client-timeout
    exact        requests that all end, one by one: the server's counts have to be the clients' sums

Prints a JSON record, and exits with 1 where a limit is passed: memory of either process grows by more than 30 MB after
the warm-up, descriptors or threads are left, blocks or requests are, a count is wrong, an idle server uses the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soak_load import CLIENTS, Client, Tally, many_requests, stopped_readers

MAX_GROWTH = 30 * 2**20  # bytes
MAX_READER = 300 * 2**10  # bytes in the server, of a client that does not read
IDLE_SECONDS = 6.0
REST_SECONDS = 11.0  # after two more beats an idle engine is left alone (engine/supervisor.py)
SETTLE_SECONDS = 20.0  # until what was cut off must be gone
REASONS = ("stop", "length", "abort", "error", "tool_calls")


# ── The server ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Usage:
    """What a process holds."""

    resident: int  # bytes
    descriptors: int
    threads: int
    cpu_seconds: float


def usage_of(pid: int) -> Usage:
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return Usage(
        resident=int(status["VmRSS"].split()[0]) * 1024,
        descriptors=len(list((process / "fd").iterdir())),
        threads=int(status["Threads"]),
        cpu_seconds=sum(int((task / "schedstat").read_text().split()[0]) for task in (process / "task").iterdir())
        / 1e9,
    )


def num_connections(port: int) -> int:
    """That the server has open: its ends of them in the kernel's table."""
    listening, nobodys = "0A", "0"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = [row for row in rows if row[1].endswith(f":{port:04X}") and row[3] != listening]
    return sum(row[9] != nobodys for row in mine)  # what is over belongs to no process


class Server:
    def __init__(self, model: str, options: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "octavo", "serve", model, "--port", str(self.port), *options]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # a pipe that nobody reads would stop the server
        self.process = subprocess.Popen(command, stderr=self._log)
        while "ready on" not in self.log():
            if self.process.poll() is not None:
                raise SystemExit(self.log())
            time.sleep(0.05)

    def log(self) -> str:
        return os.pread(self._log.fileno(), 2**26, 0).decode()

    def pids(self) -> dict[str, int]:
        """Of the server, its engine, and the process that stands by."""
        pid = self.process.pid
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        by_size = sorted(children, key=lambda child: -usage_of(child).resident)
        return {"server": pid, **dict(zip(("engine", "standby"), by_size, strict=False))}

    def usage(self) -> dict[str, Usage]:
        return {name: usage_of(pid) for name, pid in self.pids().items()}

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


# ── What is compared ──────────────────────────────────────────────────────────────────────────────────────────────


class Figures:
    """The server's own, of one moment."""

    def __init__(self, text: str) -> None:
        self._values = {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith("vllm:")
        }

    def __getitem__(self, name: str) -> float:
        return sum(value for key, value in self._values.items() if key.startswith(f"vllm:{name}{{"))

    def reasons(self) -> dict[str, int]:
        return {
            reason: int(sum(value for key, value in self._values.items() if f'finished_reason="{reason}"' in key))
            for reason in REASONS
        }


async def figures(port: int) -> Figures:
    client = Client(port)
    text = await client.get("/metrics")
    client.leave()
    return Figures(text)


async def settled(port: int) -> Figures:
    """Once no request is left, or should be none."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        now = await figures(port)
        if not now["num_requests_running"] + now["num_requests_waiting"] or time.monotonic() > deadline:
            return now
        await asyncio.sleep(0.1)


class Report:
    def __init__(self) -> None:
        self.record: dict[str, Any] = {}
        self.faults: list[str] = []

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.faults.append(what)

    def note_memory(self, name: str, before: dict[str, Usage], after: dict[str, Usage]) -> None:
        for process, usage in after.items():
            if process not in before:
                continue
            growth = usage.resident - before[process].resident
            self.record[f"{name}: {process} grew by, MB"] = round(growth / 2**20, 1)
            self.check(growth < MAX_GROWTH, f"{name}: the {process} grew by {growth / 2**20:.1f} MB")

    def note_leftovers(self, before: dict[str, Usage], after: dict[str, Usage]) -> None:
        for process, usage in after.items():
            if process in before:
                for what in ("descriptors", "threads"):
                    was, now = getattr(before[process], what), getattr(usage, what)
                    self.record[f"{process}: {what}"] = [was, now]
                    self.check(now <= was, f"the {process} had {was} {what}, and has {now}")

    def note_counts(self, before: Figures, after: Figures, tally: Tally) -> None:
        """Of requests of which some were cut off."""
        reasons = {reason: after.reasons()[reason] - before.reasons()[reason] for reason in REASONS}
        counted, seen = sum(reasons.values()), sum(tally.reasons.values())
        self.record["requests"] = {"sent": tally.sent, "left": tally.left + tally.left_at_once, "counted": reasons}
        self.check(not tally.unexpected, f"{len(tally.unexpected)} unexpected answers, such as {tally.unexpected[:3]}")
        # Who leaves at once may never have been heard.
        self.check(tally.sent - tally.left_at_once <= counted <= tally.sent, f"{tally.sent} sent, {counted} counted")
        self.check(seen + tally.left + tally.left_at_once == tally.sent, f"{tally.sent} sent, {seen} answered")
        for reason, number in tally.reasons.items():
            self.check(reasons[reason] >= number, f"{number} ended with {reason}, {reasons[reason]} counted")
        self.check(reasons["error"] == 0, f"{reasons['error']} errors")
        tokens = after["generation_tokens_total"] - before["generation_tokens_total"]
        of_requests = after["request_generation_tokens_sum"] - before["request_generation_tokens_sum"]
        self.record["output tokens"] = {
            "counted": tokens,
            "counted by request": of_requests,
            "seen": tally.output_tokens,
        }
        self.check(tokens >= tally.output_tokens, f"{tally.output_tokens} tokens seen, {tokens} counted")

    def note_exact_counts(self, before: Figures, after: Figures, tally: Tally) -> None:
        """Of requests that all ended, none by a stop string, behind which the engine may have been a token further."""
        self.check(not tally.unexpected, f"{len(tally.unexpected)} unexpected answers, such as {tally.unexpected[:3]}")
        reasons = {reason: after.reasons()[reason] - before.reasons()[reason] for reason in REASONS}
        expected = {reason: tally.reasons[reason] for reason in REASONS}
        self.record["exact: reasons"] = [expected, reasons]
        self.check(reasons == expected, f"ended {expected}, counted {reasons}")
        for name, seen in (
            ("generation_tokens_total", tally.output_tokens),
            ("request_generation_tokens_sum", tally.output_tokens),
            ("e2e_request_latency_seconds_count", tally.sent),
        ):
            counted = after[name] - before[name]
            self.record[f"exact: {name}"] = [seen, counted]
            self.check(counted == seen, f"{name} rose by {counted}, clients saw {seen}")

    def note_idle(self, now: Figures) -> None:
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            self.record[name] = now[name]
            self.check(now[name] == 0, f"{name} is {now[name]}")


async def soak(server: Server, args: argparse.Namespace, report: Report) -> None:
    port, number = server.port, args.requests
    await standby(server)
    await many_requests(port, max(64, number // 10), args.disconnects, seed=1)
    await soak_stopped_readers(server, args, report)
    warm_figures = await settled(port)
    warm = server.usage()
    began = time.monotonic()
    tally = await many_requests(port, number, args.disconnects, seed=2)
    report.record["requests per second"] = round(number / (time.monotonic() - began), 1)
    after = await settled(port)
    report.note_counts(warm_figures, after, tally)
    report.note_idle(after)
    report.note_memory("requests", warm, server.usage())
    await soak_stopped_readers(server, args, report)
    before = await settled(port)
    tally = await many_requests(port, max(32, number // 20), 0.0, seed=3)
    after = await settled(port)
    report.note_exact_counts(before, after, tally)
    report.note_idle(after)
    await note_rest(args, server, warm, report)


async def standby(server: Server) -> None:
    """Until there is one, which takes a descriptor of the server, and has imported all."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while "standby" not in server.pids() and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    await asyncio.sleep(IDLE_SECONDS)


async def soak_stopped_readers(server: Server, args: argparse.Namespace, report: Report) -> None:
    if not args.stopped_readers:
        return
    before = server.usage()
    clients = await stopped_readers(server.port, args.stopped_readers, args.stopped_tokens)
    beside = asyncio.create_task(many_requests(server.port, 2 * CLIENTS, 0.0, seed=4, clients=4))
    peak, num_open = 0, 1
    deadline = time.monotonic() + 10 * args.client_timeout + SETTLE_SECONDS
    while num_open and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        peak, num_open = max(peak, usage_of(server.process.pid).resident), num_connections(server.port)
    tally = await beside
    each = (peak - before["server"].resident) / args.stopped_readers
    report.record.setdefault("stopped readers: KB of the server for each", []).append(round(each / 2**10))
    report.check(each < MAX_READER, f"{args.stopped_readers} stopped readers cost {each / 2**10:.0f} KB each")
    report.check(num_open == 0, f"{num_open} connections of stopped readers are left")
    report.check(not tally.unexpected, f"beside stopped readers: {tally.unexpected[:3]}")
    for client in clients:
        client.leave()


async def note_rest(args: argparse.Namespace, server: Server, warm: dict[str, Usage], report: Report) -> None:
    """What is left when all is over."""
    await asyncio.sleep(REST_SECONDS)
    moments = [server.usage()]
    for _ in range(3):
        await asyncio.sleep(IDLE_SECONDS)
        moments.append(server.usage())
    report.note_memory("all", warm, moments[-1])
    report.note_leftovers(warm, moments[-1])
    for process in moments[0]:
        seconds = [moment[process].cpu_seconds for moment in moments]
        # The least of three: a busy machine makes the same work dearer.
        share = min(later - sooner for sooner, later in itertools.pairwise(seconds)) / IDLE_SECONDS
        report.record[f"{process}: CPU while idle"] = round(share, 4)
        report.check(share <= args.max_idle_cpu, f"the idle {process} uses {100 * share:.1f} % of a CPU")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--disconnects", type=float, default=0.2, help="share of the clients that leave")
    parser.add_argument("--stopped-readers", type=int, default=200)
    parser.add_argument("--stopped-tokens", type=int, default=400, help="length of the streams that nobody reads")
    parser.add_argument("--client-timeout", type=float, default=5.0)
    text = "share of one CPU that an idle process may use; what it is on a busy machine says nothing"
    parser.add_argument("--max-idle-cpu", type=float, default=0.002, help=text)
    args, options = parser.parse_known_args()
    report = Report()
    server = Server(args.model, ["--client-timeout", str(args.client_timeout), *options])
    try:
        asyncio.run(soak(server, args, report))
        code = server.stop()
        report.check(code == 0, f"the server ended with {code}")
        report.check("Traceback" not in (log := server.log()), f"the server's log: {log[-2000:]}")
    finally:
        server.process.kill()
    print(json.dumps({**report.record, "faults": report.faults}, indent=1, ensure_ascii=False))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())

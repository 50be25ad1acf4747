"""Sends hostile requests to a server on a port and looks at the answers: what is wrong with one, in words.

By hand, against any server: python -m support.fuzz http://127.0.0.1:8000 --num 20000 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from support.mutations import Hostile, Mutator

TIMEOUT = 20  # seconds for an answer: a machine that does much else is slow, what hangs takes for ever
BATCH = 500
FIXED = {"prompt": [5, 6, 7, 8], "max_tokens": 4, "seed": 7, "temperature": 0.8, "logprobs": 2, "n": 2}


@dataclass(slots=True)
class Findings:
    num_sent: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


class Connection:
    """One connection at a time, opened again where the server closes it."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, hostile: Hostile) -> Reply | None:
        """None: the server closed the connection without a word."""
        for _ in range(2):
            fresh = self._writer is None
            if fresh:
                self._reader, self._writer = await asyncio.open_connection(*self._address, limit=1 << 24)
            try:
                reply = await self._try(hostile)
            except (ConnectionError, asyncio.IncompleteReadError):
                reply = None
            if reply is None or reply.headers.get("connection") == "close":
                await self.close()
            if reply is not None or fresh:
                return reply
        return None

    async def _try(self, hostile: Hostile) -> Reply | None:
        assert self._reader is not None and self._writer is not None
        self._writer.write(hostile.data)
        await self._writer.drain()
        while True:
            head = await self._reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").splitlines()
            status = int(first.split()[1])
            if status >= 200:
                break
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        return Reply(status, headers, b"" if hostile.head_only else await self._body(headers))

    async def _body(self, headers: dict[str, str]) -> bytes:
        assert self._reader is not None
        if headers.get("transfer-encoding") != "chunked":
            return await self._reader.readexactly(int(headers.get("content-length", 0)))
        body = b""
        while size := int(await self._reader.readline(), 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()
        return body

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._reader = self._writer = None


def fault_of(reply: Reply | None) -> str | None:
    """What no request may bring about."""
    if reply is None:
        return "no answer"
    body = reply.body
    if (reply.status >= 500 and reply.status != 503) or reply.status == 422:
        return f"status {reply.status}"
    if b"internal_error" in body or b"Traceback" in body:
        return "an internal error within the answer"
    kind = reply.headers.get("content-type", "")
    if kind == "application/json" and body:
        try:
            record = json.loads(body)
        except ValueError:
            return "an answer that is no JSON"
        if reply.status >= 400:
            return _fault_of_error(record)
    elif reply.status >= 400 and body:
        return f"an error of type {kind!r}"
    elif kind.startswith("text/event-stream") and not body.endswith(b"\n\n"):
        return "a stream cut off"
    return None


def _fault_of_error(record: Any) -> str | None:
    error = record.get("error") if isinstance(record, dict) else None
    if (
        not isinstance(error, dict)
        or not isinstance(error.get("message"), str)
        or not isinstance(error.get("type"), str)
    ):
        return "an error that is no error object"
    return "an error without bounds" if len(error["message"]) > 3000 else None


async def fuzz(url: str, hostiles: Iterable[Hostile], *, num_connections: int = 8) -> Findings:
    """Sends them all, and looks after each BATCH whether the server is as it was."""
    findings = Findings()
    expected = await fixed_answer(url)
    batch: list[Hostile] = []
    for hostile in hostiles:
        batch.append(hostile)
        if len(batch) == BATCH:
            await _send_batch(url, batch, findings, num_connections)
            await _check(url, expected, findings)
            batch = []
    await _send_batch(url, batch, findings, num_connections)
    await _check(url, expected, findings)
    return findings


async def _send_batch(url: str, batch: list[Hostile], findings: Findings, num_connections: int) -> None:
    parts = urlsplit(url)
    queue = list(reversed(batch))

    async def work() -> None:
        connection = Connection(parts.hostname or "", parts.port or 80)
        while queue:
            hostile = queue.pop()
            findings.num_sent += 1
            try:
                async with asyncio.timeout(TIMEOUT):
                    reply = await connection.send(hostile)
                fault = fault_of(reply)
                findings.statuses[str(reply.status if reply else None)] += 1
            except TimeoutError:
                fault = f"no answer in {TIMEOUT} s"
                await connection.close()
            if fault is not None:
                findings.faults.append(f"{fault}: {hostile.data[:3000]!r}")
        await connection.close()

    await asyncio.gather(*(work() for _ in range(num_connections)))


async def _check(url: str, expected: str, findings: Findings) -> None:
    if await fixed_answer(url) != expected:
        findings.faults.append(f"after {findings.num_sent} requests a fixed one has another answer")
    if (left := await what_is_left(url)) is not None:
        findings.faults.append(f"after {findings.num_sent} requests the server still holds {left}")


async def fixed_answer(url: str) -> str:
    async with httpx.AsyncClient(timeout=TIMEOUT) as client:
        response = await client.post(f"{url}/v1/completions", json=FIXED)
        return json.dumps(response.json()["choices"])


async def what_is_left(url: str, patience: float = 5.0) -> str | None:
    """Of requests and KV blocks, when they have had time to go."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + patience
    async with httpx.AsyncClient(timeout=TIMEOUT) as client:
        while True:
            lines = (await client.get(f"{url}/metrics")).text.splitlines()
            held = [line for line in lines if line.startswith(tuple(f"vllm:{gauge}{{" for gauge in gauges))]
            held = [line for line in held if float(line.split()[-1])]
            if not held:
                return None
            if time.monotonic() > deadline:
                return ", ".join(held)
            await asyncio.sleep(0.02)


def hostiles(num: int, seed: int) -> Iterable[Hostile]:
    mutator = Mutator(seed)
    return (mutator.next() for _ in range(num))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--connections", type=int, default=8)
    asked = parser.parse_args()
    began = time.monotonic()
    found = asyncio.run(fuzz(asked.url, hostiles(asked.num, asked.seed), num_connections=asked.connections))
    print(f"{found.num_sent} requests in {time.monotonic() - began:.0f} s: {dict(found.statuses.most_common())}")
    for fault in found.faults:
        print(fault)


if __name__ == "__main__":
    main()

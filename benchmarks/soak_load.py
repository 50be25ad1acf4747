"""The load of soak.py: clients over plain sockets, which cost little, what they ask, and what they have seen."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

CLIENTS = 32  # at once
WORDS = ("the", "garden", "winter", "paper", "silver", "eleven", "chair", "mirror", "road", "fox", "jumps", "a", "dog")


@dataclass
class Tally:
    """What the clients know."""

    sent: int = 0  # samples
    left_at_once: int = 0  # samples whose client left before anything came
    left: int = 0  # and in mid-stream
    reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    unexpected: list[str] = field(default_factory=list)


class Client:
    """One connection after the other. HTTP/1.1 by hand: answers come in chunks, or with a length."""

    def __init__(self, port: int, receive_bytes: int | None = None) -> None:
        self._port = port
        self._receive_bytes = receive_bytes
        self._writer: asyncio.StreamWriter | None = None

    async def open(self, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        """The status and the head of the answer."""
        await self.send(path, body)
        head = await self.reader.readuntil(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), head.lower()

    async def send(self, path: str, body: dict[str, Any] | None) -> None:
        if self._writer is None:
            connection = socket.socket()
            connection.setblocking(False)
            if self._receive_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
            self.reader, self._writer = await asyncio.open_connection(sock=connection, limit=2**20)
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: a\r\n"
        kind = f"content-type: application/json\r\ncontent-length: {len(data)}\r\n"
        self._writer.write((head + (kind if body is not None else "") + "\r\n").encode() + data)

    async def rest(self, head: bytes) -> bytes:
        if b"content-length:" in head:
            return await self.reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        body = b""
        while chunk := await self.chunk():
            body += chunk
        return body

    async def chunk(self) -> bytes:
        size = int(await self.reader.readline(), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def get(self, path: str) -> str:
        _, head = await self.open(path, None)
        return (await self.rest(head)).decode()

    def leave(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None


def short_request(rng: random.Random, *, may_stop: bool) -> tuple[str, dict[str, Any]]:
    """A request of any kind; some begin alike. `may_stop`: some have stop strings."""
    words = " ".join(rng.choices(WORDS, k=rng.randint(1, 24)))
    body: dict[str, Any] = {
        "max_tokens": rng.randint(1, 24),
        "seed": rng.randrange(1000),
        "n": rng.choice((1, 1, 1, 2)),
    }
    if rng.random() < 0.6:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if may_stop and rng.random() < 0.2:
        body["stop"] = ["e", "\n"]
    if rng.random() < 0.2:
        body["temperature"] = 0.0
    if rng.random() < 0.3:
        prompt = rng.choice(("You are a helpful clerk of a library. Question: ", "")) + words
        return "/v1/completions", body | {"prompt": prompt, "logprobs": rng.choice((None, 0, 3))}
    messages = [{"role": "user", "content": words}]
    return "/v1/chat/completions", body | {"messages": messages, "logprobs": rng.random() < 0.1}


async def one_request(client: Client, rng: random.Random, tally: Tally, disconnects: float) -> None:
    path, body = short_request(rng, may_stop=disconnects > 0)
    tally.sent += body["n"]
    leaves = rng.random() < disconnects
    if leaves and rng.random() < 0.5:
        await client.send(path, body)
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.01, 0.1)))
        tally.left_at_once += body["n"]
        client.leave()
        return
    status, head = await client.open(path, body)
    if leaves and body.get("stream"):
        await client.chunk()
        tally.left += body["n"]
        client.leave()
        return
    answer = await client.rest(head)
    if status != 200:
        tally.unexpected.append(f"{status} {answer[:200]!r}")
        return
    note_answer(answer, tally, is_stream="stream" in body)


def note_answer(answer: bytes, tally: Tally, *, is_stream: bool) -> None:
    if not is_stream:
        records = [json.loads(answer)]
    else:
        events = [event.removeprefix(b"data: ") for event in answer.split(b"\n\n") if event]
        if events.pop() != b"[DONE]":
            tally.unexpected.append(f"a stream ended with {answer[-200:]!r}")
            return
        records = [json.loads(event) for event in events]
    for record in records:
        if "error" in record:
            tally.unexpected.append(str(record)[:300])
            return
        for choice in record["choices"]:
            if choice["finish_reason"] is not None:
                tally.reasons[choice["finish_reason"]] += 1
    tally.prompt_tokens += records[-1]["usage"]["prompt_tokens"]
    tally.output_tokens += records[-1]["usage"]["completion_tokens"]


async def many_requests(port: int, number: int, disconnects: float, seed: int, clients: int = CLIENTS) -> Tally:
    tally = Tally()
    left = iter(range(number))

    async def work(index: int) -> None:
        rng = random.Random(seed * 1000 + index)
        client = Client(port)
        for _ in left:
            try:
                await one_request(client, rng, tally, disconnects)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                tally.unexpected.append(repr(error))
                client.leave()
        client.leave()

    await asyncio.gather(*(work(index) for index in range(min(clients, number))))
    return tally


async def stopped_readers(port: int, number: int, num_tokens: int) -> list[Client]:
    """Clients that have sent a request for a long stream, and read its head and no more."""
    clients = [Client(port, receive_bytes=4096) for _ in range(number)]
    for index, client in enumerate(clients):
        body: dict[str, Any] = {"prompt": f"{index} the", "max_tokens": num_tokens, "ignore_eos": True}
        body |= {"stream": True, "logprobs": 5, "n": 4}  # more than a socket's buffer takes
        await client.send("/v1/completions", body)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
    return clients

"""How the front end talks to an engine, wherever that runs.

Owns the engine process, its socket and the news of its death. It knows no text: EngineRequests go in, TokenDeltas come
out.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from octavo import errors
from octavo.config import EngineConfig
from octavo.engine.messages import (
    AbortRequests,
    EngineInfo,
    EngineReply,
    MessageKind,
    SchedulerStats,
    StartLine,
    TokenDelta,
)
from octavo.errors import EngineDeadError
from octavo.request import EngineRequest

if TYPE_CHECKING:
    import zmq.asyncio

ENGINE_COMMAND = (
    sys.executable,
    "-P",
    "-m",
    "octavo.engine.process",
)  # -P: nothing is imported from the current folder
SHUTDOWN_SECONDS = 5.0  # a step in flight may finish; an engine that takes longer is killed
LAST_WORDS_SECONDS = 0.2  # what a dead engine had sent may still be in the socket
MAX_SOCKET_PATH = 100  # bytes; the system's limit is 104 to 108


class EngineClient(Protocol):
    """One engine. `info` is there after `start`; `stats` are those of the last `receive`."""

    info: EngineInfo
    stats: SchedulerStats

    @property
    def alive(self) -> bool: ...

    async def start(self) -> None:
        """Returns when the engine is ready. Raises what stopped it: ConfigError, CheckpointError, EngineDeadError …"""

    def add_request(self, request: EngineRequest) -> None:
        """Never waits. Raises EngineDeadError; a request that the engine refuses comes back as an error delta."""

    def abort(self, request_ids: list[str]) -> None:
        """Never waits; the requests are gone by the next step. Ids that are not live are ignored."""

    async def receive(self) -> list[TokenDelta]:
        """The next step's news, an empty list where only `stats` are new. Raises EngineDeadError."""

    async def close(self) -> None:
        """Ends the engine. May be called at any time, and twice."""


class ProcessClient:
    """An engine in a process of its own.

    Two channels lead there: a ZeroMQ socket in a private folder for the messages, and a socket pair on the engine's
    stdin. Neither side writes to the latter after the start line; each sees the other's death as its end.
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig, *, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self.stats = SchedulerStats()
        self._config = config
        self._command = command
        self._cleanup = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineReply)
        self._folder: Path
        self._socket: zmq.asyncio.Socket
        self._died: asyncio.Future[None]
        self._receiving: asyncio.Future[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._died.done()

    def launch(self) -> None:
        """Begin to start: the engine loads while the caller does something else. `start` does it if nobody has."""
        self._died = asyncio.get_running_loop().create_future()
        self._folder = _socket_folder()
        self._cleanup.callback(shutil.rmtree, self._folder, ignore_errors=True)
        address = f"ipc://{self._folder}/engine"
        self._spawn(StartLine(address, self._config))
        self._listen(address)

    async def start(self) -> None:
        try:
            if self._process is None:
                self.launch()
            reply = await self._next_reply()
            if reply.info is None:
                raise _start_error(reply)
        except BaseException:
            await self.close()
            raise
        # Both ends are connected: no file of ours is left from here on, however we end.
        shutil.rmtree(self._folder)
        self.info = reply.info
        self.stats = reply.stats or self.stats

    def add_request(self, request: EngineRequest) -> None:
        if not self.alive:
            raise EngineDeadError("the engine process is gone")
        self._send(MessageKind.ADD, request)

    def abort(self, request_ids: list[str]) -> None:
        if self.alive:
            self._send(MessageKind.ABORT, AbortRequests(request_ids))

    async def receive(self) -> list[TokenDelta]:
        reply = await self._next_reply()
        self.stats = reply.stats or self.stats
        return reply.deltas

    async def close(self) -> None:
        process, self._process = self._process, None
        try:
            if process is not None:
                if hasattr(self, "info") and not self._died.done():
                    self._send(MessageKind.SHUTDOWN, None)
                    await asyncio.wait((self._died,), timeout=SHUTDOWN_SECONDS)
                process.kill()
                await asyncio.to_thread(process.wait)
        finally:
            if self._receiving is not None:
                self._receiving.cancel()
            self._cleanup.close()

    def _spawn(self, start: StartLine) -> None:
        loop = asyncio.get_running_loop()
        lifeline, engine_stdin = socket.socketpair()
        self._cleanup.callback(lifeline.close)
        with engine_stdin:
            # Its stdout is our stderr: a library that prints must not get into a program's output. A process group of
            # its own: Ctrl-C in a terminal is for us, and we decide what becomes of the engine.
            self._process = subprocess.Popen(self._command, stdin=engine_stdin.fileno(), stdout=2, process_group=0)
        with contextlib.suppress(ConnectionError):  # it died before it read the line: seen just below
            lifeline.sendall(msgspec.json.encode(start) + b"\n")

        def on_end() -> None:
            loop.remove_reader(lifeline)
            self._died.set_result(None)

        loop.add_reader(lifeline, on_end)
        self._cleanup.callback(loop.remove_reader, lifeline)

    def _listen(self, address: str) -> None:
        import zmq.asyncio  # while the engine's process starts

        context = zmq.asyncio.Context()
        self._cleanup.callback(context.term)
        self._socket = context.socket(zmq.DEALER)
        self._cleanup.callback(self._socket.close, linger=0)
        self._socket.set_hwm(0)  # no limit: neither side may wait for the other
        self._socket.bind(address)

    def _send(self, kind: MessageKind, body: object) -> None:
        # The future is done at once: there is no limit to wait for. (It is not when the engine has just died.)
        self._socket.send_multipart([kind.value, self._encoder.encode(body)])

    async def _next_reply(self) -> EngineReply:
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self._socket.recv())
        await asyncio.wait((self._receiving, self._died), return_when=asyncio.FIRST_COMPLETED)
        if not self._receiving.done():
            await asyncio.wait((self._receiving,), timeout=LAST_WORDS_SECONDS)
        if not self._receiving.done():
            raise EngineDeadError(f"the engine process is gone ({await self._cause_of_death()})")
        message, self._receiving = self._receiving.result(), None
        return self._decoder.decode(message)

    async def _cause_of_death(self) -> str:
        if self._process is None:
            return "closed"
        self._process.kill()  # for one that has closed its stdin and lives on; a dead one keeps its exit code
        code = await asyncio.to_thread(self._process.wait)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _socket_folder() -> Path:
    """A new folder that only this user can open, with a path short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-"))
    if len(str(folder)) + len("/engine") > MAX_SOCKET_PATH:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="octavo-", dir="/tmp"))
    return folder


def _start_error(reply: EngineReply) -> errors.OctavoError:
    kind = getattr(errors, reply.fatal_kind or "", errors.OctavoError)
    error: errors.OctavoError = kind(reply.fatal or "the engine did not start")
    return error

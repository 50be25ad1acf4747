"""How the front end talks to an engine, wherever that runs.

Owns the engine process, its socket and the news of its death. It knows no text: EngineRequests go in, TokenDeltas come
out.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from octavo import errors
from octavo.config import EngineConfig
from octavo.core.picture import Picture
from octavo.engine.frames import FrameReader, frame
from octavo.engine.messages import AbortRequests, EngineInfo, EngineReply, MessageKind, SchedulerStats, TokenDelta
from octavo.errors import EngineDeadError
from octavo.request import EngineRequest

ENGINE_COMMAND = (
    sys.executable,
    "-P",
    "-m",
    "octavo.engine.process",
)  # -P: nothing is imported from the current folder
SHUTDOWN_SECONDS = 5.0  # a step in flight may finish; an engine that takes longer is killed
OFFLOAD_SECONDS = 15.0  # … and one that keeps its cache on disk may write it


class EngineClient(Protocol):
    """One engine. `info` is there after `start`; `stats` are those of the last `receive`, `picture` the last one that
    came."""

    info: EngineInfo
    stats: SchedulerStats

    @property
    def picture(self) -> Picture | None: ...

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""

    @property
    def restarting(self) -> bool:
        """Whether what is taken has to wait for an engine."""

    async def start(self) -> None:
        """Returns when the engine is ready. Raises what stopped it: ConfigError, CheckpointError, EngineDeadError …"""

    def add_request(self, request: EngineRequest) -> None:
        """Never waits. Raises EngineDeadError; a request that the engine refuses comes back as an error delta."""

    def abort(self, request_ids: list[str]) -> None:
        """Never waits; the requests are gone by the next step. Ids that are not live are ignored."""

    def reset_prefix_cache(self) -> None:
        """Never waits; holds for every request that is added later. Raises EngineDeadError."""

    def request_picture(self) -> None:
        """Never waits: the next `receive` or the one after it brings it, where the engine lives."""

    def look_after(self) -> None:
        """Never waits. Somebody asks how the engine is: one that was left alone is watched again, for a while."""

    async def receive(self) -> list[TokenDelta]:
        """The next step's news, an empty list where only `stats` are new. Raises EngineDeadError."""

    async def close(self) -> None:
        """Ends the engine. May be called at any time, and twice."""


class _Connection(asyncio.Protocol):
    """The client's end of the socket: replies in the order in which they came, and the news of the other end's end."""

    def __init__(self) -> None:
        self.replies: deque[bytes] = deque()
        self.news = asyncio.Event()  # a reply, or the end
        self.ended = asyncio.Event()
        self.was_heard = False  # anything has come since somebody set this to False
        self.num_beats_owed = 0  # signs of life that were asked for, and have not come yet
        self._reader = FrameReader()

    def data_received(self, data: bytes) -> None:
        self.was_heard = True
        messages = self._reader.feed(data)
        replies = [message for message in messages if message]  # an empty one answers a beat
        self.num_beats_owed -= len(messages) - len(replies)
        if replies:
            self.replies += replies
            self.news.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()
        self.news.set()


class ProcessClient:
    """An engine in a process of its own.

    One socket leads there, which is the engine's stdin: the first message is its configuration. Each side sees the
    other's death as the socket's end. The process may be started long before it is given anything to do.
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig, *, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self.stats = SchedulerStats()
        self.picture: Picture | None = None
        self._config = config
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._is_launched = False  # it has its configuration
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineReply)
        self._socket: socket.socket
        self._connection: _Connection | None = None
        self._transport: asyncio.Transport

    @property
    def alive(self) -> bool:
        return self._process is not None and self._connection is not None and not self._connection.ended.is_set()

    @property
    def restarting(self) -> bool:
        return False

    @property
    def has_news(self) -> bool:
        """Whether `receive` would return, or raise, at once."""
        connection = self._connection
        return connection is not None and bool(connection.replies or connection.ended.is_set())

    @property
    def is_standby(self) -> bool:
        """Whether there is a process that waits for `launch`, and lives."""
        return self._process is not None and not self._is_launched and self._process.poll() is None

    def spawn(self) -> None:
        """Start the process alone: it imports what it needs, and waits for `launch`. Again where it has died since.
        Raises EngineDeadError."""
        if self._process is not None:
            self._socket.close()
        try:
            self._socket, engine_stdin = socket.socketpair()
            with engine_stdin, contextlib.ExitStack() as failed:
                failed.callback(self._socket.close)
                # Its stdout is our stderr: a library that prints must not get into a program's output. A process group
                # of its own: Ctrl-C in a terminal is for us, and we decide what becomes of the engine.
                self._process = subprocess.Popen(self._command, stdin=engine_stdin.fileno(), stdout=2, process_group=0)
                failed.pop_all()
        except OSError as error:  # also where no descriptor is left
            raise EngineDeadError(f"no process can be started for the engine ({error})") from error

    def launch(self) -> None:
        """Begin to start: the engine loads while the caller does something else. `start` does it if nobody has. Raises
        EngineDeadError."""
        if not self.is_standby:
            self.spawn()
        self._is_launched = True
        with contextlib.suppress(ConnectionError):  # it died before it read this: seen when the connection ends
            self._socket.sendall(frame(self._encoder.encode(self._config)))

    async def start(self) -> None:
        try:
            if not self._is_launched:
                self.launch()
            self._transport, self._connection = await asyncio.get_running_loop().create_connection(
                _Connection, sock=self._socket
            )
            reply = await self._next_reply()
            if reply.info is None:
                raise _start_error(reply)
        except BaseException:
            await self.close()
            raise
        self.info = reply.info
        self.stats = reply.stats or self.stats

    def add_request(self, request: EngineRequest) -> None:
        self._check_alive()
        self._send(MessageKind.ADD, request)

    def abort(self, request_ids: list[str]) -> None:
        if self.alive:
            self._send(MessageKind.ABORT, AbortRequests(request_ids))

    def reset_prefix_cache(self) -> None:
        self._check_alive()
        self._send(MessageKind.RESET_PREFIX_CACHE, None)

    def request_picture(self) -> None:
        if self.alive:
            self._send(MessageKind.PICTURE, None)

    def look_after(self) -> None:
        """Its death is seen at once; for its silence see supervisor.py."""

    async def receive(self) -> list[TokenDelta]:
        reply = await self._next_reply()
        self.stats = reply.stats or self.stats
        self.picture = reply.picture or self.picture
        return reply.deltas

    @property
    def owes_beat(self) -> bool:
        """Whether it has yet to answer a call of `ask_for_beat`."""
        return self._connection is not None and self._connection.num_beats_owed > 0

    def ask_for_beat(self) -> bool:
        """Whether anything has come since the last call; and the process is asked for a sign of life."""
        connection = self._connection
        if connection is None or not self.alive:
            return False
        was_heard, connection.was_heard = connection.was_heard, False
        connection.num_beats_owed += 1
        self._transport.write(frame(MessageKind.BEAT.value))
        return was_heard

    def kill(self) -> None:
        """End the process now. `receive` still gives what it had said before."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        process, self._process = self._process, None
        connection = self._connection
        try:
            if process is not None and connection is not None and hasattr(self, "info"):
                await self._shut_down(connection)
        finally:
            if process is not None:
                process.kill()
            if connection is not None:
                self._transport.abort()
            elif process is not None:
                self._socket.close()
            if process is not None:
                await asyncio.to_thread(process.wait)

    async def _shut_down(self, connection: _Connection) -> None:
        if not connection.ended.is_set():
            self._send(MessageKind.SHUTDOWN, None)
            with contextlib.suppress(TimeoutError):
                grace = SHUTDOWN_SECONDS if self._config.kv_offload_dir is None else OFFLOAD_SECONDS
                await asyncio.wait_for(connection.ended.wait(), grace)

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineDeadError("the engine process is gone")

    def _send(self, kind: MessageKind, body: object) -> None:
        self._transport.write(frame(kind.value + self._encoder.encode(body)))

    async def _next_reply(self) -> EngineReply:
        connection = self._connection
        assert connection is not None, "the client has not been started"
        while not connection.replies:
            if self._process is None or connection.ended.is_set():
                raise EngineDeadError(f"the engine process is gone ({await self._cause_of_death()})")
            connection.news.clear()
            await connection.news.wait()
        return self._decoder.decode(connection.replies.popleft())

    async def _cause_of_death(self) -> str:
        if self._process is None:
            return "closed"
        self._process.kill()  # for one that has closed its stdin and lives on; a dead one keeps its exit code
        code = await asyncio.to_thread(self._process.wait)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _start_error(reply: EngineReply) -> errors.OctavoError:
    kind = getattr(errors, reply.fatal_kind or "", errors.OctavoError)
    error: errors.OctavoError = kind(reply.fatal or "the engine did not start")
    return error

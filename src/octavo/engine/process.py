"""The engine's own process: builds an engine and steps it while its client wants anything.

Owns the loop between a socket and the engine, and the process's end. It knows no text, no HTTP and no caller:
EngineRequests come in, EngineReplies go out. It reads its start line from stdin and ends when stdin does, so it never
outlives its client.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from octavo.config import EngineConfig
from octavo.engine.messages import AbortRequests, EngineReply, MessageKind, StartLine, TokenDelta
from octavo.errors import OctavoError
from octavo.request import EngineRequest, FinishReason

if TYPE_CHECKING:
    from octavo.engine.engine import Engine


class EngineLoop:
    """Steps an engine for one client. Blocks while there is nothing to do; one reply for each step."""

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()
        self._request_decoder = msgspec.msgpack.Decoder(EngineRequest)
        self._abort_decoder = msgspec.msgpack.Decoder(AbortRequests)

    def run(self) -> None:
        self.send(EngineReply(info=self._engine.info, stats=self._engine.stats()))
        while True:
            if not self._engine.has_unfinished:
                self._socket.poll()
            deltas: list[TokenDelta] = []
            if not self._receive(deltas):
                return
            if self._engine.has_unfinished:
                deltas += self._engine.step()
            # Without a delta too: the stats tell the client that an abort has freed its blocks.
            self.send(EngineReply(deltas=deltas, stats=self._engine.stats()))

    def send(self, reply: EngineReply) -> None:
        self._socket.send(self._encoder.encode(reply))

    def _receive(self, deltas: list[TokenDelta]) -> bool:
        """Take in all that has arrived; requests that the engine refuses go to `deltas`. False: shut down."""
        while self._socket.poll(0):
            kind, body = self._socket.recv_multipart()
            match MessageKind(kind):
                case MessageKind.ADD:
                    request = self._request_decoder.decode(body)
                    try:
                        self._engine.add_request(request)
                    except Exception as error:
                        message = str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"
                        deltas.append(TokenDelta(request.request_id, finish_reason=FinishReason.ERROR, error=message))
                case MessageKind.ABORT:
                    self._engine.abort(self._abort_decoder.decode(body).request_ids)
                case MessageKind.SHUTDOWN:
                    return False
        return True


def run(build: Callable[[EngineConfig], Any]) -> int:
    """Read the start line, build the engine, serve until told to stop; returns the exit code."""
    # The client decides when the engine ends: a signal to the whole group or terminal is not for the engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=StartLine)
    threading.Thread(target=_end_with_client, name="client-watch", daemon=True).start()
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        socket = stack.enter_context(context.socket(zmq.DEALER))
        socket.set_hwm(0)  # no limit: neither side may wait for the other
        socket.connect(start.address)
        try:
            engine = build(start.config)
        except OctavoError as error:
            fatal = EngineReply(fatal=error.message, fatal_kind=type(error).__name__)
            socket.send(msgspec.msgpack.encode(fatal))
            return 1
        # What lives now lives as long as the process: no collection need look at it again.
        gc.collect()
        gc.freeze()
        EngineLoop(engine, socket).run()
        return 0


def _end_with_client() -> None:
    """Ends the process, whatever it does, when the client's end of stdin closes."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def main() -> None:
    from octavo.engine.build import build_engine

    sys.exit(run(build_engine))


if __name__ == "__main__":
    main()

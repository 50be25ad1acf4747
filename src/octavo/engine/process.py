"""The engine's own process: builds an engine and steps it while its client wants anything.

Owns the loop between a socket and the engine, and the process's end. It knows no text, no HTTP and no caller:
EngineRequests come in, EngineReplies go out. The socket is its stdin. A thread reads it and ends the process where the
socket ends, so that the engine never outlives its client.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from octavo.config import EngineConfig
from octavo.engine.frames import FrameReader, frame
from octavo.engine.logs import set_up_logs
from octavo.engine.messages import AbortRequests, EngineReply, MessageKind, TokenDelta
from octavo.errors import OctavoError
from octavo.request import EngineRequest, FinishReason

if TYPE_CHECKING:
    from octavo.engine.engine import Engine


Inbox: TypeAlias = "queue.SimpleQueue[bytes]"  # messages: the kind (MessageKind), then the body


class EngineLoop:
    """Steps an engine for one client. Blocks while there is nothing to do; one reply for each step."""

    def __init__(self, engine: Engine, inbox: Inbox, send: Callable[[EngineReply], None]) -> None:
        self._engine = engine
        self._inbox = inbox
        self._send = send
        self._picture_wanted = False
        self._request_decoder = msgspec.msgpack.Decoder(EngineRequest)
        self._abort_decoder = msgspec.msgpack.Decoder(AbortRequests)

    def run(self) -> None:
        self._send(EngineReply(info=self._engine.info, stats=self._engine.stats()))
        while True:
            deltas: list[TokenDelta] = []
            if not self._receive(deltas):
                return
            if self._engine.has_unfinished:
                deltas += self._engine.step()
            picture = self._engine.picture() if self._picture_wanted else None
            self._picture_wanted = False
            # Without a delta too: the stats tell the client that an abort has freed its blocks.
            self._send(EngineReply(deltas=deltas, stats=self._engine.stats(), picture=picture))

    def _receive(self, deltas: list[TokenDelta]) -> bool:
        """Take in all that has arrived, and wait for it where there is nothing else to do. Requests that the engine
        refuses go to `deltas`. False: shut down."""
        waits = not self._engine.has_unfinished
        while waits or not self._inbox.empty():
            waits = False
            message = self._inbox.get()
            kind, body = message[:1], message[1:]
            match MessageKind(kind):
                case MessageKind.ADD:
                    request = self._request_decoder.decode(body)
                    try:
                        self._engine.add_request(request)
                    except Exception as error:
                        why = str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"
                        deltas.append(TokenDelta(request.request_id, finish_reason=FinishReason.ERROR, error=why))
                case MessageKind.ABORT:
                    self._engine.abort(self._abort_decoder.decode(body).request_ids)
                case MessageKind.RESET_PREFIX_CACHE:
                    self._engine.reset_prefix_cache()
                case MessageKind.PICTURE:
                    self._picture_wanted = True
                case MessageKind.SHUTDOWN:
                    return False
        return True


def run(build: Callable[[EngineConfig], Any], log_options: Sequence[str] = ()) -> int:
    """Read the configuration, build the engine, serve until told to stop; returns the exit code. `log_options`: none,
    or those of `set_up_logs`."""
    if log_options:
        set_up_logs(*log_options)
    # The client decides when the engine ends: a signal to the whole group or terminal is not for the engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    client = socket.socket(fileno=sys.stdin.fileno())
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_fill, args=(inbox, client), name="client-messages", daemon=True).start()
    encoder = msgspec.msgpack.Encoder()

    def send(reply: EngineReply) -> None:
        # The client always reads, so this waits only for one that has fallen many steps behind.
        client.sendall(frame(encoder.encode(reply)))

    config = msgspec.msgpack.decode(inbox.get(), type=EngineConfig)
    try:
        engine = build(config)
    except OctavoError as error:
        send(EngineReply(fatal=error.message, fatal_kind=type(error).__name__))
        return 1
    # What lives now lives as long as the process: no collection need look at it again.
    gc.collect()
    gc.freeze()
    EngineLoop(engine, inbox, send).run()
    engine.close()
    return 0


def _fill(inbox: Inbox, client: socket.socket) -> None:
    """Passes on the client's messages. Ends the process, whatever it does, when the client's end closes."""
    reader = FrameReader()
    with contextlib.suppress(ConnectionError):
        while data := client.recv(1 << 16):
            for message in reader.feed(data):
                inbox.put(message)
    os._exit(1)


def main() -> None:
    from octavo.engine.build import build_engine

    sys.exit(run(build_engine, sys.argv[1:]))


if __name__ == "__main__":
    main()

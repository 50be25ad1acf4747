"""What a server says at GET /live, for as long as anybody wants it: where it goes away, it is waited for.

Owns the thread that reads, and the terminal's keys meanwhile. Knows nothing of what a record means.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

from octavo.cli.client import Client
from octavo.errors import OctavoError

RETRY_SECONDS = 1.0
News: TypeAlias = "dict[str, Any] | OctavoError"  # a record, or why there is none for now


class Feed:
    """Reads in a thread of its own. `fileno` is readable when there is news, so that a terminal can be watched too."""

    def __init__(self, client: Client, path: str) -> None:
        self._client = client
        self._path = path
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._bell, self._ringer = socket.socketpair()
        threading.Thread(target=self._run, name="octavo-feed", daemon=True).start()

    def fileno(self) -> int:
        return self._bell.fileno()

    def wait(self) -> News:
        """The next news, however long that takes."""
        self._bell.recv(1)
        return self._news.get()

    def close(self) -> None:
        """The thread ends with the next news, at the latest."""
        self._bell.close()
        self._ringer.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                try:
                    for record in self._client.watch(self._path):
                        self._put(record)
                    self._put(OctavoError(f"{self._client.url} has ended its answer"))
                except OctavoError as error:
                    self._put(error)
                time.sleep(RETRY_SECONDS)

    def _put(self, news: News) -> None:
        self._news.put(news)
        self._ringer.send(b"!")


class Keys:
    """The keys that are pressed, one by one, while it is open; none where the standard input is no terminal."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        if self._fd is None:
            yield
            return
        import termios
        import tty

        before = termios.tcgetattr(self._fd)
        tty.setcbreak(self._fd)  # Ctrl-C still interrupts
        try:
            yield
        finally:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, before)

    def wait(self, feed: Feed, seconds: float) -> tuple[str, bool]:
        """What was pressed, and whether the feed has news; neither, after so many seconds."""
        watched: list[Any] = [feed] if self._fd is None else [feed, self._fd]
        ready, _, _ = select.select(watched, [], [], seconds)
        pressed = ""
        if self._fd in ready and self._fd is not None:
            data = os.read(self._fd, 64)
            pressed = data.decode(errors="replace")
            if not data:  # the terminal is gone
                self._fd = None
        return pressed, feed in ready

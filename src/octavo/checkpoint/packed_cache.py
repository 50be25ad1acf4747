"""A model's matrices as they lay packed in an earlier process: taken from a folder, or put there for the next start.

Owns when a copy is read and when it is made, how much the folder may hold, and who goes first. Knows neither the format
of a file (packed_file.py) nor what a key is made of (packed_key.py).

    start: is there a good copy? ── yes ─► it is read, and matrices are taken from it
                └── no ─► matrices are packed from the checkpoint, and remembered
    some seconds later, or at the end: a thread writes those to a file, in a twentieth of its time

Nothing here can keep an engine from starting or computing: what goes wrong is a line in the log.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from octavo.checkpoint import packed_file
from octavo.checkpoint.packed_file import Interrupted, file_bytes, place_after
from octavo.errors import CheckpointError
from octavo.ops.api import Backend, Matrix, TensorSource
from octavo.quant.formats import MatrixFormat

# After the start: the first requests have the machine to themselves.
DELAY_SECONDS = 2.0
# How long the end of the process may wait for the copy: less than a client gives an engine (engine/client.py).
EXIT_SECONDS = 3.0
# A temporary file that nobody has written to for so long is a crash's.
TEMPORARY_SECONDS = 600
# Copies that old builds or changed checkpoints have left behind go even where there is room.
UNUSED_SECONDS = 30 * 24 * 3600
# What is left free on the disk: others need it more.
FREE_SHARE, FREE_BYTES = 0.05, 2**30
# Of the time that the last part took, before the next is written. All threads of a step wait for the slowest, so
# one that writes slows each step by nearly half; the lowest priority changes nothing about that.
PAUSE_FACTOR = 19
PACKED = "packed from the checkpoint"

_NAME = re.compile(r"[0-9a-f]{32}\.packed")
_TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{32}\.tmp")

logger = logging.getLogger(__name__)


class MatrixStore(Protocol):
    """Where the loader looks for packed matrices; called for each in turn, in the same order at every start."""

    @property
    def origin(self) -> str:
        """Where the matrices come from, and how, for people: "packed from the checkpoint"."""

    def take(self, sources: Sequence[TensorSource], form: MatrixFormat, bias: Sequence[TensorSource]) -> Matrix | None:
        """The next matrix; None where it must be packed."""

    def add(self, matrix: Matrix) -> None:
        """The next matrix is this one, taken or packed."""

    def keep(self) -> None:
        """All matrices are there: keep them for the next start."""

    def close(self) -> None:
        """The engine ends."""


class NoStore:
    """No copy is read or made."""

    origin = PACKED

    def take(self, sources: Sequence[TensorSource], form: MatrixFormat, bias: Sequence[TensorSource]) -> Matrix | None:
        return None

    def add(self, matrix: Matrix) -> None:
        pass

    def keep(self) -> None:
        pass

    def close(self) -> None:
        pass


class _File(NamedTuple):
    """Of the folder. Files sort by age, the one used longest ago first."""

    used_ns: int  # since the epoch
    path: Path
    num_bytes: int


class PackedCache:
    """The copy of one model in a folder. For one thread, which loads the model; another one writes."""

    def __init__(self, folder: Path, max_bytes: int, identify: Callable[[], bytes], backend: Backend) -> None:
        """`identify`: the key (packed_key.py). It is asked again before a copy is written: a checkpoint that changed
        while it was read is not kept. Raises CheckpointError where it cannot be read at all."""
        self._folder, self._max_bytes, self._identify, self._backend = folder, max_bytes, identify, backend
        self._key = identify()
        self._path = folder / f"{self._key.hex()[:32]}.packed"
        self._matrices: list[Matrix] = []
        self._offset = 0
        self._ended = threading.Event()  # no more waiting for a better moment …
        self._stopped = threading.Event()  # … nor for the end of the file
        self._writer: threading.Thread | None = None
        self._found = _identity(self._path)  # a file that somebody puts there later has another
        self._packed = self._read() if self._found is not None else None

    @property
    def origin(self) -> str:
        return PACKED if self._packed is None else f"read from {self._path}"

    # ── Loading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, sources: Sequence[TensorSource], form: MatrixFormat, bias: Sequence[TensorSource]) -> Matrix | None:
        if self._packed is None:
            return None
        try:
            return self._backend.packed_matrix(self._packed, self._offset, sources, form.dtype, bias, form.storage)
        except ValueError as error:
            self._refuse(error)
            return None

    def add(self, matrix: Matrix) -> None:
        self._matrices.append(matrix)
        self._offset = place_after(self._offset, matrix.nbytes)

    def keep(self) -> None:
        if self._packed is not None:
            self._matrices = []
            with contextlib.suppress(OSError):  # somebody else's, or read-only
                os.utime(self._path)
            return
        self._writer = threading.Thread(target=self._run, name="packed-cache", daemon=True)
        self._writer.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Write what is not yet written, for at most EXIT_SECONDS."""
        self._ended.set()
        if self._writer is not None and self._writer is not threading.current_thread():
            self._writer.join(EXIT_SECONDS)
            self._stopped.set()
            self._writer.join(1.0)  # a thread that the disk holds for longer ends with the process

    def _read(self) -> Any:
        try:
            return packed_file.read(self._path, self._key, self._backend)
        except (OSError, ValueError) as error:
            self._refuse(error)
            return None

    def _refuse(self, error: OSError | ValueError) -> None:
        logger.warning("the packed weights in %s are not used: %s", self._path, _reason(error))
        self._packed = None

    # ── Writing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        self._ended.wait(DELAY_SECONDS)
        try:
            self._write()
        except Interrupted:
            logger.info("no packed weights are kept: the process ends before they are written")
        except (OSError, CheckpointError) as error:
            say = logger.info if _is_forbidden(error) else logger.warning
            say("no packed weights are kept in %s: %s", self._folder, _reason(error))
        finally:
            self._matrices = []
            atexit.unregister(self.close)

    def _write(self) -> None:
        num_bytes = file_bytes(matrix.nbytes for matrix in self._matrices)
        if num_bytes > self._max_bytes:
            logger.info(
                "no packed weights are kept: they take %s, and packed_cache_size is %s",
                _size(num_bytes),
                _size(self._max_bytes),
            )
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _identity(self._path) not in (None, self._found):
            return  # somebody else was faster
        self._make_room(num_bytes)
        if self._identify() != self._key:
            raise CheckpointError("the checkpoint has changed while it was loaded")
        start = time.monotonic()
        data = (matrix.data for matrix in self._matrices)
        packed_file.write(self._path, self._key, data, self._backend, self._pace)
        logger.info(
            "%s of packed weights written to %s in %.1f s", _size(num_bytes), self._path, time.monotonic() - start
        )

    def _pace(self, seconds: float) -> None:
        if self._stopped.is_set():
            raise Interrupted
        self._ended.wait(PAUSE_FACTOR * seconds)

    def _make_room(self, num_bytes: int) -> None:
        """OSError where there is none."""
        files = sorted(self._files())
        used = sum(file.num_bytes for file in files)
        oldest = time.time_ns() - UNUSED_SECONDS * 10**9
        for file in files:
            if file.used_ns < oldest or used + num_bytes > self._max_bytes:
                file.path.unlink(missing_ok=True)
                used -= file.num_bytes
        disk = shutil.disk_usage(self._folder)
        if disk.free - num_bytes < max(FREE_BYTES, int(disk.total * FREE_SHARE)):
            raise OSError(errno.ENOSPC, f"they take {_size(num_bytes)}, and the disk has {_size(disk.free)} left")

    def _files(self) -> list[_File]:
        """All copies but the one that is to be replaced. What crashes have left behind is removed."""
        files = []
        for entry in os.scandir(self._folder):
            is_temporary = _TEMPORARY_NAME.fullmatch(entry.name) is not None
            if not (is_temporary or _NAME.fullmatch(entry.name)) or entry.name == self._path.name:
                continue
            with contextlib.suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                if is_temporary and info.st_mtime < time.time() - TEMPORARY_SECONDS:
                    os.unlink(entry.path)
                elif not is_temporary:
                    files.append(_File(info.st_mtime_ns, Path(entry.path), info.st_size))
        return files


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What tells a file from another one under the same name; None: there is none."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_size


def _is_forbidden(error: Exception) -> bool:
    """A folder that cannot be written to is the way some machines are, and no reason for a warning at each start."""
    return isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


def _reason(error: Exception) -> str:
    return str((isinstance(error, OSError) and error.strerror) or error)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.1f} MiB"

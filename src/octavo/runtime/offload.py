"""The disk tier of the prefix cache: KV blocks that memory had no room for, kept in a folder across restarts.

Owns the index of what is there, the size limit, who goes first, the queue of blocks to be written and the thread that
writes them. Knows no file format (block_files.py), no requests and no tensors; what a fingerprint is made of is
fingerprint.py's.

    engine's thread                               writer's thread
    put ──► queued ─────────────────────────────► write ──► known
    contains: queued or known                     mark: what was used since
    fetch ◄── queued, or the file                 make room: scan, remove the oldest

The index is a set in memory, read from the folder at start. The truth is the folder: several engines may share it, of
the same model or others, and every scan takes in what they have written and removed. `max_bytes` limits all of them
together: whoever is about to pass it removes the files used longest ago, whatever model they are of, so that the blocks
of a model that nobody runs any more are the first to go. Between two scans an engine does not see what the others
write, for at most a sixteenth of `max_bytes`, and by so much each of them may go beyond it.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from pathlib import Path

from octavo.core.store import StoreCounts
from octavo.errors import ConfigError
from octavo.runtime.block_files import HASH_BYTES, BlockFile, BlockFolder

# What waits to be written lies in memory. The eviction of a long prompt must fit: 8,192 tokens of SmolLM2 are 180 MiB.
MAX_QUEUED_BYTES = 256 * 2**20
# The share of `max_bytes` that is made free at once, and that may be written between two scans, which take some
# 0.1 s for 25,000 files.
SCAN_SHARE = 16
# A directory in a block's place, a temporary file that somebody has cleaned away: that one block cannot be written.
# Any other error would come again with the next.
_ONE_BLOCK_ERRORS = (IsADirectoryError, FileNotFoundError)

logger = logging.getLogger(__name__)


class DiskStore:
    """Blocks by content hash. `contains`, `fetch` and `put` are for one thread, the engine's."""

    def __init__(self, directory: Path, max_bytes: int, fingerprint: bytes, block_bytes: int) -> None:
        """`fingerprint`: 32 bytes, of all that decides what a block's `block_bytes` bytes are. Raises ConfigError for a
        directory that cannot be made or read, and for a limit below one block."""
        self.max_bytes = max_bytes
        self.num_hits = 0  # fetches that gave a block
        self.num_misses = 0  # fetches that gave none
        self.num_written = 0  # blocks
        self.num_dropped = 0  # blocks that were put, but not written
        self.num_bytes = 0  # of all files in the directory, as far as this engine knows
        self._folder = BlockFolder(directory.expanduser().absolute(), fingerprint, block_bytes)
        self._scan_bytes = max(self._folder.file_bytes, max_bytes // SCAN_SHARE)
        self._num_unscanned = 0  # bytes written since the last scan
        self._max_queued = max(1, MAX_QUEUED_BYTES // block_bytes)
        self._known: set[bytes] = set()  # blocks that have a file
        self._open(directory)

        # All below belongs to whoever holds the lock of `_changed`; `_known` may be asked without.
        self._changed = threading.Condition()
        self._queued: dict[bytes, tuple[bytes, int]] = {}  # payload and time of use; first in, first out
        self._used: dict[bytes, int] = {}  # known blocks that were used, and when: not yet marked
        self._last_stamp = 0
        self._is_idle = True
        self._is_closed = False
        self._may_write = True
        self._writer = threading.Thread(target=self._run, name="kv-offload", daemon=True)
        self._writer.start()

    # ── The engine's side ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def counts(self) -> StoreCounts:
        """For the metrics; the writer's are a moment old."""
        block_bytes = self._folder.block_bytes
        return StoreCounts(
            num_hits=self.num_hits,
            num_misses=self.num_misses,
            num_read_bytes=self.num_hits * block_bytes,
            num_written_bytes=self.num_written * block_bytes,
            num_dropped=self.num_dropped,
            num_bytes=self.num_bytes,
        )

    def contains(self, content_hash: bytes) -> bool:
        """Whether `fetch` should find the block. Asks memory alone."""
        return content_hash in self._queued or content_hash in self._known

    def fetch(self, content_hash: bytes) -> bytes | memoryview | None:
        """The block's payload, which now counts as used; None is a miss. A file that is not exactly the block that was
        put is removed, with a warning."""
        queued = self._queued.get(content_hash)
        payload = queued[0] if queued is not None else self._read(content_hash)
        if payload is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        with self._changed:
            self._mark(content_hash)
        return payload

    def put(self, content_hash: bytes, payload: bytes) -> None:
        """Keep a block, and do not wait for it: it is dropped where the disk is too slow. A known one counts as used.

        The payload is not copied, and must not change any more. ValueError unless it has `block_bytes` bytes.
        """
        if len(content_hash) != HASH_BYTES:
            raise ValueError(f"content_hash has {len(content_hash)} bytes; it must have {HASH_BYTES}")
        if len(payload) != self._folder.block_bytes:
            raise ValueError(f"payload has {len(payload)} bytes; a block has {self._folder.block_bytes}")
        with self._changed:
            if self.contains(content_hash):
                self._mark(content_hash)
            elif self._may_write and not self._is_closed and len(self._queued) < self._max_queued:
                self._queued[content_hash] = (payload, self._stamp())
                self._changed.notify_all()
            else:
                self.num_dropped += 1

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all is on the disk that was put. False: it took longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_idle and not self._has_work, timeout)

    def close(self, timeout: float = 30.0) -> None:
        """Write what was put, for at most `timeout` seconds, and end the thread. Blocks can still be fetched."""
        self.flush(timeout)
        with self._changed:
            self._is_closed = True
            self._drop_queued()
            self._changed.notify_all()
        self._writer.join(1.0)  # a thread that the disk holds for longer ends with the process

    def _read(self, content_hash: bytes) -> memoryview | None:
        if content_hash not in self._known:
            return None
        path = self._folder.path(content_hash)
        try:
            return self._folder.read(content_hash)
        except FileNotFoundError:  # every day's work where engines share a folder
            logger.debug("%s has gone", path)
        except (OSError, ValueError) as error:
            reason = error.strerror or error if isinstance(error, OSError) else error
            logger.warning("%s is not used, and removed: %s", path, reason)
            self._folder.remove(path)
        self._known.discard(content_hash)
        return None

    def _mark(self, content_hash: bytes) -> None:
        """Under the lock. A queued block has a mark that is fresh enough."""
        if content_hash in self._known and not self._is_closed:
            self._used[content_hash] = self._stamp()
            self._changed.notify_all()

    def _stamp(self) -> int:
        """Now, in nanoseconds since the epoch; later than the last one, whatever the clock says."""
        self._last_stamp = max(time.time_ns(), self._last_stamp + 1)
        return self._last_stamp

    # ── The writer's side ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _has_work(self) -> bool:
        return bool(self._queued or self._used)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._has_work or self._is_closed)
                if not self._has_work:
                    return
                self._is_idle = False
                used, self._used = self._used, {}
                block = next(iter(self._queued.items()), None)
            for content_hash, used_ns in used.items():
                self._folder.mark(content_hash, used_ns)
            if block is not None:
                self._write(block[0], *block[1])

    def _write(self, content_hash: bytes, payload: bytes, used_ns: int) -> None:
        error: OSError | None = None
        try:
            self._make_room()
            self._folder.write(content_hash, payload, used_ns)
            self.num_bytes += self._folder.file_bytes
            self._num_unscanned += self._folder.file_bytes
        except OSError as cause:
            error = cause
        with self._changed:
            if error is None:
                self._known.add(content_hash)  # before it leaves the queue: `contains` takes no lock
                self.num_written += self._queued.pop(content_hash, None) is not None  # else `close` gave it up
            elif isinstance(error, _ONE_BLOCK_ERRORS):
                logger.warning("a KV block is not kept: %s", error)
                self.num_dropped += self._queued.pop(content_hash, None) is not None
            else:
                logger.warning("no KV block is written to disk any more, until octavo is started again: %s", error)
                self._may_write = False
                self._drop_queued()

    def _drop_queued(self) -> None:
        """Under the lock."""
        self.num_dropped += len(self._queued)
        self._queued.clear()

    def _make_room(self) -> None:
        """For one more file. OSError where that is impossible."""
        file_bytes = self._folder.file_bytes
        if self.num_bytes + file_bytes > self.max_bytes or self._num_unscanned >= self._scan_bytes:
            self._refresh(file_bytes)
        if self.num_bytes + file_bytes > self.max_bytes:
            raise OSError(errno.EDQUOT, f"{self._folder.directory} is full, and its files cannot be removed")

    # ── Both, at start and later ─────────────────────────────────────────────────────────────────────────────────

    def _open(self, directory: Path) -> None:
        file_bytes = self._folder.file_bytes
        if self.max_bytes < file_bytes:
            raise ConfigError(
                f"kv_offload_size is {self.max_bytes / 2**30:g} GiB; one KV block takes {file_bytes} bytes on disk, so "
                f"it must be at least {file_bytes / 2**30:.2g}",
                param="kv_offload_size",
            )
        try:
            self._folder.make()
            self._refresh(num_new_bytes=0)
        except OSError as error:
            raise ConfigError(
                f"kv_offload_dir is {str(directory)!r}; it must be a folder that octavo can make and read: "
                f"{error.strerror or error}",
                param="kv_offload_dir",
            ) from error

    def _refresh(self, num_new_bytes: int) -> None:
        """Scan the folder, and where `num_new_bytes` more do not fit, make free what is written until the next scan."""
        files = self._folder.scan()
        self.num_bytes = sum(file.num_bytes for file in files)
        self._num_unscanned = 0
        if self.num_bytes + num_new_bytes > self.max_bytes:
            files = self._remove_oldest(files, self.max_bytes - self._scan_bytes)
        self._known = {file.content_hash for file in files if file.content_hash is not None}

    def _remove_oldest(self, files: list[BlockFile], max_bytes: int) -> list[BlockFile]:
        """Until at most `max_bytes` are used. Returns the files that are left."""
        left = []
        for file in sorted(files):
            if self.num_bytes > max_bytes and self._folder.remove(file.path):
                self.num_bytes -= file.num_bytes
            else:
                left.append(file)
        return left

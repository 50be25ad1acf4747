"""KV blocks as files in a folder that many engines may share: names, format, and the only calls that touch the disk.

Owns how a block is found, written whole, read back and proved to be what it should be. Knows nothing of limits, queues
and warnings (offload.py), nor what is in a block or in a fingerprint: they are bytes here.

    DIRECTORY / first 16 hex digits of the fingerprint / first 2 of the content hash / the content hash .kv

A file, integers little-endian. A block is what its reader expects in every field, or it is not used:

    offset  bytes
         0      8  magic "octavoKV"
         8      8  version of this layout
        16     32  fingerprint of what computed the block (fingerprint.py)
        48     32  content hash of the block (core/prefix_index.py)
        80      8  length of the payload
        88     32  SHA-256 of all that stands before, and of the payload
       120      …  payload

A file's modification time is when its block was last used. A file appears under its name when it is complete, by a
rename; what a crash leaves behind is called `.*.tmp` and goes at the next `scan` that finds it too old to be still in
the making. Nothing is flushed to the disk: what a power cut spoils, the checksum finds. The checksum finds damage, not
forgery: whoever may write into the directory is trusted, so it is made for its owner alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAGIC = b"octavoKV"
VERSION = 1
HASH_BYTES = 32  # of a fingerprint and of a content hash
HEADER_BYTES = 120
# A block is written in milliseconds; a minute allows for a disk that hangs. A writer whose temporary file is taken away
# too early only loses that block.
MAX_WRITE_SECONDS = 60

_FIELDS = struct.Struct("<8sQ32s32sQ")  # the header without its checksum
_FINGERPRINT_NAME = re.compile(r"[0-9a-f]{16}")
_PREFIX_NAME = re.compile(r"[0-9a-f]{2}")
_BLOCK_NAME = re.compile(r"([0-9a-f]{64})\.kv")
_TEMPORARY_NAME = re.compile(r"\.[0-9a-f]+\.tmp")


class BlockFile(NamedTuple):
    """One file of the directory. Files sort by age, the one used longest ago first."""

    used_ns: int  # since the epoch
    path: str
    num_bytes: int
    content_hash: bytes | None  # None: of another fingerprint, or a temporary file


class BlockFolder:
    """The blocks of one fingerprint in a directory. Holds no state: the directory is the truth."""

    def __init__(self, directory: Path, fingerprint: bytes, block_bytes: int) -> None:
        """`fingerprint`: HASH_BYTES bytes. Touches nothing yet."""
        self.directory = str(directory)
        self.fingerprint = fingerprint
        self.block_bytes = block_bytes
        self.file_bytes = HEADER_BYTES + block_bytes
        self._own_name = fingerprint.hex()[:16]

    def make(self) -> None:
        """Make the directory, where there is none, for its owner alone. OSError if that is impossible."""
        os.makedirs(self.directory, mode=0o700, exist_ok=True)

    def path(self, content_hash: bytes) -> str:
        name = content_hash.hex()
        return f"{self.directory}/{self._own_name}/{name[:2]}/{name}.kv"

    def read(self, content_hash: bytes) -> memoryview:
        """The payload, `block_bytes` long. ValueError says what is wrong with the file; OSError: it cannot be read."""
        with open(self.path(content_hash), "rb", opener=_open_at_once) as file:
            data = file.read(self.file_bytes + 1) or b""  # one more, to see a file that is too long
        fields = self._fields(content_hash)
        if data[: len(fields)] != fields:
            raise ValueError(self._difference(data, content_hash))
        if len(data) != self.file_bytes:
            raise ValueError("it is cut short" if len(data) < self.file_bytes else "it is too long")
        payload = memoryview(data)[HEADER_BYTES:]
        if data[len(fields) : HEADER_BYTES] != _checksum(fields, payload):
            raise ValueError("its checksum is wrong")
        return payload

    def write(self, content_hash: bytes, payload: bytes, used_ns: int) -> None:
        """Put a complete file in place, also of one that is there. OSError: it could not be done, and nothing is left
        of the attempt."""
        path = self.path(content_hash)
        folder = os.path.dirname(path)
        temporary = f"{folder}/.{secrets.token_hex(16)}.tmp"
        fields = self._fields(content_hash)
        header = fields + _checksum(fields, memoryview(payload))
        file = self._create(folder, temporary)
        try:
            with file:
                file.write(header)
                file.write(payload)
                file.flush()
                os.utime(file.fileno(), ns=(used_ns, used_ns))
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _create(self, folder: str, path: str) -> BinaryIO:
        try:
            return open(path, "xb")
        except FileNotFoundError:  # the first block here, or somebody has removed the empty folder
            self.make()
            os.makedirs(folder, exist_ok=True)
            return open(path, "xb")

    def mark(self, content_hash: bytes, used_ns: int) -> None:
        """Note when the block was last used, if its file is there and may be changed."""
        with contextlib.suppress(OSError):
            os.utime(self.path(content_hash), ns=(used_ns, used_ns))

    def remove(self, path: str) -> bool:
        """Remove a file, or an empty folder in a file's place, and the folders that become empty. False: it is still
        there."""
        try:
            is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
            (os.rmdir if is_folder else os.unlink)(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        with contextlib.suppress(OSError):  # not empty, mostly
            os.rmdir(os.path.dirname(path))
            os.rmdir(os.path.dirname(os.path.dirname(path)))
        return True

    def scan(self) -> list[BlockFile]:
        """All files of all fingerprints, in no order. Leftovers of crashed writers are removed. Files that vanish
        meanwhile, and whatever has no name of ours, are passed over. OSError: the directory cannot be read."""
        try:
            groups = [entry for entry in os.scandir(self.directory) if _FINGERPRINT_NAME.fullmatch(entry.name)]
        except FileNotFoundError:  # removed by somebody; the next write makes it again
            return []
        too_old = time.time_ns() - MAX_WRITE_SECONDS * 10**9
        files = []
        for file in (file for group in groups for file in self._files(group)):
            if file.path.endswith(".tmp") and file.used_ns < too_old and self.remove(file.path):
                continue
            files.append(file)
        return files

    def _files(self, group: os.DirEntry[str]) -> Iterator[BlockFile]:
        is_own = group.name == self._own_name
        for folder in _entries(group):
            if not _PREFIX_NAME.fullmatch(folder.name):
                continue
            for entry in _entries(folder):
                match = _BLOCK_NAME.fullmatch(entry.name)
                if match is None and not _TEMPORARY_NAME.fullmatch(entry.name):
                    continue
                with contextlib.suppress(OSError):
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(info.st_mode):
                        content_hash = bytes.fromhex(match[1]) if match and is_own else None
                        yield BlockFile(info.st_mtime_ns, entry.path, info.st_size, content_hash)

    def _fields(self, content_hash: bytes) -> bytes:
        """The header that a block must have, without the checksum."""
        return _FIELDS.pack(MAGIC, VERSION, self.fingerprint, content_hash, self.block_bytes)

    def _difference(self, data: bytes, content_hash: bytes) -> str:
        if len(data) < HEADER_BYTES:
            return "it is cut short"
        magic, version, fingerprint, found_hash, block_bytes = _FIELDS.unpack_from(data)
        if magic != MAGIC:
            return "it is not a KV block"
        if version != VERSION:
            return f"its layout has version {version}, not {VERSION}"
        if fingerprint != self.fingerprint:
            return "another checkpoint, type or build made it"
        if found_hash != content_hash:
            return "it is another block"
        return f"its block has {block_bytes} bytes, not {self.block_bytes}"


def _checksum(fields: bytes, payload: memoryview) -> bytes:
    # SHA-256, because a CRC of 32 bits passes one damaged file in four thousand million, and because CPUs have
    # instructions for it: 1.6 GB/s, where reading the file takes as long.
    digest = hashlib.sha256(fields)
    digest.update(payload)
    return digest.digest()


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe in a file's place would be waited for


def _entries(folder: os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing where it is none, has gone, or may not be read."""
    try:
        return list(os.scandir(folder.path)) if folder.is_dir(follow_symlinks=False) else []
    except OSError:
        return []

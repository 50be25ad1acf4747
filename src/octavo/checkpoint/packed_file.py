"""One file of packed matrices: its format, and the only calls that read and write it.

Owns how it is written whole, and how it is proved to be what it should be. Knows nothing of folders, limits and models:
a key is bytes here, a matrix its packed bytes. Integers are little-endian; a file is what its reader expects in every
field, or it is not used:

    bytes
        …  payload: the matrices in the order of loading, each from a multiple of 64 bytes on
        8  magic "octavoPW"
        8  version of this format
       32  key of all that decides what the payload is (packed_key.py)
        8  length of the payload
       32  BLAKE2b of these fields, and of the payload's checksums (`Backend.checksums`)

It appears under its name when it is complete, by a rename; what a crash leaves behind is called `.*.tmp`. Nothing is
flushed to the disk: what a power cut spoils, the checksums find, since each reader looks at the whole file. It is never
written to again, only replaced or removed, which those who read it do not notice. The checksums find damage, not
forgery: whoever may write into the folder is trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.packed_key import KEY_BYTES
from octavo.ops.api import Backend

MAGIC = b"octavoPW"
VERSION = 1
ALIGNMENT = 64  # of a matrix: a cache line, and a vector
# Written at a time: a page of 2 MB, and whole MiB, the parts that have checksums of their own.
CHUNK_BYTES = 2 * 2**20
DIGEST_BYTES = 32

_FIELDS = struct.Struct(f"<8sQ{KEY_BYTES}sQ")  # without the digest
_END_BYTES = _FIELDS.size + DIGEST_BYTES

Bytes = npt.NDArray[np.uint8]


class Interrupted(Exception):
    """A file was not written to its end because its writer was told to stop."""


def place_after(offset: int, num_bytes: int) -> int:
    """Where in the file the matrix after one of `num_bytes` at `offset` begins."""
    return -(-(offset + num_bytes) // ALIGNMENT) * ALIGNMENT


def file_bytes(sizes: Iterable[int]) -> int:
    """The length of a file of matrices that have these many bytes."""
    offset = 0
    for size in sizes:
        offset = place_after(offset, size)
    return offset + _END_BYTES


def read(path: Path, key: bytes, backend: Backend) -> Any:
    """The file, read and proved (`Backend.read_packed`). ValueError says what is wrong with it; OSError: it cannot be
    read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe in its place would be waited for
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError("it is no regular file")
        end = os.pread(descriptor, _END_BYTES, max(0, info.st_size - _END_BYTES))
        _check(end, key, info.st_size)
        packed = backend.read_packed(descriptor, info.st_size - _END_BYTES)
    finally:
        os.close(descriptor)
    if _digest(end[: _FIELDS.size], backend.checksums(packed.data)) != end[_FIELDS.size :]:
        raise ValueError("its checksum is wrong")
    return packed


def write(path: Path, key: bytes, matrices: Iterable[Bytes], backend: Backend, pace: Callable[[float], None]) -> int:
    """Put a complete file in place, also of one that is there; its length. `pace` is called after each
    part with the seconds that it took, and may wait, or raise Interrupted. After that, or an OSError, the file is not
    there, and nothing is left of the attempt."""
    temporary = path.with_name(f".{secrets.token_hex(16)}.tmp")
    try:
        with temporary.open("xb", buffering=0) as file:
            sums, length = [], 0
            for chunk in _chunks(matrices):
                start = time.monotonic()
                sums.append(backend.checksums(chunk, threads=False))
                _write_all(file, chunk)
                length += len(chunk)
                pace(time.monotonic() - start)
            fields = _FIELDS.pack(MAGIC, VERSION, key, length)
            _write_all(file, fields + _digest(fields, np.concatenate(sums)))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return length + _END_BYTES


def _check(end: bytes, key: bytes, num_bytes: int) -> None:
    if len(end) < _END_BYTES:
        raise ValueError("it is cut short")
    magic, version, found_key, length = _FIELDS.unpack_from(end)
    if magic != MAGIC:
        raise ValueError("it is cut short, or holds no packed weights")
    if version != VERSION:
        raise ValueError(f"its format has version {version}, not {VERSION}")
    if found_key != key:
        raise ValueError("it belongs to another checkpoint, format or build")
    if num_bytes != length + _END_BYTES or length % ALIGNMENT or not length:
        raise ValueError(f"it has {num_bytes} bytes, not {length + _END_BYTES}")


def _digest(fields: bytes, sums: npt.NDArray[np.uint64]) -> bytes:
    return hashlib.blake2b(fields + sums.astype("<u8").tobytes(), digest_size=DIGEST_BYTES).digest()


def _chunks(matrices: Iterable[Bytes]) -> Iterator[Bytes]:
    """The payload in parts of CHUNK_BYTES, the last one shorter. A part is valid until the next one."""
    staging = np.zeros(CHUNK_BYTES, np.uint8)
    filled = 0
    for matrix in matrices:
        begin, end = 0, len(matrix)
        while begin < end:
            count = min(end - begin, CHUNK_BYTES - filled)
            staging[filled : filled + count] = matrix[begin : begin + count]
            begin, filled = begin + count, filled + count
            if filled == CHUNK_BYTES:
                yield staging
                filled = 0
        padded = -(-filled // ALIGNMENT) * ALIGNMENT
        staging[filled:padded] = 0
        filled = padded % CHUNK_BYTES
        if padded and not filled:
            yield staging
    if filled:
        yield staging[:filled]


def _write_all(file: BinaryIO, data: Any) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]

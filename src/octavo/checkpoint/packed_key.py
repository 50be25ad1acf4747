"""What the bytes of a model's packed matrices depend on, as one hash: the key under which a copy of them is kept.

Owns the list of these things. Knows no file of packed weights (packed_file.py). What does not change the bytes is left
out: the checkpoint's place and name, threads, lengths, everything about the KV cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import octavo
from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.weight_files import weight_files
from octavo.ops import isa
from octavo.ops.api import TensorSource
from octavo.quant.formats import MatrixFormat

KEY_BYTES = 32
# Of each tensor, somewhere in it. Weights that differ, differ nearly everywhere.
SAMPLE_BYTES = 256
_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, spread evenly


def packed_key(
    checkpoint: Checkpoint, matrices: Iterable[tuple[Sequence[TensorSource], MatrixFormat]], variant: str
) -> bytes:
    """KEY_BYTES bytes. `matrices`: what each is made of, in the order in which they are packed; `variant`: the kernels'
    instruction set. Raises CheckpointError for a file that cannot be read.

    A file counts with its size, with the times at which its contents and (which no program can choose) its inode were
    changed, and with both its ends, where the headers are. These times tell any change on a disk of one's own; for
    those that are set to one value everywhere, as in some images and file systems, there is a sample of every tensor.
    The samples come from the mapped tensors themselves, so that a key never belongs to other bytes than were packed.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in (*_build(variant), *_files(checkpoint), *_tensors(matrices)):
        digest.update(len(part).to_bytes(8, "little"))  # where a part ends is part of the whole
        digest.update(part)
    return digest.digest()


def _build(variant: str) -> Iterator[bytes]:
    """The layout is what this build of the kernels makes: no number that somebody would have to remember to raise."""
    module = isa.load(variant).__file__
    assert module is not None, "a native module is a file"
    yield f"{octavo.__version__} {variant}".encode()
    yield Path(module).read_bytes()


def _files(checkpoint: Checkpoint) -> Iterator[bytes]:
    for file in weight_files(checkpoint):
        yield repr((file.info.st_size, file.info.st_mtime_ns, file.info.st_ctime_ns)).encode()
        yield file.first
        yield file.last


def _tensors(matrices: Iterable[tuple[Sequence[TensorSource], MatrixFormat]]) -> Iterator[bytes]:
    number = 0
    for sources, form in matrices:
        yield repr((form, [(source.name, source.type, source.shape) for source in sources])).encode()
        for source in sources:
            number += 1
            start = int(number * _GOLDEN % 1 * max(0, source.data.size - SAMPLE_BYTES))
            yield source.data[start : start + SAMPLE_BYTES].tobytes()
            yield b"" if source.row_order is None else source.row_order.tobytes()

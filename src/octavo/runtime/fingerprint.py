"""What the bytes of a KV block depend on beside its tokens, as one hash. A block that another engine has left on disk
is good here if that had the same fingerprint.

Owns the list of these things. Knows nothing of where blocks are kept (offload.py). What does not change the bytes is
left out, above all the number of threads, the token budget and `enforce_eager`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.weight_files import weight_files
from octavo.models.config import ModelConfig
from octavo.models.rope import rope_frequencies
from octavo.ops import isa
from octavo.ops.api import CacheDType, DType
from octavo.quant.formats import WeightFormats
from octavo.runtime.block_files import HASH_BYTES

# Raise it when the bytes of a block mean something else although nothing below tells.
LAYOUT_VERSION = 1
_PACKAGE = Path(__file__).resolve().parent.parent
_COMPUTING_FOLDERS = ("checkpoint", "core", "models", "ops", "quant", "runtime")


def fingerprint(
    checkpoint: Checkpoint,
    model: ModelConfig,
    *,
    dtype: DType,
    kv_dtype: CacheDType,
    formats: WeightFormats,
    block_size: int,
    max_model_len: int,
    variant: str,
    seed: int,
) -> bytes:
    """32 bytes. Each argument is as the engine uses it, no longer "auto"; `variant` is the kernels' instruction set.

    Weights are known by their files' names (without the folder), sizes, times of change and both ends; random ones by
    `seed`, which else does not count. `max_model_len` counts as far as it changes the rope table. Raises
    CheckpointError for a file that cannot be read.
    """
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    options = (LAYOUT_VERSION, model, dtype, kv_dtype, formats, block_size, variant)
    weights = [repr(seed).encode()] if checkpoint.format == "config" else _files(checkpoint)
    for part in (repr(options).encode(), *weights, *_positions(model, max_model_len), *_arithmetic(variant)):
        digest.update(len(part).to_bytes(8, "little"))  # where a part ends is part of the whole
        digest.update(part)
    return digest.digest()


def _files(checkpoint: Checkpoint) -> Iterator[bytes]:
    for file in weight_files(checkpoint):
        yield repr((file.name, file.info.st_size, file.info.st_mtime_ns)).encode()
        yield file.first
        yield file.last


def _positions(model: ModelConfig, max_model_len: int) -> Iterator[bytes]:
    """What the rope table is made of. NumPy has several cosines and takes the CPU's fastest: a sample tells them
    apart, by the last bits of float64, where the table itself would not."""
    frequencies, scale = rope_frequencies(model, max_model_len)
    angles = np.arange(4096, dtype=np.float64) * 0.37
    yield repr(scale).encode()
    for values in (frequencies, np.cos(angles), np.sin(angles)):
        yield values.tobytes()


def _arithmetic(variant: str) -> Iterator[bytes]:
    """The build of the kernels and the Python around them: another build may round otherwise."""
    module = isa.load(variant).__file__
    assert module is not None, "a native module is a file"
    yield Path(module).read_bytes()
    for folder in _COMPUTING_FOLDERS:
        for file in sorted((_PACKAGE / folder).glob("*.py")):
            yield f"{folder}/{file.name}".encode()
            yield file.read_bytes()

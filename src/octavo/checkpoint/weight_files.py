"""The files that a checkpoint's weights are in, and as much of each as can be looked at in no time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from octavo.checkpoint.base import Checkpoint
from octavo.errors import CheckpointError

EDGE_BYTES = 64 * 1024  # that are read at each end of a file: whole ones would take as long as loading


class WeightFile(NamedTuple):
    name: str  # without the folder
    info: os.stat_result
    first: bytes  # EDGE_BYTES of it, or all
    last: bytes


def weight_files(checkpoint: Checkpoint) -> Iterator[WeightFile]:
    """By name; with the index of a folder. Raises CheckpointError for a file that cannot be read."""
    path = checkpoint.path
    # A folder's index says what is where. A stray file that it does not name is taken in too, which does no harm.
    files = sorted([*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")]) if path.is_dir() else [path]
    for file in files:
        yield _look_at(file)


def _look_at(file: Path) -> WeightFile:
    try:
        with file.open("rb") as stream:
            info = os.fstat(stream.fileno())
            first = stream.read(EDGE_BYTES)
            stream.seek(max(0, info.st_size - EDGE_BYTES))
            return WeightFile(file.name, info, first, stream.read(EDGE_BYTES))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error

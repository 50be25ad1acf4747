"""A whole file as a read-only array of bytes, paged in by the kernel when it is touched."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """uint8 [size of the file]; the mapping lives as long as any slice of it. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise CheckpointError(f"{path}: cannot be read: {error}") from error

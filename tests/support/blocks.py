"""Random blocks of GGUF's quantised types, with scales small enough that the values look like weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
PLAIN_TYPES = ("F32", "F16", "BF16", "F64")

# type: (values in a block, bytes in a block, offsets of its float16 scales, spread of the integers they multiply)
_LAYOUT = {
    "Q4_0": (32, 18, (0,), 4.6),
    "Q4_1": (32, 20, (0, 2), 9.0),
    "Q5_0": (32, 22, (0,), 9.2),
    "Q5_1": (32, 24, (0, 2), 18.0),
    "Q8_0": (32, 34, (0,), 74.0),
    "Q4_K": (256, 144, (0, 2), 330.0),
    "Q5_K": (256, 176, (0, 2), 660.0),
    "Q6_K": (256, 210, (208,), 1360.0),
}


def block_columns(type: str) -> int:
    """Values in one block; 1 for the plain types."""
    return _LAYOUT[type][0] if type in _LAYOUT else 1


def random_blocks(
    type: str, rows: int, columns: int, rng: np.random.Generator, std: float = 0.1
) -> npt.NDArray[np.uint8]:
    """uint8 [rows, bytes of a row]: every bit random but for the scales, so that all integers of the type occur.

    Decoded values spread by about `std`; scales have both signs.
    """
    if type in PLAIN_TYPES:
        return _random_plain(type, rows, columns, rng, std)
    size, nbytes, scale_offsets, spread = _LAYOUT[type]
    blocks = rng.integers(0, 256, (rows, columns // size, nbytes), dtype=np.uint8)
    for offset in scale_offsets:
        scales = rng.normal(0, std / spread, (rows, columns // size)).astype(np.float16)
        blocks[:, :, offset : offset + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def _random_plain(type: str, rows: int, columns: int, rng: np.random.Generator, std: float) -> npt.NDArray[np.uint8]:
    values = rng.normal(0, std, (rows, columns))
    if type == "BF16":
        top = values.astype(np.float32).view(np.uint32) >> 16
        return top.astype(np.uint16).view(np.uint8)
    return values.astype({"F32": np.float32, "F16": np.float16, "F64": np.float64}[type]).view(np.uint8)

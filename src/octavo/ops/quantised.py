"""What quantised matrices and activations are, in NumPy: the definition of `Storage`, int8 and int16 activations.

Every function says what a value becomes; the kernels pack the same integers (native/include/octavo/blocks.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from octavo.ops.api import Float32Array, Storage, TensorSource
from octavo.ops.decode import BLOCK_TYPES, Codes

GROUP = 32  # values along K that share a scale
NUM_OUTLIERS = 2  # activations of a row that stay float32
PANEL_ROWS = 32  # block types cannot change within so many rows of a matrix
SAMPLED_ROWS = 256  # of a matrix, that say how large its channels are
HIGHEST_INT16 = np.float32(32639)  # the code of a row's largest activation: 127.5 times 256, so that both bytes fit
LEAST_ACTIVATION = np.float32(1e-30)  # rows of nothing larger are zeros


def keeps_blocks(sources: Sequence[TensorSource], storage: Storage) -> bool:
    """Whether a matrix of these sources keeps integers; else it is plain."""
    if storage in ("int8", "int4", "int8_row"):
        return True
    if storage == "plain" or any(source.type not in BLOCK_TYPES for source in sources):
        return False
    first_rows = np.cumsum([0, *(source.shape[0] for source in sources)])
    changes = [
        first_rows[i] for i in range(1, len(sources)) if sources[i].type != sources[i - 1].type
    ]  # the rows at which the type changes
    return all(row % PANEL_ROWS == 0 for row in changes)


def quantise_weights(values: Float32Array, storage: Storage) -> Float32Array:
    """float32 [N, K] as its quantised values, [N, K]: for "int8" and "int4"; others pass."""
    if storage not in ("int8", "int4"):
        return values
    restored: Float32Array = quantise_codes(values, storage).values.reshape(len(values), -1)[:, : values.shape[1]]
    return restored


def quantise_codes(values: Float32Array, storage: Storage) -> Codes:
    """float32 [N, K] as "int8" or "int4" keep it, in whole groups."""
    groups = _groups(values)  # [N, groups, 32], the last one padded by repeating its last value
    if storage == "int8":
        scale = _half(np.max(np.abs(groups), axis=2, keepdims=True) / np.float32(127))
        codes = np.clip(_steps(groups, scale), -127, 127) + 128
        return Codes(codes.astype(np.uint8), 8, 128, scale[..., 0], None)
    low = np.min(groups, axis=2, keepdims=True)
    scale = _half((np.max(groups, axis=2, keepdims=True) - low) / np.float32(15))
    minimum = _half(low)
    codes = np.clip(_steps(groups - minimum, scale), 0, 15)
    return Codes(codes.astype(np.uint8), 4, 0, scale[..., 0], minimum[..., 0])


def quantise_activations(x: Float32Array) -> Float32Array:
    """float32 [T, K] as what a product with int8 activations multiplies: the two largest |x| of a row as they are (the
    first of equals), the rest in groups of 32, each rounded to multiples of its largest |x| / 127."""
    rest = x.copy()
    outliers = np.zeros_like(x)
    rows = np.arange(len(x))
    for _ in range(min(NUM_OUTLIERS, x.shape[1])):
        largest = np.argmax(np.abs(rest), axis=1)
        outliers[rows, largest] += rest[rows, largest]
        rest[rows, largest] = 0
    groups = _groups(rest, pad="constant")
    largest_of_group = np.max(np.abs(groups), axis=2, keepdims=True)
    inverse = np.divide(
        np.float32(127), largest_of_group, out=np.zeros_like(largest_of_group), where=largest_of_group > 0
    )
    codes = np.rint(groups * inverse)
    restored: Float32Array = (codes * (largest_of_group / np.float32(127))).reshape(len(x), -1)[:, : x.shape[1]]
    return restored + outliers


@dataclass(slots=True, frozen=True)
class Int8Rows:
    """A matrix as codes in [-127, 127]: a value is scale * code * channel_scale."""

    codes: npt.NDArray[np.int64]  # [N, K]
    scales: Float32Array  # [N]: the largest of a row, divided by the scales of the channels, / 127
    channel_scales: Float32Array  # [K]

    @classmethod
    def quantise(cls, values: Float32Array) -> Int8Rows:
        channels = _channel_scales(values)
        values = values / channels
        scales: Float32Array = np.max(np.abs(values), axis=1) / np.float32(127)
        return cls(np.clip(_steps(values, scales[:, None]), -127, 127).astype(np.int64), scales, channels)

    @property
    def values(self) -> Float32Array:
        return self.scales[:, None] * self.codes.astype(np.float32) * self.channel_scales


def _channel_scales(values: Float32Array) -> Float32Array:
    """m^(1/4), m the mean square of a channel in a sample of the rows, not less than a 65,536th of the largest."""
    num = min(len(values), SAMPLED_ROWS)
    sample = values[np.arange(num) * len(values) // num].astype(np.float64)
    squares = np.sum(sample**2, axis=0)
    least = np.max(squares) / 65536
    if not least > 0:
        return np.ones(values.shape[1], np.float32)
    scales: Float32Array = np.sqrt(np.sqrt(np.maximum(squares, least) / num)).astype(np.float32)
    return scales


def to_int16_rows(x: Float32Array) -> tuple[npt.NDArray[np.int64], Float32Array]:
    """float32 [T, K] as codes, [T, K], and the scale of each row, [T]: its largest |x| / 32,639; NaN, with codes of
    zero, where one is not finite."""
    finite = np.isfinite(x).all(axis=1)
    largest = np.max(np.abs(np.where(finite[:, None], x, 0)), axis=1)
    inverse = np.divide(HIGHEST_INT16, largest, out=np.zeros_like(largest), where=largest > LEAST_ACTIVATION)
    codes = np.rint(np.where(finite[:, None], x, 0) * inverse[:, None])
    scale: Float32Array = np.where(finite, largest / HIGHEST_INT16, np.float32(np.nan))
    return codes.astype(np.int64), scale


def _groups(values: Float32Array, pad: Literal["edge", "constant"] = "edge") -> Float32Array:
    padding = -values.shape[1] % GROUP
    padded: Float32Array = np.pad(values, ((0, 0), (0, padding)), mode=pad)
    return padded.reshape(len(values), -1, GROUP)


def _half(values: Float32Array) -> Float32Array:
    rounded: Float32Array = values.astype(np.float16).astype(np.float32)
    return rounded


def _steps(values: Float32Array, scale: Float32Array) -> Float32Array:
    steps = np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)
    rounded: Float32Array = np.rint(steps)
    return rounded

"""The number formats of checkpoint tensors, in NumPy: this file defines what the bytes of each type mean.

Every block type stores a run of values along a row as small integers with float16 scales; the layouts stand at each
function. The native decoder (native/kernels/decode.cpp) gives the same bits. Source: the GGUF format of ggml.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.api import Float32Array, TensorSource

Bytes = npt.NDArray[np.uint8]

# type: (values in a block, bytes in a block)
BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "F64": (1, 8),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
BLOCK_TYPES = tuple(name for name, (values, _) in BLOCKS.items() if values > 1)


def num_bytes(type: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises ValueError if a row is not a whole number of blocks, KeyError for an unknown type."""
    values, nbytes = BLOCKS[type]
    columns = shape[-1] if shape else 1
    if columns % values:
        raise ValueError(f"{type} has blocks of {values} values, and a row of {columns} is not a whole number of them")
    return math.prod(shape) // values * nbytes


@dataclass(slots=True, frozen=True)
class Codes:
    """What blocks hold: value = scale * (code - zero) + minimum."""

    codes: npt.NDArray[Any]  # integers, [B, groups, values of a group]
    bits: int  # of a code
    zero: int
    scales: Float32Array  # [B, groups]
    minimums: Float32Array | None  # [B, groups]

    @property
    def values(self) -> Float32Array:
        """[B, groups, values of a group]"""
        values = self.scales[..., None] * (self.codes.astype(np.float32) - np.float32(self.zero))
        return values if self.minimums is None else values + self.minimums[..., None]

    def reshape(self, rows: int) -> Codes:
        """As many rows instead of blocks."""
        minimums = None if self.minimums is None else self.minimums.reshape(rows, -1)
        codes = self.codes.reshape(rows, -1, self.codes.shape[2])
        return Codes(codes, self.bits, self.zero, self.scales.reshape(rows, -1), minimums)


def decode(source: TensorSource) -> Float32Array:
    """float32 of source.shape, rows in the order meant."""
    blocks = source.data.reshape(-1, BLOCKS[source.type][1])
    decoded = _PLAIN[source.type](blocks) if source.type in _PLAIN else _SPLIT[source.type](blocks).values
    values = decoded.reshape(source.shape)
    return values if source.row_order is None else values[source.row_order]


def split(source: TensorSource) -> Codes:
    """The codes of a matrix [N, K] of a block type, by rows in the order meant."""
    data = source.data.reshape(source.shape[0], -1)
    if source.row_order is not None:
        data = data[source.row_order]
    return _SPLIT[source.type](data.reshape(-1, BLOCKS[source.type][1])).reshape(source.shape[0])


def _f16(data: Bytes) -> Float32Array:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _bf16(data: Bytes) -> Float32Array:
    return (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """[B, n] -> [B, 2n]: all low halves, then all high halves."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _bits(data: Bytes) -> Bytes:
    """[B, 4] -> [B, 32]: bit i of the 32-bit word."""
    return np.unpackbits(data, axis=1, bitorder="little")


def _q4_0(blocks: Bytes) -> Codes:
    """d f16, 32 nibbles: (q - 8) * d."""
    return Codes(_nibbles(blocks[:, 2:])[:, None], 4, 8, _f16(blocks[:, :2]), None)


def _q4_1(blocks: Bytes) -> Codes:
    """d f16, m f16, 32 nibbles: q * d + m."""
    return Codes(_nibbles(blocks[:, 4:])[:, None], 4, 0, _f16(blocks[:, :2]), _f16(blocks[:, 2:4]))


def _q5_0(blocks: Bytes) -> Codes:
    """d f16, 32 fifth bits, 32 nibbles: (q - 16) * d."""
    q = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return Codes(q[:, None], 5, 16, _f16(blocks[:, :2]), None)


def _q5_1(blocks: Bytes) -> Codes:
    """d f16, m f16, 32 fifth bits, 32 nibbles: q * d + m."""
    q = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return Codes(q[:, None], 5, 0, _f16(blocks[:, :2]), _f16(blocks[:, 2:4]))


def _q8_0(blocks: Bytes) -> Codes:
    """d f16, 32 int8: q * d."""
    return Codes(blocks[:, None, 2:] ^ np.uint8(0x80), 8, 128, _f16(blocks[:, :2]), None)


def _k_scales(packed: Bytes) -> tuple[Float32Array, Float32Array]:
    """[B, 12] -> eight 6-bit scales and eight 6-bit minima [B, 8].

    Bytes 0-3 and 4-7 hold scales and minima 0-3 in their low six bits; scales and minima 4-7 have their low four bits
    in the nibbles of bytes 8-11 and their high two bits on top of bytes 0-3 and 4-7.
    """
    scales, minima, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    all_scales = np.concatenate([scales & 63, (low & 15) | (scales >> 6) << 4], axis=1)
    all_minima = np.concatenate([minima & 63, (low >> 4) | (minima >> 6) << 4], axis=1)
    return all_scales.astype(np.float32), all_minima.astype(np.float32)


def _k_codes(blocks: Bytes, bits: int, q: npt.NDArray[Any]) -> Codes:
    """[B, 8, 32] integers: (d * scale) * q - (dmin * minimum), one scale and minimum for each 32."""
    scales, minima = _k_scales(blocks[:, 4:16])
    return Codes(q, bits, 0, _f16(blocks[:, 0:2]) * scales, -(_f16(blocks[:, 2:4]) * minima))


def _pairs(data: Bytes) -> Bytes:
    """[B, 128] -> [B, 8, 32]: each 32 bytes hold 32 values in the low nibbles, the next 32 in the high ones."""
    halves = data.reshape(-1, 4, 1, 32)
    return np.concatenate([halves & 15, halves >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> Codes:
    """d f16, dmin f16, 12 bytes of scales and minima, 256 nibbles."""
    return _k_codes(blocks, 4, _pairs(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Codes:
    """As q4_k with 256 fifth bits before the nibbles: bit j of byte i belongs to value i of group j."""
    high = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [B, 8, 32]
    return _k_codes(blocks, 5, _pairs(blocks[:, 48:]) | high << 4)


def _q6_k(blocks: Bytes) -> Codes:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales (one for 16 values), d f16: d * scale * (q - 32).

    Each half of 128 values takes 64 low bytes (two runs of 32, low nibbles first) and 32 high bytes (four bit pairs).
    """
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)) & 3
    scales = _f16(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)  # [B, 16]
    return Codes((low | high << 4).reshape(-1, 16, 16), 6, 32, scales, None)


_PLAIN: dict[str, Callable[[Bytes], Float32Array]] = {
    "F32": lambda data: np.ascontiguousarray(data).view(np.float32),
    "F16": _f16,
    "BF16": _bf16,
    "F64": lambda data: np.ascontiguousarray(data).view(np.float64).astype(np.float32),
}
_SPLIT: dict[str, Callable[[Bytes], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}

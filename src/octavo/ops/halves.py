"""Block types unpacked to bfloat16 in half precision, in NumPy: what products with bfloat16 activations multiply where
the instruction set does that (isa.UNPACKS_IN_HALVES). The native side, and the reasons, are in
native/include/octavo/halves.h.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops.api import Float32Array
from octavo.ops.decode import Codes


def unpack_in_halves(codes: Codes) -> tuple[Float32Array, Float32Array]:
    """[N, K] twice: the values that products multiply, all of bfloat16, and those of the integers with the scales
    that are kept. Rows with a scale or minimum that is not finite are NaN.

    Each row has a power of two, t. Values are scale * code + minimum, divided by 2^t and rounded to half; what is
    smaller than 2^-14 then, is zero; the rest is rounded to the eight significant bits of bfloat16, ties away from
    zero.
    """
    unit = -22 if codes.bits == 4 else -24  # a code is read as the half code * 2^unit
    finite, t = _powers(codes, unit)
    kept = _half(codes.scales * np.exp2(-t - unit))
    if codes.minimums is None:
        offset = _half(kept.astype(np.float64) * (-codes.zero * 2.0**unit))
    else:
        offset = _half(codes.minimums * np.exp2(-t))
    # Exact in float64 up to its one rounding.
    halves = _half(kept[..., None].astype(np.float64) * codes.codes * 2.0**unit + offset[..., None])
    unpacked = np.exp2(t)[..., None] * _round_away(halves)
    minimums = None if codes.minimums is None else _float32(offset * np.exp2(t))
    stored = Codes(codes.codes, codes.bits, codes.zero, _float32(kept * np.exp2(t + unit)), minimums)
    rows = len(codes.codes)
    unpacked, values = unpacked.reshape(rows, -1), stored.values.reshape(rows, -1)
    return _float32(np.where(finite, unpacked, np.nan)), _float32(np.where(finite, values, np.nan))


def _powers(codes: Codes, unit: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """[N, 1] twice: whether all of a row's scales and minimums are finite, and its t: scales and minimums, divided by
    2^(t + unit) and 2^t, are below 2^16 and 2^14."""
    scale = np.max(np.abs(codes.scales), axis=1, keepdims=True)
    minimum = np.zeros_like(scale)
    if codes.minimums is not None:
        minimum = np.max(np.abs(codes.minimums), axis=1, keepdims=True)
    t = np.maximum(_exponent(scale) - 16 - unit, _exponent(minimum) - 14)
    return np.isfinite(scale) & np.isfinite(minimum), np.maximum(t, -100)


def _exponent(x: Float32Array) -> npt.NDArray[np.float64]:
    """The power of two above x, and above what x may be rounded to in half; -inf for nothing."""
    exponent = np.frexp(x * np.float32(1 + 2**-11))[1].astype(np.float64)
    return np.where(x > 0, exponent, -np.inf)


def _half(x: npt.NDArray[Any]) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore", invalid="ignore"):  # of rows that are not finite
        return x.astype(np.float16)


def _float32(x: npt.NDArray[Any]) -> Float32Array:
    return x.astype(np.float32)


def _round_away(halves: npt.NDArray[np.float16]) -> npt.NDArray[np.float64]:
    """To the bits of bfloat16; without what is subnormal."""
    bits = halves.view(np.uint16).astype(np.int32)
    magnitude = ((bits & 0x7FFF) + 4) >> 3 << 3
    rounded = (bits & 0x8000 | magnitude).astype(np.uint16).view(np.float16).astype(np.float64)
    return np.where(magnitude < 0x400, 0, rounded)

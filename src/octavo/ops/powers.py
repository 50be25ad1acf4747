"""Powers of two in integers of 16 bits, in NumPy: the probabilities of attention with a bfloat16 cache where the
instruction set makes them so (isa.SHORT_POWERS). The native side, and the reasons, are in native/tiles/short_powers.h.
"""

from __future__ import annotations

import numpy as np

from octavo.ops.api import Float32Array

UNIT = 1024  # of the exponents, which are rounded to integers of 16 bits


def short_powers(x: Float32Array) -> Float32Array:
    """2^(x / UNIT), of bfloat16, but for a factor common to all. What is below 2^-32 is that, and so is a NaN."""
    exponents = np.where(np.isnan(x), -32768, np.clip(np.rint(x), -32768, 32767)).astype(np.int64)
    fraction = exponents << 6 & 0xFFFF
    slope = (fraction * 80 >> 16) + 312
    correction = (fraction * (-fraction & 0xFFFF) >> 16) * slope >> 16
    bits = (exponents - correction + 4 >> 3) + (127 << 7)
    return (bits << 16).astype(np.uint32).view(np.float32)

"""Rotary position tables for every known rope type: config in, cosines and sines out.

The frequencies are computed in float32 in the same order of operations as in transformers, because a float32 angle at
position 8000 moves by 5e-4 when a frequency moves by its last bit. Powers, cosines and sines go through float64 and
are rounded once. `dynamic` and `longrope` are fixed for the chosen max_model_len, so that a token's bytes do not
depend on how long its request has become.

Sources: RoFormer (arXiv 2104.09864), YaRN (2309.00071), LongRoPE (2402.13753), Llama 3.1's frequency bands.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from octavo.models.config import ModelConfig, RopeConfig
from octavo.ops.api import Float32Array


def rope_table(config: ModelConfig, max_model_len: int) -> Float32Array:
    """float32 [max_model_len, rotary_dim]: rotary_dim/2 cosines, then as many sines, scaled as the type asks."""
    frequencies, scale = rope_frequencies(config, max_model_len)
    positions = np.arange(max_model_len, dtype=np.float32)
    angles = (positions[:, None] * frequencies[None, :]).astype(np.float64)  # the product is rounded to float32
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return table * np.float32(scale)


def rope_frequencies(config: ModelConfig, max_model_len: int) -> tuple[Float32Array, float]:
    """float32 [rotary_dim / 2] radians per position of each pair, and the factor on cosines and sines."""
    return _TYPES[config.rope.type](config.rope, config.max_position_embeddings, max_model_len)


def _powers(theta: float, rotary_dim: int) -> Float32Array:
    """float32 theta^(2i / rotary_dim): the wavelengths over 2π."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)


def _default(rope: RopeConfig, max_positions: int, max_model_len: int) -> tuple[Float32Array, float]:
    return np.float32(1) / _powers(rope.theta, rope.rotary_dim), 1.0


def _linear(rope: RopeConfig, max_positions: int, max_model_len: int) -> tuple[Float32Array, float]:
    assert rope.factor is not None
    return np.float32(1) / _powers(rope.theta, rope.rotary_dim) / np.float32(rope.factor), 1.0


def _dynamic(rope: RopeConfig, max_positions: int, max_model_len: int) -> tuple[Float32Array, float]:
    """The base grows with the length beyond the trained one (NTK-aware)."""
    assert rope.factor is not None
    length, dim = max(max_model_len, max_positions), rope.rotary_dim
    stretch = rope.factor * length / max_positions - (rope.factor - 1)
    return np.float32(1) / _powers(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(rope: RopeConfig, max_positions: int, max_model_len: int) -> tuple[Float32Array, float]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    assert rope.factor is not None
    trained, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    factor, one = np.float32(rope.factor), np.float32(1)
    kept = one / _powers(rope.theta, rope.rotary_dim)
    wavelengths = np.float32(2 * math.pi) / kept
    blend = (np.float32(trained) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (one - blend) * kept / factor + blend * kept
    is_long, is_short = wavelengths > np.float32(trained / low), wavelengths < np.float32(trained / high)
    return np.where(is_long, kept / factor, np.where(is_short, kept, blended)), 1.0


def _yarn(rope: RopeConfig, max_positions: int, max_model_len: int) -> tuple[Float32Array, float]:
    """Pairs that turn often in the trained length keep their frequency, those that hardly turn are stretched."""
    assert rope.factor is not None
    dim, trained, one = rope.rotary_dim, rope.original_max_position_embeddings, np.float32(1)

    def pair_that_turns(times: float) -> float:
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step instead of a division by zero
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    keep = one - np.clip(ramp, np.float32(0), one)
    powers = _powers(rope.theta, dim)
    frequencies = one / (np.float32(rope.factor) * powers) * (one - keep) + one / powers * keep
    return frequencies, _yarn_scale(rope, rope.factor)


def _yarn_scale(rope: RopeConfig, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope(rope: RopeConfig, max_positions: int, max_model_len: int) -> tuple[Float32Array, float]:
    """One divisor per pair, found by search: a set for lengths up to the trained one, a set for those beyond."""
    assert rope.factor is not None
    trained = rope.original_max_position_embeddings
    divisors = np.array(rope.long_factor if max_model_len > trained else rope.short_factor, np.float32)
    scale = rope.attention_factor
    if scale is None:
        scale = math.sqrt(1 + math.log(rope.factor) / math.log(trained)) if rope.factor > 1 else 1.0
    return np.float32(1) / (divisors * _powers(rope.theta, rope.rotary_dim)), scale


_TYPES: dict[str, Callable[[RopeConfig, int, int], tuple[Float32Array, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}

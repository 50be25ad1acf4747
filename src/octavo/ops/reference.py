"""The ops in NumPy, slow and obvious: this file defines their semantics, kernels are tested against it.

It runs eagerly on float32 arrays, one row and one head at a time where that is clearer, and computes every row alone,
so that no result depends on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo.ops.api import ActivationDType, Batch, CacheDType, DType, Float32Array, Int32Array, Storage, TensorSource
from octavo.ops.decode import Codes, decode, split
from octavo.ops.halves import unpack_in_halves
from octavo.ops.quantised import (
    Int8Rows,
    keeps_blocks,
    quantise_activations,
    quantise_codes,
    quantise_weights,
    to_int16_rows,
)

SPLIT = 256  # tokens of the KV cache that attention sums at a time


def round_to(x: Float32Array, dtype: DType) -> Float32Array:
    """float32 values rounded to `dtype`, to nearest even."""
    return x if dtype == "float32" else x.astype(ml_dtypes.bfloat16).astype(np.float32)


@dataclass(slots=True, frozen=True)
class ReferenceMatrix:
    values: Float32Array  # [N, K]: rounded to dtype, or what the matrix's integers stand for
    dtype: ActivationDType
    bias: Float32Array | None  # [N]
    in_blocks: bool = False  # values are of a block type, not of dtype
    rows: Int8Rows | None = None  # of dtype int16
    unpacked: Float32Array | None = None  # [N, K]: what products multiply, where that is not `values` rounded to dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


def to_codes(x: Float32Array) -> tuple[Float32Array, Float32Array]:
    """Integers in [-127, 127], and their scale for each row of the last dimension: x is about codes * scale."""
    scale = np.max(np.abs(x), axis=-1, keepdims=True) / np.float32(127)
    return np.rint(x / np.where(scale > 0, scale, np.float32(1))), scale


@dataclass(slots=True, frozen=True)
class ReferenceKVCache:
    k: Float32Array  # [num_blocks * block_size, G, D], rounded to dtype, or codes
    v: Float32Array
    k_scale: Float32Array  # [num_blocks * block_size, G, 1]: of the codes, else ones
    v_scale: Float32Array
    block_size: int
    dtype: CacheDType

    @property
    def operand_dtype(self) -> DType:
        """What the products round queries and probabilities to."""
        return "float32" if self.dtype == "float32" else "bfloat16"


@dataclass(slots=True, frozen=True)
class ReferenceKVBlocks:
    layers: tuple[ReferenceKVCache, ...]
    block_size: int

    @property
    def block_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts(0))

    def layer(self, index: int) -> ReferenceKVCache:
        return self.layers[index]

    def copy_block(self, from_block: int, to_block: int, num_tokens: int) -> None:
        for source, target in zip(self._parts(from_block), self._parts(to_block), strict=True):
            target[:num_tokens] = source[:num_tokens]

    def save_block(self, block: int, out: npt.NDArray[np.uint8]) -> None:
        out[:] = np.concatenate([part.reshape(-1).view(np.uint8) for part in self._parts(block)])

    def load_block(self, block: int, bytes: npt.NDArray[np.uint8]) -> None:
        start = 0
        for part in self._parts(block):
            part[:] = bytes[start : start + part.nbytes].view(np.float32).reshape(part.shape)
            start += part.nbytes

    def _parts(self, block: int) -> list[Float32Array]:
        """The block's slots in each array of each layer."""
        slots = slice(block * self.block_size, (block + 1) * self.block_size)
        return [array[slots] for layer in self.layers for array in (layer.k, layer.v, layer.k_scale, layer.v_scale)]


class ReferenceOps:
    def embedding(self, table: ReferenceMatrix, token_ids: Int32Array) -> Float32Array:
        return table.values[token_ids]

    def rms_norm(self, x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
        mean_square: Float32Array = np.mean(x * x, axis=1, keepdims=True, dtype=np.float32)
        y: Float32Array = x / np.sqrt(mean_square + np.float32(eps)) * weight
        return y

    def linear(self, x: Float32Array, weight: ReferenceMatrix) -> Float32Array:
        if weight.rows is not None:
            codes, scales = to_int16_rows(x * weight.rows.channel_scales)
            sums = codes.astype(np.float64) @ weight.rows.codes.T.astype(np.float64)  # integers below 2^53: exact
            exact: Float32Array = sums.astype(np.float32) * (scales[:, None] * weight.rows.scales)
            return exact if weight.bias is None else exact + weight.bias
        if weight.dtype == "int8":
            inputs, values = quantise_activations(x), weight.values
        else:
            inputs = round_to(x, weight.dtype)
            values = round_to(weight.values, weight.dtype) if weight.unpacked is None else weight.unpacked
        y = np.empty((len(x), len(values)), np.float32)
        for t, row in enumerate(inputs):  # one product per row: a product of matrices may sum in another order
            y[t] = values @ row
        return y if weight.bias is None else y + weight.bias

    def split(self, x: Float32Array, sizes: Sequence[int]) -> tuple[Float32Array, ...]:
        return tuple(np.split(x, np.cumsum(sizes)[:-1], axis=1))

    def rope(self, x: Float32Array, positions: Int32Array, table: Float32Array, head_dim: int) -> Float32Array:
        heads = x.reshape(len(x), -1, head_dim)
        half = table.shape[1] // 2
        cos, sin = table[positions, None, :half], table[positions, None, half:]  # [T, 1, half]
        first, second = heads[:, :, :half], heads[:, :, half : 2 * half]
        turned = [first * cos - second * sin, second * cos + first * sin, heads[:, :, 2 * half :]]
        return np.concatenate(turned, axis=2).reshape(x.shape)

    def write_kv(self, k: Float32Array, v: Float32Array, cache: ReferenceKVCache, batch: Batch) -> None:
        shape = (len(k), *cache.k.shape[1:])
        slots = batch.slot_mapping
        if cache.dtype == "int8":
            cache.k[slots], cache.k_scale[slots] = to_codes(k.reshape(shape))
            cache.v[slots], cache.v_scale[slots] = to_codes(v.reshape(shape))
        else:
            cache.k[slots] = round_to(k, cache.dtype).reshape(shape)
            cache.v[slots] = round_to(v, cache.dtype).reshape(shape)

    def attention(self, q: Float32Array, cache: ReferenceKVCache, batch: Batch, scale: float) -> Float32Array:
        num_kv_heads, head_dim = cache.k.shape[1:]
        heads = round_to(q, cache.operand_dtype).reshape(len(q), -1, head_dim)  # [T, H, D]
        heads_per_kv = heads.shape[1] // num_kv_heads
        out = np.empty_like(heads)
        for r in range(len(batch.seq_lens)):
            slots = _slots(batch.block_tables[r], int(batch.seq_lens[r]), cache.block_size)
            for t in range(batch.query_start[r], batch.query_start[r + 1]):
                seen = slots[: batch.positions[t] + 1]
                for h in range(heads.shape[1]):
                    out[t, h] = _attend(heads[t, h], cache, seen, h // heads_per_kv, scale)
        return out.reshape(q.shape)

    def silu_mul(self, gate_up: Float32Array) -> Float32Array:
        gate, up = np.split(gate_up, 2, axis=1)
        with np.errstate(over="ignore"):  # exp(-x) may reach infinity, and then silu is the 0 that it should be
            y: Float32Array = gate / (1 + np.exp(-gate)) * up
        return y

    def add(self, x: Float32Array, y: Float32Array) -> Float32Array:
        return x + y

    def take_rows(self, x: Float32Array, rows: Int32Array) -> Float32Array:
        return x[rows]


def _slots(block_table: Int32Array, num_tokens: int, block_size: int) -> Int32Array:
    """Where positions 0 … num_tokens - 1 lie in the cache."""
    positions = np.arange(num_tokens, dtype=np.int32)
    slots: Int32Array = block_table[positions // block_size] * np.int32(block_size) + positions % np.int32(block_size)
    return slots


def _attend(q: Float32Array, cache: ReferenceKVCache, slots: Int32Array, head: int, scale: float) -> Float32Array:
    """One query [D] on the keys and values [n, D] of a head in `slots`: softmax(k @ q * scale) @ v.

    Each split has its own maximum; the probabilities relative to it are rounded for their product with v, but summed
    unrounded. Then the splits are merged from left to right, rescaled to the larger of the two maxima.
    """
    k, k_scale = cache.k[slots, head], cache.k_scale[slots, head, 0]
    v, v_scale = cache.v[slots, head], cache.v_scale[slots, head, 0]
    maximum, total, sums = np.float32(-np.inf), np.float32(0), np.zeros_like(q)
    for begin in range(0, len(k), SPLIT):
        split = slice(begin, begin + SPLIT)
        scores = (k[split] @ q) * k_scale[split] * np.float32(scale)
        split_maximum = np.max(scores)
        p = np.exp(scores - split_maximum)
        split_total = np.sum(p, dtype=np.float32)
        split_sums = v[split].T @ round_to(p * v_scale[split], cache.operand_dtype)
        merged = np.maximum(maximum, split_maximum)
        old, new = np.exp(maximum - merged), np.exp(split_maximum - merged)
        total = total * old + split_total * new
        sums = sums * old + split_sums * new
        maximum = merged
    return sums / total


class ReferenceBackend:
    """`unpacks_in_halves`: as an instruction set of isa.UNPACKS_IN_HALVES does."""

    name = "reference"

    def __init__(self, unpacks_in_halves: bool = False) -> None:
        self._unpacks_in_halves = unpacks_in_halves

    def matrix(
        self,
        sources: Sequence[TensorSource],
        dtype: ActivationDType,
        bias: Sequence[TensorSource] = (),
        storage: Storage = "plain",
    ) -> ReferenceMatrix:
        values = np.concatenate([decode(source) for source in sources])
        in_blocks = keeps_blocks(sources, storage)
        codes = [split(source) for source in sources] if in_blocks and storage == "blocks" else []
        return self._matrix(values, dtype, storage, in_blocks, codes, bias)

    def vector(self, source: TensorSource) -> Float32Array:
        return decode(source)

    def random_matrix(
        self, shape: tuple[int, int], dtype: ActivationDType, seed: int, storage: Storage = "plain"
    ) -> ReferenceMatrix:
        limit = shape[1] ** -0.5
        values = np.random.default_rng(seed).uniform(-limit, limit, shape).astype(np.float32)
        return self._matrix(values, dtype, storage, storage in ("int8", "int4"))

    def constant(self, values: Float32Array) -> Float32Array:
        return values

    def kv_blocks(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: CacheDType
    ) -> ReferenceKVBlocks:
        shape, scales = (num_blocks * block_size, num_kv_heads, head_dim), (num_blocks * block_size, num_kv_heads, 1)
        k, v = (np.zeros((num_layers, *shape), np.float32) for _ in range(2))
        k_scale, v_scale = (np.ones((num_layers, *scales), np.float32) for _ in range(2))
        layers = (ReferenceKVCache(*arrays, block_size, dtype) for arrays in zip(k, v, k_scale, v_scale, strict=True))
        return ReferenceKVBlocks(tuple(layers), block_size)

    def _matrix(
        self,
        values: Float32Array,
        dtype: ActivationDType,
        storage: Storage,
        in_blocks: bool,
        codes: Sequence[Codes] = (),
        bias: Sequence[TensorSource] = (),
    ) -> ReferenceMatrix:
        """`codes`: of the sources, where the matrix keeps them as they are."""
        rows, unpacked = None, None
        if dtype == "int16":
            rows = Int8Rows.quantise(values)
            values = rows.values
        elif in_blocks and dtype == "bfloat16" and self._unpacks_in_halves:
            both = [unpack_in_halves(part) for part in codes or [quantise_codes(values, storage)]]
            unpacked, values = (np.concatenate(parts)[:, : values.shape[1]] for parts in zip(*both, strict=True))
        elif in_blocks:
            values = quantise_weights(values, storage)
        else:
            dtype = "bfloat16" if dtype == "int8" else dtype
            values = round_to(values, dtype)
        biases = np.concatenate([decode(b) for b in bias]) if bias else None
        return ReferenceMatrix(values, dtype, biases, in_blocks, rows, unpacked)

"""Every op once: shapes, dtypes, meaning. `reference.py` defines the semantics; every kernel is tested against it.

A model's forward calls these and nothing else; what a Tensor or a Matrix is, only the backend knows.

Arithmetic, for all backends:
- Activations are float32 between ops. Only the *inputs of matrix products* are rounded, to the matrix's compute type
  (`Matrix.dtype`): float32 or bfloat16, round to nearest even, with products summed in float32; or as follows.
- A matrix may keep its values as the integers of a block type (`Storage`). Its products then take the values rounded to
  bfloat16, or (dtype int8) activations rounded to int8: in groups of 32 along K with scale max|x| / 127, after the two
  largest |x| of a row (the first of equals) were taken out; those two multiply the unrounded values.
- A matrix of dtype int16 has int8 codes, with a scale for each of its rows and one for each of its channels, along K
  (`Int8Rows` in quantised.py). Its products take activations, multiplied by the scales of the channels, as int16 codes
  with a scale for each row. The sum of the products of codes is exact, and rounded once; then it is multiplied by the
  product of both rows' scales. A row of activations with one that is not finite gives NaN.
- In attention with a bfloat16 cache, the inputs of matrix products are q (after rope), k, v and the probabilities. An
  int8 cache keeps codes, with a float32 scale for each token and kv head: max|x| / 127, codes rounded to nearest even.
  The products take the codes, which are exact in bfloat16; scores are multiplied by the scales of the keys,
  probabilities by the scales of the values before they are rounded. An instruction set of isa.SHORT_POWERS makes the
  probabilities of a bfloat16 cache with exponents in units of 2^-10 (powers.py), and sums them as they are multiplied.
- Every row of every result depends on that row's inputs alone, never on how many rows there are.

Notation: T tokens in the step, R requests, L rows of logits, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Tensor = Any  # a backend's array, [rows, columns]
Matrix = Any  # a backend's packed weight matrix, [N, K]: N outputs, K inputs
Vector = Any  # a backend's float32 vector
DType = Literal["float32", "bfloat16"]
ActivationDType = Literal["float32", "bfloat16", "int8", "int16"]
CacheDType = Literal["float32", "bfloat16", "int8"]
# How a matrix keeps its values: in its dtype (of float32 in bfloat16, if its sources are all BF16); block types as the
# checkpoint has them (else plain); quantised when packed, to groups of 32 with a half-precision scale (int8: symmetric,
# Q8_0) or scale and minimum (int4: Q4_1), or to int8 with a float32 scale for each row (int8_row, with dtype int16 and
# only with that).
Storage = Literal["plain", "blocks", "int8", "int4", "int8_row"]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class KVCache(Protocol):
    """A backend's paged cache of one layer: what its ops make of it is its own."""


class KVBlocks(Protocol):
    """A backend's paged cache of all layers. A block is what all of them keep of its tokens."""

    @property
    def block_bytes(self) -> int: ...

    def layer(self, index: int) -> KVCache: ...

    def copy_block(self, from_block: int, to_block: int, num_tokens: int) -> None:
        """The first `num_tokens` tokens of a block into another one, or the same. What then stands behind them is
        finite."""

    def save_block(self, block: int, out: npt.NDArray[np.uint8]) -> None:
        """A block's bytes into `out` [block_bytes]."""

    def load_block(self, block: int, bytes: npt.NDArray[np.uint8]) -> None:
        """The way back."""


@dataclass(slots=True, frozen=True)
class TensorSource:
    """A checkpoint tensor as it lies in the (memory-mapped) file, not yet converted.

    `data` is the raw little-endian bytes, uint8 [nbytes], C order. `type` is one of F32, F16, BF16, F64, Q4_0, Q4_1,
    Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K (block types: blocks run along the last dimension). `shape` is in PyTorch
    order: (N, K) for a matrix, (N,) for a vector. `row_order`: row i of the tensor meant is row row_order[i] of
    `data` (GGUF stores some q and k rows in another order); None is the identity.
    """

    name: str
    data: npt.NDArray[np.uint8]
    type: str
    shape: tuple[int, ...]
    row_order: Int32Array | None = None


@dataclass(slots=True)
class Batch:
    """The integers of one step, as arrays. Request r owns token rows [query_start[r], query_start[r + 1])."""

    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T]
    slot_mapping: Int32Array  # [T]: block_id * block_size + offset where each token's K and V go
    query_start: Int32Array  # [R + 1]
    seq_lens: Int32Array  # [R]: tokens in the cache after this step
    block_tables: Int32Array  # [R, max_blocks]: padded with 0
    logit_rows: Int32Array  # [L]: the token rows whose logits are wanted, in the order they are wanted in


class Ops(Protocol):
    def embedding(self, table: Matrix, token_ids: Tensor) -> Tensor:
        """[V, K], int32 [T] -> [T, K]: row token_ids[t] of the table, in float32."""

    def rms_norm(self, x: Tensor, weight: Vector, eps: float) -> Tensor:
        """[T, K], [K] -> [T, K]: x / sqrt(mean(x², over K) + eps) * weight."""

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        """[T, K], [N, K] -> [T, N]: round(x) @ weightᵀ (+ the matrix's bias, where it has one)."""

    def split(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """[T, sum(sizes)] -> views of consecutive columns."""

    def rope(self, x: Tensor, positions: Tensor, table: Tensor, head_dim: int) -> Tensor:
        """[T, heads * D], int32 [T], float32 [max_model_len, rotary_dim] -> [T, heads * D].

        table[p] holds rotary_dim/2 cosines, then as many sines. In each head, with h = rotary_dim/2, the pair
        (i, i + h) turns: x[i]*cos[i] - x[i+h]*sin[i], x[i+h]*cos[i] + x[i]*sin[i]; columns beyond rotary_dim pass.
        """

    def write_kv(self, k: Tensor, v: Tensor, cache: KVCache, batch: Any) -> None:
        """[T, G * D] each: store row t at slot_mapping[t], rounded to the cache's dtype."""

    def attention(self, q: Tensor, cache: KVCache, batch: Any, scale: float) -> Tensor:
        """[T, H * D] -> [T, H * D]. A token at position p of request r attends to positions 0 … p of r in the cache;
        query head h reads key/value head h // (H / G). Computed in splits of 256 tokens, merged left to right."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2F] -> [T, F]: silu(first F columns) * last F columns, silu(x) = x / (1 + exp(-x))."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """[T, K] + [T, K]."""

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """[T, K], int32 [L] -> [L, K]."""


class Backend(Protocol):
    """What a device brings beside its ops: how weights and caches are laid out there."""

    name: str

    def matrix(
        self,
        sources: Sequence[TensorSource],
        dtype: ActivationDType,
        bias: Sequence[TensorSource] = (),
        storage: Storage = "plain",
    ) -> Matrix:
        """Pack [N, K] from sources stacked along N (fused q, k, v …). `bias`, if any, stacks to [N]. Block types that
        change within 32 rows cannot be kept: such a matrix becomes plain, and a plain one has no int8 activations."""

    def read_packed(self, file: int, num_bytes: int) -> Any:
        """A file of packed matrices, open as `file`, read into memory: its `data` is a read-only array of uint8. It
        lives as long as a matrix in it. OSError where it cannot be read, or is shorter."""

    def packed_matrix(
        self,
        packed: Any,
        offset: int,
        sources: Sequence[TensorSource],
        dtype: ActivationDType,
        bias: Sequence[TensorSource] = (),
        storage: Storage = "plain",
    ) -> Matrix:
        """What `matrix` made of the same once, and the same build: its `data` stands in `packed` from `offset` on, a
        multiple of 64. Of the sources only `bias` is read. ValueError where that is too short."""

    def checksums(self, data: npt.NDArray[np.uint8], *, threads: bool = True) -> npt.NDArray[np.uint64]:
        """A checksum for each MiB of the data, a multiple of four bytes. `threads`: with those that compute a step, and
        not while one is computed."""

    def vector(self, source: TensorSource) -> Vector:
        """float32 [N] from any unblocked or blocked type."""

    def random_matrix(
        self, shape: tuple[int, int], dtype: ActivationDType, seed: int, storage: Storage = "plain"
    ) -> Matrix:
        """For --load-format dummy: small random values."""

    def constant(self, values: Float32Array) -> Tensor:
        """A float32 array that the ops read: a rope table, a vector of ones."""

    def kv_blocks(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: CacheDType
    ) -> KVBlocks:
        """Empty, num_blocks * block_size tokens."""

"""The CPU backend: packed weights, caches and kernels of the native module. No PyTorch, no BLAS.

`CpuOps` runs a model's forward op by op (`--enforce-eager`); the traced program of `runtime/program.py` calls the same
kernels and gives the same bytes. It knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.ops import isa
from octavo.ops.api import ActivationDType, Batch, CacheDType, Float32Array, Int32Array, Storage, TensorSource
from octavo.ops.threads import choose_cpus


class CpuBackend:
    """Owns the thread pool; everything packed or computed on the CPU goes through it."""

    name = "cpu"

    def __init__(self, *, variant: str | None = None, num_threads: int | None = None) -> None:
        """`variant` and `num_threads` None: the best for this machine. Raises ConfigError for an impossible variant."""
        self.native = isa.load(variant)
        self.variant = variant or isa.available()[0]
        cpus = choose_cpus(num_threads, lambda cpus: self.native.measure_work(self.native.ThreadPool(len(cpus), cpus)))
        # More threads than CPUs cannot each have one: leave them to the kernel's scheduler.
        self.pool = self.native.ThreadPool(len(cpus), cpus if len(set(cpus)) == len(cpus) else [])

        self._arena = self.native.Arena()

    @property
    def num_threads(self) -> int:
        return int(self.pool.size)

    def matrix(
        self,
        sources: Sequence[TensorSource],
        dtype: ActivationDType,
        bias: Sequence[TensorSource] = (),
        storage: Storage = "plain",
    ) -> Any:
        return self.native.Matrix(self.pool, self._arena, *self._layout(sources, dtype, bias, storage))

    def read_packed(self, file: int, num_bytes: int) -> Any:
        return self.native.PackedWeights(file, num_bytes, self.pool)

    def packed_matrix(
        self,
        packed: Any,
        offset: int,
        sources: Sequence[TensorSource],
        dtype: ActivationDType,
        bias: Sequence[TensorSource] = (),
        storage: Storage = "plain",
    ) -> Any:
        return self.native.Matrix.packed(packed, offset, *self._layout(sources, dtype, bias, storage))

    def checksums(self, data: npt.NDArray[np.uint8], *, threads: bool = True) -> npt.NDArray[np.uint64]:
        sums: npt.NDArray[np.uint64] = self.native.checksums(data, self.pool if threads else None)
        return sums

    def _layout(
        self, sources: Sequence[TensorSource], dtype: ActivationDType, bias: Sequence[TensorSource], storage: Storage
    ) -> tuple[Any, ...]:
        """What decides how a matrix is packed, as the native module takes it."""
        rows = [(source.data, source.type, source.shape[0], source.row_order) for source in sources]
        values = np.concatenate([self.vector(source) for source in bias]) if bias else None
        return rows, sources[0].shape[1], dtype, storage, values

    def vector(self, source: TensorSource) -> Float32Array:
        values: Float32Array = self.native.decode(source.type, source.data, 1, source.shape[0])[0]
        return values if source.row_order is None else values[source.row_order]

    def random_matrix(
        self, shape: tuple[int, int], dtype: ActivationDType, seed: int, storage: Storage = "plain"
    ) -> Any:
        scale = float(np.sqrt(3 / shape[1]))  # variance 1 / K, so that activations keep their size from layer to layer
        return self.native.Matrix.random(self.pool, self._arena, *shape, dtype, storage, seed, scale)

    def constant(self, values: Float32Array) -> Float32Array:
        return np.ascontiguousarray(values, np.float32)

    def kv_blocks(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: CacheDType
    ) -> Any:
        return self.native.KVBlocks(num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype)

    def step(self, batch: Batch) -> Any:
        """The batch as the kernels read it; keeps its arrays alive."""
        return self.native.Step(
            batch.token_ids,
            batch.positions,
            batch.slot_mapping,
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            batch.logit_rows,
        )


class CpuOps:
    """Ops (see api.py) on NumPy arrays, each result in a new array."""

    def __init__(self, backend: CpuBackend) -> None:
        self.native = backend.native
        self.pool = backend.pool
        self.backend = backend

    def embedding(self, table: Any, token_ids: Int32Array) -> Float32Array:
        out = np.empty((len(token_ids), table.shape[1]), np.float32)
        self.native.embedding(self.pool, table, token_ids, out)
        return out

    def rms_norm(self, x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
        out = np.empty(x.shape, np.float32)
        self.native.rms_norm(self.pool, x, weight, eps, out)
        return out

    def linear(self, x: Float32Array, weight: Any) -> Float32Array:
        out = np.empty((x.shape[0], weight.shape[0]), np.float32)
        self.native.linear(self.pool, x, weight, None, out)
        return out

    def split(self, x: Float32Array, sizes: Sequence[int]) -> tuple[Float32Array, ...]:
        ends = np.cumsum(sizes)
        return tuple(x[:, end - size : end] for size, end in zip(sizes, ends, strict=True))

    def rope(self, x: Float32Array, positions: Int32Array, table: Float32Array, head_dim: int) -> Float32Array:
        out = np.empty(x.shape, np.float32)
        self.native.rope(self.pool, x, positions, table, head_dim, out)
        return out

    def write_kv(self, k: Float32Array, v: Float32Array, cache: Any, batch: Batch) -> None:
        self.native.write_kv(self.pool, k, v, cache, self.backend.step(batch))

    def attention(self, q: Float32Array, cache: Any, batch: Batch, scale: float) -> Float32Array:
        out = np.empty(q.shape, np.float32)
        self.native.attention(self.pool, q, cache, self.backend.step(batch), scale, out)
        return out

    def silu_mul(self, gate_up: Float32Array) -> Float32Array:
        out = np.empty((gate_up.shape[0], gate_up.shape[1] // 2), np.float32)
        self.native.silu_mul(self.pool, gate_up, out)
        return out

    def add(self, x: Float32Array, y: Float32Array) -> Float32Array:
        out = np.empty(x.shape, np.float32)
        self.native.add(self.pool, x, y, out)
        return out

    def take_rows(self, x: Float32Array, rows: Int32Array) -> Float32Array:
        out = np.empty((len(rows), x.shape[1]), np.float32)
        self.native.take_rows(self.pool, x, rows, out)
        return out

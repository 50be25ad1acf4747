"""A model's forward, run once on symbols: the list of ops that every step will replay.

Owns the trace's records and `TraceOps`, which writes them. It computes nothing and knows no device; fusion.py rewrites
the list and program.py turns it into native instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Domain = Literal["tokens", "logits"]  # how many rows a value has: the step's tokens, or the wanted logits


@dataclass(eq=False, slots=True)
class Value:
    """A float32 tensor of the trace, [rows of its domain, columns]. A slice shares the memory of `parent`."""

    domain: Domain
    columns: int
    parent: Value | None = None
    first: int = 0  # its first column in the parent
    # Not 0: its memory holds what products make of it times this factor (native/kernels/packed_rows.h).
    packed: float = 0.0

    @property
    def root(self) -> Value:
        return self.parent or self


@dataclass(eq=False, slots=True)
class Node:
    """One op: values in, at most one value out, and what is fixed at trace time (weights, caches, numbers)."""

    op: str
    inputs: tuple[Value, ...]
    output: Value | None
    constants: dict[str, Any] = field(default_factory=dict)


class SymbolicBatch:
    """Stands for the step's Batch in a trace: the native program finds these arrays in each step by itself."""

    token_ids = "token_ids"
    positions = "positions"
    logit_rows = "logit_rows"


class TraceOps:
    """Ops (see ops/api.py) that record instead of compute."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def embedding(self, table: Any, token_ids: Any) -> Value:
        return self._record("embedding", (), Value("tokens", table.shape[1]), table=table)

    def rms_norm(self, x: Value, weight: Any, eps: float) -> Value:
        return self._record("rms_norm", (x,), Value(x.domain, x.columns), weight=weight, eps=eps)

    def linear(self, x: Value, weight: Any) -> Value:
        return self._record("linear", (x,), Value(x.domain, weight.shape[0]), weight=weight)

    def split(self, x: Value, sizes: Sequence[int]) -> tuple[Value, ...]:
        starts = [x.first + sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(Value(x.domain, size, x.root, start) for size, start in zip(sizes, starts, strict=True))

    def rope(self, x: Value, positions: Any, table: Any, head_dim: int) -> Value:
        return self._record("rope", (x,), Value(x.domain, x.columns), table=table, head_dim=head_dim)

    def write_kv(self, k: Value, v: Value, cache: Any, batch: Any) -> None:
        self.nodes.append(Node("write_kv", (k, v), None, {"cache": cache}))

    def attention(self, q: Value, cache: Any, batch: Any, scale: float) -> Value:
        return self._record("attention", (q,), Value(q.domain, q.columns), cache=cache, scale=scale)

    def silu_mul(self, gate_up: Value) -> Value:
        return self._record("silu_mul", (gate_up,), Value(gate_up.domain, gate_up.columns // 2))

    def add(self, x: Value, y: Value) -> Value:
        return self._record("add", (x, y), Value(x.domain, x.columns))

    def take_rows(self, x: Value, rows: Any) -> Value:
        return self._record("take_rows", (x,), Value("logits", x.columns))

    def _record(self, op: str, inputs: tuple[Value, ...], output: Value, **constants: Any) -> Value:
        self.nodes.append(Node(op, inputs, output, constants))
        return output

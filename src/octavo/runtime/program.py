"""From a trace to the native program: which buffer holds each value, one native instruction for each node.

A step is then one call into C++, `run(batch, rows)`, with the GIL released; each chunk of logits that scores a prompt
is another, `logits(...)`. Eager execution of the same model is `EagerExecutor`; both give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from octavo.core.plan import StepPlan
from octavo.models.registry import Model
from octavo.ops.api import Batch, Float32Array, Int32Array
from octavo.ops.cpu import CpuBackend, CpuOps
from octavo.runtime.batch import make_batch
from octavo.runtime.fusion import fuse
from octavo.runtime.trace import Node, SymbolicBatch, TraceOps, Value
from octavo.sampling.feature import SamplerRow
from octavo.sampling.sampler import Drawn

# Rows of logits computed at a time: at a vocabulary of 49,152, 64 rows are 12.6 MB. Scoring a long prompt thus needs no
# more memory than decoding.
MAX_LOGITS = 64


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of the program, for people: `weight_bytes` are read once a run, `macs` are multiply-adds a row."""

    op: str
    name: str
    domain: str
    weight_bytes: int
    macs: int


class EagerExecutor:
    """Runs the model op by op (--enforce-eager)."""

    def __init__(self, model: Model, backend: CpuBackend, kv_caches: Sequence[Any], block_size: int) -> None:
        self._model = model
        self._ops = CpuOps(backend)
        self._kv_caches = kv_caches
        self._block_size = block_size

    def batch(self, plan: StepPlan) -> Batch:
        return make_batch(plan, self._block_size)

    def run(self, batch: Batch, rows: Sequence[SamplerRow] = ()) -> Drawn:
        self._batch = batch
        self._hidden = self._model.forward(self._ops, batch, self._kv_caches)
        token_ids: list[int] = []
        details: dict[int, Any] = {}
        for first in range(0, len(rows), MAX_LOGITS):
            chunk = rows[first : first + MAX_LOGITS]
            drawn = self._ops.native.sample(self._ops.pool, self.logits(first, len(chunk)), chunk)
            token_ids += drawn[0]
            details |= {first + i: detail for i, detail in drawn[1].items()}
        return token_ids, details

    def logits(self, first: int, count: int) -> Float32Array:
        """float32 [count, vocab] of logit rows [first, first + count) of the last batch run."""
        wanted = replace(self._batch, logit_rows=self._batch.logit_rows[first : first + count])
        logits: Float32Array = self._model.logits(self._ops, self._hidden, wanted)
        return logits

    def final_states(self, rows: Int32Array) -> Float32Array:
        """float32 [n, hidden] of these token rows of the last batch run, after the last norm."""
        states: Float32Array = self._model.final_states(self._ops, self._ops.take_rows(self._hidden, rows))
        return states


class ProgramExecutor:
    """Traces the model once, then replays the native program."""

    def __init__(
        self, model: Model, backend: CpuBackend, kv_caches: Sequence[Any], block_size: int, max_tokens: int
    ) -> None:
        config = model.config
        self._model = model
        self._block_size = block_size
        self._max_tokens = max_tokens
        ops = TraceOps()
        batch = SymbolicBatch()
        hidden = model.forward(ops, batch, kv_caches)
        self._output = model.logits(ops, hidden, batch)
        nodes = fuse(ops.nodes)
        self.native = backend.native.Program(
            backend.pool, max_tokens, MAX_LOGITS, config.num_heads, config.num_kv_heads, config.head_dim
        )
        self._backend = backend
        self._ops = CpuOps(backend)
        self._run_and_sample: Callable[..., Drawn] = backend.native.run_and_sample
        self._slice = backend.native.Slice
        self._names = _weight_names(model)
        self._buffers = _assign_buffers(nodes, self._output, self.native)
        for node in nodes:
            self._emit(node)
        self.native.allocate()
        self._hidden, self._logits = self._place(hidden), self._place(self._output)

    def batch(self, plan: StepPlan) -> Any:
        """`make_batch` of the plan, as the kernels read it."""
        return self._backend.native.make_step(plan.scheduled, self._block_size)

    def run(self, batch: Any, rows: Sequence[SamplerRow] = ()) -> Drawn:
        """`batch`: from `batch`, or a Batch."""
        self._step = self._backend.step(batch) if isinstance(batch, Batch) else batch  # run_logits reads it too
        return self._run_and_sample(self._backend.pool, self.native, self._step, self._logits, rows, MAX_LOGITS)

    def logits(self, first: int, count: int) -> Any:
        """Logit rows [first, first + count) of the last batch run, where the program left them: valid until the next
        call. The sampler scores them there; `np.array` copies them."""
        self.native.run_logits(first, count)
        return self.native.logit_rows(self._logits, count)

    def final_states(self, rows: Int32Array) -> Float32Array:
        """As EagerExecutor's. No instruction of the program: the steps that nobody embeds in do not pay for it."""
        hidden = self.native.rows(self._hidden, self._max_tokens)
        states: Float32Array = self._model.final_states(self._ops, self._ops.take_rows(hidden, rows))
        return states

    def instructions(self) -> list[Instruction]:
        return [Instruction(*row) for row in self.native.instructions]

    def _place(self, value: Value) -> Any:
        return self._slice(self._buffers[value.root], value.first, value.columns, value.reader)

    def _name(self, weight: Any) -> str:
        return self._names.get(id(weight), "")

    def _emit(self, node: Node) -> None:
        inputs = [self._place(value) for value in node.inputs]
        out = self._place(node.output) if node.output is not None else None
        constants, native = node.constants, self.native
        match node.op:
            case "embedding":
                native.embedding(constants["table"], out)
            case "rms_norm":
                native.rms_norm(self._name(constants["weight"]), inputs[0], constants["weight"], constants["eps"], out)
            case "linear" if node.output is self._output:
                native.logits(self._name(constants["weight"]), inputs[0], constants["weight"], out)
            case "linear" | "linear_add":
                weight, residual = constants["weight"], inputs[1] if node.op == "linear_add" else None
                native.linear(self._name(weight), inputs[0], weight, residual, out)
            case "linear_silu_mul":
                native.linear_silu_mul(self._name(constants["weight"]), inputs[0], constants["weight"], out)
            case "rope":
                native.rope(inputs[0], constants["table"], constants["head_dim"], out)
            case "write_kv":
                native.write_kv(*inputs, constants["cache"])
            case "rope_write_kv":
                native.rope_write_kv(*inputs, constants["table"], constants["cache"])
            case "attention":
                native.attention(inputs[0], constants["cache"], constants["scale"], out)
            case "silu_mul":
                native.silu_mul(inputs[0], out)
            case "add":
                native.add(*inputs, out)
            case "take_rows":
                native.take_logit_rows(inputs[0], out)
            case unknown:
                raise AssertionError(f"no instruction for {unknown}")


def _assign_buffers(nodes: list[Node], output: Value, native: Any) -> dict[Value, int]:
    """A buffer of the workspace for each root value, used again by others after the value's last reader:

    node i writes value ──── node j reads it ──── node last_use reads it │ from here on its buffer is spare

    What is read in the segment in which it is written only lives in local buffers (native/include/octavo/program.h);
    not so what write_kv reads, which finds its rows by their number in the step.
    """
    last_use = _last_uses(nodes, output)
    numbered = {value.root for node in nodes if node.op.endswith("write_kv") for value in node.inputs}
    segments = _segments(nodes)
    buffers: dict[Value, int] = {}
    local_buffers: set[int] = set()
    spare: dict[tuple[str, int, bool], list[int]] = {}  # by domain, columns and locality
    for i, node in enumerate(nodes):
        ended = [value for value in dict.fromkeys(v.root for v in node.inputs) if last_use[value] == i]
        if node.output is not None:
            local = segments[i] == segments[last_use[node.output]] and node.output not in numbered
            residual = node.inputs[1] if node.op == "linear_add" else None
            if residual in ended and (local or buffers[residual] not in local_buffers):
                buffers[node.output] = buffers[residual]  # nobody else reads it: add in place
                ended.remove(residual)
            else:
                domain, columns = node.output.domain, node.output.columns
                fitting = spare.setdefault((domain, columns, local), [])
                buffers[node.output] = fitting.pop() if fitting else native.add_buffer(domain, columns, local)
                if local:
                    local_buffers.add(buffers[node.output])
        for value in ended:
            key = (value.domain, value.columns, buffers[value] in local_buffers)
            spare.setdefault(key, []).append(buffers[value])
    return buffers


def _segments(nodes: list[Node]) -> list[int]:
    """The number of each node's segment, and behind the last node another one: attention, which sees other rows than
    its own, is one by itself."""
    segments: list[int] = []
    segment = 0
    for node in nodes:
        segment += node.op == "attention"
        segments.append(segment)
        segment += node.op == "attention"
    return [*segments, segment + 1]


def _last_uses(nodes: list[Node], output: Value) -> dict[Value, int]:
    """Root value -> the last node that reads it. What outlives the replay counts as read after the last node: the
    logits, and the hidden state, from which several chunks of logits may be taken."""
    last_use = {value.root: i for i, node in enumerate(nodes) for value in node.inputs}
    hidden_states = [node.inputs[0] for node in nodes if node.op == "take_rows"]
    return last_use | {value.root: len(nodes) for value in (output, *hidden_states)}


def _weight_names(model: Model) -> dict[int, str]:
    """id of a weight -> its name in the model, layers numbered."""
    names = {id(value): name for name, value in vars(model).items()}
    for i, layer in enumerate(model.layers):
        if is_dataclass(layer):
            names |= {id(getattr(layer, f.name)): f"layers.{i}.{f.name}" for f in fields(layer)}
    return names

"""`octavo inspect --profile`: the native program on made-up steps, timed op by op, against what the machine can do.

Counts as bytes what has to come from or go to memory (weights, K and V), as operations the multiplications and
additions of matrix products and attention. What an op reads from its neighbour lies in a cache and is not counted.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from octavo.cli.bench.common import runner_of
from octavo.cli.bench.report import show_table
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.engine.messages import EngineInfo
    from octavo.models.config import ModelConfig
    from octavo.ops.api import Batch, CacheDType, KVBlocks
    from octavo.runtime.program import Instruction, ProgramExecutor

WARMUP = 3  # repetitions before the timed ones
BANDWIDTH_BYTES = 256 * 2**20  # beyond every cache


@dataclass(frozen=True, slots=True)
class Shape:
    """The step: each of `num_requests` computes `num_tokens` tokens, after which it has `context_len`."""

    num_requests: int
    num_tokens: int
    context_len: int

    @property
    def num_attended(self) -> int:
        """Sum over all computed tokens of the tokens that each attends to."""
        first = self.context_len - self.num_tokens + 1
        return self.num_requests * (first + self.context_len) * self.num_tokens // 2


@dataclass(slots=True)
class OpCost:
    """One op of every layer, summed over the layers and over one step."""

    op: str
    name: str
    calls: int = 0
    seconds: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    costs: list[OpCost]  # in the program's order
    bandwidth: float  # bytes per second
    peak: float  # operations per second

    def limit(self, cost: OpCost) -> float:
        """Seconds that the machine needs at least for these bytes and operations."""
        return max(cost.bytes / self.bandwidth, cost.flops / self.peak)


def profile(engine: Engine, executor: ProgramExecutor, model: ModelConfig, shape: Shape, num_iters: int) -> Profile:
    """Raises ConfigError for a step that the engine could not have."""
    from octavo.ops.cpu import CpuBackend

    batch = made_up_batch(engine, shape)
    fill_blocks(runner_of(engine).storage.blocks, int(batch.block_tables.max()) + 1)
    seconds = time_program(executor, batch, shape.num_requests, num_iters)
    backend = CpuBackend(variant=engine.info.isa, num_threads=engine.info.num_threads)
    return Profile(
        _sum_up(executor.instructions(), seconds, model, shape, engine.info),
        backend.native.measure_bandwidth(backend.pool, BANDWIDTH_BYTES),
        backend.native.measure_flops(backend.pool, engine.info.dtype),
    )


def time_program(
    executor: ProgramExecutor,
    batch: Batch,
    num_logits: int,
    num_iters: int,
    before_each: Callable[[], object] = lambda: None,
) -> list[float]:
    """The median seconds of each instruction; `before_each` run is not counted."""
    samples = []  # seconds, [num_iters][instruction]
    for _ in range(WARMUP + num_iters):
        before_each()
        executor.native.set_profiling(True)  # from zero again
        executor.run(batch)
        executor.logits(0, num_logits)
        samples.append(executor.native.seconds)
    executor.native.set_profiling(False)
    return [statistics.median(times) for times in zip(*samples[WARMUP:], strict=True)]


def fill_blocks(blocks: KVBlocks, num_blocks: int) -> None:
    """Some small numbers, whatever the cache's type, in each of the first blocks: memory that was never written would
    all be one page, and come from the nearest cache."""
    import numpy as np

    payload = np.random.default_rng(2).integers(0x3A, 0x3F, blocks.block_bytes, np.uint8)
    for block in range(num_blocks):
        blocks.load_block(block, payload)


def kv_token_bytes(model: ModelConfig, info: EngineInfo) -> float:
    """Bytes that K and V of one token take in one layer."""
    from octavo.runtime.memory import kv_block_bytes

    return kv_block_bytes(model, info.block_size, kv_dtype(info)) / info.block_size / model.num_layers


def kv_dtype(info: EngineInfo) -> CacheDType:
    named = info.cache_config["cache_dtype"]
    return cast("CacheDType", info.dtype if named == "auto" else named)


def show_profile(result: Profile, shape: Shape, info: EngineInfo) -> None:
    costs = result.costs
    total = OpCost("total", "")
    for cost in costs:
        total.calls += cost.calls
        total.seconds += cost.seconds
        total.bytes += cost.bytes
        total.flops += cost.flops
    rows = [_row(cost, result, total.seconds) for cost in [*costs, total]]
    title = f"{shape.num_requests} × {shape.num_tokens} tokens at a context of {shape.context_len}"
    columns = ("op", "weight", "calls", "ms", "% of time", "MB", "GB/s", "MFLOP", "GFLOP/s", "% of limit")
    show_table(title, columns, rows, num_text_columns=2)
    rate = shape.num_requests * shape.num_tokens / total.seconds
    print(f"\n{rate:,.0f} tokens/s without sampling and text")
    print(
        f"limits of this machine, {info.num_threads} threads, {info.dtype}: {result.bandwidth / 1e9:.1f} GB/s, "
        f"{result.peak / 1e9:.0f} GFLOP/s"
    )


def _row(cost: OpCost, result: Profile, total: float) -> tuple[str, ...]:
    limit = result.limit(cost)
    return (
        cost.op,
        cost.name,
        str(cost.calls),
        f"{cost.seconds * 1e3:.3f}",
        f"{100 * cost.seconds / total:.1f}",
        f"{cost.bytes / 1e6:.2f}" if cost.bytes else "",
        f"{cost.bytes / cost.seconds / 1e9:.1f}" if cost.bytes else "",
        f"{cost.flops / 1e6:.2f}" if cost.flops else "",
        f"{cost.flops / cost.seconds / 1e9:.1f}" if cost.flops else "",
        f"{100 * limit / cost.seconds:.0f}" if limit else "",
    )


def made_up_batch(engine: Engine, shape: Shape) -> Batch:
    """Raises ConfigError for a step that the engine could not have."""
    info, scheduler = engine.info, engine.scheduler
    blocks_each = max(1, -(-shape.context_len // info.block_size))
    rows = shape.num_requests * shape.num_tokens
    for name, value, low, high in (
        ("--context-len", shape.context_len, 1, info.max_model_len),
        ("--num-tokens", shape.num_tokens, 1, shape.context_len),
        ("--num-requests", shape.num_requests, 1, min(scheduler.queues.max_num_seqs, info.num_blocks // blocks_each)),
        ("--num-requests times --num-tokens", rows, 1, scheduler.max_num_batched_tokens),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name} is {value}; it must be in [{low}, {high}]")
    return batch_of(shape, info.block_size, info.vocab_size)


def batch_of(shape: Shape, block_size: int, vocab_size: int, *, shuffle: bool = False) -> Batch:
    """Random tokens; request r has its own blocks, one after the other, or scattered where `shuffle`."""
    import numpy as np

    from octavo.ops.api import Batch

    random = np.random.default_rng(0)
    rows, blocks_each = shape.num_requests * shape.num_tokens, -(-shape.context_len // block_size)
    blocks = np.arange(shape.num_requests * blocks_each, dtype=np.int32)
    tables = (random.permutation(blocks) if shuffle else blocks).reshape(shape.num_requests, blocks_each)
    positions = np.arange(shape.context_len - shape.num_tokens, shape.context_len, dtype=np.int32)
    slots = tables[:, positions // block_size] * block_size + positions % block_size  # [R, tokens]
    query_start = np.arange(0, rows + 1, shape.num_tokens, dtype=np.int32)
    return Batch(
        token_ids=random.integers(0, vocab_size, rows).astype(np.int32),
        positions=np.tile(positions, shape.num_requests),
        slot_mapping=slots.reshape(-1).astype(np.int32),
        query_start=query_start,
        seq_lens=np.full(shape.num_requests, shape.context_len, np.int32),
        block_tables=tables,
        logit_rows=query_start[1:] - 1,
    )


def _sum_up(
    instructions: Sequence[Instruction], seconds: Sequence[float], model: ModelConfig, shape: Shape, info: EngineInfo
) -> list[OpCost]:
    costs: dict[tuple[str, str], OpCost] = {}
    kv_bytes = kv_token_bytes(model, info)
    for line, spent in zip(instructions, seconds, strict=True):
        name = "" if line.name == line.op else re.sub(r"^layers\.\d+\.", "", line.name)
        cost = costs.setdefault((line.op, name), OpCost(line.op, name))
        rows = shape.num_requests * (1 if line.domain == "logits" else shape.num_tokens)
        cost.calls += 1
        cost.seconds += spent
        cost.bytes += line.weight_bytes
        cost.flops += 2 * line.macs * rows
        if line.op == "attention":
            # K and V of every token of the context once; q·k and p·v for every token attended to.
            cost.bytes += shape.num_requests * shape.context_len * kv_bytes
            cost.flops += 4 * shape.num_attended * model.q_size
        elif line.op in ("write_kv", "rope_write_kv"):
            cost.bytes += rows * kv_bytes
    return list(costs.values())

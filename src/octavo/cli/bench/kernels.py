"""`octavo bench kernels`: the matrix products and the attention of a model, against what the machine can do.

Products are timed inside the model's own program, so that each finds in the caches what it would find at work; before
each repetition a large array is read, so that no weight is left there from the one before. Attention runs over many
caches of one layer, filled and with scattered blocks. Bytes are those of weights, or of K and V; operations are
multiplications and additions.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from octavo.cli.bench.common import make_parser, parse, runner_of
from octavo.cli.bench.report import show_table, write_json
from octavo.cli.parser import Parser
from octavo.cli.profile import (
    BANDWIDTH_BYTES,
    Shape,
    batch_of,
    fill_blocks,
    kv_dtype,
    kv_token_bytes,
    made_up_batch,
    time_program,
)
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.models.config import ModelConfig
    from octavo.ops.api import DType
    from octavo.ops.cpu import CpuBackend
    from octavo.quant.formats import WeightFormats
    from octavo.runtime.program import Instruction, ProgramExecutor

CACHE_BYTES = 64 * 2**20  # of K and V that one run of the attention reads, at least
MAX_CACHES = 512
IDLE_DRIFT = 0.15  # by which the limits of an idle machine may differ
LIMITS = {
    "float32": "GFLOP/s in float32",
    "bfloat16": "GFLOP/s in bfloat16",
    "int8": "GOP/s in int8",
    "int16": "GOP/s in int16",
    "bandwidth": "GB/s",
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One kernel at one size: a median of seconds, and what it read and computed in them."""

    kernel: str
    shape: str
    size: str
    rows: int
    dtype: str  # in which it computes
    seconds: float
    bytes: float
    flops: float

    def share(self, limits: dict[str, float]) -> float:
        """Of the nearer limit: 1 is as fast as the machine allows."""
        return max(self.bytes / limits["bandwidth"], self.flops / limits[self.dtype]) / self.seconds


def run(argv: list[str]) -> int:
    least = {"num_tokens": 1, "num_requests": 1, "context_len": 1, "prefill_len": 1, "num_iters": 1}
    args, config = parse(_parser(), argv, least)
    if config.enforce_eager:
        raise ConfigError("--enforce-eager has no program to time")

    from octavo.checkpoint.base import open_checkpoint
    from octavo.checkpoint.resolve import resolve
    from octavo.engine.build import build_engine
    from octavo.models.config import ModelConfig
    from octavo.ops.cpu import CpuBackend
    from octavo.quant.formats import choose_formats

    checkpoint = open_checkpoint(resolve(config.model, config.revision), config.load_format)
    model = ModelConfig.from_hf(checkpoint.config)
    engine = build_engine(config)
    info = engine.info
    formats = choose_formats(
        config.quantization,
        config.activation_dtype,
        cast("DType", info.dtype),
        has_blocks=checkpoint.has_blocks,
        variant=info.isa,
    )
    most = min(info.max_model_len, config.max_num_batched_tokens)
    if max(args.num_tokens) > most:
        raise ConfigError(f"--num-tokens is {max(args.num_tokens)}; it must be in [1, {most}]")
    backend = CpuBackend(variant=info.isa, num_threads=info.num_threads)
    before = measure_limits(backend)
    _show_limits("before", before)
    products = in_order_of_kernels(
        each for rows in args.num_tokens for each in time_products(engine, model, formats, rows, args.num_iters)
    )
    shapes = [Shape(requests, 1, context) for context in args.context_len for requests in args.num_requests]
    shapes += [Shape(1, length, length) for length in args.prefill_len]
    attention = [time_attention(engine, model, backend, shape, args.num_iters) for shape in shapes]
    after = measure_limits(backend)
    _show_limits("after", after)
    if drift(before, after) > IDLE_DRIFT:
        print("these differ by much: other work ran beside, and the percentages below mean little")
    limits = {name: max(before[name], after[name]) for name in before}
    title = f"{config.model}, {info.dtype} on {info.isa}, {info.num_threads} threads"
    _show(f"matrix products: {title}", products, limits)
    _show(f"attention: {title}, cache in {kv_dtype(info)}", attention, limits)
    figures = {
        "limits": {"before": before, "after": after},
        "products": [_record(each, limits) for each in products],
        "attention": [_record(each, limits) for each in attention],
    }
    write_json(args, figures, config)
    return 0


def _parser() -> Parser:
    return make_parser(
        "kernels",
        "Time a model's matrix products and attention alone.",
        (
            ("--num-tokens", (1, 2, 4, 8, 16, 32, 64, 128, 256), "rows of the matrix products"),
            ("--num-requests", (1, 16), "requests that decode, for the attention"),
            ("--context-len", (256, 1024, 4096, 16384), "their contexts"),
            ("--prefill-len", (512, 1024, 4096), "prompts computed as a whole, for the attention"),
            ("--num-iters", 10, "repetitions"),
        ),
    )


def measure_limits(backend: CpuBackend) -> dict[str, float]:
    """Bytes per second from memory, operations per second by type."""
    native, pool = backend.native, backend.pool
    peaks = {dtype: native.measure_flops(pool, dtype) for dtype in LIMITS if dtype != "bandwidth"}
    return {**peaks, "bandwidth": native.measure_bandwidth(pool, BANDWIDTH_BYTES)}


def drift(before: dict[str, float], after: dict[str, float]) -> float:
    """The largest difference of two measurements of one limit, as a share of the higher one."""
    return max(1 - min(before[name], after[name]) / max(before[name], after[name]) for name in before)


def time_products(
    engine: Engine, model: ModelConfig, formats: WeightFormats, rows: int, num_iters: int
) -> list[Measurement]:
    """Each of the model's matrices with `rows` rows of inputs, the layers' average; of logits as many as are computed
    at a time."""
    import numpy as np

    from octavo.runtime.program import MAX_LOGITS

    executor = cast("ProgramExecutor", runner_of(engine).executor)
    step = dataclasses.replace(made_up_batch(engine, Shape(1, rows, rows)), logit_rows=np.arange(rows, dtype=np.int32))
    num_logits = min(rows, MAX_LOGITS)
    seconds = time_program(executor, step, num_logits, num_iters, forget_caches())
    groups: dict[str, list[tuple[Instruction, float]]] = {}
    for line, spent in zip(executor.instructions(), seconds, strict=True):
        if line.op.startswith("linear"):
            groups.setdefault(re.sub(r"^layers\.\d+\.", "", line.name), []).append((line, spent))
    shapes, measured = matrix_shapes(model), []
    for name, lines in groups.items():
        one, is_head = lines[0][0], lines[0][0].domain == "logits"
        num_rows = num_logits if is_head else rows
        measured.append(
            Measurement(
                kernel=name,
                shape=" × ".join(map(str, shapes[name])) if name in shapes else "",
                size=f"{8 * one.weight_bytes / one.macs:.2f} bits",
                rows=num_rows,
                dtype=(formats.rest if is_head else formats.layers).dtype,
                seconds=statistics.mean(spent for _, spent in lines),
                bytes=statistics.mean(line.weight_bytes for line, _ in lines),
                flops=2.0 * one.macs * num_rows,
            )
        )
    return measured


def in_order_of_kernels(measured: Iterable[Measurement]) -> list[Measurement]:
    """All sizes of the first kernel, then of the next … each once: of more rows than fit, a head computes as many."""
    kernels: dict[str, dict[int, Measurement]] = {}
    for each in measured:
        kernels.setdefault(each.kernel, {}).setdefault(each.rows, each)
    return [each for sizes in kernels.values() for each in sizes.values()]


def matrix_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each matrix, by its name in the model's tables."""
    from octavo.models.registry import model_class
    from octavo.models.weights import MatrixWeight

    tables = model_class(model.architecture)
    found = {}
    for name, weight in {**tables.WEIGHTS, **tables.LAYER_WEIGHTS}.items():
        if isinstance(weight, MatrixWeight):
            shapes = list(weight.shapes(model).values())
            found[name] = (sum(rows for rows, _ in shapes), shapes[0][1])
            if weight.tied_to and model.tie_word_embeddings:
                found[weight.tied_to] = found[name]
    return found


def forget_caches() -> Callable[[], object]:
    """A call after which the processor's caches hold something else."""
    import numpy as np

    other = np.ones(BANDWIDTH_BYTES // 8)
    return lambda: float(other.sum())


def time_attention(
    engine: Engine, model: ModelConfig, backend: CpuBackend, shape: Shape, num_iters: int
) -> Measurement:
    """One layer's attention, at a size that the model itself may not be made for."""
    import numpy as np

    block_size, dtype = engine.info.block_size, kv_dtype(engine.info)
    context_bytes = shape.num_requests * shape.context_len * kv_token_bytes(model, engine.info)
    blocks = shape.num_requests * -(-shape.context_len // block_size)
    num_caches = min(MAX_CACHES, -(-CACHE_BYTES // int(context_bytes)))
    owner = backend.kv_blocks(num_caches, blocks, block_size, model.num_kv_heads, model.head_dim, dtype)
    caches = [owner.layer(i) for i in range(num_caches)]
    fill_blocks(owner, blocks)
    program = backend.native.Program(
        backend.pool,
        shape.num_requests * shape.num_tokens,
        1,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
    )
    query, out = (backend.native.Slice(program.add_buffer("tokens", model.q_size), 0, model.q_size) for _ in range(2))
    for cache in caches:
        program.attention(query, cache, model.head_dim**-0.5, out)
    program.allocate()
    queries = program.rows(query, shape.num_requests * shape.num_tokens)
    queries[:] = np.random.default_rng(1).standard_normal(queries.shape)
    step = backend.step(batch_of(shape, block_size, 1, shuffle=True))
    samples = []
    for _ in range(1 + num_iters):
        program.set_profiling(True)
        program.run(step)
        samples.append(sum(program.seconds) / num_caches)
    return Measurement(
        kernel="prefill" if shape.num_tokens > 1 else "decode",
        shape=f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}",
        size=f"{shape.num_requests} × {shape.context_len}",
        rows=shape.num_requests * shape.num_tokens,
        dtype="float32" if dtype == "float32" else "bfloat16",
        seconds=statistics.median(samples[1:]),
        bytes=context_bytes,
        flops=4.0 * shape.num_attended * model.q_size,
    )


def _show_limits(when: str, limits: dict[str, float]) -> None:
    print(f"limits {when}: " + ", ".join(f"{limits[name] / 1e9:,.1f} {text}" for name, text in LIMITS.items()))


def _show(title: str, measured: Sequence[Measurement], limits: dict[str, float]) -> None:
    rows = [
        (
            each.kernel,
            each.shape,
            each.size,
            each.dtype,
            str(each.rows),
            f"{each.seconds * 1e6:,.1f}",
            f"{each.bytes / 1e6:.2f}",
            f"{each.bytes / each.seconds / 1e9:.1f}",
            f"{each.flops / each.seconds / 1e9:,.0f}",
            f"{100 * each.share(limits):.0f}",
        )
        for each in measured
    ]
    columns = ("kernel", "shape", "size", "in", "rows", "µs", "MB", "GB/s", "GFLOP/s", "% of limit")
    show_table(title, columns, rows, num_text_columns=4)


def _record(each: Measurement, limits: dict[str, float]) -> dict[str, Any]:
    return {**dataclasses.asdict(each), "share_of_limit": each.share(limits)}

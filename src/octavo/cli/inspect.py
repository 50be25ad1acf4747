"""`octavo inspect`: what a model becomes here: its numbers, the memory plan, the native program, each op's cost."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from octavo.cli.bench.report import show_table
from octavo.cli.flags import add_config_flags, config_from_args, parse_count
from octavo.cli.parser import Parser
from octavo.cli.serve import MODEL_HELP
from octavo.config import EngineConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.checkpoint.base import Checkpoint
    from octavo.engine.engine import Engine
    from octavo.models.config import ModelConfig
    from octavo.runtime.program import Instruction, ProgramExecutor
    from octavo.runtime.runner import Runner


def run(argv: list[str]) -> int:
    parser = Parser("octavo inspect", "Show a model, its memory plan and its native program.", "[MODEL] [options]")
    parser.add_argument("model", nargs="?", default=EngineConfig.model, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--full", action="store_true", help="print every layer of the program")
    group = parser.add_argument_group("profile")
    group.add_argument("--profile", action="store_true", help="time the program's ops in one kind of step, that has")
    for flag, default, text in (
        ("--num-requests", 1, "requests"),
        ("--num-tokens", 1, "tokens to compute of each (1: decoding)"),
        ("--context-len", 256, "tokens of each when they are computed"),
        ("--num-iters", 20, "repetitions"),
    ):
        group.add_argument(flag, type=parse_count, default=default, metavar="N", help=f"{text} (default: {default})")
    add_config_flags(parser, EngineConfig, "engine", exclude=["model"])
    args = parser.parse_args(argv)
    config = config_from_args(args, EngineConfig)
    if args.profile and config.enforce_eager:
        raise ConfigError("--profile times the native program, which --enforce-eager does without")

    from octavo.checkpoint.base import open_checkpoint
    from octavo.checkpoint.resolve import resolve
    from octavo.engine.build import build_engine
    from octavo.models.config import ModelConfig

    checkpoint = open_checkpoint(resolve(config.model, config.revision), config.load_format)
    model = ModelConfig.from_hf(checkpoint.config)
    engine = build_engine(config)
    executor = cast("Runner", engine.runner).executor
    _show_model(checkpoint, model, engine)
    if args.profile:
        from octavo.cli.profile import Shape, profile, show_profile

        shape = Shape(args.num_requests, args.num_tokens, args.context_len)
        show_profile(
            profile(engine, cast("ProgramExecutor", executor), model, shape, args.num_iters), shape, engine.info
        )
    elif not config.enforce_eager:
        _show_program(cast("ProgramExecutor", executor).instructions(), args.full)
    return 0


def _show_model(checkpoint: Checkpoint, model: ModelConfig, engine: Engine) -> None:
    info = engine.info
    rows = {
        "model": f"{model.architecture}, {_num_parameters(model) / 1e6:,.1f} M parameters",
        "checkpoint": f"{checkpoint.path} ({checkpoint.format}: {_tensor_types(checkpoint)})",
        "layers": (
            f"{model.num_layers} × (hidden {model.hidden_size}, intermediate {model.intermediate_size}, "
            f"{model.num_heads} heads of {model.head_dim}, {model.num_kv_heads} of them for K and V)"
        ),
        "vocabulary": f"{model.vocab_size:,}" + (", embeddings tied" if model.tie_word_embeddings else ""),
        "context": f"{info.max_model_len:,} tokens, rope {model.rope.type} with base {model.rope.theta:g}",
        "compute": f"{info.arithmetic} on {info.isa}, {info.num_threads} threads",
    }
    name, _, plan = info.memory_plan.partition(": ")
    rows[name] = plan
    rows["weights"] = info.loading
    for name, text in rows.items():
        print(f"{name:12}{text}")


def _num_parameters(model: ModelConfig) -> int:
    from octavo.models.registry import model_class
    from octavo.models.weights import MatrixWeight

    tables = model_class(model.architecture)
    weights = [*tables.WEIGHTS.values(), *(w for w in tables.LAYER_WEIGHTS.values() for _ in range(model.num_layers))]
    total = 0
    for weight in weights:
        if isinstance(weight, MatrixWeight):
            if weight.tied_to and model.tie_word_embeddings:
                continue
            total += sum(math.prod(shape) for shape in weight.bias_shapes(model).values())
        total += sum(math.prod(shape) for shape in weight.shapes(model).values())
    return total


def _tensor_types(checkpoint: Checkpoint) -> str:
    counts: dict[str, int] = {}
    for source in checkpoint.tensors.values():
        counts[source.type] = counts.get(source.type, 0) + 1
    return ", ".join(f"{count} {type}" for type, count in sorted(counts.items())) or "random weights"


def _show_program(instructions: Sequence[Instruction], full: bool) -> None:
    start, period, repeats = (0, 0, 1) if full else find_repeat([_without_layer(line) for line in instructions])
    rows = []
    for i, line in enumerate(instructions):
        if start + period <= i < start + period * repeats:
            if i == start + period:
                rows.append(("", f"… {repeats - 1} × the same {period}", "", "", ""))
            continue
        name = "" if line.name == line.op else line.name
        rows.append((f"{i:4}", line.op, name, _or_blank(line.weight_bytes / 1e6), _or_blank(line.macs / 1e6)))
    title = f"program: {len(instructions)} instructions, the last {_num_logits(instructions)} for the logits"
    show_table(title, ("", "op", "weight", "MB", "M multiply-adds a row"), rows, num_text_columns=3)


def find_repeat(lines: Sequence[object]) -> tuple[int, int, int]:
    """(start, period, repeats) of the repetition that covers the most lines; repeats is 1 where there is none."""
    best = (0, 0, 1)
    for period in range(1, len(lines) // 2 + 1):
        run = 0  # how many lines up to here equal the line one period before
        for i in range(period, len(lines) + 1):
            if i < len(lines) and lines[i] == lines[i - period]:
                run += 1
                continue
            repeats = run // period + 1
            if repeats > 1 and period * repeats > best[1] * best[2]:
                best = (i - run - period, period, repeats)
            run = 0
    return best


def _without_layer(line: Instruction) -> tuple[object, ...]:
    return (line.op, re.sub(r"\d+", "*", line.name), line.domain, line.weight_bytes, line.macs)


def _num_logits(instructions: Sequence[Instruction]) -> int:
    return sum(line.domain == "logits" for line in instructions)


def _or_blank(value: float) -> str:
    return f"{value:.2f}" if value else ""

"""`octavo bench throughput`: all requests are handed over at once; how many tokens come out per second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.cli.bench.common import RandomPrompts, greedy, make_llm, make_parser, parse
from octavo.cli.bench.report import PERCENTILES, percentiles, show_table, write_json

if TYPE_CHECKING:
    from octavo.request import RequestOutput


def run(argv: list[str]) -> int:
    parser = make_parser(
        "throughput",
        "Hand over all requests at once, and count the tokens per second.",
        (
            ("--num-prompts", 64, "requests"),
            ("--input-len", 128, "tokens of each prompt"),
            ("--output-len", 128, "tokens of each answer"),
        ),
    )
    args, config = parse(parser, argv, {"num_prompts": 1, "input_len": 1, "output_len": 1})
    with make_llm(config) as llm:
        prompts = RandomPrompts(llm.get_tokenizer().vocab_size, config.seed)
        llm.generate(prompts.take(2, args.input_len), greedy(2), use_tqdm=False)  # warm-up
        batch = prompts.take(args.num_prompts, args.input_len)
        began = time.perf_counter()
        outputs = llm.generate(batch, greedy(args.output_len), use_tqdm=False)
        elapsed = time.perf_counter() - began
    figures = sum_up(outputs, elapsed)
    show_table(
        f"{args.num_prompts} × ({args.input_len} tokens in, {args.output_len} out) in {elapsed:.2f} s",
        ("", "mean", *(f"{p} %" for p in PERCENTILES)),
        [
            (name, *(f"{s:.3f}" for s in (figures[key]["mean"], *figures[key]["percentiles"].values())))
            for name, key in (
                ("seconds to the first token", "time_to_first_token"),
                ("seconds for each further token", "time_per_output_token"),
                ("seconds to the last token", "latency"),
            )
        ],
    )
    print(
        f"{figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.1f} tokens/s, "
        f"of them output {figures['output_tokens_per_second']:.1f} tokens/s"
    )
    write_json(args, figures, config)
    return 0


def sum_up(outputs: Sequence[RequestOutput], elapsed: float) -> dict[str, Any]:
    """vLLM's names for the totals; times in seconds, each with its mean and percentiles over the requests."""
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_total = num_output + sum(len(output.prompt_token_ids) for output in outputs)
    first, further, latency = [], [], []
    for output in outputs:
        times = output.metrics
        if times is None or times.first_token_time is None or times.finished_time is None:
            continue
        first.append(times.first_token_time - times.arrival_time)
        latency.append(times.finished_time - times.arrival_time)
        further.append((latency[-1] - first[-1]) / max(1, len(output.outputs[0].token_ids) - 1))
    return {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": num_total,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": num_total / elapsed,
        "output_tokens_per_second": num_output / elapsed,
        "time_to_first_token": _spread(first),
        "time_per_output_token": _spread(further),
        "latency": _spread(latency),
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"mean": statistics.mean(values), "percentiles": percentiles(values)}

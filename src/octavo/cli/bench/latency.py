"""`octavo bench latency`: how long one batch takes, from handing it over to its last token."""

from __future__ import annotations

import statistics
import time

from octavo.cli.bench.common import RandomPrompts, greedy, make_llm, make_parser, parse
from octavo.cli.bench.report import PERCENTILES, percentiles, show_table, write_json


def run(argv: list[str]) -> int:
    parser = make_parser(
        "latency",
        "How long one batch takes, from handing it over to its last token.",
        (
            ("--batch-size", 8, "requests in the batch"),
            ("--input-len", 32, "tokens of each prompt"),
            ("--output-len", 128, "tokens of each answer"),
            ("--num-iters-warmup", 2, "batches before the measured ones"),
            ("--num-iters", 10, "measured batches"),
        ),
    )
    least = {"batch_size": 1, "input_len": 1, "output_len": 1, "num_iters_warmup": 0, "num_iters": 1}
    args, config = parse(parser, argv, least)
    params = greedy(args.output_len)
    latencies: list[float] = []
    with make_llm(config) as llm:
        prompts = RandomPrompts(llm.get_tokenizer().vocab_size, config.seed)
        for i in range(args.num_iters_warmup + args.num_iters):
            batch = prompts.take(args.batch_size, args.input_len)
            began = time.perf_counter()
            llm.generate(batch, params, use_tqdm=False)
            if i >= args.num_iters_warmup:
                latencies.append(time.perf_counter() - began)
    figures = {
        "avg_latency": statistics.mean(latencies),
        "latencies": latencies,
        "percentiles": percentiles(latencies),
        "output_tokens_per_second": args.batch_size * args.output_len / statistics.median(latencies),
    }
    show_table(
        f"{args.batch_size} × ({args.input_len} tokens in, {args.output_len} out), {args.num_iters} times",
        ("", "mean", *(f"{p} %" for p in PERCENTILES)),
        [("seconds", *(f"{s:.3f}" for s in (figures["avg_latency"], *figures["percentiles"].values())))],
    )
    print(f"output tokens per second, by the median: {figures['output_tokens_per_second']:.1f}")
    write_json(args, figures, config)
    return 0

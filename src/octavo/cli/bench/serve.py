"""`octavo bench serve`: a load for a running server, of any make, and the times that its clients see.

Speaks the OpenAI completions API with streaming. Options, figures and the shown table are those of `vllm bench serve`.
Each client is a thread: it waits for its server nearly all the time.
"""

from __future__ import annotations

import itertools
import math
import queue
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.cli.bench.common import RandomPrompts, add_count_options, parse_args
from octavo.cli.bench.report import percentiles, write_json
from octavo.cli.client import Client
from octavo.cli.flags import parse_count, parse_number
from octavo.cli.parser import Parser
from octavo.cli.sources import DEFAULT_URL
from octavo.config import api_key_of_environment
from octavo.errors import ConfigError, OctavoError

VOCAB_SIZE = 4096  # smaller than that of any model in use, but for tests
WIDTH = 50  # of the shown table


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it; times in seconds since it was sent."""

    input_len: int
    output_len: int = 0
    ttft: float = 0.0  # to the first token
    gaps: list[float] = field(default_factory=list)  # between one piece of the answer and the next
    error: str | None = None

    @property
    def latency(self) -> float:
        return self.ttft + sum(self.gaps)


def run(argv: list[str]) -> int:
    parser = _parser()
    args = parse_args(parser, argv, {"num_prompts": 1, "random_input_len": 1, "random_output_len": 1})
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency is {args.max_concurrency}; it must be at least 1")
    if not args.request_rate > 0:
        raise ConfigError(f"--request-rate is {args.request_rate}; it must be above 0 (inf: all at once)")
    client = Client(args.base_url, args.api_key or api_key_of_environment())
    model = args.model or client.get("/v1/models")["data"][0]["id"]
    prompts = RandomPrompts(_vocab_size(args.tokenizer), args.seed).take(args.num_prompts + 1, args.random_input_len)
    body = {
        "model": model,
        "max_tokens": args.random_output_len,
        "temperature": args.temperature,
        "ignore_eos": args.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    bodies = [{**body, "prompt": prompt} for prompt in prompts]
    trial = ask(client, args.endpoint, bodies.pop())
    if trial.error is not None:
        raise OctavoError(f"the first request, a trial, failed: {trial.error}")
    began = time.perf_counter()
    arrivals = arrival_times(args.request_rate, args.seed)
    outcomes = put_load(client, args.endpoint, bodies, arrivals, args.max_concurrency or len(bodies))
    figures = {
        "base_url": client.url,
        "model_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "max_concurrency": args.max_concurrency,
        "random_input_len": args.random_input_len,
        "random_output_len": args.random_output_len,
        **sum_up(outcomes, time.perf_counter() - began),
    }
    show(figures)
    write_json(args, figures)
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    for error, count in errors.most_common():
        print(f"{count} × {error}", file=sys.stderr)
    return 1 if errors else 0


def _parser() -> Parser:
    parser = Parser("octavo bench serve", "Put a load on a running server, of any make.", "[options]")
    counts = (
        ("--num-prompts", 1000, "requests"),
        ("--random-input-len", 1024, "tokens of each prompt"),
        ("--random-output-len", 128, "tokens of each answer"),
    )
    group = add_count_options(parser, counts)
    group.add_argument("--max-concurrency", type=parse_count, metavar="N", help="requests at once (default: no limit)")
    text = "requests sent per second, at random times; inf: all at once (default: inf)"
    group.add_argument("--request-rate", type=parse_number, default=math.inf, metavar="X", help=text)
    text = "go on after the end of text, so that each answer has its full length"
    group.add_argument("--ignore-eos", action="store_true", help=text)
    group.add_argument("--temperature", type=parse_number, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    group.add_argument("--seed", type=parse_count, default=0, metavar="N", help="of prompts and times (default: 0)")
    group.add_argument("--dataset-name", default="random", choices=("random",), help="prompts of random tokens")
    text = f"folder or .gguf file: prompts from its whole vocabulary (default: from the first {VOCAB_SIZE} tokens)"
    group.add_argument("--tokenizer", type=Path, metavar="PATH", help=text)
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", default=DEFAULT_URL, metavar="URL", help=f"(default: {DEFAULT_URL})")
    group.add_argument("--endpoint", default="/v1/completions", metavar="PATH", help="(default: /v1/completions)")
    group.add_argument("--model", metavar="NAME", help="which of the server's models (default: its first)")
    group.add_argument("--api-key", metavar="KEY", help="the server's key (default: $OCTAVO_API_KEY, $VLLM_API_KEY)")
    return parser


def _vocab_size(tokenizer: Path | None) -> int:
    if tokenizer is None:
        return VOCAB_SIZE
    from octavo.checkpoint.resolve import resolve
    from octavo.text.tokenizer import load_tokenizer

    return load_tokenizer(resolve(str(tokenizer))).vocab_size


def arrival_times(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests are sent: a Poisson process of `rate` requests per second."""
    gaps = random.Random(seed)
    return itertools.accumulate(
        itertools.chain([0.0], (0.0 if math.isinf(rate) else gaps.expovariate(rate) for _ in itertools.count()))
    )


def put_load(
    client: Client, endpoint: str, bodies: Sequence[dict[str, Any]], arrivals: Iterator[float], max_concurrency: int
) -> list[Outcome]:
    """Sends each body at its time, or when fewer than `max_concurrency` are on their way; one outcome for each."""
    waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    outcomes: list[Outcome] = []

    def work() -> None:
        while (body := waiting.get()) is not None:
            outcomes.append(ask(client, endpoint, body))

    # Daemons: Ctrl-C does not wait for answers.
    clients = [threading.Thread(target=work, daemon=True) for _ in range(min(max_concurrency, len(bodies)))]
    for thread in clients:
        thread.start()
    began = time.perf_counter()
    for body, arrival in zip(bodies, arrivals, strict=False):
        time.sleep(max(0.0, began + arrival - time.perf_counter()))
        waiting.put(body)
    for _ in clients:
        waiting.put(None)
    for thread in clients:
        thread.join()
    return outcomes


def ask(client: Client, endpoint: str, body: dict[str, Any]) -> Outcome:
    """One request from its sending to the end of its answer."""
    outcome = Outcome(len(body["prompt"]))
    num_pieces, num_tokens = 0, None
    last = time.perf_counter()
    try:
        for event in client.stream(endpoint, body):
            now = time.perf_counter()
            if event.get("choices"):
                if num_pieces:
                    outcome.gaps.append(now - last)
                else:
                    outcome.ttft = now - last
                num_pieces, last = num_pieces + 1, now
            if usage := event.get("usage"):
                num_tokens = usage["completion_tokens"]
    except OctavoError as error:
        outcome.error = error.message
    except Exception as error:  # a server that speaks another language
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.output_len = num_pieces if num_tokens is None else num_tokens
    if outcome.error is None and num_pieces == 0:
        outcome.error = "the answer has no text"
    return outcome


def sum_up(outcomes: Sequence[Outcome], duration: float) -> dict[str, Any]:
    """vLLM's names; of the requests that were answered."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    num_input, num_output = sum(each.input_len for each in done), sum(each.output_len for each in done)
    times = {
        "ttft": [each.ttft for each in done],
        "tpot": [sum(each.gaps) / (each.output_len - 1) for each in done if each.output_len > 1],
        "itl": [gap for each in done for gap in each.gaps],
        "e2el": [each.latency for each in done],
    }
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
    }
    for name, seconds in times.items():
        values = [1e3 * value for value in seconds] or [0.0]
        figures[f"mean_{name}_ms"] = statistics.mean(values)
        figures[f"median_{name}_ms"] = statistics.median(values)
        figures[f"std_{name}_ms"] = statistics.pstdev(values)
        figures[f"p99_{name}_ms"] = percentiles(values)["99"]
    return figures


def show(figures: dict[str, Any]) -> None:
    """The table of `vllm bench serve`, in its words: scripts that read it can read this one."""
    print(f"{' Serving Benchmark Result ':=^{WIDTH}}")
    _line("Successful requests:", figures["completed"])
    _line("Failed requests:", figures["failed"])
    if figures["max_concurrency"] is not None:
        _line("Maximum request concurrency:", figures["max_concurrency"])
    if figures["request_rate"] != "inf":
        _line("Request rate configured (RPS):", figures["request_rate"])
    _line("Benchmark duration (s):", figures["duration"])
    _line("Total input tokens:", figures["total_input_tokens"])
    _line("Total generated tokens:", figures["total_output_tokens"])
    _line("Request throughput (req/s):", figures["request_throughput"])
    _line("Output token throughput (tok/s):", figures["output_throughput"])
    _line("Total token throughput (tok/s):", figures["total_token_throughput"])
    for name, title in (
        ("ttft", "Time to First Token"),
        ("tpot", "Time per Output Token (excl. 1st token)"),
        ("itl", "Inter-token Latency"),
        ("e2el", "End-to-end Latency"),
    ):
        print(f"{title:-^{WIDTH}}")
        for kind in ("mean", "median", "p99"):
            label = kind.upper() if kind == "p99" else kind.capitalize()
            _line(f"{label} {name.upper()} (ms):", figures[f"{kind}_{name}_ms"])
    print("=" * WIDTH)


def _line(name: str, value: float) -> None:
    print(f"{name:<40} {value:<10.2f}".rstrip() if isinstance(value, float) else f"{name:<40} {value}")

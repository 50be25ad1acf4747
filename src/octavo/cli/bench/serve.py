"""`octavo bench serve`: a load for a running server, of any make, and the times that its clients see.

Speaks the OpenAI completions or chat API with streaming; options are those of `vllm bench serve`. Each client is a
thread: it waits for its server nearly all the time.
"""

from __future__ import annotations

import argparse
import math
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo.cli.bench.common import add_count_options, parse_args
from octavo.cli.bench.outcomes import OBJECTIVES, TIMES, Outcome, parse_objectives, show, sum_up
from octavo.cli.bench.report import write_json
from octavo.cli.bench.workload import DATASETS, Job, arrival_times, bodies, jobs_of_file, random_jobs
from octavo.cli.client import Client
from octavo.cli.flags import parse_count, parse_number
from octavo.cli.parser import Parser
from octavo.cli.sources import DEFAULT_URL
from octavo.config import api_key_of_environment
from octavo.errors import ConfigError, OctavoError

VOCAB_SIZE = 4096  # smaller than that of any model in use, but for tests
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}  # by --backend


def run(argv: list[str]) -> int:
    parser = _parser()
    args = parse_args(parser, argv, {"num_prompts": 1, "random_input_len": 1, "random_output_len": 1})
    _check(args)
    objectives = parse_objectives(args.goodput)
    client = Client(_base_url(args), args.api_key or api_key_of_environment())
    jobs = _jobs(args)
    model = args.model or client.get("/v1/models")["data"][0]["id"]
    fields = {
        "model": model,
        "temperature": args.temperature,
        "ignore_eos": args.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = bodies(jobs, is_chat=args.backend == "openai-chat", fields=fields)
    endpoint = args.endpoint or ENDPOINTS[args.backend]
    trial = ask(client, endpoint, sent.pop())
    if trial.error is not None:
        raise OctavoError(f"the first request, a trial, failed: {trial.error}")
    began = time.perf_counter()
    arrivals = arrival_times(args.request_rate, args.seed, args.burstiness)
    outcomes = put_load(client, endpoint, sent, arrivals, args.max_concurrency or len(sent))
    duration = time.perf_counter() - began
    figures = {
        "base_url": client.url,
        "model_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **_dataset(args),
        **({"goodput": objectives} if objectives else {}),
        **sum_up(outcomes, duration, objectives=objectives, percentiles=args.metric_percentiles),
    }
    show(figures, args.metric_percentiles, args.percentile_metrics)
    write_json(args, figures)
    errors = Counter(outcome.error for outcome in outcomes if outcome.error is not None)
    for error, count in errors.most_common():
        print(f"{count} × {error}", file=sys.stderr)
    return 1 if errors else 0


def _parser() -> Parser:
    parser = Parser("octavo bench serve", "Put a load on a running server, of any make.", "[options]")
    _add_load(parser)
    _add_dataset(parser)
    group = parser.add_argument_group("figures")
    text = f"count the answers that meet these, in milliseconds: {', '.join(f'{name}:X' for name in OBJECTIVES)}"
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:X", help=text)
    text = f"which times to show (default: all, {','.join(TIMES)})"
    group.add_argument("--percentile-metrics", type=_times, default=tuple(TIMES), metavar="NAME,…", help=text)
    text = "percentiles to compute (default: 99)"
    group.add_argument("--metric-percentiles", type=_percentiles, default=(99.0,), metavar="P,…", help=text)
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", metavar="URL", help=f"(default: {DEFAULT_URL})")
    group.add_argument("--host", metavar="NAME", help="in place of the base URL, with --port (default: 127.0.0.1)")
    group.add_argument("--port", type=parse_count, metavar="N", help="(default: 8000)")
    text = "completions, or chat (default: openai)"
    group.add_argument("--backend", default="openai", choices=tuple(ENDPOINTS), help=text)
    group.add_argument("--endpoint", metavar="PATH", help="(default: the backend's)")
    group.add_argument("--model", metavar="NAME", help="which of the server's models (default: its first)")
    group.add_argument("--api-key", metavar="KEY", help="the server's key (default: $OCTAVO_API_KEY, $VLLM_API_KEY)")
    return parser


def _add_load(parser: Parser) -> None:
    group = add_count_options(parser, [("--num-prompts", 1000, "requests")])
    group.add_argument("--max-concurrency", type=parse_count, metavar="N", help="requests at once (default: no limit)")
    text = "requests sent per second, at random times; inf: all at once (default: inf)"
    group.add_argument("--request-rate", type=parse_number, default=math.inf, metavar="X", help=text)
    text = "shape of the gamma distribution of the gaps: 1 Poisson, below in bursts, above more even (default: 1)"
    group.add_argument("--burstiness", type=parse_number, default=1.0, metavar="X", help=text)
    text = "go on after the end of text, so that each answer has its full length"
    group.add_argument("--ignore-eos", action="store_true", help=text)
    group.add_argument("--temperature", type=parse_number, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    group.add_argument("--seed", type=parse_count, default=0, metavar="N", help="of prompts and times (default: 0)")


def _add_dataset(parser: Parser) -> None:
    group = parser.add_argument_group("data set")
    text = "random tokens, or the file of --dataset-path (default: random)"
    group.add_argument("--dataset-name", default="random", choices=DATASETS, help=text)
    text = 'custom: lines of {"prompt": …, "output_tokens": …}; sharegpt: its JSON'
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help=text)
    text = "tokens of each answer, for a file (default: as it says)"
    group.add_argument("--output-len", type=parse_count, metavar="N", help=text)
    for flag, default, text in (
        ("--random-input-len", 1024, "tokens of each random prompt"),
        ("--random-output-len", 128, "tokens of each answer to one"),
        ("--random-prefix-len", 0, "tokens before it that all share"),
    ):
        group.add_argument(flag, type=parse_count, default=default, metavar="N", help=f"{text} (default: {default})")
    text = "lengths differ by so much from those given: 0.5 is by half (default: 0)"
    group.add_argument("--random-range-ratio", type=parse_number, default=0.0, metavar="X", help=text)
    text = f"folder or .gguf file: prompts from its whole vocabulary (default: from the first {VOCAB_SIZE} tokens)"
    group.add_argument("--tokenizer", type=Path, metavar="PATH", help=text)


def _times(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= TIMES.keys():
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: {', '.join(TIMES)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    shares = tuple(parse_number(word) for word in text.split(","))
    if not all(0 <= share <= 100 for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 0 … 100")
    return shares


def _check(args: argparse.Namespace) -> None:
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency is {args.max_concurrency}; it must be at least 1")
    if not args.request_rate > 0:
        raise ConfigError(f"--request-rate is {args.request_rate}; it must be above 0 (inf: all at once)")
    if not 0 < args.burstiness < math.inf:
        raise ConfigError(f"--burstiness is {args.burstiness}; it must be above 0")
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio is {args.random_range_ratio}; it must be at least 0 and below 1")
    if args.output_len is not None and args.output_len < 1:
        raise ConfigError(f"--output-len is {args.output_len}; it must be at least 1")
    if (args.dataset_path is None) != (args.dataset_name == "random"):
        rule = "--dataset-path goes with custom and sharegpt alone, and they with it"
        raise ConfigError(f"--dataset-name is {args.dataset_name!r}; {rule}")


def _base_url(args: argparse.Namespace) -> str:
    if args.host is None and args.port is None:
        return args.base_url or DEFAULT_URL
    if args.base_url is not None:
        raise ConfigError(f"--base-url is {args.base_url!r}; it must be absent with --host or --port")
    return f"http://{args.host or '127.0.0.1'}:{args.port or 8000}"


def _jobs(args: argparse.Namespace) -> list[Job]:
    """One more than asked for: a trial."""
    count = args.num_prompts + 1
    if args.dataset_path is not None:
        name, path = args.dataset_name, args.dataset_path
        return jobs_of_file(name, path, count, output_len=args.output_len, seed=args.seed)
    return random_jobs(
        count,
        args.random_input_len,
        args.random_output_len,
        vocab_size=_vocab_size(args.tokenizer),
        seed=args.seed,
        prefix_len=args.random_prefix_len,
        spread=args.random_range_ratio,
    )


def _dataset(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures say of it."""
    if args.dataset_path is not None:
        return {"dataset_name": args.dataset_name, "dataset_path": args.dataset_path.name}
    names = ("random_input_len", "random_output_len", "random_prefix_len", "random_range_ratio")
    return {"dataset_name": "random", **{name: getattr(args, name) for name in names}}


def _vocab_size(tokenizer: Path | None) -> int:
    if tokenizer is None:
        return VOCAB_SIZE
    from octavo.checkpoint.resolve import resolve
    from octavo.text.tokenizer import load_tokenizer

    return load_tokenizer(resolve(str(tokenizer))).vocab_size


def put_load(
    client: Client, endpoint: str, sent: Sequence[dict[str, Any]], arrivals: Iterator[float], max_concurrency: int
) -> list[Outcome]:
    """Sends each body at its time, or when fewer than `max_concurrency` are on their way; one outcome for each."""
    waiting: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    outcomes: list[Outcome] = []

    def work() -> None:
        while (body := waiting.get()) is not None:
            outcomes.append(ask(client, endpoint, body))

    # Daemons: Ctrl-C does not wait for answers.
    clients = [threading.Thread(target=work, daemon=True) for _ in range(min(max_concurrency, len(sent)))]
    for thread in clients:
        thread.start()
    began = time.perf_counter()
    for body, arrival in zip(sent, arrivals, strict=False):
        time.sleep(max(0.0, began + arrival - time.perf_counter()))
        waiting.put(body)
    for _ in clients:
        waiting.put(None)
    for thread in clients:
        thread.join()
    return outcomes


def ask(client: Client, endpoint: str, body: dict[str, Any]) -> Outcome:
    """One request from its sending to the end of its answer."""
    outcome = Outcome(len(body.get("prompt", ())))  # of a text, until the server counts its tokens
    num_pieces, num_tokens = 0, None
    last = time.perf_counter()
    try:
        for event in client.stream(endpoint, body):
            now = time.perf_counter()
            if _is_piece(event):
                if num_pieces:
                    outcome.gaps.append(now - last)
                else:
                    outcome.ttft = now - last
                num_pieces, last = num_pieces + 1, now
            if usage := event.get("usage"):
                num_tokens = usage["completion_tokens"]
                outcome.input_len = usage.get("prompt_tokens", outcome.input_len)
    except OctavoError as error:
        outcome.error = error.message
    except Exception as error:  # a server that speaks another language
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.output_len = num_pieces if num_tokens is None else num_tokens
    if outcome.error is None and num_pieces == 0:
        outcome.error = "the answer has no text"
    return outcome


def _is_piece(event: dict[str, Any]) -> bool:
    """Whether it is some of the answer. A chat begins with one that only names the role."""
    choices = event.get("choices")
    return bool(choices) and ("role" not in choices[0].get("delta", {}) or bool(choices[0]["delta"].get("content")))

"""`octavo bench sharing`: what KV that is shared saves. A system prompt that is cached against one that is not; samples
and beams of one prompt against as many separate requests.

Every case runs on its own new random prompts, so that nothing is shared but what the case is about.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from octavo.cli.bench.common import RandomPrompts, engine_of, greedy, make_llm, make_parser, parse, replaced
from octavo.cli.bench.report import show_table, write_json

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.request import RequestOutput

Prompts = list[list[int]]


@dataclass
class Run:
    """Times in seconds. `peak_blocks`: most KV blocks in use after a step."""

    seconds: float
    output_tokens: int
    peak_blocks: int

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def run(argv: list[str]) -> int:
    parser = make_parser(
        "sharing",
        "Measure what shared KV saves: of a cached system prompt, and of samples and beams of one prompt.",
        (
            ("--system-len", 1500, "tokens of the system prompt"),
            ("--question-len", 8, "tokens of each question behind it"),
            ("--num-questions", 16, "questions"),
            ("--answer-len", 16, "tokens of each answer"),
            ("--num-prompts", 8, "prompts that are sampled or searched"),
            ("--input-len", 256, "tokens of each of these prompts"),
            ("--output-len", 128, "tokens of each sample or beam"),
            ("--width", 4, "samples or beams of a prompt"),
            ("--rounds", 3, "times that each case runs; the medians count"),
        ),
    )
    names = (
        *("system_len", "question_len", "num_questions", "answer_len", "num_prompts", "input_len", "output_len"),
        *("width", "rounds"),
    )
    args, config = parse(parser, argv, dict.fromkeys(names, 1))
    with make_llm(config) as llm:
        prompts = RandomPrompts(llm.get_tokenizer().vocab_size, config.seed)
        llm.generate(prompts.take(2, 8), greedy(2), use_tqdm=False)  # warm-up
        figures = {"prefix": _prefix(llm, prompts, args), "samples": _samples(llm, prompts, args)}
    write_json(args, figures, config)
    return 0


# ── A system prompt ──────────────────────────────────────────────────────────────────────────────────────────────────


def _prefix(llm: LLM, prompts: RandomPrompts, args: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {"cold": [], "warm": []}
    for _ in range(args.rounds):
        for name, runs in figures.items():
            systems = prompts.take(1 if name == "warm" else 2 * args.num_questions, args.system_len)
            if name == "warm":
                llm.generate(systems, greedy(1), use_tqdm=False)
                systems *= 2 * args.num_questions
            questions = prompts.take(2 * args.num_questions, args.question_len)
            asked = [system + question for system, question in zip(systems, questions, strict=True)]
            runs.append(_ask(llm, asked[: args.num_questions], asked[args.num_questions :], args.answer_len))
    medians = {
        name: {key: statistics.median(each[key] for each in runs) for key in runs[0]} for name, runs in figures.items()
    }
    cold, warm = medians["cold"], medians["warm"]
    show_table(
        f"{args.num_questions} questions of {args.question_len} tokens behind {args.system_len}, answers of "
        f"{args.answer_len}",
        ("system prompt", "requests/s, all at once", "seconds to the first token, one by one"),
        [
            (name, f"{row['requests_per_second']:.2f}", f"{row['time_to_first_token']:.4f}")
            for name, row in medians.items()
        ],
    )
    medians["ratio"] = {key: warm[key] / cold[key] for key in warm}
    print(
        f"cached: {medians['ratio']['requests_per_second']:.1f} times the throughput, first token in "
        f"1/{1 / medians['ratio']['time_to_first_token']:.1f} of the time"
    )
    return medians


def _ask(llm: LLM, at_once: Prompts, one_by_one: Prompts, answer_len: int) -> dict[str, float]:
    began = time.perf_counter()
    llm.generate(at_once, greedy(answer_len), use_tqdm=False)
    elapsed = time.perf_counter() - began
    waits = []
    for prompt in one_by_one:
        began = time.perf_counter()
        llm.generate([prompt], greedy(1), use_tqdm=False)
        waits.append(time.perf_counter() - began)
    return {"requests_per_second": len(at_once) / elapsed, "time_to_first_token": statistics.mean(waits)}


# ── Samples and beams of a prompt ────────────────────────────────────────────────────────────────────────────────────


def _samples(llm: LLM, prompts: RandomPrompts, args: Any) -> dict[str, Any]:
    from octavo.request import BeamSearchParams, SamplingParams

    sampled = SamplingParams(n=args.width, temperature=1.0, max_tokens=args.output_len, ignore_eos=True, seed=0)
    searched = BeamSearchParams(beam_width=args.width, max_tokens=args.output_len, ignore_eos=True)
    one_each = SamplingParams(temperature=1.0, max_tokens=args.output_len, ignore_eos=True, seed=0)

    def take(count: int) -> Prompts:
        return prompts.take(count, args.input_len)

    cases: dict[str, Callable[[], Run]] = {
        f"{args.num_prompts * args.width} separate requests": lambda: _generate(
            llm, take(args.num_prompts * args.width), one_each
        ),
        f"{args.num_prompts} requests with n = {args.width}": lambda: _generate(llm, take(args.num_prompts), sampled),
        f"{args.num_prompts} searches with {args.width} beams": lambda: _search(llm, take(args.num_prompts), searched),
    }
    runs: dict[str, list[Run]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, case in cases.items():
            runs[name].append(case())
    medians = {name: sorted(each, key=lambda run: run.seconds)[len(each) // 2] for name, each in runs.items()}
    show_table(
        f"{args.num_prompts} prompts of {args.input_len} tokens, {args.width} answers of {args.output_len} to each",
        ("", "seconds", "output tokens/s", "KV blocks at most"),
        [
            (name, f"{run.seconds:.2f}", f"{run.tokens_per_second:.0f}", str(run.peak_blocks))
            for name, run in medians.items()
        ],
    )
    return {name: asdict(run) | {"tokens_per_second": run.tokens_per_second} for name, run in medians.items()}


def _generate(llm: LLM, prompts: Prompts, params: Any) -> Run:
    def work() -> int:
        outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(sample.token_ids) for output in outputs for sample in output.outputs)

    return _measure(llm, work)


def _search(llm: LLM, prompts: Prompts, params: Any) -> Run:
    def work() -> int:
        outputs = llm.beam_search(prompts, params, use_tqdm=False)
        return sum(
            len(beam.tokens) - len(prompt)
            for prompt, output in zip(prompts, outputs, strict=True)
            for beam in output.sequences
        )

    return _measure(llm, work)


def _measure(llm: LLM, work: Callable[[], int]) -> Run:
    engine = engine_of(llm)
    pool, step, peak = engine.scheduler.kv.pool, engine.step, 0

    def watched() -> Any:
        nonlocal peak
        news = step()
        peak = max(peak, pool.num_used)
        return news

    with replaced((engine, "step", watched)):
        began = time.perf_counter()
        num_tokens = work()
        return Run(time.perf_counter() - began, num_tokens, peak)

"""`octavo bench step`: where the time of an engine's step goes while every request decodes, phase by phase.

Clocks are put around the phases from outside, for as long as the measurement lasts; the engine knows nothing of them.
A phase's time is its own: what another phase spends inside it, native code for one, is that one's.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from octavo.cli.bench.common import RandomPrompts, engine_of, greedy, make_llm, make_parser, parse, runner_of
from octavo.cli.bench.report import show_table, write_json
from octavo.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from octavo.core.plan import StepPlan
    from octavo.llm import LLM
    from octavo.runtime.program import ProgramExecutor

WARMUP = 8  # steps
PYTHON = ("schedule", "make batch", "run", "logits", "sample", "update", "rest")
NATIVE = ("native run", "native logits", "native sample")
OUTPUT = "output processing"  # after the step; in a process of its own where octavo serves

Phases = defaultdict[str, float]  # seconds by phase


class StepClock:
    """`steps` holds for each step the seconds of its phases, and how many rows and tokens it computed."""

    def __init__(self) -> None:
        self.steps: list[Phases] = []
        self.sizes: list[tuple[int, int]] = []
        self._inner: list[float] = []  # seconds of the phases inside each phase that runs now

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent = time.perf_counter() - began
                self.steps[-1][phase] += spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        return timed_call

    def begin_step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        step = self.timed("rest", call)

        def timed_step() -> Any:
            self.steps.append(defaultdict(float))
            self.sizes.append((0, 0))
            return step()

        return timed_step

    def note_size(self, call: Callable[[], StepPlan]) -> Callable[[], StepPlan]:
        schedule = self.timed("schedule", call)

        def timed_schedule() -> StepPlan:
            plan: StepPlan = schedule()
            self.sizes[-1] = (len(plan.scheduled), plan.num_scheduled_tokens)
            return plan

        return timed_schedule

    def steady(self, num_requests: int) -> list[Phases]:
        """The steps in which that many requests, and nothing else, decoded."""
        decodes = (num_requests, num_requests)
        return [step for step, size in zip(self.steps, self.sizes, strict=True) if size == decodes]


class Clocked:
    """Something native, with clocks around some of its functions."""

    def __init__(self, inner: Any, clock: StepClock, phases: dict[str, str]) -> None:
        self._inner = inner
        for name, phase in phases.items():
            setattr(self, name, clock.timed(phase, getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextlib.contextmanager
def clocks_on(llm: LLM) -> Iterator[StepClock]:
    """Puts a clock around every phase, and takes it away again."""
    clock, engine = StepClock(), engine_of(llm)
    runner = runner_of(engine)
    executor = cast("ProgramExecutor", runner.executor)
    program = Clocked(executor.native, clock, {"run": "native run", "run_logits": "native logits"})
    sampler = Clocked(runner.sampler._native, clock, {"sample": "native sample"})
    with contextlib.ExitStack() as undo:
        for owner, name, clocked in (
            (executor, "native", program),
            (runner.sampler, "_native", sampler),
            (engine, "step", clock.begin_step(engine.step)),
            (engine.scheduler, "schedule", clock.note_size(engine.scheduler.schedule)),
            (executor, "batch", clock.timed("make batch", executor.batch)),
            (executor, "run", clock.timed("run", executor.run)),
            (executor, "logits", clock.timed("logits", executor.logits)),
            (runner.sampler, "sample", clock.timed("sample", runner.sampler.sample)),
            (engine.scheduler, "update", clock.timed("update", engine.scheduler.update)),
            (llm._outputs, "process", clock.timed(OUTPUT, llm._outputs.process)),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, clocked)
        yield clock


def run(argv: list[str]) -> int:
    parser = make_parser(
        "step",
        "Where the time of a step goes while every request decodes.",
        (
            ("--num-requests", (1, 8, 64), "requests that decode"),
            ("--context-len", (128,), "tokens of each before the first measured step"),
            ("--num-steps", 64, "measured steps"),
        ),
    )
    args, config = parse(parser, argv, {"num_requests": 1, "context_len": 2, "num_steps": 1})
    if config.enforce_eager:
        raise ConfigError("--enforce-eager has no program to time")
    points = []
    with make_llm(config) as llm:
        prompts = RandomPrompts(llm.get_tokenizer().vocab_size, config.seed)
        for context_len in args.context_len:
            for num_requests in args.num_requests:
                steps = measure(llm, prompts, num_requests, context_len, args.num_steps)
                points.append({"num_requests": num_requests, "context_len": context_len, **sum_up(steps)})
        title = f"{config.model}, {llm.info.dtype} on {llm.info.isa}, {llm.info.num_threads} threads"
    show(title, points)
    write_json(args, {"points": points}, config)
    return 0


def measure(llm: LLM, prompts: RandomPrompts, num_requests: int, context_len: int, num_steps: int) -> list[Phases]:
    """The phases of `num_steps` steps, after some that are not counted."""
    scheduler = engine_of(llm).scheduler
    if num_requests > scheduler.max_num_seqs:
        raise ConfigError(f"--num-requests is {num_requests}; at most {scheduler.max_num_seqs} run (--max-num-seqs)")
    # The first to have its prompt computed decodes until the last one has.
    num_prefills = num_requests + 2 * num_requests * context_len // scheduler.max_num_batched_tokens
    prompt_len = max(1, context_len - WARMUP)
    params = greedy(num_prefills + WARMUP + num_steps, detokenize=True)
    with clocks_on(llm) as clock:
        llm.generate(prompts.take(num_requests, prompt_len), params, use_tqdm=False)
    steps = clock.steady(num_requests)[WARMUP : WARMUP + num_steps]
    if len(steps) < num_steps:
        raise OctavoError(
            f"{num_requests} requests decoded together in {len(steps)} steps only: is the cache too small?"
        )
    return steps


def sum_up(steps: Sequence[Phases]) -> dict[str, Any]:
    """Medians in seconds: of the whole step, of its Python and its native part, of each phase."""

    def median(phases: Sequence[str]) -> float:
        return statistics.median(sum(step[phase] for phase in phases) for step in steps)

    return {
        "num_steps": len(steps),
        "step": median([*PYTHON, *NATIVE]),
        "python": median(PYTHON),
        "native": median(NATIVE),
        "step_and_output": median([*PYTHON, *NATIVE, OUTPUT]),
        "phases": {phase: median([phase]) for phase in (*PYTHON, *NATIVE, OUTPUT)},
    }


def show(title: str, points: Sequence[dict[str, Any]]) -> None:
    def line(name: str, values: Sequence[float]) -> tuple[str, ...]:
        return (name, *(f"{value * 1e6:,.0f}" for value in values))

    rows = [
        *(line(f"  {phase}", [point["phases"][phase] for point in points]) for phase in PYTHON),
        line("Python", [point["python"] for point in points]),
        *(line(f"  {phase}", [point["phases"][phase] for point in points]) for phase in NATIVE),
        line("native", [point["native"] for point in points]),
        line("step", [point["step"] for point in points]),
        line(OUTPUT, [point["phases"][OUTPUT] for point in points]),
        ("tokens/s", *(f"{point['num_requests'] / point['step_and_output']:,.1f}" for point in points)),
    ]
    columns = ("µs", *(f"{point['num_requests']} × {point['context_len']}" for point in points))
    show_table(f"{title}: decode steps, requests × context", columns, rows)

"""`octavo bench step`: where the time of an engine's step goes while every request decodes, phase by phase.

Clocks are put around the phases from outside, for as long as the measurement lasts; the engine knows nothing of them.
A phase's time is its own: what another phase spends inside it, native code for one, is that one's. Clocks cost time, so
the sums come from steps of which only the native calls have some.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from octavo.cli.bench.common import RandomPrompts, engine_of, greedy, make_llm, make_parser, parse, replaced, runner_of
from octavo.cli.bench.report import show_table, write_json
from octavo.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from octavo.engine.engine import Engine
    from octavo.llm import LLM
    from octavo.runtime.program import ProgramExecutor

WARMUP = 8  # steps
PYTHON = ("schedule", "make batch", "sampler rows", "run", "update", "rest")
NATIVE = ("program and sampler",)
OUTPUT = "output processing"  # after the step; in a process of its own where octavo serves

Phases = defaultdict[str, float]  # seconds by phase


class Enough(Exception):
    """Ends the generation from which steps are measured."""


class StepClock:
    """Times steps until `num_steps`, after WARMUP more, were decodes of `num_requests` and nothing else.

    These are in `steady`; the step after them raises Enough.
    """

    def __init__(self, num_requests: int, num_steps: int) -> None:
        self.steady: list[Phases] = []
        self._decodes = (num_requests, num_requests)
        self._num_steps = WARMUP + num_steps
        self._now: Phases = defaultdict(float)
        self._inner: list[float] = []  # seconds of the phases inside each phase that runs now

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent = time.perf_counter() - began
                self._now[phase] += spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        return timed_call

    def timed_step(self, engine: Engine) -> Callable[[], Any]:
        step, scheduler = self.timed("rest", engine.step), engine.scheduler

        def timed_step() -> Any:
            if len(self.steady) == self._num_steps:
                raise Enough
            self._now = defaultdict(float)  # until the next step: what follows this one counts too
            news = step()
            if (len(scheduler.running), scheduler.step_tokens) == self._decodes:
                self.steady.append(self._now)
            return news

        return timed_step


@contextlib.contextmanager
def clocks_on(llm: LLM, clock: StepClock, *, every_phase: bool) -> Iterator[None]:
    """Puts clocks around the step and its native calls, and around every phase if asked for; takes them away again."""
    engine = engine_of(llm)
    runner = runner_of(engine)
    executor, sampler, scheduler = cast("ProgramExecutor", runner.executor), runner.sampler, engine.scheduler
    clocked: list[tuple[Any, str, Any]] = [
        (executor, "_run_and_sample", clock.timed(NATIVE[0], executor._run_and_sample)),
        (llm._outputs, "process", clock.timed(OUTPUT, llm._outputs.process)),
        (engine, "step", clock.timed_step(engine)),
    ]
    if every_phase:
        clocked += [
            (owner, name, clock.timed(phase, getattr(owner, name)))
            for owner, name, phase in (
                (scheduler, "schedule", "schedule"),
                (executor, "batch", "make batch"),
                (sampler, "rows", "sampler rows"),
                (executor, "run", "run"),
                (scheduler, "update", "update"),
            )
        ]
    with replaced(*clocked):
        yield


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
                rough, fine = (
                    measure(llm, prompts, num_requests, context_len, args.num_steps, every_phase=every_phase)
                    for every_phase in (False, True)
                )
                points.append({"num_requests": num_requests, "context_len": context_len, **sum_up(rough, fine)})
        title = f"{config.model}, {llm.info.dtype} on {llm.info.isa}, {llm.info.num_threads} threads"
    show(title, points)
    write_json(args, {"points": points}, config)
    return 0


def measure(
    llm: LLM, prompts: RandomPrompts, num_requests: int, context_len: int, num_steps: int, *, every_phase: bool
) -> list[Phases]:
    """The phases of `num_steps` steps, after some that are not counted."""
    scheduler = engine_of(llm).scheduler
    if num_requests > scheduler.queues.max_num_seqs:
        raise ConfigError(
            f"--num-requests is {num_requests}; at most {scheduler.queues.max_num_seqs} run (--max-num-seqs)"
        )
    clock, prompt_len = StepClock(num_requests, num_steps), max(1, context_len - WARMUP)
    batch = prompts.take(num_requests, prompt_len)
    params = greedy(llm.info.max_model_len - prompt_len, detokenize=True)  # as many as there may be
    with clocks_on(llm, clock, every_phase=every_phase), contextlib.suppress(Enough):
        llm.generate(batch, params, use_tqdm=False)
    steps = clock.steady[WARMUP:]
    if len(steps) < num_steps:
        raise OctavoError(
            f"{num_requests} requests decoded together in {len(steps)} steps only: their context of "
            f"{llm.info.max_model_len} (--max-model-len) or the KV cache was full"
        )
    return steps


def sum_up(rough: Sequence[Phases], fine: Sequence[Phases]) -> dict[str, Any]:
    """Medians in seconds: of the whole step, of its Python and its native part, of each phase. Python's phases are from
    `fine`, steps with clocks around every phase."""

    def median(steps: Sequence[Phases], phases: Sequence[str]) -> float:
        return statistics.median(sum(step[phase] for phase in phases) for step in steps)

    return {
        "num_steps": len(rough),
        "step": median(rough, [*PYTHON, *NATIVE]),
        "python": median(rough, PYTHON),
        "native": median(rough, NATIVE),
        "step_and_output": median(rough, [*PYTHON, *NATIVE, OUTPUT]),
        "phases": {
            **{phase: median(fine, [phase]) for phase in PYTHON},
            **{phase: median(rough, [phase]) for phase in (*NATIVE, OUTPUT)},
        },
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

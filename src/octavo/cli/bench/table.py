"""`octavo bench table`: engines side by side, from the JSON of their runs, as a Markdown table.

A file is one run of one engine, or holds several runs by name. Files that differ after the first dot of their names
(vllm.1.json, vllm.2.json) are rounds of one engine; medians are shown.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.cli.bench.report import read_json
from octavo.cli.parser import Parser
from octavo.errors import ConfigError

# What is shown, in this order, and how it is called; `ANSWERS` is a list of texts.
NAMES = (
    (r"start_s", "start to first token, s"),
    (r"rows(\d+)_tok_s", r"\1 at once, output tokens/s"),
    (r"prefill_tok_s", "prompts, tokens/s"),
    (r"c(\d+)_out_tok_s", r"\1 users, output tokens/s"),
    (r"c(\d+)_tpot_ms", r"\1 users, time per output token, ms"),
    (r"c(\d+)_ttft_ms", r"\1 users, mean time to first token, ms"),
    (r"c(\d+)_ttft_p99_ms", r"\1 users, 99 % of first tokens within, ms"),
    (r"rss_mb", "resident memory, MB"),
    # of `octavo bench serve` and `vllm bench serve`
    (r"output_throughput", "output tokens/s"),
    (r"mean_tpot_ms", "time per output token, ms"),
    (r"mean_ttft_ms", "mean time to first token, ms"),
    (r"p99_ttft_ms", "99 % of first tokens within, ms"),
    # of `octavo bench latency` and `throughput`
    (r"avg_latency", "mean latency, s"),
    (r"output_tokens_per_second", "output tokens/s"),
    (r"tokens_per_second", "tokens/s, prompts too"),
)
ANSWERS = "answers"
SAME_BEGINNING = 40  # characters


def run(argv: list[str]) -> int:
    parser = Parser("octavo bench table", "Engines side by side, from their JSON, as Markdown.", "FILE... [options]")
    text = "a run of the engine that the name says, up to its first dot"
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=text)
    parser.add_argument("--against", metavar="NAME", help="show each figure's ratio to this engine's too")
    args = parser.parse_args(argv)
    rounds: dict[str, list[dict[str, Any]]] = {}
    for path in args.files:
        for name, figures in read(path).items():
            rounds.setdefault(name, []).append(figures)
    engines = {name: medians(runs) for name, runs in rounds.items()}
    if args.against is not None and args.against not in engines:
        raise ConfigError(f"--against is {args.against}; there are: {', '.join(engines)}")
    print("\n".join(render(engines, args.against)))
    return 0


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The runs in a file, by engine."""
    record = read_json(path)
    if not isinstance(record, dict) or not record:
        raise ConfigError(f"{path} holds no figures by name")
    several = all(isinstance(value, dict) for value in record.values())
    return record if several else {path.name.partition(".")[0]: record}


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each figure that all runs have. Answers are those of the first run."""
    shared = [key for key in runs[0] if all(key in run for run in runs)]
    figures = {
        key: statistics.median(run[key] for run in runs)
        for key in shared
        if all(isinstance(run[key], (int, float)) and not isinstance(run[key], bool) for run in runs)
    }
    return figures if ANSWERS not in shared else {**figures, ANSWERS: runs[0][ANSWERS]}


def render(engines: Mapping[str, Mapping[str, Any]], against: str | None) -> list[str]:
    """The lines of the table; ratios to `against`, where that is named."""
    lines = ["| | " + " | ".join(engines) + " |", "|---|" + "---:|" * len(engines)]
    keys = list(dict.fromkeys(key for figures in engines.values() for key in figures))
    for pattern, name in NAMES:
        for match in filter(None, (re.fullmatch(pattern, key) for key in keys)):
            base = engines[against].get(match[0]) if against else None
            cells = [
                _cell(figures.get(match[0]), None if engine == against else base) for engine, figures in engines.items()
            ]
            lines.append(f"| {match.expand(name).replace('1 users', '1 user')} | " + " | ".join(cells) + " |")
    answers = {engine: figures.get(ANSWERS) for engine, figures in engines.items()}
    if first := next(filter(None, answers.values()), None):
        cells = [_same(first, each) for each in answers.values()]
        lines.append("| answers that begin as the first's | " + " | ".join(cells) + " |")
    return lines


def _cell(value: float | None, base: float | None) -> str:
    if value is None:
        return ""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}" + (f" ({value / base:.2f} ×)" if base else "")


def _same(first: Sequence[str], answers: Sequence[str] | None) -> str:
    if answers is None:
        return ""
    same = sum(a[:SAME_BEGINNING] == b[:SAME_BEGINNING] for a, b in zip(first, answers, strict=False))
    return f"{same}/{len(first)}"

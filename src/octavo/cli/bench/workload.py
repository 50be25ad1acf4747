"""What `octavo bench serve` sends, and when: prompts of random tokens or from a file, and the times of their arrival.

Knows the forms of files and the laws of chance; no server and no clock.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cli.bench.common import RandomPrompts
from octavo.errors import ConfigError

DATASETS = ("random", "custom", "sharegpt")
DEFAULT_OUTPUT_LEN = 256  # of a file's prompts that name none; vLLM's


@dataclass(frozen=True, slots=True)
class Job:
    """One request to be sent."""

    prompt: str | list[int]  # text, or token ids
    output_len: int


def random_jobs(
    count: int, input_len: int, output_len: int, *, vocab_size: int, seed: int, prefix_len: int = 0, spread: float = 0.0
) -> list[Job]:
    """Prompts of random tokens behind `prefix_len` that all share. Lengths are even between (1 - spread) and
    (1 + spread) times those given, and at least 1."""
    numbers, prompts = random.Random(seed), RandomPrompts(vocab_size, seed)

    def drawn(length: int) -> int:
        low, high = math.floor(length * (1 - spread)), math.ceil(length * (1 + spread))
        return length if spread == 0 else max(1, numbers.randint(low, high))

    (prefix,) = prompts.take(1, prefix_len) if prefix_len else [[]]
    return [Job(prefix + prompts.take(1, drawn(input_len))[0], drawn(output_len)) for _ in range(count)]


def jobs_of_file(name: str, path: Path, count: int, *, output_len: int | None, seed: int) -> list[Job]:
    """`count` requests of a file, in random order, again from the start where it has fewer. ConfigError, with the
    place, where it is not what `name` says:

    custom      a line for each request: {"prompt": text, "output_tokens": number or absent}
    sharegpt    a list of {"conversations": [{"value": text}, {"value": text}, …]}: the first is the prompt; the length
                of the second, at four characters for a token, is that of the answer
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--dataset-path is {str(path)!r}: {reason}") from error
    jobs = list((_custom_jobs if name == "custom" else _sharegpt_jobs)(text, output_len, path))
    if not jobs:
        raise ConfigError(f"--dataset-path is {str(path)!r}: it has no requests")
    random.Random(seed).shuffle(jobs)
    return list(itertools.islice(itertools.cycle(jobs), count))


def _custom_jobs(text: str, output_len: int | None, path: Path) -> Iterator[Job]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        record = _decoded(line, f"{path}, line {number}")
        prompt = record.get("prompt") if isinstance(record, dict) else None
        asked = record.get("output_tokens") if isinstance(record, dict) else None
        if not isinstance(prompt, str) or not (asked is None or (type(asked) is int and asked > 0)):
            raise ConfigError(
                f'{path}, line {number}: must be {{"prompt": text}}, perhaps with "output_tokens": a number above 0'
            )
        yield Job(prompt, output_len or asked or DEFAULT_OUTPUT_LEN)


def _sharegpt_jobs(text: str, output_len: int | None, path: Path) -> Iterator[Job]:
    records = _decoded(text, str(path))
    if not isinstance(records, list):
        raise ConfigError(f"{path}: must be a list of conversations")
    for record in records:
        turns = record.get("conversations") if isinstance(record, dict) else None
        values = [turn.get("value") for turn in turns or [] if isinstance(turn, dict)]
        match values:
            case [str(prompt), str(answer), *_] if prompt and answer:
                yield Job(prompt, output_len or max(1, len(answer) // 4))


def _decoded(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}: no JSON: {error}") from error


def arrival_times(rate: float, seed: int, burstiness: float = 1.0) -> Iterator[float]:
    """Seconds from the start at which requests are sent: `rate` per second on average, with gaps of a gamma
    distribution of shape `burstiness`. 1 is a Poisson process; less comes in bursts, more is more even."""
    gaps = random.Random(seed)

    def gap() -> float:
        return 0.0 if math.isinf(rate) else gaps.gammavariate(burstiness, 1 / (rate * burstiness))

    return itertools.accumulate(itertools.chain([0.0], (gap() for _ in itertools.count())))


def bodies(jobs: Sequence[Job], *, is_chat: bool, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """What is sent for each job. ConfigError where a chat would have to say token ids."""
    sent = []
    for job in jobs:
        body = {**fields, "max_tokens": job.output_len}
        if not is_chat:
            body["prompt"] = job.prompt
        elif isinstance(job.prompt, str):
            body["messages"] = [{"role": "user", "content": job.prompt}]
        else:
            raise ConfigError("--backend is openai-chat, which takes text; --dataset-name random has token ids")
        sent.append(body)
    return sent

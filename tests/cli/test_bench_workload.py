"""What is sent and when: files that are what they say, and the laws of chance."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path

import pytest

from octavo.cli.bench.workload import Job, arrival_times, bodies, jobs_of_file, random_jobs
from octavo.errors import ConfigError


def test_times_of_arrival() -> None:
    assert list(itertools.islice(arrival_times(float("inf"), 0), 3)) == [0, 0, 0]
    times = list(itertools.islice(arrival_times(10, seed=1), 2001))
    assert times[0] == 0 and times == sorted(times)
    assert times[-1] == pytest.approx(200, rel=0.1)
    assert times == list(itertools.islice(arrival_times(10, seed=1), 2001))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_bursts(burstiness: float) -> None:
    """The gaps of a gamma distribution of shape k: their spread is 1/√k of their mean, whatever the rate."""
    times = list(itertools.islice(arrival_times(10, seed=1, burstiness=burstiness), 4001))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.1)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)


def test_random_prompts() -> None:
    jobs = random_jobs(50, 20, 10, vocab_size=100, seed=3, prefix_len=5, spread=0.5)
    assert len({tuple(job.prompt[:5]) for job in jobs}) == 1
    assert len({tuple(job.prompt[5:]) for job in jobs}) == 50
    input_lens, output_lens = {len(job.prompt) - 5 for job in jobs}, {job.output_len for job in jobs}
    assert min(input_lens) >= 10 and max(input_lens) <= 30 and len(input_lens) > 10
    assert min(output_lens) >= 5 and max(output_lens) <= 15 and len(output_lens) > 5
    assert jobs == random_jobs(50, 20, 10, vocab_size=100, seed=3, prefix_len=5, spread=0.5)
    assert {len(job.prompt) for job in random_jobs(5, 20, 10, vocab_size=100, seed=3)} == {20}


def test_sharegpt(tmp_path: Path) -> None:
    conversations = [
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "x" * 40}]},
        {"conversations": [{"from": "human", "value": "alone"}]},
        {"id": "no conversation"},
    ]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps(conversations))
    assert jobs_of_file("sharegpt", file, 2, output_len=None, seed=0) == [Job("Hello", 10)] * 2
    assert jobs_of_file("sharegpt", file, 1, output_len=7, seed=0) == [Job("Hello", 7)]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("custom", "", "it has no requests"),
        ("custom", '{"prompt": "a"}\n{"prompt": 5}\n', 'line 2: must be {"prompt": text}'),
        ("custom", '{"prompt": "a", "output_tokens": 0}\n', "a number above 0"),
        ("custom", "[1]\n", 'line 1: must be {"prompt": text}'),
        ("custom", "{\n", "line 1: no JSON"),
        ("sharegpt", "{}", "must be a list of conversations"),
        ("sharegpt", "[]", "it has no requests"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, name: str, text: str, said: str) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        jobs_of_file(name, file, 1, output_len=None, seed=0)
    assert said in str(caught.value) and str(file) in str(caught.value)
    file.unlink()
    with pytest.raises(ConfigError, match="--dataset-path is"):
        jobs_of_file(name, file, 1, output_len=None, seed=0)


def test_a_chat_has_no_token_ids() -> None:
    with pytest.raises(ConfigError, match="--backend is openai-chat, which takes text"):
        bodies([Job([1, 2], 3)], is_chat=True, fields={})

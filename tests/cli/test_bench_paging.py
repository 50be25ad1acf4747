"""`octavo bench paging`: accounts worked out by hand, the engine's scheduler as the oracle, and the figures' ranges."""

from __future__ import annotations

import json
import math
import random
import statistics
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.bench.paging.lengths import TRACES, Length, draw
from octavo.cli.bench.paging.memory import Buddy, Contiguous, FirstFit, Memory, Paged, reserve_oracle, reserve_pow2
from octavo.cli.bench.paging.sharing import Blocks, Scores, beams, parallel
from octavo.cli.bench.paging.steps import Account, play
from octavo.cli.main import main
from octavo.core.plan import RowResult, StepResult
from octavo.core.policy import make_policy
from octavo.core.scheduler import Scheduler
from octavo.request import Request
from support.fake_runner import make_request

SVG = "{http://www.w3.org/2000/svg}"
SMALL = ["--num-requests", "600", "--num-sampled", "60", "--num-searches", "8"]


def bench(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "paging.json"
    assert main(["bench", "paging", *SMALL, *words, "--output-json", str(file)]) == 0
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


# ── Accounts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def buddy(reserve: Callable[[Length], int]) -> Memory:
    return Contiguous(16, Buddy(16), reserve)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        # In the first of two steps A holds 3 tokens, B 2; in the second each has one more. C waits. A will hold 4, B 5.
        # A and B have 8 slots each.
        (buddy(lambda _: 8), Account(tokens=12, reserved=6, internal=14)),
        # 3 + 2 and 2 + 4 slots, in places of 8.
        (buddy(partial(reserve_pow2, max_model_len=8)), Account(tokens=12, reserved=6, internal=4, rounding=10)),
        # 4 and 5 slots, in places of 4 and 8; the 4 that are left are too few for C's 5.
        (buddy(reserve_oracle), Account(tokens=12, reserved=6, rounding=6, free=8)),
    ],
    ids=["max", "pow2", "oracle"],
)
def test_accounts_by_hand(memory: Memory, expected: Account) -> None:
    expected.num_slots, expected.num_steps, expected.num_running = 32, 2, 4
    check_account(memory, play(memory, [Length(3, 2), Length(2, 4), Length(4, 2)], num_warmup=0), expected)


def test_an_account_of_blocks_by_hand() -> None:
    """A and B have a block each; C waits, for it would take the last one, and none would be left for them."""
    memory = Paged(3, block_size=4)
    expected = Account(tokens=12, reserved=4, free=8, num_slots=24, num_steps=2, num_running=4)
    check_account(memory, play(memory, [Length(3, 2), Length(2, 4), Length(4, 1)], num_warmup=0), expected)


def check_account(memory: Memory, account: Account, expected: Account) -> None:
    assert account == expected
    parts = (account.tokens, account.reserved, account.internal, account.rounding, account.free)
    assert sum(parts) == account.num_slots
    assert memory.num_taken == 0


def test_what_warms_up_is_not_counted() -> None:
    lengths = [Length(3, 2), Length(2, 4), Length(4, 2), Length(4, 2)]
    # A has ended after step 2; C takes its place in steps 3 and 4, while D waits: B 4 and 5 of 5 tokens, C 4 and 5.
    expected = Account(tokens=18, reserved=2, internal=12, num_slots=32, num_steps=2, num_running=4)
    assert play(buddy(lambda _: 8), lengths, num_warmup=1) == expected


def test_blocks_are_counted_as_the_scheduler_takes_them() -> None:
    generator = random.Random(5)
    lengths = [Length(generator.randint(1, 30), generator.randint(1, 40)) for _ in range(80)]
    memory = Paged(40, block_size=4)
    account = play(memory, lengths, num_warmup=0)
    memory.kv.check_integrity()

    kv = Paged(40, block_size=4).kv
    scheduler = Scheduler(kv, make_policy("fcfs"), max_num_seqs=99, max_num_batched_tokens=9999, max_model_len=160)
    for i, (num_input, num_output) in enumerate(lengths):
        source = make_request(str(i), [1] * num_input, max_tokens=num_output, ignore_eos=True)
        scheduler.add(Request.from_source(source))
    expected = Account()
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        if scheduler.waiting:
            rows = [row.request for row in plan.scheduled]
            expected.tokens += sum(row.num_tokens for row in rows)
            useful = [min(len(kv.block_table(row)) * 4, sum(lengths[int(row.request_id)]) - 1) for row in rows]
            expected.reserved += sum(useful) - sum(row.num_tokens for row in rows)
            expected.internal += sum(len(kv.block_table(row)) * 4 for row in rows) - sum(useful)
            expected.free += 4 * kv.pool.num_free
            expected.num_slots += 160
            expected.num_steps += 1
            expected.num_running += len(rows)
            expected.num_preemptions += len(plan.preempted)
        scheduler.update(plan, StepResult([RowResult(token_id=1) for _ in plan.scheduled]))
    assert account == expected
    assert account.num_preemptions > 0 and account.internal > 0


def test_first_fit_leaves_gaps_and_joins_them() -> None:
    places = FirstFit(16)
    assert [places.allocate(size) for size in (5, 6, 5)] == [0, 5, 11]
    places.free(0)
    places.free(11)
    assert places.num_taken == 6 and places.allocate(6) is None
    assert places.allocate(2) == 0
    places.free(5)
    assert places.allocate(14) == 2
    places.free(2)
    places.free(0)
    assert places.allocate(16) == 0


def test_buddies_are_split_and_joined() -> None:
    places = Buddy(12)  # 8 and 4
    assert [places.allocate(3), places.allocate(3)] == [8, 0]
    assert places.num_taken == 8 and places.allocate(5) is None  # the 4 that are free are one half of 8
    assert places.allocate(4) == 4
    places.free(0)
    places.free(4)
    assert places.allocate(5) == 0
    assert places.allocate(1) is None
    places.free(8)
    assert places.allocate(1) == 8


# ── Sharing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_blocks_of_samples() -> None:
    # A prompt of 6 tokens has 2 blocks; the second is copied when the samples write their seventh and eighth into it.
    assert parallel([Length(6, 3)], num_samples=2, block_size=4) == Blocks(used=2 + 3 + 3, unshared=4 + 4 + 4)
    assert parallel([Length(6, 3)], num_samples=3, block_size=4) == Blocks(used=2 + 4 + 4, unshared=6 + 6 + 6)
    assert parallel([Length(4, 2)], num_samples=2, block_size=4) == Blocks(
        used=1 + 3, unshared=2 + 4
    )  # nothing to copy


def test_blocks_of_beams() -> None:
    # All beams of the second step come from the prompt, whatever their scores.
    assert beams([Length(6, 2)], beam_width=2, block_size=4, seed=0) == Blocks(used=2 + 3, unshared=4 + 4)
    assert beams([Length(6, 1)], beam_width=3, block_size=4, seed=0) == Blocks(used=2, unshared=6)
    long = beams([Length(6, 60)], beam_width=3, block_size=4, seed=0)
    assert long.saved > parallel([Length(6, 60)], num_samples=3, block_size=4).saved
    assert long == beams([Length(6, 60)], beam_width=3, block_size=4, seed=0)


def test_scores_are_those_of_a_broken_stick() -> None:
    scores = Scores(seed=1, concentration=1.5)
    drawn = [scores.likeliest(8) for _ in range(4000)]
    assert all(each == sorted(each, reverse=True) and sum(map(math.exp, each)) < 1 for each in drawn)
    # The mean of the largest weight: the integral of exp(-x - 1.5 E1(x)) over x > 0. For its logarithm, what the module
    # says.
    assert statistics.mean(math.exp(each[0]) for each in drawn) == pytest.approx(0.5375, abs=0.01)
    assert statistics.mean(each[0] for each in drawn) == pytest.approx(-0.67, abs=0.02)


# ── Lengths ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name)
def test_built_in_lengths_have_the_means_of_the_paper(trace: Any) -> None:
    lengths = draw(trace, 500, 2048, seed=3)
    assert statistics.mean(length.input for length in lengths) == pytest.approx(trace.input.mean, abs=0.02)
    assert statistics.mean(length.output for length in lengths) == pytest.approx(trace.output.mean, abs=0.02)
    assert all(length.input >= 1 and length.output >= 1 and sum(length) <= 2048 for length in lengths)
    spread = statistics.stdev(math.log(length.output) for length in lengths)
    assert spread == pytest.approx(trace.output.sigma, rel=0.03)
    assert lengths == draw(trace, 500, 2048, seed=3) != draw(trace, 500, 2048, seed=4)


def test_lengths_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("id,input,output\n" + "".join(f"{i},{10 + i},{20 + i}\n" for i in range(50)))
    figures = bench(tmp_path, "--lengths", str(file), "--num-blocks", "20", "--max-model-len", "128")
    assert list(figures["lengths"]) == ["mine"]
    mine = figures["lengths"]["mine"]
    assert (mine["num_requests"], mine["mean_input"], mine["mean_output"]) == (50, 34.5, 44.5)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("input,output\n1,2\n3,x\n", "{file}, line 3: output is 'x'; it must be a whole number, at least 1"),
        ("input,output\n0,2\n", "{file}, line 2: input is '0'; it must be a whole number, at least 1"),
        ("input,output\n7\n", "{file}, line 2: output is ''; it must be a whole number, at least 1"),
        ("input,output\n2000,49\n", "{file}, line 2: input + output is 2049; --max-model-len allows 2048"),
        ("input,out\n1,2\n", "{file}, line 1: there is no column 'output'; columns are input,output"),
        ("input,output\n", "--lengths: {file} has no requests"),
        ("input,output\n1,1\n", "--num-requests is 1; that is too few: nobody waits for 15696 slots"),
    ],
)
def test_files_that_cannot_be_used(content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text(content)
    assert main(["bench", "paging", "--lengths", str(file)]) == 2
    assert capsys.readouterr().err == f"octavo: error: {said.format(file=file)}\n"


# ── The command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_figures_of_the_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "paging.svg"
    figures = bench(tmp_path, "--plot", str(file))
    for each in figures["lengths"].values():
        for memory in each["memory"].values():
            assert sum(memory[part] for part in ("tokens", "reserved", "internal", "external")) == pytest.approx(1)
    chat, short = (figures["lengths"][name] for name in ("ShareGPT", "Alpaca"))
    waste = {name: memory["waste"] for name, memory in chat["memory"].items()}
    assert 0.55 < waste["oracle"] < 0.65 < waste["pow2"] < 0.75 < waste["max"] < 0.85
    assert waste["octavo"] < 0.045  # 0.039 with as many requests as by default
    blocks = chat["memory"]["octavo"]
    assert blocks["reserved"] + blocks["internal"] < 0.02 and blocks["rounding"] == 0
    running = {name: memory["mean_running"] for name, memory in chat["memory"].items()}
    assert running["max"] == 7  # 15.7 k slots have room for seven times 2,048
    assert running["max"] < running["pow2"] < running["oracle"] < running["octavo"] / 2
    samples, searches = short["sharing"]["parallel"], short["sharing"]["beam"]
    assert 0.05 < samples["2"]["saved"] < samples["4"]["saved"] < samples["6"]["saved"] < 0.15
    assert 0.35 < searches["2"]["saved"] < searches["4"]["saved"] < searches["6"]["saved"] < 0.66

    texts = [element.text for element in ET.parse(file).getroot().iter(f"{SVG}text")]
    assert {"ShareGPT: 161 tokens in, 338 out", "Alpaca: 19 tokens in, 58 out", "token states", "7.0"} < set(texts)
    bars = [element for element in ET.parse(file).getroot().iter(f"{SVG}rect") if "x" in element.attrib]
    assert len(bars) == 6 + 2 * (4 * 4 + 4 + 3 * 2)  # the legend; in each row the parts, the requests, the savings
    stacks = [float(bar.attrib["height"]) for bar in bars[6 : 6 + 16]]
    assert all(sum(stacks[i : i + 4]) == pytest.approx(200, abs=0.3) for i in range(0, 16, 4))
    out = capsys.readouterr().out
    assert "ShareGPT: 600 requests, 161.3 tokens in and 338.0 out" in out and "% of blocks saved by sharing" in out


def test_same_seed_same_figures(tmp_path: Path) -> None:
    words = ["--allocator", "first-fit", "--widths", "2", "--num-blocks", "128", "--num-requests", "100"]
    words += ["--num-sampled", "4", "--num-searches", "2"]
    first, second = (bench(tmp_path, *words)["lengths"] for _ in range(2))
    assert first == second
    assert all(memory["rounding"] == 0 for memory in first["ShareGPT"]["memory"].values())
    assert bench(tmp_path, *words, "--seed", "1")["lengths"] != first


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plot", "x.png"], "--plot is x.png; its name must end in .svg"),
        (["--widths", "1,2"], "--widths is 1; it must be at least 2"),
        (["--widths", "2,129"], "--widths is 129; it must be at most 128"),
        (
            ["--num-blocks", "100"],
            "--num-blocks is 100; with --block-size 16 it must be at least 128 for one request of --max-model-len 2048",
        ),
        (
            ["--max-model-len", "300"],
            "--max-model-len is 300; ShareGPT's lengths do not fit: a mean of 161.31 tokens",
        ),
        (
            ["--max-model-len", "1500", "--num-blocks", "100"],
            "--num-blocks is too small: 1600 slots have no room for a request of",
        ),
    ],
)
def test_options_that_do_not_fit(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "paging", *SMALL, *words]) == 2
    assert capsys.readouterr().err.startswith(f"octavo: error: {said}")

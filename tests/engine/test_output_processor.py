"""From deltas to outputs: kinds of output, stop strings, n, logprobs, failures and times."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.input_processor import InputProcessor
from octavo.engine.messages import EngineInfo, TokenDelta
from octavo.engine.output_processor import OutputProcessor, RequestState, as_logprob_dict
from octavo.request import CompletionOutput, FinishReason, Logprob, SamplingParams, TokenLogprobs
from support.front import END, small_tokenizer

A, B, C, BLANK, HEL, LO, WOR, LD, MARK = 1, 2, 3, 6, 7, 8, 9, 10, 11
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Bench:
    """One request, fed by hand."""

    def __init__(self, **params: Any) -> None:
        tokenizer = small_tokenizer()
        info = EngineInfo(64, 13, 4, 64, "float32", "none", 1, "no memory", 8)
        inputs = InputProcessor(tokenizer, info, eos_token_ids=[END], max_logprobs=-1)
        self.outputs = OutputProcessor(tokenizer)
        self.request: RequestState = self.outputs.add(inputs.process("r", "Hel", SamplingParams(seed=1, **params)))
        self.to_abort: list[str] = []

    def feed(self, *token_ids: int, id: str = "r#0", logprobs: list[float] | None = None, **fields: Any) -> None:
        wire = (
            None if logprobs is None else [TokenLogprobs([t], [p], 1) for t, p in zip(token_ids, logprobs, strict=True)]
        )
        news = self.outputs.process([TokenDelta(id, list(token_ids), logprobs=wire, **fields)])
        self.to_abort += news.to_abort
        self.news = news

    def take(self) -> list[CompletionOutput] | None:
        output = self.request.take_output()
        return None if output is None else output.outputs

    def text(self) -> str | None:
        outputs = self.take()
        return None if outputs is None else outputs[0].text


def test_cumulative():
    bench = Bench()
    bench.feed(LO)
    assert bench.text() == "lo"
    bench.feed(WOR)
    bench.feed(LD, finish_reason=LENGTH)
    (output,) = bench.take() or []
    assert (output.text, output.token_ids, output.finish_reason) == ("lo world", [LO, WOR, LD], "length")
    assert (output.logprobs, output.cumulative_logprob, output.stop_reason) == (None, None, None)
    assert bench.take() is None  # said already


def test_a_slow_reader_gets_several_steps_in_one_delta():
    bench = Bench(output_kind="delta")
    assert bench.take() is None
    bench.feed(LO)
    assert bench.text() == "lo"
    bench.feed(WOR)
    bench.feed(LD)
    (output,) = bench.take() or []
    assert (output.text, output.token_ids, output.finish_reason) == (" world", [WOR, LD], None)
    assert bench.take() is None
    bench.feed(finish_reason=FinishReason.LENGTH)
    (output,) = bench.take() or []
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
    assert bench.take() is None


def test_final_only():
    bench = Bench(output_kind="final_only")
    bench.feed(LO)
    assert bench.take() is None
    bench.feed(WOR, finish_reason=LENGTH)
    assert bench.text() == "lo wor"


def test_an_end_token_counts_but_is_not_seen():
    bench = Bench()
    bench.feed(LO)
    bench.feed(END, finish_reason=STOP)
    (output,) = bench.take() or []
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == ("lo", [LO, END], "stop", None)
    shown = Bench(skip_special_tokens=False)
    shown.feed(LO, END, finish_reason=STOP)
    assert shown.text() == "lo<end>"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token(include, text):
    bench = Bench(stop_token_ids=[B], include_stop_str_in_output=include)
    bench.feed(A)
    bench.feed(B, finish_reason=STOP, stop_reason=B)
    (output,) = bench.take() or []
    assert (output.text, output.token_ids, output.stop_reason) == (text, [A, B], B)
    assert bench.to_abort == []


@pytest.mark.parametrize(("include", "text", "num_kept"), [(False, "Hel", 1), (True, "Hello wor", 3)])
def test_a_stop_string_ends_the_request(include, text, num_kept):
    bench = Bench(stop=["lo wor"], include_stop_str_in_output=include, logprobs=0, max_tokens=10)
    for token_id, logprob in ((HEL, -1.0), (LO, -2.0), (WOR, -4.0)):
        bench.feed(token_id, logprobs=[logprob])
    (output,) = bench.take() or []
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", "lo wor")
    assert output.token_ids == [HEL, LO, WOR][:num_kept]
    assert output.logprobs is not None
    assert [position[t].logprob for position, t in zip(output.logprobs, output.token_ids, strict=True)] == (
        [-1.0, -2.0, -4.0][:num_kept]
    )
    assert output.cumulative_logprob == sum([-1.0, -2.0, -4.0][:num_kept])
    assert bench.to_abort == ["r#0"]
    bench.feed(LD)  # the engine was already at the next token
    assert bench.take() is None
    assert bench.to_abort == ["r#0"]


def test_a_stop_string_on_the_last_token_beats_length():
    bench = Bench(stop=["wor"])
    bench.feed(LO)
    bench.feed(WOR, finish_reason=LENGTH)
    (output,) = bench.take() or []
    assert (output.text, output.finish_reason, output.stop_reason) == ("lo ", "stop", "wor")
    assert bench.to_abort == []  # the engine knows that it is over


def test_tokens_are_not_shown_before_their_text():
    bench = Bench(stop=["lo wor"], output_kind="delta", logprobs=0)
    bench.feed(A, logprobs=[-1.0])
    assert bench.text() == "a"
    bench.feed(LO, logprobs=[-1.0])
    assert bench.take() is None
    bench.feed(A, logprobs=[-1.0])
    (output,) = bench.take() or []
    assert (output.text, output.token_ids, len(output.logprobs or [])) == ("loa", [LO, A], 2)
    bench.feed(LO, logprobs=[-1.0])
    bench.feed(WOR, logprobs=[-1.0])
    (output,) = bench.take() or []
    assert (output.text, output.token_ids, output.logprobs, output.finish_reason) == ("", [], [], "stop")


def test_without_text():
    bench = Bench(detokenize=False, logprobs=1)
    bench.feed(LO, logprobs=[-0.5])
    bench.feed(END, logprobs=[-0.25], finish_reason=STOP)
    (output,) = bench.take() or []
    assert (output.text, output.token_ids, output.cumulative_logprob) == ("", [LO, END], -0.75)
    assert output.logprobs == [{LO: Logprob(-0.5, 1, None)}, {END: Logprob(-0.25, 1, None)}]


def test_logprobs_have_the_token_first_and_each_token_once():
    wire = TokenLogprobs([B, A, B, C], [-1.5, -0.5, -1.5, -2.5], 2)
    position = as_logprob_dict(wire, small_tokenizer().token_text)
    assert list(position.items()) == [
        (B, Logprob(-1.5, 2, "b")),
        (A, Logprob(-0.5, 1, "a")),
        (C, Logprob(-2.5, 3, "c")),
    ]


def test_prompt_logprobs_begin_with_none():
    bench = Bench(prompt_logprobs=1, max_tokens=0)
    bench.feed(prompt_logprobs=[TokenLogprobs([A, B], [-2.0, -1.0], 2)], finish_reason=LENGTH, num_cached_tokens=0)
    output = bench.request.take_output()
    assert output is not None and output.finished
    assert output.prompt_logprobs == [None, {A: Logprob(-2.0, 2, "a"), B: Logprob(-1.0, 1, "b")}]
    assert (output.prompt, output.prompt_token_ids, output.num_cached_tokens) == ("Hel", [HEL], 0)


def test_n_samples_make_one_output():
    bench = Bench(n=2)
    bench.feed(A, id="r#1", num_cached_tokens=0)
    assert [output.text for output in bench.take() or []] == ["", "a"]
    bench.feed(B, id="r#0", finish_reason=LENGTH, num_cached_tokens=0)
    output = bench.request.take_output()
    assert output is not None and not output.finished and output.seed == 1
    assert [(o.index, o.text, o.finish_reason) for o in output.outputs] == [(0, "b", "length"), (1, "a", None)]
    bench.feed(C, id="r#1", finish_reason=LENGTH)
    output = bench.request.take_output()
    assert output is not None and output.finished
    assert [o.text for o in output.outputs] == ["b", "ac"]


def test_deltas_of_n_samples_name_those_that_have_news():
    bench = Bench(n=2, output_kind="delta")
    bench.feed(A, id="r#1")
    assert [(o.index, o.text) for o in bench.take() or []] == [(1, "a")]
    bench.feed(B, id="r#0")
    assert [(o.index, o.text) for o in bench.take() or []] == [(0, "b")]


def test_abort_ends_what_still_lives():
    bench = Bench(n=2)
    bench.feed(A, id="r#0", finish_reason=LENGTH)
    news = bench.outputs.abort(bench.request)
    assert news.to_abort == ["r#1"]
    assert [sample.source.request_id for sample in news.finished] == ["r#1"]
    output = bench.request.take_output()
    assert output is not None and output.finished
    assert [o.finish_reason for o in output.outputs] == ["length", "abort"]
    assert bench.outputs.num_unfinished == 0
    assert bench.outputs.abort(bench.request).to_abort == []


def test_abort_lets_go_of_text_held_back_for_a_stop_string():
    bench = Bench(stop=["lo world!"], output_kind="delta")
    bench.feed(LO, WOR)
    assert bench.take() is None  # it may yet become the stop string
    bench.outputs.abort(bench.request)
    (output,) = bench.take() or []
    assert (output.text, output.token_ids, output.finish_reason) == ("lo wor", [LO, WOR], "abort")


def test_an_error_from_the_engine():
    bench = Bench()
    bench.feed(A)
    bench.feed(finish_reason=FinishReason.ERROR, error="no token is allowed")
    output = bench.request.take_output()
    assert output is not None and output.finished
    assert (output.error, output.outputs[0].finish_reason, output.outputs[0].text) == (
        "no token is allowed",
        "error",
        "a",
    )


def test_a_detokenizer_that_fails_ends_its_request_alone(caplog, monkeypatch):
    bench = Bench(n=2)
    monkeypatch.setattr(bench.request.samples[0]._detokenizer, "append", lambda token_ids: 1 / 0)
    bench.feed(A, id="r#0")
    bench.feed(A, id="r#1", finish_reason=LENGTH)
    output = bench.request.take_output()
    assert output is not None and output.finished
    assert [o.finish_reason for o in output.outputs] == ["error", "length"]
    assert output.error == "its text could not be made (ZeroDivisionError)"
    assert bench.to_abort == ["r#0"]
    assert "request r failed" in caplog.text


def test_times_and_figures():
    bench = Bench()
    bench.feed(A, first_scheduled_time=bench.request.metrics.arrival_time)
    assert (bench.news.num_prompt_tokens, bench.news.num_output_tokens) == (1, 1)
    assert len(bench.news.times_to_first_token) == 1 and bench.news.inter_token_latencies == []
    bench.feed(B, C, finish_reason=LENGTH, num_preemptions=2)
    assert (bench.news.num_prompt_tokens, bench.news.num_output_tokens) == (0, 2)
    assert bench.news.times_to_first_token == [] and len(bench.news.inter_token_latencies) == 1
    assert [sample.num_preemptions for sample in bench.news.finished] == [2]
    output = bench.request.take_output()
    assert output is not None and output.metrics is not None
    times = output.metrics
    assert times.first_scheduled_time == times.arrival_time
    assert times.first_token_time is not None and times.finished_time is not None
    assert times.arrival_time <= times.first_token_time <= times.finished_time

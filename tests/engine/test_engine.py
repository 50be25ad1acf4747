"""The engine around a runner without a model: answers depend on the request alone, whatever the schedule."""

from __future__ import annotations

import pytest

from octavo.engine.engine import Engine
from octavo.errors import InvalidRequestError, OctavoError
from octavo.request import FinishReason
from support.fake_runner import Answer, FakeRunner, FakeStore, expected_answer, make_engine, make_request, run_to_end


def fake(engine: Engine) -> FakeRunner:
    assert isinstance(engine.runner, FakeRunner)
    return engine.runner


def test_one_request_from_prompt_to_end():
    engine = make_engine()
    source = make_request("a", [1, 2, 3, 4, 5], max_tokens=9, logprobs=0)
    engine.add_request(source)
    assert run_to_end(engine) == {"a": expected_answer(source, 256)}
    assert engine.stats().num_steps == 9  # the prompt's step samples the first token
    assert not engine.has_unfinished and engine.step() == []


@pytest.mark.parametrize("budget", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("num_blocks", [12, 64])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_answers_do_not_depend_on_the_schedule(budget, num_blocks, enable_prefix_caching):
    engine = make_engine(
        num_blocks=num_blocks, max_num_batched_tokens=budget, enable_prefix_caching=enable_prefix_caching
    )
    shared = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    sources = [
        make_request(f"r{i}", shared + [i] * i, max_tokens=12, seed=i, logprobs=0, prompt_logprobs=0 if i % 2 else None)
        for i in range(6)
    ]
    for source in sources:
        engine.add_request(source)
    assert run_to_end(engine) == {source.request_id: expected_answer(source, 49) for source in sources}


@pytest.mark.parametrize("budget", [8, 100])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_answers_survive_preemption(budget, policy, enable_prefix_caching):
    engine = make_engine(
        num_blocks=12,
        max_num_batched_tokens=budget,
        policy=policy,
        enable_prefix_caching=enable_prefix_caching,
    )
    sources = [
        make_request(
            f"r{i}", [i, i], max_tokens=30, seed=i, logprobs=0, prompt_logprobs=0, priority=-i, user="ab"[i % 2]
        )
        for i in range(4)
    ]
    for source in sources:
        engine.add_request(source)
    assert run_to_end(engine) == {source.request_id: expected_answer(source, 49) for source in sources}
    assert engine.stats().num_preemptions > 0


def test_a_prefix_hit_changes_only_num_cached_tokens():
    engine = make_engine()
    prompt = list(range(1, 13))
    first, second = (make_request(name, prompt, max_tokens=5) for name in ("first", "second"))
    engine.add_request(first)
    cold = run_to_end(engine)["first"]
    engine.add_request(second)
    delta = engine.step()[0]
    assert delta.num_cached_tokens == 11  # of 12: the last token's logits are needed
    warm = Answer()
    warm.take(delta)
    while engine.has_unfinished:
        warm.take(engine.step()[0])
    assert warm == cold
    assert (engine.stats().prefix_cache_queries, engine.stats().prefix_cache_hits) == (24, 11)


def test_what_was_on_disk_is_told_apart():
    store, prompt = FakeStore(), list(range(1, 13))
    engine = make_engine(store=store)
    engine.add_request(make_request("first", prompt, max_tokens=5))
    run_to_end(engine)
    engine.close()
    engine = make_engine(store=store)
    counts = []
    for name in ("from disk", "from the pool"):
        engine.add_request(make_request(name, prompt, max_tokens=1))
        (delta,) = engine.step()
        counts.append((delta.num_cached_tokens, delta.num_stored_tokens))
    assert counts == [(8, 8), (11, 0)]


def test_a_reset_of_the_prefix_cache_changes_only_num_cached_tokens():
    engine = make_engine()
    prompt = list(range(1, 13))

    def ask(name: str) -> tuple[Answer, int]:
        engine.add_request(make_request(name, prompt, max_tokens=5))
        (first,) = engine.step()
        answer = run_to_end(engine)[name]
        answer.token_ids = first.token_ids + answer.token_ids
        return answer, first.num_cached_tokens

    (cold, _), warm = ask("a"), ask("b")
    assert warm == (cold, 11)
    engine.reset_prefix_cache()
    assert ask("c") == (cold, 0)
    assert ask("d") == (cold, 11)
    engine.check_integrity()


@pytest.mark.parametrize("num_steps_before", range(8))
def test_a_reset_while_requests_run_changes_no_answer(num_steps_before):
    engine = make_engine(num_blocks=12, max_num_batched_tokens=9)
    shared = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    sources = [make_request(f"r{i}", [*shared, i], max_tokens=12, seed=i) for i in range(4)]
    answers = {source.request_id: Answer() for source in sources}
    for source in sources:
        engine.add_request(source)
    for number in range(200):
        if number == num_steps_before:
            engine.reset_prefix_cache()
            engine.check_integrity()
        for delta in engine.step():
            answers[delta.request_id].take(delta)
    assert answers == {source.request_id: expected_answer(source, 49) for source in sources}
    engine.check_integrity()


def test_prompt_logprobs_on_a_warm_prefix_equal_the_cold_ones():
    engine = make_engine(max_num_batched_tokens=5)
    prompt = list(range(1, 13))
    engine.add_request(make_request("cold", prompt, max_tokens=2, prompt_logprobs=0))
    cold = run_to_end(engine)["cold"]
    engine.add_request(make_request("warm", prompt, max_tokens=2, prompt_logprobs=0))
    assert run_to_end(engine)["warm"] == cold
    assert cold.prompt_logprobs is not None and len(cold.prompt_logprobs) == 11


def test_scoring_gives_prompt_logprobs_and_no_token():
    engine = make_engine(max_num_batched_tokens=5)
    source = make_request("a", list(range(12)), max_tokens=0, prompt_logprobs=0)
    engine.add_request(source)
    answer = run_to_end(engine)["a"]
    assert answer == expected_answer(source, 256)
    assert (answer.token_ids, answer.finish_reason) == ([], FinishReason.LENGTH)


def test_a_prompt_larger_than_the_pool_is_refused_and_the_next_request_answers():
    engine = make_engine(num_blocks=50, block_size=16, max_model_len=2048, max_num_batched_tokens=2048)
    with pytest.raises(InvalidRequestError, match=r"prompt has 1002 tokens.* holds 800 \(50 blocks of 16\)"):
        engine.add_request(make_request("long", [1] * 1002))
    engine.add_request(make_request("short", [1, 2], max_tokens=3))
    assert len(run_to_end(engine)["short"].token_ids) == 3


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(63, 1), (60, 4), (64, 0)])
def test_prompts_right_at_max_model_len_pass(num_prompt_tokens, max_tokens):
    engine = make_engine(max_model_len=64)
    engine.add_request(make_request("a", [1] * num_prompt_tokens, max_tokens=max_tokens, ignore_eos=True))
    answer = run_to_end(engine)["a"]
    assert (len(answer.token_ids), answer.finish_reason) == (max_tokens, FinishReason.LENGTH)


@pytest.mark.parametrize("num_prompt_tokens", [64, 65])
def test_prompts_beyond_max_model_len_are_refused(num_prompt_tokens):
    engine = make_engine(max_model_len=64)
    with pytest.raises(OctavoError, match=f"prompt has {num_prompt_tokens} tokens.*max_model_len is 64") as caught:
        engine.add_request(make_request("a", [1] * num_prompt_tokens, max_tokens=1))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert not engine.has_unfinished


@pytest.mark.parametrize("max_tokens", [5, None])
def test_max_model_len_ends_what_max_tokens_does_not(max_tokens):
    engine = make_engine(max_model_len=64)
    engine.add_request(make_request("a", [1] * 60, max_tokens=max_tokens, ignore_eos=True))
    answer = run_to_end(engine)["a"]
    assert (len(answer.token_ids), answer.finish_reason) == (4, FinishReason.LENGTH)


def test_more_samples_than_seats_all_finish():
    engine = make_engine(max_num_seqs=4)
    sources = [
        make_request(f"{request}-{i}", [request, 7], max_tokens=8, ignore_eos=True, seed=request, sample_index=i)
        for request in range(3)
        for i in range(16)
    ]
    for source in sources:
        engine.add_request(source)
    assert run_to_end(engine) == {source.request_id: expected_answer(source, 256) for source in sources}
    assert max(len(plan.scheduled) for plan in fake(engine).plans) == 4


def test_aborting_everybody_empties_all_gauges_without_another_request():
    engine = make_engine(max_num_seqs=8)
    for i in range(20):
        engine.add_request(make_request(f"r{i}", [i, 2, 3, 4, 5], max_tokens=50))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (8, 12) and stats.kv_cache_usage > 0
    deltas = engine.abort([f"r{i}" for i in range(20)])
    assert [delta.finish_reason for delta in deltas] == [FinishReason.ABORT] * 20
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    engine.check_integrity()
    assert engine.step() == []


def test_a_row_that_fails_takes_nobody_with_it():
    engine = make_engine()
    sources = [make_request(name, [1, 2, 3, 4, 5], max_tokens=6, seed=i) for i, name in enumerate("abc")]
    for source in sources:
        engine.add_request(source)
    fake(engine).failing.add("b")
    answers = run_to_end(engine)
    assert answers["b"] == Answer(finish_reason=FinishReason.ERROR)
    assert answers["a"] == expected_answer(sources[0], 256) and answers["c"] == expected_answer(sources[2], 256)


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(caplog):
    engine = make_engine(max_num_seqs=2)
    sources = [make_request(name, [i, 2, 3, 4, 5], max_tokens=6) for i, name in enumerate("abc")]
    for source in sources:
        engine.add_request(source)
    fake(engine).explodes = True
    deltas = engine.step()
    assert [(delta.request_id, delta.finish_reason) for delta in deltas] == [
        ("a", FinishReason.ERROR),
        ("b", FinishReason.ERROR),
    ]
    assert deltas[0].error == "the step that computed this request failed: RuntimeError: boom"
    assert "a step of 2 requests failed" in caplog.text
    engine.check_integrity()
    assert run_to_end(engine) == {"c": expected_answer(sources[2], 256)}  # and read nothing of the failed step

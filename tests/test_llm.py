"""LLM around the fake engine: batches, order, interruption, closing."""

from __future__ import annotations

import gc
import json
import sys
import threading
import types
import weakref
from typing import Any

import pytest

from octavo.errors import ConfigError, InvalidRequestError, OctavoError, RequestFailedError
from octavo.llm import LLM
from octavo.pooling import PoolingParams
from octavo.request import SamplingParams
from octavo.text.chat_template import ChatTemplate
from support.fake_runner import FakeRunner, expected_answer, make_embedding, make_request
from support.front import END, build_fake_engine, small_front_end, small_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}!{% endif %}"


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    monkeypatch.setattr("octavo.llm.load_front_end", lambda config: small_front_end({"top_k": 7}))
    monkeypatch.setitem(sys.modules, "octavo.engine.build", types.SimpleNamespace(build_engine=build_fake_engine))


def make_llm(seed: int = 0, **options: Any) -> LLM:
    return LLM(json.dumps(options), seed=seed)


def runner_of(llm: LLM) -> FakeRunner:
    assert llm._engine is not None and isinstance(llm._engine.runner, FakeRunner)
    return llm._engine.runner


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ("Hello", [[7, 8]]),
        ([7, 8], [[7, 8]]),
        ({"prompt": "Hello"}, [[7, 8]]),
        ({"prompt_token_ids": [7, 8]}, [[7, 8]]),
        (["Hello", "a"], [[7, 8], [1]]),
        ([[7, 8], [1]], [[7, 8], [1]]),
        (["Hello", {"prompt_token_ids": [1]}, [2, 3]], [[7, 8], [1], [2, 3]]),
        ([], []),
    ],
)
def test_every_form_of_prompts(prompts, ids):
    outputs = make_llm().generate(prompts, SamplingParams(max_tokens=3), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == ids
    assert all(output.finished and output.outputs[0].token_ids for output in outputs)


def test_order_and_values():
    prompts = [[i, 2] for i in range(1, 8)]
    params = [SamplingParams(max_tokens=12 - i, seed=i) for i in range(1, 8)]
    outputs = make_llm(max_num_seqs=3).generate(prompts, params)
    for i, output in enumerate(outputs, start=1):
        source = make_request("x", [i, 2], max_tokens=12 - i, seed=i, eos_token_ids=[END])
        expected = expected_answer(source, 256)
        assert output.outputs[0].token_ids == expected.token_ids
        assert output.outputs[0].text == small_tokenizer().decode(expected.token_ids)
        assert output.outputs[0].finish_reason == expected.finish_reason
        assert output.request_id == str(i - 1)


def test_any_output_kind_gives_the_whole_output():
    llm = make_llm()
    outputs = [
        llm.generate([1], SamplingParams(max_tokens=9, seed=1, output_kind=kind))[0].outputs
        for kind in ("cumulative", "delta", "final_only")
    ]
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_script_repeats_itself():
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    def script(seed: int) -> list[Any]:
        llm = make_llm(seed)
        return [
            (output.seed, output.outputs[0].token_ids) for _ in range(2) for output in llm.generate([[1], [1]], params)
        ]

    first = script(0)
    assert first == script(0) != script(1)
    assert len({seed for seed, _ in first}) == 4


def test_default_params_are_the_models():
    llm = make_llm()
    assert llm.get_default_sampling_params() == SamplingParams(top_k=7)
    assert llm.get_default_sampling_params() is not llm.get_default_sampling_params()
    assert len(llm.generate([1])[0].outputs[0].token_ids) <= 16
    assert llm.get_tokenizer().encode("Hello") == [7, 8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling_params": [SamplingParams()]}, "sampling_params has 1 entries for 2 prompts"),
        ({"priority": [1, 2, 3]}, "priority has 3 entries for 2 prompts"),
    ],
)
def test_lengths_must_match(arguments, message):
    with pytest.raises(InvalidRequestError, match=message):
        make_llm().generate(["a", "b"], **arguments)


def test_a_wrong_prompt_stops_the_batch_before_it_runs():
    llm = make_llm()
    with pytest.raises(InvalidRequestError, match="token id 13"):
        llm.generate([[1], [13]])
    with pytest.raises(InvalidRequestError, match="prompts is a int"):
        llm.generate(3)  # type: ignore[arg-type]
    assert runner_of(llm).plans == []
    assert llm.generate([1])[0].finished


def test_a_failing_request_says_why(caplog):
    llm = make_llm()
    runner_of(llm).failing.add("1#1")
    outputs = llm.generate([[1], [1]], SamplingParams(max_tokens=5, ignore_eos=True))
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"]
    assert [output.error for output in outputs] == [None, "no token is allowed"]
    assert "request 1 failed: no token is allowed" in caplog.text


def test_an_interrupt_leaves_the_llm_usable(monkeypatch):
    llm = make_llm()
    params = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)
    execute = runner_of(llm).execute

    def interrupted(plan: Any) -> Any:
        if len(runner_of(llm).plans) == 5:
            raise KeyboardInterrupt
        return execute(plan)

    monkeypatch.setattr(runner_of(llm), "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], params)
    monkeypatch.undo()
    assert llm._engine is not None and not llm._engine.has_unfinished
    llm._engine.check_integrity()
    monkeypatch.setitem(sys.modules, "octavo.engine.build", types.SimpleNamespace(build_engine=build_fake_engine))
    monkeypatch.setattr("octavo.llm.load_front_end", lambda config: small_front_end())
    assert llm.generate([1], params)[0].outputs == make_llm().generate([1], params)[0].outputs


def test_a_reset_of_the_prefix_cache():
    llm = make_llm()

    def ask() -> tuple[list[int], int | None]:
        (output,) = llm.generate([1, 2, 3, 4, 5], SamplingParams(max_tokens=3, seed=1))
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    (cold, _), warm = ask(), ask()
    assert warm == (cold, 4)
    assert llm.reset_prefix_cache() is True
    assert ask() == (cold, 0)
    llm.close()
    with pytest.raises(OctavoError, match="this LLM is closed"):
        llm.reset_prefix_cache()


def test_options():
    with pytest.raises(ConfigError, match="LLM has no option 'block_sizes'; the nearest is 'block_size'"):
        LLM("x", block_sizes=16)
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2; only 1 is supported"):
        LLM("x", tensor_parallel_size=2)
    llm = LLM("{}", block_size=32, dtype="float32", max_model_len=9, enforce_eager=True)
    config = llm.config
    assert (config.block_size, config.dtype, config.max_model_len, config.enforce_eager) == (32, "float32", 9, True)


def test_close_frees_the_engine():
    threads = threading.active_count()
    with make_llm() as llm:
        llm.generate([1])
        engine = weakref.ref(llm._engine)
        assert engine() is not None
    assert engine() is None
    llm.close()
    with pytest.raises(OctavoError, match="this LLM is closed"):
        llm.generate([1])
    assert threading.active_count() == threads


def test_dropping_the_llm_frees_the_engine():
    llm = make_llm()
    llm.generate([1])
    engine = weakref.ref(llm._engine)
    del llm
    gc.collect()
    assert engine() is None


def test_an_init_that_failed_can_be_collected():
    with pytest.raises(OctavoError, match="bad"):
        make_llm(error="bad")
    gc.collect()


def test_chat(monkeypatch):
    front_end = small_front_end()
    llm = make_llm()
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat([{"role": "user", "content": "a"}])
    outputs = llm.chat([{"role": "user", "content": "a"}], chat_template=TEMPLATE)
    assert (outputs[0].prompt, outputs[0].prompt_token_ids) == ("a !", [1, 6, 11])

    object.__setattr__(front_end, "chat_template", ChatTemplate(TEMPLATE))
    monkeypatch.setattr("octavo.llm.load_front_end", lambda config: front_end)
    llm = make_llm(max_model_len=20)
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    one, two = llm.chat([conversation, conversation[:1]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert (one.prompt, two.prompt) == ("a b !", "a !")
    (prefilled,) = llm.chat(conversation, add_generation_prompt=False, continue_final_message=True)
    assert prefilled.prompt == "a b"
    with pytest.raises(InvalidRequestError, match="only one may be"):
        llm.chat(conversation, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="must not contain 'tools'"):
        llm.chat(conversation, chat_template_kwargs={"tools": []})
    with pytest.raises(InvalidRequestError, match="messages is empty"):
        llm.chat([])


def test_a_chat_may_use_the_rest_of_the_context(monkeypatch):
    front_end = small_front_end()
    object.__setattr__(front_end, "eos_token_ids", [])
    monkeypatch.setattr("octavo.llm.load_front_end", lambda config: front_end)
    (output,) = make_llm(max_model_len=40).chat([{"role": "user", "content": "a"}], chat_template=TEMPLATE)
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 40
    assert output.outputs[0].finish_reason == "length"


def test_the_progress_bar(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    monkeypatch.setenv("COLUMNS", "100")
    threads = threading.active_count()
    make_llm().generate([[1], [2]], SamplingParams(max_tokens=3))
    out, err = capsys.readouterr()
    assert out == "" and "2/2" in err and "tok/s" in err
    assert threading.active_count() == threads
    make_llm().generate([[1], [2]], SamplingParams(max_tokens=3), use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_no_bar_where_nobody_watches(capsys):
    make_llm().generate([[1], [2]], SamplingParams(max_tokens=3))
    assert capsys.readouterr() == ("", "")


def test_embeddings_stand_in_the_order_of_their_prompts():
    prompts: list[Any] = ["Hello", [1, 2, 3], {"prompt_token_ids": [4]}]
    mean = PoolingParams(pooling_type="mean", normalize=False)
    last = PoolingParams(normalize=False)
    llm = make_llm()
    outputs = llm.embed(prompts, pooling_params=[mean, last, mean], use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[7, 8], [1, 2, 3], [4]]
    for output, pooling_type in zip(outputs, ("mean", "last", "mean"), strict=True):
        pooling = PoolingParams(pooling_type=pooling_type, normalize=False)  # type: ignore[arg-type]
        expected = expected_answer(make_embedding("x", output.prompt_token_ids, pooling), 256)
        assert output.outputs.data.tobytes() == expected.embedding
    assert llm.encode([[1, 2, 3]], last, use_tqdm=False)[0].outputs == outputs[1].outputs


def test_embeddings_take_no_seed_from_others():
    first, second = make_llm(seed=3), make_llm(seed=3)
    second.embed("Hello", use_tqdm=False)
    assert first.generate("a", use_tqdm=False)[0].seed == second.generate("a", use_tqdm=False)[0].seed


def test_wrong_embeddings():
    llm = make_llm(max_model_len=4)
    with pytest.raises(InvalidRequestError, match="prompt has 5 tokens; the context is 4 tokens long"):
        llm.embed([1, 2, 3, 4, 5])
    with pytest.raises(InvalidRequestError, match="pooling_task is 'score'; it must be 'embed'"):
        llm.encode("a", pooling_task="score")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="pooling_params has 2 entries for 1 prompts"):
        llm.embed("a", pooling_params=[PoolingParams()] * 2)
    runner_of(llm).failing = {"1#0"}
    with pytest.raises(RequestFailedError, match="no token is allowed"):
        llm.embed("a", use_tqdm=False)
    assert len(llm.embed([1, 2, 3, 4], use_tqdm=False)[0].outputs.embedding) == 3

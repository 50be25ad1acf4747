"""LLM and AsyncLLM with a real engine under them: a small random Llama, and Llamas that say a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, CompletionOutput, EngineConfig, SamplingParams
from support.checkpoints import chain_llama, tiny_llama, tiny_tokenizer

SMALL: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 64, "max_model_len": 256}
PROMPTS = ["The quick brown fox", "1 2 3", "日本語", [5, 6, 7, 8] * 12]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # No more rows than tokens: transformers, unlike octavo, would choose one without a token.
    return tiny_llama(tmp_path_factory.mktemp("tiny"), vocab=len(tiny_tokenizer()))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), **SMALL) as llm:
        yield llm


def one(llm: LLM, prompt: Any, **params: Any) -> CompletionOutput:
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]


def chain(path: Path, *pieces: str | int, **options: Any) -> LLM:
    return LLM(str(chain_llama(path, pieces, tokenizer=tiny_tokenizer(), **options)), **SMALL)


def test_greedy_is_transformers_greedy(tiny, llm):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=0)
    for output in llm.generate(PROMPTS, params):
        prompt, answer = output.prompt_token_ids, list(output.outputs[0].token_ids)
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        assert answer == logprobs[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert output.outputs[0].logprobs is not None and output.prompt_logprobs is not None
        for row, token_id, position in zip(
            logprobs[len(prompt) - 1 :], answer, output.outputs[0].logprobs, strict=False
        ):
            best = row.topk(3)
            assert list(position) == best.indices.tolist() and next(iter(position)) == token_id
            assert [entry.rank for entry in position.values()] == [1, 2, 3]
            got = [entry.logprob for entry in position.values()]
            assert got == pytest.approx(best.values.tolist(), abs=1e-4)
        assert output.prompt_logprobs[0] is None
        for row, token_id, position in zip(logprobs, prompt[1:], output.prompt_logprobs[1:], strict=False):
            assert position is not None
            assert position[token_id].logprob == pytest.approx(row[token_id].item(), abs=1e-4)
            assert position[token_id].rank == int((row > row[token_id]).sum()) + 1


def test_the_text_is_that_of_the_tokens(llm):
    for prompt in PROMPTS:
        output = one(llm, prompt, max_tokens=40, seed=3)
        assert output.text == tiny_tokenizer().decode(output.token_ids, skip_special_tokens=True)


def test_samples_depend_on_seed_and_index_alone(llm):
    params = {"max_tokens": 12, "seed": 5, "temperature": 0.8}
    four = llm.generate("Once upon", SamplingParams(n=4, **params))[0].outputs
    two = llm.generate(["x", "Once upon"], SamplingParams(n=2, **params))[1].outputs
    assert four[:2] == two
    assert len({tuple(output.token_ids) for output in four}) > 1
    # A seed that was drawn is reported, and gives the answer again.
    drawn = llm.generate("Once upon", SamplingParams(max_tokens=12))[0]
    assert one(llm, "Once upon", max_tokens=12, seed=drawn.seed) == drawn.outputs[0]


def test_a_prompt_alone_can_be_scored(llm):
    (output,) = llm.generate("The quick", SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_the_second_time_the_prompt_is_cached(llm):
    prompt = [9, 10, 11, 12] * 16
    first, second = (
        llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0))[0] for _ in "ab"
    )
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)  # all of it is computed for the logprobs
    assert (first.outputs, first.prompt_logprobs) == (second.outputs, second.prompt_logprobs)
    assert llm.generate(prompt, SamplingParams(max_tokens=1))[0].num_cached_tokens == 63


def test_stop_strings(tmp_path):
    with chain(tmp_path, "Q", "H", "e", "l", "o", " ", "w", "z") as llm:
        assert one(llm, "Q").text == "Helo wz"
        stopped = one(llm, "Q", stop=["lo w"])
        assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("He", "stop", "lo w")
        assert tiny_tokenizer().decode(stopped.token_ids) == "He"
        assert one(llm, "Q", stop=["lo w"], include_stop_str_in_output=True).text == "Helo w"
        assert one(llm, "Q", stop=["e"], min_tokens=3).text == "Helo wz"
        assert one(llm, "Q", stop=["z"], max_tokens=7).finish_reason == "stop"


def test_stop_tokens(tmp_path):
    with chain(tmp_path, "Q", "r", "g", "b") as llm:
        (g,) = tiny_tokenizer().encode("g")
        for include, text in ((False, "r"), (True, "rg")):
            output = one(llm, "Q", stop_token_ids=[g], include_stop_str_in_output=include)
            assert (output.text, output.stop_reason, output.token_ids[-1]) == (text, g, g)
        end = one(llm, "Q")
        assert (end.text, end.token_ids[-1], end.finish_reason, end.stop_reason) == ("rgb", 2, "stop", None)
        assert one(llm, "Q", skip_special_tokens=False).text == "rgb<|im_end|>"


@pytest.mark.parametrize("end", [0, 2])
@pytest.mark.parametrize("named", ["generation_config", "config_and_tokenizer"])
def test_load_5_any_of_the_end_tokens_ends(tmp_path, end, named):
    """A chat's prompt ends in a line feed, where the script begins."""
    path = chain_llama(tmp_path, ["\n", "a"], tokenizer=tiny_tokenizer(), end=end)
    if named == "generation_config":
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    else:  # the tokenizer's own is 2
        (path / "generation_config.json").unlink()
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    with LLM(str(path), **SMALL) as llm:
        (chat,) = llm.chat([{"role": "user", "content": "Q"}], use_tqdm=False)
        for output in (one(llm, "\n"), chat.outputs[0]):
            assert (output.text, output.finish_reason, output.token_ids[-1]) == ("a", "stop", end)


def test_bad_words_are_banned_with_and_without_a_blank(tmp_path):
    with chain(tmp_path, "Q", "a", "b", alts={"Q": "c"}) as llm:
        assert one(llm, "Q", temperature=0, max_tokens=1).text == "a"
        assert one(llm, "Q", temperature=0, max_tokens=1, bad_words=["a"]).text == "c"


def test_chat_takes_the_template_of_the_model(tmp_path):
    with chain(tmp_path, "\n", "h", "i") as llm:
        (output,) = llm.chat([{"role": "user", "content": "Q"}], use_tqdm=False)
        assert output.prompt == "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
        assert output.outputs[0].text == "hi"


def test_close_gives_the_memory_back(tiny):
    def resident() -> int:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * 4096

    size = 64 * 2**20

    def use() -> int:
        with LLM(str(tiny), kv_cache_memory_bytes=size, max_num_batched_tokens=64) as llm:
            llm.generate([[i] * 400 for i in range(3, 20)], SamplingParams(max_tokens=1), use_tqdm=False)
            return resident()

    use()  # what is loaded once for all stays
    before = resident()
    assert use() - before > 3 * 2**20
    assert resident() - before < 1 * 2**20


async def test_a_process_of_its_own_gives_the_same_bytes(tiny, llm):
    params = SamplingParams(max_tokens=20, seed=8, logprobs=2, output_kind="final_only")
    expected = [output.outputs for output in llm.generate(PROMPTS, params, use_tqdm=False)]

    async def last(server: AsyncLLM, prompt: Any) -> Any:
        async for output in server.generate(prompt, params):
            assert output.finished
            return output.outputs

    server = await AsyncLLM.start(EngineConfig(model=str(tiny), **SMALL))
    try:
        assert await server.is_ready()
        assert await asyncio.gather(*(last(server, prompt) for prompt in PROMPTS)) == expected
        assert server.num_unfinished == 0
    finally:
        await server.close()

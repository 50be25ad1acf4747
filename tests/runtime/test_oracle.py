"""The real model, SmolLM2-135M, against transformers in float32: tokens, logits, and how far bfloat16 strays."""

from __future__ import annotations

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.text.tokenizer import load_tokenizer
from support.engines import all_logits, make_engine, make_request, run_requests
from support.smollm2 import smollm2_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a pirate.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "SELECT name, age FROM users WHERE",
    "Die Hauptstadt von Deutschland ist",
    "今天天气很好，",
    "🙂🙂🙂",
    "Q: What is 7 times 8?\nA:",
    "a",
    "\n\n\n",
    "The quick brown fox jumps over the lazy dog. " * 12,
    '{"name": "Alice", "age": 31, "city": "',
    "In 1969, the first humans landed on the Moon. The mission was called Apollo 11, and its crew were",
]


@pytest.fixture(scope="module")
def oracle(smollm2_hf):
    """token ids -> float32 logits [n, vocab] by transformers in float32, from the bfloat16 folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_hf, dtype=torch.float32)

    def logits(token_ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].numpy()

    return logits


@pytest.fixture(scope="module")
def prompts(smollm2_hf) -> list[list[int]]:
    tokenizer = load_tokenizer(smollm2_hf)
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def float32(smollm2_hf):
    return make_engine(smollm2_hf, dtype="float32", max_model_len=512)


@pytest.fixture(scope="module")
def greedy(float32, prompts) -> list[list[int]]:
    """octavo's own 64 greedy tokens for each prompt, all computed together."""
    requests = [
        make_request(str(i), prompt, temperature=0, max_tokens=64, ignore_eos=True) for i, prompt in enumerate(prompts)
    ]
    return [answer.token_ids for answer in run_requests(float32, requests)]


@pytest.mark.slow
def test_float32_is_transformers_float32(float32, oracle, prompts, greedy):
    for prompt, output in zip(prompts, greedy, strict=True):
        assert len(output) == 64
        tokens = prompt + output
        expected = oracle(tokens)
        actual = all_logits(float32, tokens)
        assert np.abs(actual - expected).max() < 1e-3
        # By induction over the positions, these are the tokens that transformers would have chosen.
        assert expected[len(prompt) - 1 : -1].argmax(axis=1).tolist() == output


def mean_kl(expected: np.ndarray, actual: np.ndarray) -> float:
    """Mean over rows of KL(softmax(expected) || softmax(actual)), in nats."""

    def log_softmax(x):
        x = x.astype(np.float64) - x.max(axis=1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=1, keepdims=True))

    p, q = log_softmax(expected), log_softmax(actual)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


@pytest.mark.slow
def test_bfloat16_stays_close(smollm2_hf, oracle, prompts, greedy):
    engine = make_engine(smollm2_hf, max_model_len=512)
    assert engine.info.dtype == "bfloat16"
    sequences = [prompt + output for prompt, output in zip(prompts, greedy, strict=True)]
    kl = [mean_kl(oracle(tokens)[-65:-1], all_logits(engine, tokens)[-65:-1]) for tokens in sequences]
    assert np.mean(kl) < 5e-4
    print("mean KL of bfloat16:", np.mean(kl))


@pytest.fixture(scope="module")
def unpacked():
    """token ids -> float32 logits [n, vocab] of the GGUF, unpacked by transformers and computed in float32."""
    import torch

    model = smollm2_model()

    def logits(token_ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].numpy()

    return logits


@pytest.mark.slow
def test_gguf_is_transformers_unpacked_gguf(smollm2_gguf, unpacked, prompts, greedy):
    exact = make_engine(smollm2_gguf, dtype="float32", max_model_len=512)
    packed = {
        name: make_engine(smollm2_gguf, activation_dtype=name, max_model_len=512) for name in ("bfloat16", "int8")
    }
    kl: dict[str, list[float]] = {name: [] for name in packed}
    for prompt, output in zip(prompts[:8], greedy[:8], strict=True):
        tokens = prompt + output
        expected = unpacked(tokens)
        assert np.abs(all_logits(exact, tokens) - expected).max() < 1e-3
        for name, engine in packed.items():
            kl[name].append(mean_kl(expected[len(prompt) :], all_logits(engine, tokens)[len(prompt) :]))
    print("mean KL of the GGUF:", {name: np.mean(values) for name, values in kl.items()})
    assert np.mean(kl["bfloat16"]) < 5e-4
    assert np.mean(kl["int8"]) < 1.5e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_load_1_greedy_answers_of_the_gguf_are_those_of_its_reference(smollm2_gguf, unpacked, dtype):
    """They may part only where the reference's two best are a near tie: 0.25 as it comes, 1e-3 in float32."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(str(smollm2_gguf), dtype=dtype, max_model_len=512, num_gpu_blocks_override=64) as llm:
        outputs = llm.generate(PROMPTS[:5], params, use_tqdm=False)
    for output in outputs:
        prompt, answer = output.prompt_token_ids, list(output.outputs[0].token_ids)
        assert len(answer) == 20
        rows = unpacked(prompt + answer)[len(prompt) - 1 : -1]
        parted = [i for i, token_id in enumerate(answer) if token_id != rows[i].argmax()]
        if parted:
            second, best = np.sort(rows[parted[0]])[-2:]
            assert best - second < (1e-3 if dtype == "float32" else 0.25)

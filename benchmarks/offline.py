#!/usr/bin/env python3
"""The same offline work in octavo, vLLM, OpenVINO GenAI or transformers, with that engine's own Python.

    PYTHON offline.py ENGINE MODEL --out FILE.json [--dtype D] [--quantization Q] [--isa I] [--rows 1,8,32,64]
        [--rounds N]

Measures the seconds from the start of this process to the first token; for each number in --rows, how many tokens per
second come out when so many short prompts are handed over at once (128 tokens each, greedy, the end of text ignored);
how many tokens of long prompts are taken in per second (8 of some 1,000 tokens, one token of answer each); and keeps
the beginnings of 16 greedy answers. `octavo bench table` sets the files side by side.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

BEGAN = time.time()
OUTPUT_LEN = 128
ANSWER_LEN = 24
LONG_WORDS = 1000
STORY = "Chapter {}. Tell the whole story of the lighthouse keeper and the storm, slowly and with many details."
WORDS = ("garden", "winter", "paper", "silver", "eleven", "chair", "mirror", "road")
QUESTIONS = (
    "What is the capital of Norway?",
    "Name three kinds of trees.",
    "How many days are in a leap year?",
    "Write one sentence about the wind.",
    "Translate 'thank you' to French.",
    "What is 12 plus 30?",
    "Who painted the Mona Lisa?",
    "Give me a word that rhymes with moon.",
    "Why do boats float?",
    "Explain to a child in one sentence what money is.",
    "What is the opposite of early?",
    "List the four seasons.",
    "What is table salt made of?",
    "Write a Python function that returns the larger of two numbers.",
    "Which planet is closest to the sun?",
    "Finish this: the old door opened and",
)


class Engine(Protocol):
    def complete(self, prompts: Sequence[str], length: int) -> None:
        """Exactly `length` tokens after each prompt, all handed over at once."""

    def answer(self, question: str, length: int) -> str:
        """The model's chat answer, at most `length` tokens."""

    def count(self, text: str) -> int:
        """Tokens."""


class VllmLike:
    """vLLM, and octavo, which has its interface."""

    def __init__(self, module: str, args: argparse.Namespace) -> None:
        api: Any = __import__(module)
        options = {name: value for name in ("quantization", "isa") if (value := getattr(args, name))}
        self._params = api.SamplingParams
        self._llm = api.LLM(
            model=args.model, dtype=args.dtype or "auto", max_model_len=2048, max_num_seqs=max(args.rows), **options
        )
        self._tokenizer = self._llm.get_tokenizer()

    def complete(self, prompts: Sequence[str], length: int) -> None:
        params = self._params(temperature=0, max_tokens=length, ignore_eos=True)
        self._llm.generate(list(prompts), params, use_tqdm=False)

    def answer(self, question: str, length: int) -> str:
        params = self._params(temperature=0, max_tokens=length)
        outputs = self._llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
        return str(outputs[0].outputs[0].text)

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))


class OpenVino:
    """A model exported for OpenVINO; what it computes in is its own choice unless --dtype float32."""

    def __init__(self, args: argparse.Namespace) -> None:
        import openvino_genai as genai

        self._genai = genai
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 2  # GB
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = max(args.rows), 2048
        properties = {"INFERENCE_PRECISION_HINT": "f32"} if args.dtype == "float32" else {}
        self._pipeline = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)

    def _generate(self, prompts: Sequence[str], length: int, *, chat: bool) -> list[str]:
        config = self._genai.GenerationConfig()
        config.do_sample, config.max_new_tokens = False, length
        config.ignore_eos, config.apply_chat_template = not chat, chat
        results = self._pipeline.generate(list(prompts), [config] * len(prompts))
        return [str(result.m_generation_ids[0]) for result in results]

    def complete(self, prompts: Sequence[str], length: int) -> None:
        self._generate(prompts, length, chat=False)

    def answer(self, question: str, length: int) -> str:
        return self._generate([question], length, chat=True)[0]

    def count(self, text: str) -> int:
        return int(self._pipeline.get_tokenizer().encode(text).input_ids.shape[1])


class Transformers:
    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
        self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype or "float32")

    def _generate(self, inputs: Any, **options: Any) -> str:
        with self._torch.inference_mode():
            ids = self._model.generate(**inputs, do_sample=False, **options)
        return str(self._tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    def complete(self, prompts: Sequence[str], length: int) -> None:
        inputs = self._tokenizer(list(prompts), return_tensors="pt", padding=True)
        self._generate(inputs, max_new_tokens=length, min_new_tokens=length)

    def answer(self, question: str, length: int) -> str:
        messages = [{"role": "user", "content": question}]
        inputs = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return self._generate(inputs, max_new_tokens=length)

    def count(self, text: str) -> int:
        return len(self._tokenizer(text)["input_ids"])


ENGINES: dict[str, Callable[[argparse.Namespace], Engine]] = {
    "octavo": lambda args: VllmLike("octavo", args),
    "vllm": lambda args: VllmLike("vllm", args),
    "openvino": OpenVino,
    "transformers": Transformers,
}


def measure(engine: Engine, rows: Sequence[int], rounds: int) -> dict[str, Any]:
    engine.complete(["Hi"], 1)
    figures: dict[str, Any] = {"start_s": time.time() - BEGAN}
    for count in rows:
        prompts = [STORY.format(i) for i in range(count)]
        figures[f"rows{count}_tok_s"] = statistics.median(
            count * OUTPUT_LEN / seconds_of(lambda prompts=prompts: engine.complete(prompts, OUTPUT_LEN))
            for _ in range(rounds)
        )
    words = random.Random(0)
    texts = [" ".join(words.choice(WORDS) for _ in range(LONG_WORDS)) for _ in range(8)]
    num_tokens = sum(engine.count(text) for text in texts)
    figures["prefill_tok_s"] = num_tokens / seconds_of(lambda: engine.complete(texts, 1))
    figures["answers"] = [engine.answer(question, ANSWER_LEN) for question in QUESTIONS]
    return figures


def seconds_of(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", help="a folder or file in the engine's own format")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype")
    parser.add_argument("--quantization")
    parser.add_argument("--isa", help="octavo's instruction set, to compare with engines that are kept from AMX too")
    parser.add_argument("--rows", default=[1, 8, 32, 64], type=lambda text: [int(word) for word in text.split(",")])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    figures = measure(ENGINES[args.engine](args), args.rows, args.rounds)
    args.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps({name: round(value, 2) for name, value in figures.items() if name != "answers"}))


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()

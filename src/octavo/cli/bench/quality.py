"""`octavo bench quality`: how far the next-token distribution of an engine is from float32's, on the same tokens.

The reference is the same checkpoint with `--dtype float32` and nothing quantised. It answers short questions, once
greedily and once by sampling; both engines then say at each position of these answers what they hold of the next token.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.cli.bench.common import engine_of, make_llm, make_parser, parse, runner_of
from octavo.cli.bench.report import show_table, write_json
from octavo.cli.flags import config_from_args
from octavo.config import EngineConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from octavo.llm import LLM
    from octavo.ops.api import Batch
    from octavo.request import RequestOutput, SamplingParams

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
# What a setting may change about the numbers; the reference has none of it.
NUMERICS = ("quantization", "kv_cache_dtype", "activation_dtype")


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens whose successors are judged from `first` on: position p says what it holds of token p + 1."""

    token_ids: list[int]
    first: int

    @property
    def targets(self) -> list[int]:
        return self.token_ids[self.first + 1 :]


@dataclass(frozen=True, slots=True)
class Divergence:
    """Of each position of a set of texts, float64."""

    kl: npt.NDArray[np.float64]  # of the distribution from the reference's, in nats
    same_top: npt.NDArray[np.bool_]  # do both hold the same token likeliest?
    surprise: npt.NDArray[np.float64]  # log-probability that the reference gives the token that came, less one's own

    def figures(self) -> dict[str, Any]:
        return {
            "positions": len(self.kl),
            "mean_kl": float(self.kl.mean()),
            "max_kl": float(self.kl.max()),
            "top1_agreement": float(self.same_top.mean()),
            "perplexity_ratio": math.exp(float(self.surprise.mean())),
        }


def run(argv: list[str]) -> int:
    import numpy as np

    counts = (
        ("--output-len", 48, "most tokens of each greedy answer"),
        ("--sampled-len", 48, "most tokens of each sampled answer"),
    )
    parser = make_parser("quality", "How far an engine's next-token distribution is from float32's.", counts)
    text = (
        "one more setting beside the line's own: its flags without dashes, as in --compare 'quantization=int8'; repeat"
    )
    parser.add_argument("--compare", action="append", default=[], metavar="FLAGS", help=text)
    args, config = parse(parser, argv, {"output_len": 1, "sampled_len": 1})
    settings = {"as given": config}
    for words in args.compare:
        flags = [f"--{word}" for word in shlex.split(words)]
        settings[words] = config_from_args(parser.parse_args([*argv, *flags]), EngineConfig)

    with make_llm(reference_config(config)) as llm:
        texts = write_texts(llm, config.seed, args.output_len, args.sampled_len)
        # [positions, vocab] for each text: the one thing here that is large.
        expected = {name: list(read_logits(llm, group)) for name, group in texts.items()}
    results: dict[str, dict[str, Any]] = {}
    for setting, each in settings.items():
        with make_llm(each) as llm:
            results[setting] = {}
            for name, group in texts.items():
                parts = [
                    diverge(theirs, ours, text.targets)
                    for theirs, ours, text in zip(expected[name], read_logits(llm, group), group, strict=True)
                ]
                whole = Divergence(*(np.concatenate(column) for column in zip(*map(_columns, parts), strict=True)))
                results[setting][name] = whole.figures()
            results[setting]["compute"] = f"{llm.info.arithmetic} on {llm.info.isa}"
    _show(config, results)
    write_json(args, {"settings": results}, config)
    return 0


def reference_config(config: EngineConfig) -> EngineConfig:
    plain: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(EngineConfig) if f.name in NUMERICS}
    return dataclasses.replace(config, dtype="float32", **plain)


def write_texts(llm: LLM, seed: int, output_len: int, sampled_len: int) -> dict[str, list[Text]]:
    """The questions with their answers: by kind of answer, one text for each question."""
    from octavo.request import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=output_len, detokenize=False)
    sampled = [
        SamplingParams(temperature=1.0, seed=seed + i, max_tokens=sampled_len, detokenize=False)
        for i in range(len(QUESTIONS))
    ]
    groups = {"greedy": _answer(llm, greedy), "sampled": _answer(llm, sampled)}
    return {
        name: [Text([*o.prompt_token_ids, *o.outputs[0].token_ids], len(o.prompt_token_ids) - 1) for o in outputs]
        for name, outputs in groups.items()
    }


def _answer(llm: LLM, params: SamplingParams | Sequence[SamplingParams]) -> list[RequestOutput]:
    if llm.config.chat_template or llm.get_tokenizer().chat_template:
        return llm.chat([[{"role": "user", "content": text}] for text in QUESTIONS], params, use_tqdm=False)
    return llm.generate(list(QUESTIONS), params, use_tqdm=False)


def read_logits(llm: LLM, texts: Sequence[Text]) -> Iterator[npt.NDArray[np.float32]]:
    """For each text the logits of its judged positions, float32 [positions, vocab].

    Runs the executor behind the scheduler's back, over whatever its cache held: nothing may be generated afterwards.
    """
    import numpy as np

    from octavo.runtime.program import MAX_LOGITS

    engine = engine_of(llm)
    executor = runner_of(engine).executor
    vocab_size = llm.get_tokenizer().vocab_size  # logits from there on are padding
    for text in texts:
        rows = []
        for batch in chunks(text, engine.info.block_size, engine.scheduler.max_num_batched_tokens):
            executor.run(batch)
            for first in range(0, len(batch.logit_rows), MAX_LOGITS):
                count = min(MAX_LOGITS, len(batch.logit_rows) - first)
                rows.append(np.array(executor.logits(first, count))[:, :vocab_size])
        yield np.concatenate(rows)


def chunks(text: Text, block_size: int, max_tokens: int) -> Iterator[Batch]:
    """The text, without its last token, as steps of one request in the cache's first blocks."""
    import numpy as np

    from octavo.ops.api import Batch

    num_tokens = len(text.token_ids) - 1
    for start in range(0, num_tokens, max_tokens):
        positions = np.arange(start, min(start + max_tokens, num_tokens), dtype=np.int32)
        yield Batch(
            token_ids=np.array(text.token_ids, np.int32)[positions],
            positions=positions,
            slot_mapping=positions,  # block i of the request is block i of the cache
            query_start=np.array([0, len(positions)], np.int32),
            seq_lens=np.array([positions[-1] + 1], np.int32),
            block_tables=np.arange(-(-num_tokens // block_size), dtype=np.int32)[None],
            logit_rows=np.flatnonzero(positions >= text.first).astype(np.int32),
        )


def diverge(reference: npt.NDArray[np.float32], logits: npt.NDArray[np.float32], targets: Sequence[int]) -> Divergence:
    """Float32 [positions, vocab] twice, and the token that came after each position."""
    import numpy as np

    p, q = _log_softmax(reference), _log_softmax(logits)
    rows = np.arange(len(targets))
    return Divergence(
        kl=(np.exp(p) * (p - q)).sum(axis=1),
        same_top=reference.argmax(axis=1) == logits.argmax(axis=1),
        surprise=p[rows, targets] - q[rows, targets],
    )


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    import numpy as np

    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def _columns(divergence: Divergence) -> tuple[npt.NDArray[Any], ...]:
    return divergence.kl, divergence.same_top, divergence.surprise


def _show(config: EngineConfig, results: dict[str, dict[str, Any]]) -> None:
    rows = [
        (
            setting,
            figures["compute"],
            name,
            str(of["positions"]),
            f"{of['mean_kl']:.2e}",
            f"{of['max_kl']:.2e}",
            f"{100 * of['top1_agreement']:.2f}",
            f"{of['perplexity_ratio']:.5f}",
        )
        for setting, figures in results.items()
        for name, of in figures.items()
        if name != "compute"
    ]
    columns = ("setting", "compute", "answers", "positions", "mean KL", "max KL", "% same top", "perplexity ratio")
    show_table(f"{config.model} against its own float32", columns, rows, num_text_columns=3)

"""An AsyncLLM that is real but for the numbers: its engine says what a script says. Milliseconds to make."""

from __future__ import annotations

import asyncio
import functools
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import tokenizers

from octavo.async_llm import AsyncLLM
from octavo.config import EngineConfig
from octavo.engine.front_end import FrontEnd, SamplingDefaults
from octavo.engine.messages import EngineInfo, SchedulerStats, TokenDelta
from octavo.engine.metrics import Metrics
from octavo.errors import EngineDeadError
from octavo.pooling import PoolingParams
from octavo.request import EngineRequest, FinishReason, TokenLogprobs
from octavo.text.chat_template import load_chat_template
from octavo.text.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'refused' %}{{ raise_exception('the role refused is refused') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SAID = " one two three four five six seven eight nine ten eleven twelve"
CORPUS = "Hello world, how are you today?" + SAID + " red green blue system user assistant\n"


@functools.cache
def scripted_tokenizer(*more_special_tokens: str) -> Tokenizer:
    """Byte-level BPE: 0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|> (the end token), 256 bytes, some words."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *more_special_tokens],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([CORPUS] * 3, trainer)
    special_tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return Tokenizer(backend, special_tokens=special_tokens, chat_template=CHAT_TEMPLATE)


def embedding_of(prompt: list[int], pooling: PoolingParams) -> list[float]:
    """What the scripted engine makes of a prompt: four numbers that tell what it was asked."""
    return [len(prompt) / 8, prompt[-1], float(pooling.pooling_type == "mean"), float(pooling.normalize is True)]


class ScriptedEngine:
    """An EngineClient that says `script(request)` token by token, and again from the start when that is over.

    While `held`, every request waits. `fail` maps a request's last prompt token to the error it ends with.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.info = EngineInfo(
            max_model_len=max_model_len,
            vocab_size=tokenizer.vocab_size,
            block_size=16,
            num_blocks=8192,
            dtype="float32",
            isa="scripted",
            num_threads=1,
            memory_plan="memory: none",
            max_num_seqs=128,
            hidden_size=4,
        )
        self.stats = SchedulerStats()
        self.picture = None
        self.script: Callable[[EngineRequest], Iterable[int]] = lambda request: tokenizer.encode(SAID)
        self.fail: dict[int, str] = {}
        self.held = False
        self.num_looks = 0
        self.num_cached_tokens = 0  # that every request finds
        self.num_resets = 0  # of the prefix cache
        self.step_seconds = 0.0
        self.dead = False
        self.requests: list[EngineRequest] = []  # all there ever were
        self.live: dict[str, tuple[EngineRequest, int]] = {}  # and how many tokens each has said
        self._news = asyncio.Event()
        self._aborted = False  # and not yet told in the stats

    @property
    def alive(self) -> bool:
        return not self.dead

    @property
    def restarting(self) -> bool:
        return False

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        self.die()

    def die(self) -> None:
        self.dead = True
        self._news.set()

    def add_request(self, request: EngineRequest) -> None:
        self.requests.append(request)
        self.live[request.request_id] = (request, 0)
        self._news.set()

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.live.pop(request_id, None)
        self._aborted = True
        self._news.set()

    def reset_prefix_cache(self) -> None:
        if self.dead:
            raise EngineDeadError("the engine process is gone")
        self.num_resets += 1

    def request_picture(self) -> None:
        """There are no blocks to show."""

    def look_after(self) -> None:
        self.num_looks += 1

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False
        self._news.set()

    async def receive(self) -> list[TokenDelta]:
        for _ in range(8):  # slower than its readers, so that each token comes alone
            await asyncio.sleep(0)
        await asyncio.sleep(self.step_seconds)
        while not self.dead and not self._aborted and (self.held or not self.live):
            self.stats = SchedulerStats(num_waiting=len(self.live))
            self._news.clear()
            await self._news.wait()
        if self.dead:
            raise EngineDeadError("the engine process is gone")
        self._aborted = False
        deltas = [] if self.held else [self._step(request, said) for request, said in list(self.live.values())]
        self.stats = SchedulerStats(**{"num_waiting" if self.held else "num_running": len(self.live)})
        return deltas

    def _step(self, request: EngineRequest, said: int) -> TokenDelta:
        params, request_id = request.params, request.request_id
        delta = TokenDelta(request_id, num_cached_tokens=self.num_cached_tokens)
        if said == 0:
            delta.first_scheduled_time = time.time()
        if said == 0 and params.prompt_logprobs is not None:
            delta.prompt_logprobs = [
                self._logprobs(token_id, params.prompt_logprobs) for token_id in request.prompt_token_ids[1:]
            ]
        error = self.fail.get(request.prompt_token_ids[-1])
        if error is not None and (said == 2 or request.pooling is not None):
            delta.finish_reason, delta.error = FinishReason.ERROR, error
        elif request.pooling is not None:
            delta.finish_reason = FinishReason.STOP
            delta.embedding = array("f", embedding_of(request.prompt_token_ids, request.pooling)).tobytes()
        elif params.max_tokens == 0:
            delta.finish_reason = FinishReason.LENGTH
        else:
            self._say(request, said, delta)
        if delta.finish_reason is None:
            self.live[request_id] = (request, said + 1)
        else:
            del self.live[request_id]
        return delta

    def _say(self, request: EngineRequest, said: int, delta: TokenDelta) -> None:
        params, script = request.params, list(self.script(request))
        token_id = script[said % len(script)]
        delta.token_ids = [token_id]
        if params.logprobs is not None:
            delta.logprobs = [self._logprobs(token_id, params.logprobs)]
        if token_id in (params.stop_token_ids or ()):
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, token_id
        elif token_id in request.eos_token_ids and not params.ignore_eos:
            delta.finish_reason = FinishReason.STOP
        elif said + 1 == params.max_tokens:
            delta.finish_reason = FinishReason.LENGTH

    def _logprobs(self, token_id: int, num: int) -> TokenLogprobs:
        """The token itself is the second most likely; the others follow its id."""
        others = [(token_id + 1 + i) % self.info.vocab_size for i in range(max(num, 1))]
        ranked = [others[0], token_id, *others[1:]][:num]
        return TokenLogprobs([token_id, *ranked], [-1.0, *(-0.5 * (i + 1) for i in range(num))], rank=2)


def scripted_llm(
    *,
    max_model_len: int = 256,
    chat_template: bool = True,
    defaults: dict[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    **engine_options: Any,
) -> tuple[AsyncLLM, ScriptedEngine]:
    """To be called in the event loop that it is to live in."""
    tokenizer = tokenizer or scripted_tokenizer()
    engine = ScriptedEngine(tokenizer, max_model_len)
    front_end = FrontEnd(
        tokenizer=tokenizer,
        chat_template=load_chat_template(None, tokenizer) if chat_template else None,
        model_config={},
        eos_token_ids=[2],
        sampling_defaults=SamplingDefaults(defaults or {}, "a test"),
    )
    return AsyncLLM(
        EngineConfig(model="tiny", **engine_options), engine, front_end, Metrics("tiny", engine.info)
    ), engine

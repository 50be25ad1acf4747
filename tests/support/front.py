"""The callers' side without a model: a tokenizer of 13 tokens and clients for the engine of `fake_runner`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import tokenizers

from octavo.config import EngineConfig
from octavo.core.picture import Picture
from octavo.engine.engine import Engine
from octavo.engine.front_end import FrontEnd, default_sampling_params
from octavo.engine.messages import EngineInfo, SchedulerStats, TokenDelta
from octavo.errors import CheckpointError, EngineDeadError, OctavoError
from octavo.request import EngineRequest, FinishReason
from octavo.text.tokenizer import Tokenizer
from support.fake_runner import VOCAB_SIZE, make_engine
from support.faults import FaultyEngine, strike

END = 0  # "<end>", the one special token
PIECES = ("<end>", "a", "b", "c", "d", "e", " ", "Hel", "lo", " wor", "ld", "!", "z")
assert len(PIECES) == VOCAB_SIZE


def small_tokenizer() -> Tokenizer:
    """Each of PIECES is a token, spelled as it is; "Hello world" is Hel+lo+" wor"+ld."""
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram([(piece, -1.0) for piece in PIECES], unk_id=END))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, special_tokens={"eos_token": "<end>"})


def small_front_end(generation_config: dict[str, Any] | None = None) -> FrontEnd:
    return FrontEnd(
        tokenizer=small_tokenizer(),
        chat_template=None,
        model_config={"model_type": "fake"},
        eos_token_ids=[END],
        sampling_defaults=default_sampling_params(generation_config or {}, "auto"),
    )


def build_fake_engine(config: EngineConfig) -> Engine:
    """`config.model` is JSON: the arguments of `make_engine`, or {"error": message}; and "faults", a file of Faults."""
    options = json.loads(config.model)
    if "error" in options:
        raise CheckpointError(options["error"])
    faults = options.pop("faults", None)
    engine = make_engine(**options)
    if faults is not None:
        strike(Path(faults), "start")
        return FaultyEngine(engine, Path(faults))
    return engine


class LocalClient:
    """An EngineClient whose engine lives here; it steps when `receive` is awaited. `dies` makes it die."""

    info: EngineInfo

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stats = SchedulerStats()
        self.picture: Picture | None = None
        self.num_pictures = 0  # asked for
        self.aborted: list[str] = []
        self._refused: list[TokenDelta] = []
        self._dead = False
        self._work = asyncio.Event()

    @property
    def alive(self) -> bool:
        return not self._dead

    @property
    def restarting(self) -> bool:
        return False

    async def start(self) -> None:
        self.info = self.engine.info

    def die(self) -> None:
        self._dead = True
        self._work.set()

    def add_request(self, request: EngineRequest) -> None:
        if self._dead:
            raise EngineDeadError("dead")
        try:
            self.engine.add_request(request)
        except OctavoError as error:
            self._refused.append(TokenDelta(request.request_id, finish_reason=FinishReason.ERROR, error=error.message))
        self._work.set()

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        self.engine.abort(request_ids)
        self._work.set()

    def reset_prefix_cache(self) -> None:
        if self._dead:
            raise EngineDeadError("dead")
        self.engine.reset_prefix_cache()

    def request_picture(self) -> None:
        self.num_pictures += 1
        self.picture = self.engine.picture()

    def look_after(self) -> None:
        """It cannot hang by itself."""

    async def receive(self) -> list[TokenDelta]:
        if not self.engine.has_unfinished:
            await self._work.wait()
        self._work.clear()
        await asyncio.sleep(0)
        if self._dead:
            raise EngineDeadError("the engine process is gone")
        refused, self._refused = self._refused, []
        deltas = refused + self.engine.step()
        self.stats = self.engine.stats()
        return deltas

    async def close(self) -> None:
        self.die()

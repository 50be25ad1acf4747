"""What a checkpoint gives to the callers' side: tokenizer, chat template, end tokens and sampling defaults.

It reads no weights and knows no engine; `LLM` and `AsyncLLM` both stand on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.engine.pooling import PoolingDefaults, pooling_defaults
from octavo.errors import ConfigError, InvalidRequestError
from octavo.request import SamplingParams

if TYPE_CHECKING:
    from octavo.text.chat_template import ChatTemplate
    from octavo.text.tokenizer import Tokenizer

# `max_new_tokens` is not among them: what an absent max_tokens means is octavo's own decision on each route.
_DEFAULTS_TAKEN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The fields of SamplingParams that have another default than the class's own, and where these come from."""

    values: dict[str, Any]
    origin: str


@dataclass(frozen=True, slots=True)
class FrontEnd:
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    model_config: dict[str, Any]  # as config.json has it
    eos_token_ids: list[int]
    sampling_defaults: SamplingDefaults
    pooling_defaults: PoolingDefaults = field(default_factory=PoolingDefaults)


def load_front_end(config: EngineConfig) -> FrontEnd:
    """Raises CheckpointError and ConfigError."""
    from octavo.checkpoint.base import open_checkpoint
    from octavo.checkpoint.resolve import resolve
    from octavo.text.chat_template import load_chat_template
    from octavo.text.tokenizer import load_tokenizer

    path = resolve(config.model, config.revision)
    checkpoint = open_checkpoint(path, config.load_format)
    tokenizer = load_tokenizer(path if config.tokenizer is None else _tokenizer_path(config.tokenizer))
    return FrontEnd(
        tokenizer=tokenizer,
        chat_template=load_chat_template(config.chat_template, tokenizer),
        model_config=checkpoint.config,
        eos_token_ids=eos_token_ids(checkpoint.generation_config, checkpoint.config, tokenizer.end_token_ids),
        sampling_defaults=default_sampling_params(checkpoint.generation_config, config.generation_config),
        pooling_defaults=pooling_defaults(config, path),
    )


def _tokenizer_path(name: str) -> Path:
    from octavo.checkpoint.resolve import resolve

    folder = Path(name).expanduser()
    return folder if (folder / "tokenizer.json").is_file() else resolve(name)  # the first may be no model's folder


def eos_token_ids(
    generation_config: Mapping[str, Any], model_config: Mapping[str, Any], tokenizer_ends: Iterable[int]
) -> list[int]:
    """The union of all that are named: models often name the end of a text in one place, that of a turn in another."""
    found = set(tokenizer_ends)
    for value in (generation_config.get("eos_token_id"), model_config.get("eos_token_id")):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(found)


def default_sampling_params(generation_config: Mapping[str, Any], mode: str) -> SamplingDefaults:
    """What `--generation-config` (`mode`) makes of a model's generation_config.json. Raises ConfigError."""
    if mode in ("octavo", "vllm"):
        return SamplingDefaults({}, f"--generation-config {mode}")
    origin = "the model's generation_config.json" if generation_config else "the model names none"
    if mode != "auto":
        file = Path(mode) / "generation_config.json"
        try:
            generation_config, origin = json.loads(file.read_text(encoding="utf-8")), str(file)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"generation_config is {mode!r}; it must be auto, octavo, vllm or a folder with a "
                f"generation_config.json ({error})",
                param="generation_config",
            ) from None
    values = {name: generation_config[name] for name in _DEFAULTS_TAKEN if generation_config.get(name) is not None}
    try:
        SamplingParams(**values)
    except InvalidRequestError as error:
        raise ConfigError(f"{origin}: {error} (--generation-config octavo ignores it)") from None
    return SamplingDefaults(values, origin)

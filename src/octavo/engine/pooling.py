"""Embeddings on the callers' side: a model's defaults, what a request leaves open, and an output as callers see it.

It reads no weights and knows no engine; the arithmetic is runtime/pooling.py's.
"""

from __future__ import annotations

import dataclasses
import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidRequestError
from octavo.pooling import EmbeddingOutput, EmbeddingRequestOutput, PoolingParams, PoolingType
from octavo.request import RequestOutput, SamplingParams

# The modes of a sentence-transformers folder that octavo has, by their fields in its 1_Pooling/config.json.
_MODES: tuple[tuple[str, PoolingType], ...] = (("pooling_mode_mean_tokens", "mean"), ("pooling_mode_lasttoken", "last"))


@dataclass(frozen=True, slots=True)
class PoolingDefaults:
    """What a request does not say."""

    pooling_type: PoolingType = "last"
    normalize: bool = True


def pooling_defaults(config: EngineConfig, folder: Path) -> PoolingDefaults:
    """`--pooler-config`, on top of what the model's folder says. Raises ConfigError."""
    given: Any = config.pooler_config or {}
    if "pooling_type" in given:
        return PoolingDefaults(given["pooling_type"], given.get("normalize", True))
    return dataclasses.replace(_sentence_transformers(folder), **given)


def _sentence_transformers(folder: Path) -> PoolingDefaults:
    """Of such a folder (https://sbert.net): modules.json lists what follows the model, 1_Pooling/config.json says how
    that pools."""
    file = folder / "1_Pooling" / "config.json"
    if not file.is_file():
        return PoolingDefaults()
    modes, modules = _read(file, dict), folder / "modules.json"
    wanted = [name for name, value in modes.items() if name.startswith("pooling_mode_") and value is True]
    known = [pooling_type for name, pooling_type in _MODES if wanted == [name]]
    if not known:
        raise ConfigError(
            f"{file} asks for {', '.join(wanted) or 'no mode'}; octavo pools the mean or the last token: choose by "
            '--pooler-config \'{"pooling_type": "MEAN"}\' or "LAST"',
            param="pooler_config",
        )
    if not modules.is_file():
        return PoolingDefaults(known[0])
    kinds = [str(module.get("type")) for module in _read(modules, list) if isinstance(module, dict)]
    return PoolingDefaults(known[0], any(kind.endswith(".Normalize") for kind in kinds))


def _read(file: Path, kind: type) -> Any:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read ({error})", param="pooler_config") from None
    if not isinstance(record, kind):
        raise ConfigError(f"{file} holds no JSON {kind.__name__}", param="pooler_config")
    return record


def decided(params: PoolingParams | None, defaults: PoolingDefaults, hidden_size: int) -> PoolingParams:
    """A copy with nothing left open. Raises InvalidRequestError."""
    params = params or PoolingParams()
    if params.dimensions not in (None, hidden_size):
        raise InvalidRequestError(
            f"dimensions is {params.dimensions}; it must be absent, or {hidden_size}: this model's embeddings are not "
            "made to be cut short",
            param="dimensions",
        )
    return dataclasses.replace(
        params,
        pooling_type=params.pooling_type or defaults.pooling_type,
        normalize=defaults.normalize if params.normalize is None else params.normalize,
    )


def no_output() -> SamplingParams:
    """Of the engine's requests for embeddings: the prompt, and no token. The seed, which nothing draws from, takes none
    from others."""
    return SamplingParams(max_tokens=0, seed=0, detokenize=False, output_kind="final_only")


def as_embedding_output(output: RequestOutput) -> EmbeddingRequestOutput:
    """Of a finished request that has its embedding."""
    assert output.embedding is not None, "it failed, or was aborted"
    return EmbeddingRequestOutput(
        request_id=output.request_id,
        outputs=EmbeddingOutput(array("f", output.embedding).tolist()),
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )

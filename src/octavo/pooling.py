"""The words of an embedding: what a caller asks (PoolingParams), what comes back, how a server's defaults are given.

A leaf, as request.py is: it knows no tensors and no engine. Names are vLLM's.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from octavo.errors import ConfigError, refuse

PoolingType = Literal["last", "mean"]
POOLING_TYPES: tuple[str, ...] = get_args(PoolingType)

_ONE_OF_THEM = f"one of {', '.join(POOLING_TYPES)}"
_INT32_MAX = 2**31 - 1


@dataclass(slots=True, kw_only=True)
class PoolingParams:
    """How a prompt becomes one vector: from the model's hidden states after its last norm, those of the `last` token or
    the `mean` over all. None: the model's default, or the server's.

    `normalize`: to a length of one (L2); `use_activation` is its newer name. `dimensions` may only say what the vector
    has anyway. `truncate_prompt_tokens` as in SamplingParams. `task` may be "embed". Raises InvalidRequestError.
    """

    pooling_type: PoolingType | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    task: Literal["embed"] | None = None

    def __post_init__(self) -> None:
        if self.pooling_type is not None:
            self.pooling_type = _lower(self.pooling_type)
            if self.pooling_type not in POOLING_TYPES:
                refuse("pooling_type", self.pooling_type, _ONE_OF_THEM)
        for name in ("normalize", "use_activation"):
            if not isinstance(getattr(self, name), bool | None):
                refuse(name, getattr(self, name), "true or false")
        if self.normalize is None:
            self.normalize = self.use_activation
        elif self.use_activation not in (None, self.normalize):
            refuse("use_activation", self.use_activation, "what normalize is")
        self._check_integer("dimensions", 1)
        self._check_integer("truncate_prompt_tokens", -1)
        if self.truncate_prompt_tokens == 0:
            refuse("truncate_prompt_tokens", 0, "-1, or at least 1")
        if self.task not in (None, "embed"):
            refuse("task", self.task, "'embed'")

    def _check_integer(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if value is not None and (type(value) is not int or not low <= value <= _INT32_MAX):
            refuse(name, value, f"an integer in [{low}, {_INT32_MAX}]")


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]  # float32 values

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    @property
    def data(self) -> Any:
        """The same as a NumPy array, float32 [hidden_size]."""
        import numpy as np

        return np.array(self.embedding, np.float32)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """What `LLM.embed` returns for a prompt, and `AsyncLLM.encode` yields."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int | None = None
    finished: bool = True


def read_pooler_config(value: Any) -> dict[str, Any]:
    """`--pooler-config` as fields of PoolingParams. It is a dict, or JSON, with vLLM's keys. Raises ConfigError."""
    record = value
    if isinstance(value, str):
        try:
            record = json.loads(value)
        except (ValueError, RecursionError):
            record = None
    if not isinstance(record, Mapping):
        raise _wrong("pooler_config", value, 'an object such as {"pooling_type": "MEAN"}')
    fields: dict[str, Any] = {}
    for key, entry in record.items():
        if entry is None:
            continue
        if key in ("pooling_type", "seq_pooling_type"):
            fields["pooling_type"] = _lower(entry)
            if fields["pooling_type"] not in POOLING_TYPES:
                raise _wrong(f"pooler_config.{key}", entry, _ONE_OF_THEM)
        elif key in ("normalize", "use_activation"):
            if not isinstance(entry, bool):
                raise _wrong(f"pooler_config.{key}", entry, "true or false")
            fields["normalize"] = entry
        elif key != "task" or entry != "embed":
            message = f"pooler_config has {key!r}: {reprlib.repr(entry)}; allowed: pooling_type, normalize"
            raise ConfigError(message, param="pooler_config")
    return fields


def _lower(word: Any) -> Any:
    """vLLM has the names of pooling types in upper case."""
    return word.lower() if isinstance(word, str) else word


def _wrong(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {reprlib.repr(value)}; it must be {allowed}", param="pooler_config")

"""Which class serves which architecture name of config.json (a model is one line), and what such a class must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from octavo.errors import CheckpointError
from octavo.models.config import ModelConfig
from octavo.models.llama import Llama
from octavo.models.weights import Weight
from octavo.ops.api import KVCache, Ops, Tensor


class Model(Protocol):
    """Built by checkpoint/loader.py from its tables, run by the runner. `models/llama.py` is the one to read."""

    WEIGHTS: ClassVar[dict[str, Weight]]
    LAYER_PREFIX: str  # of the names in LAYER_WEIGHTS, with {layer}
    LAYER_WEIGHTS: ClassVar[dict[str, Weight]]
    config: ModelConfig
    layers: Sequence[Any]  # a dataclass of weights for each

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        layers: Sequence[Mapping[str, Any]],
        rope_table: Tensor,
    ) -> None: ...

    def forward(self, ops: Ops, batch: Any, kv_caches: Sequence[KVCache]) -> Tensor: ...

    def final_states(self, ops: Ops, hidden: Tensor) -> Tensor: ...

    def logits(self, ops: Ops, hidden: Tensor, batch: Any) -> Tensor: ...


MODELS: Mapping[str, type[Model]] = MappingProxyType(
    {
        "LlamaForCausalLM": Llama,
        "MistralForCausalLM": Llama,
    }
)


def model_class(architecture: str) -> type[Model]:
    """Raises CheckpointError, listing what is known, for an unknown name."""
    if architecture not in MODELS:
        raise CheckpointError(f"architecture {architecture!r} is not known; known: {', '.join(sorted(MODELS))}")
    return MODELS[architecture]

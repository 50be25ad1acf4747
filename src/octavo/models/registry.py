"""Which class serves which architecture name of config.json. A model is one line."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from octavo.errors import CheckpointError
from octavo.models.llama import Llama

MODELS: Mapping[str, type[Llama]] = MappingProxyType(
    {
        "LlamaForCausalLM": Llama,
        "MistralForCausalLM": Llama,
    }
)


def model_class(architecture: str) -> type[Llama]:
    """Raises CheckpointError, listing what is known, for an unknown name."""
    if architecture not in MODELS:
        raise CheckpointError(f"architecture {architecture!r} is not known; known: {', '.join(sorted(MODELS))}")
    return MODELS[architecture]

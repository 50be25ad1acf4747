"""octavo: LLM inference and serving with vLLM's interface.

The public names, each imported when first used, so that `import octavo` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.config import EngineConfig
    from octavo.errors import (
        ChatTemplateError,
        CheckpointError,
        ConfigError,
        ContextLengthError,
        EngineDeadError,
        InvalidRequestError,
        NotFoundError,
        OctavoError,
        QueueFullError,
        RequestFailedError,
    )
    from octavo.llm import LLM
    from octavo.pooling import EmbeddingOutput, EmbeddingRequestOutput, PoolingParams
    from octavo.request import (
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
        CompletionOutput,
        FinishReason,
        Logprob,
        RequestMetrics,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ChatTemplateError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineDeadError",
    "FinishReason",
    "InvalidRequestError",
    "Logprob",
    "NotFoundError",
    "OctavoError",
    "PoolingParams",
    "QueueFullError",
    "RequestFailedError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "octavo.llm": ("LLM",),
    "octavo.async_llm": ("AsyncLLM",),
    "octavo.config": ("EngineConfig",),
    "octavo.pooling": ("EmbeddingOutput", "EmbeddingRequestOutput", "PoolingParams"),
    "octavo.errors": tuple(name for name in __all__ if name.endswith("Error")),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), "octavo.request")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

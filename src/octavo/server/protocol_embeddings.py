"""The body of /v1/embeddings, OpenAI's and vLLM's: see protocol.py for the four places of a field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from octavo.server.fields import anything, boolean, one_of, string, wire
from octavo.server.protocol import EngineFields, TemplateFields


@dataclass(kw_only=True)
class EmbeddingsRequest(TemplateFields, EngineFields):
    """POST /v1/embeddings: `input`, or the `messages` of one conversation. `add_special_tokens` is on for an input, off
    for messages. `pooling_type` is octavo's own: which hidden states an embedding is made of, "last" or "mean"."""

    LATER: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "truncation_side": ("left",),
    }

    input: str | list[int] | list[str] | list[list[int]] | None = wire(anything)
    add_generation_prompt: bool = wire(boolean, False)
    add_special_tokens: bool | None = wire(boolean)
    user: str | None = wire(string)
    encoding_format: Literal["float", "base64"] = wire(one_of("float", "base64"), "float")
    dimensions: Any = wire(anything)  # this and the next four: PoolingParams checks them
    normalize: Any = wire(anything)
    use_activation: Any = wire(anything)
    pooling_type: Any = wire(anything)
    truncate_prompt_tokens: Any = wire(anything)

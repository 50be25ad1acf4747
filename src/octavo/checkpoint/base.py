"""What a checkpoint is, whatever its format: a config in Hugging Face's words and tensors under Hugging Face's names.

Knows which reader a path needs; knows nothing of models. The tensors point into memory-mapped files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.errors import CheckpointError
from octavo.ops.api import DType, TensorSource
from octavo.ops.decode import BLOCK_TYPES


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    format: Literal["safetensors", "gguf", "config"]  # config: no weights (--load-format dummy)
    config: dict[str, Any]  # as in config.json
    generation_config: dict[str, Any]  # as in generation_config.json; empty if there is none
    tensors: dict[str, TensorSource]  # empty for format "config"

    @property
    def has_blocks(self) -> bool:
        """Whether some of its matrices are quantised."""
        return any(source.type in BLOCK_TYPES for source in self.tensors.values())

    @property
    def dtype(self) -> DType:
        """What --dtype auto means here: float32 only where all matrices are float32."""
        if self.format == "config":
            return (
                "float32" if (self.config.get("dtype") or self.config.get("torch_dtype")) == "float32" else "bfloat16"
            )
        matrices = [source.type for source in self.tensors.values() if len(source.shape) == 2]
        return "float32" if all(type in ("F32", "F64") for type in matrices) else "bfloat16"


def open_checkpoint(path: Path, load_format: str = "auto") -> Checkpoint:
    """Read the header of a folder or .gguf file; no weight is read yet.

    `load_format`: auto (by what the path is), safetensors, gguf, or dummy (the config alone).
    Raises CheckpointError naming the file, and the tensor where there is one.
    """
    kind = "gguf" if path.suffix == ".gguf" else "safetensors"
    if load_format in ("safetensors", "gguf") and load_format != kind:
        raise CheckpointError(f"{path} is not a {load_format} checkpoint, which load_format asks for")
    if kind == "gguf":
        from octavo.checkpoint.gguf import open_gguf

        checkpoint = open_gguf(path)
        if load_format != "dummy":
            return checkpoint
        return Checkpoint(path, "config", checkpoint.config, checkpoint.generation_config, {})

    config = _read_json(path / "config.json")
    if config is None:
        raise CheckpointError(f"{path} has no config.json")
    generation_config = _read_json(path / "generation_config.json") or {}
    if load_format == "dummy":
        return Checkpoint(path, "config", config, generation_config, {})
    from octavo.checkpoint.safetensors import read_folder

    return Checkpoint(path, "safetensors", config, generation_config, read_folder(path))


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return content

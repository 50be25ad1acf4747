"""The words of a model's WEIGHTS table: which checkpoint tensors make a parameter, and how large each must be.

A table is data: the loader checks and packs by it, the memory plan adds it up, the model's forward reads the results by
name. Sizes are names of ModelConfig attributes. Names in a layer's table lack the layer's prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models.config import ModelConfig


@dataclass(frozen=True)
class MatrixWeight:
    """[N, K] from one or several checkpoint tensors stacked along N, one packed matrix.

    `sources` maps checkpoint module -> its rows; the tensors are `<module>.weight` and, where the config attribute
    `bias` is true, `<module>.bias`. `tied_to` names the matrix that is used instead when embeddings are tied.
    """

    sources: dict[str, str]
    columns: str
    bias: str | None = None
    tied_to: str | None = None

    def shapes(self, config: ModelConfig) -> dict[str, tuple[int, int]]:
        """Checkpoint tensor -> [rows, columns]."""
        columns = getattr(config, self.columns)
        return {f"{module}.weight": (getattr(config, rows), columns) for module, rows in self.sources.items()}

    def bias_shapes(self, config: ModelConfig) -> dict[str, tuple[int]]:
        """Checkpoint tensor -> [rows]; empty without biases."""
        if self.bias is None or not getattr(config, self.bias):
            return {}
        return {f"{module}.bias": (getattr(config, rows),) for module, rows in self.sources.items()}


@dataclass(frozen=True)
class VectorWeight:
    """[N] from one checkpoint tensor `<source>.weight`."""

    source: str
    size: str

    def shapes(self, config: ModelConfig) -> dict[str, tuple[int]]:
        return {f"{self.source}.weight": (getattr(config, self.size),)}


Weight = MatrixWeight | VectorWeight

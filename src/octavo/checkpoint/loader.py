"""Builds a model: checks every tensor against the model's WEIGHTS table, then packs them one at a time.

Nothing is packed before all names and shapes are right. Knows tables, not architectures.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.packed_cache import MatrixStore, NoStore
from octavo.errors import CheckpointError
from octavo.models.config import ModelConfig
from octavo.models.registry import Model, model_class
from octavo.models.rope import rope_table
from octavo.models.weights import MatrixWeight, VectorWeight, Weight
from octavo.ops.api import Backend, Matrix, TensorSource, Vector
from octavo.ops.decode import BLOCKS
from octavo.ops.quantised import keeps_blocks
from octavo.quant.formats import MatrixFormat, WeightFormats

MAX_NAMES = 8  # that an error or a warning lists

logger = logging.getLogger(__name__)


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    backend: Backend,
    formats: WeightFormats,
    max_model_len: int,
    seed: int = 0,
    store: MatrixStore | None = None,
) -> Model:
    """The model with all its weights packed by `backend`, its matrices in `formats`. What `store` has of those need not
    be packed.

    A checkpoint of format "config" gets random matrices, drawn from `seed`, and vectors of ones. Raises
    CheckpointError naming the tensor that is missing or has a wrong shape, before anything is packed.
    """
    model = model_class(config.architecture)
    config.check_max_model_len(max_model_len)
    build: _RandomWeights | _CheckpointWeights
    if checkpoint.format == "config":
        build = _RandomWeights(config, backend, seed)
    else:
        _check_tensors(checkpoint, config, model)
        build = _CheckpointWeights(config, backend, checkpoint.tensors, store or NoStore())
    weights = _build_table(model.WEIGHTS, "", config, formats.rest, build)
    layers = [
        _build_table(model.LAYER_WEIGHTS, _prefix(model, layer), config, formats.layers, build)
        for layer in range(config.num_layers)
    ]
    return model(config, weights, layers, backend.constant(rope_table(config, max_model_len)))


def weight_bytes(checkpoint: Checkpoint, config: ModelConfig, formats: WeightFormats) -> int:
    """Bytes that the packed weights will take, to plan memory before loading. Padding of panels is left out."""
    bits = 0.0
    for weight, prefix in _all_weights(model_class(config.architecture), config):
        shapes: dict[str, tuple[int, ...]] = {**weight.shapes(config)}
        if isinstance(weight, MatrixWeight):
            form = formats.layers if prefix else formats.rest
            sources = [checkpoint.tensors[prefix + name] for name in shapes if prefix + name in checkpoint.tensors]
            if not keeps_blocks(sources, form.storage):
                form = replace(form, storage="plain")
            mixed = form.storage == "plain" and len({source.type for source in sources}) > 1
            for name, shape in shapes.items():
                source = checkpoint.tensors.get(prefix + name)
                bits += math.prod(shape) * form.bits(source.type if source and not mixed else "F32")
            shapes = {**weight.bias_shapes(config)}
        bits += 32 * sum(map(math.prod, shapes.values()))
    return int(bits) // 8


def matrix_sources(
    checkpoint: Checkpoint, config: ModelConfig, formats: WeightFormats
) -> Iterator[tuple[list[TensorSource], MatrixFormat]]:
    """What each matrix is packed from, as far as the checkpoint has it, without biases; in no particular order, but
    always in the same."""
    for weight, prefix in _all_weights(model_class(config.architecture), config):
        if isinstance(weight, MatrixWeight):
            names = [prefix + name for name in weight.shapes(config)]
            form = formats.layers if prefix else formats.rest
            yield [checkpoint.tensors[name] for name in names if name in checkpoint.tensors], form


def _prefix(model: type[Model], layer: int) -> str:
    return model.LAYER_PREFIX.format(layer=layer)


def _all_weights(model: type[Model], config: ModelConfig) -> Iterator[tuple[Weight, str]]:
    """Every weight that the checkpoint must hold, with the prefix of its names."""
    for weight in model.WEIGHTS.values():
        if not _is_shared(weight, config):
            yield weight, ""
    for layer in range(config.num_layers):
        for weight in model.LAYER_WEIGHTS.values():
            yield weight, _prefix(model, layer)


def _is_shared(weight: Weight, config: ModelConfig) -> bool:
    return isinstance(weight, MatrixWeight) and weight.tied_to is not None and config.tie_word_embeddings


def _check_tensors(checkpoint: Checkpoint, config: ModelConfig, model: type[Model]) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for weight, prefix in _all_weights(model, config):
        shapes: dict[str, tuple[int, ...]] = {**weight.shapes(config)}
        if isinstance(weight, MatrixWeight):
            shapes |= weight.bias_shapes(config)
        expected |= {prefix + name: shape for name, shape in shapes.items()}

    missing = [name for name in expected if name not in checkpoint.tensors]
    if missing:
        raise CheckpointError(f"{checkpoint.path} lacks {_listed(missing)}, which {config.architecture} needs")
    for name, shape in expected.items():
        source = checkpoint.tensors[name]
        if source.shape != shape:
            raise CheckpointError(
                f"{checkpoint.path}: {name} has shape {list(source.shape)}; config.json asks for {list(shape)}"
            )
        if source.type not in BLOCKS:
            raise CheckpointError(f"{checkpoint.path}: {name} has type {source.type}; octavo reads {', '.join(BLOCKS)}")
    # Old checkpoints store the rope frequencies, which the config already says.
    unused = [name for name in checkpoint.tensors if name not in expected and not name.endswith("rotary_emb.inv_freq")]
    if unused:
        logger.warning(
            "%s: %s does not use, and octavo ignores: %s", checkpoint.path, config.architecture, _listed(unused)
        )


def _listed(names: Iterable[str]) -> str:
    names = sorted(names, key=_natural)
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + rest


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _build_table(
    table: Mapping[str, Weight],
    prefix: str,
    config: ModelConfig,
    form: MatrixFormat,
    build: _RandomWeights | _CheckpointWeights,
) -> dict[str, Any]:
    built: dict[str, Any] = {}
    for name, weight in table.items():
        if isinstance(weight, MatrixWeight):
            shared = weight.tied_to if config.tie_word_embeddings else None
            built[name] = built[shared] if shared else build.matrix(weight, prefix, form)
        else:
            built[name] = build.vector(weight, prefix)
    return built


class _CheckpointWeights:
    """Packs what the checkpoint holds, and the store does not."""

    def __init__(
        self, config: ModelConfig, backend: Backend, tensors: Mapping[str, TensorSource], store: MatrixStore
    ) -> None:
        self.config, self.backend, self.tensors, self.store = config, backend, tensors, store

    def matrix(self, weight: MatrixWeight, prefix: str, form: MatrixFormat) -> Matrix:
        sources = [self.tensors[prefix + name] for name in weight.shapes(self.config)]
        bias = [self.tensors[prefix + name] for name in weight.bias_shapes(self.config)]
        matrix = self.store.take(sources, form, bias)
        if matrix is None:
            matrix = self.backend.matrix(sources, form.dtype, bias, form.storage)
        self.store.add(matrix)
        return matrix

    def vector(self, weight: VectorWeight, prefix: str) -> Vector:
        return self.backend.vector(self.tensors[prefix + weight.source + ".weight"])


class _RandomWeights:
    """Random matrices without biases, and vectors of ones: the speed of a model without its weights."""

    def __init__(self, config: ModelConfig, backend: Backend, seed: int) -> None:
        self.config, self.backend = config, backend
        self.seeds = itertools.count(seed * 1_000_000)  # more matrices than that no model has

    def matrix(self, weight: MatrixWeight, prefix: str, form: MatrixFormat) -> Matrix:
        rows = sum(rows for rows, _ in weight.shapes(self.config).values())
        shape = (rows, getattr(self.config, weight.columns))
        return self.backend.random_matrix(shape, form.dtype, next(self.seeds), form.storage)

    def vector(self, weight: VectorWeight, prefix: str) -> Vector:
        return self.backend.constant(np.ones(getattr(self.config, weight.size), np.float32))

"""From options and a checkpoint to the format of each matrix. Decides; packs nothing (the backend does).

Activations, the inputs of matrix products, are rounded to bfloat16 or, before quantised weights, to int8 with a scale
for every 32, the two largest of each row kept exact. int8 is the faster in vectors, whose products of bytes outrun all
others. A tile unit multiplies bfloat16 faster still where rows are many, and bfloat16 is more exact.

int8 weights have a third arithmetic: one scale for a whole row of the matrix, and activations in int16, whose products
are exact integers. Nothing is unpacked and nothing scaled before the end of a sum, which suits a tile unit: it
multiplies bytes at twice the rate of bfloat16, as they lie in memory. Vectors have twice the work with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from octavo.errors import ConfigError
from octavo.ops.api import ActivationDType, DType, Storage
from octavo.ops.decode import BLOCK_TYPES
from octavo.ops.isa import COMPACTS, UNPACKS_IN_HALVES

# Bits that a packed value takes, with its share of scales and minimums (native/include/octavo/blocks.h). What a whole
# row has one of is left out.
BITS = {
    "F32": 32.0,
    "BF16": 16.0,
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q5_0": 8.5,
    "Q5_1": 9.0,
    "Q8_0": 8.5,
    "Q4_K": 6.0,
    "Q5_K": 10.0,
    "Q6_K": 10.0,
    "int8": 8.0,
}
# What the products of octavo/ops/halves.py save: their scales and minimums are halves instead of float32.
K_BITS_IN_HALVES = {"Q4_K": 5.0, "Q5_K": 9.0, "Q6_K": 9.0}
# Of bfloat16 in compact panels (native/include/octavo/compact.h), with its share of tables (from 256 columns on) and as
# many exceptions as there may be. A matrix with more takes 16 bits; SmolLM2's have a twelfth of that at most.
COMPACT_BITS = 12.2
TILE_VARIANTS = ("amx",)  # instruction sets with a tile unit for bfloat16


@dataclass(frozen=True, slots=True)
class MatrixFormat:
    dtype: ActivationDType  # what a product's inputs are rounded to
    storage: Storage
    in_halves: bool = False  # whether products unpack by way of half precision (octavo/ops/halves.py)
    compact: bool = False  # whether bfloat16 is kept in twelve bits

    def __str__(self) -> str:
        if self.storage == "plain":
            return self.dtype
        weights = "packed blocks" if self.storage == "blocks" else f"{self.storage.removesuffix('_row')} weights"
        return f"{weights}, {self.dtype} activations"

    def bits(self, source_type: str) -> float:
        """Bits of a packed value of a matrix whose checkpoint tensors are of this type."""
        if self.storage == "int8_row":
            return BITS["int8"]
        if self.storage == "int8":
            return BITS["Q8_0"]
        if self.storage == "int4":
            return BITS["Q4_1"]
        if self.storage == "blocks" and source_type in BLOCK_TYPES:
            return (K_BITS_IN_HALVES if self.in_halves else {}).get(source_type, BITS[source_type])
        # float32 products lose nothing where the values of bfloat16 stay what they are.
        if self.dtype == "float32" and source_type != "BF16":
            return BITS["F32"]
        return COMPACT_BITS if self.compact else BITS["BF16"]


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The formats of a model's matrices: those in its layers, and the rest (embedding and head)."""

    layers: MatrixFormat
    rest: MatrixFormat

    @classmethod
    def plain(cls, dtype: DType, *, compact: bool = False) -> WeightFormats:
        """Every matrix in its compute type."""
        return cls(*[MatrixFormat(dtype, "plain", compact=compact)] * 2)


def choose_formats(
    quantization: str | None, activation_dtype: str, dtype: DType, *, has_blocks: bool, variant: str
) -> WeightFormats:
    """The formats for these options of EngineConfig (`dtype` resolved), a checkpoint with or without block types, and
    an instruction set. Raises ConfigError for options that contradict each other or the checkpoint."""
    if quantization is not None and has_blocks:
        raise ConfigError(
            f"quantization is {quantization!r}, but the checkpoint is quantised already; leave the option out",
            param="quantization",
        )
    quantised = quantization is not None or (has_blocks and dtype != "float32")
    if quantization is not None and dtype == "float32":
        raise ConfigError(
            f"quantization is {quantization!r} and dtype is 'float32'; quantised weights need dtype auto or bfloat16",
            param="quantization",
        )
    if activation_dtype != "auto" and not quantised and activation_dtype != dtype:
        raise ConfigError(
            f"activation_dtype is {activation_dtype!r}, but the weights are {dtype}; "
            f"allowed: {'auto' if dtype == 'float32' else 'auto, bfloat16'}",
            param="activation_dtype",
        )
    if activation_dtype == "int16" and quantization != "int8":
        raise ConfigError(
            "activation_dtype is 'int16', which goes with quantization 'int8' alone; allowed: auto, bfloat16, int8",
            param="activation_dtype",
        )
    compact = dtype in COMPACTS.get(variant, ())
    if not quantised:
        return WeightFormats.plain(dtype, compact=compact)
    if activation_dtype == "auto":
        of_tiles = "int16" if quantization == "int8" else "bfloat16"
        activation_dtype = of_tiles if variant in TILE_VARIANTS else "int8"
    if activation_dtype == "int16":
        return WeightFormats(*[MatrixFormat("int16", "int8_row")] * 2)
    activations = cast(ActivationDType, activation_dtype)
    storage = cast(Storage, quantization or "blocks")
    # Four bits are too few for the head: a token's logit is one dot product, and its error is never averaged.
    rest: Storage = "int8" if storage == "int4" else storage
    layout = activations == "bfloat16" and variant in UNPACKS_IN_HALVES, compact
    return WeightFormats(MatrixFormat(activations, storage, *layout), MatrixFormat(activations, rest, *layout))

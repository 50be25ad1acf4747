"""Reads GGUF files: the header (metadata, tensor list), and what it means in Hugging Face's words.

Own parser, because start-up time counts: a vocabulary of 262144 strings is read in about 0.1 s. Knows the architectures
in ARCHITECTURES; what the values of a block type mean is ops/decode.py's.
Source: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md), versions 2 and 3, little endian.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import Checkpoint
from octavo.checkpoint.mapping import map_file
from octavo.errors import CheckpointError
from octavo.ops.api import Int32Array, TensorSource
from octavo.ops.decode import BLOCKS, num_bytes

ARCHITECTURES = {"llama": "LlamaForCausalLM"}  # general.architecture -> config.json's name

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, struct.Struct] = {
    id: struct.Struct("<" + code)
    for id, code in {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}.items()
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]

# The numbers of ggml's types; those that octavo does not read are here so that an error can name them.
_TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]  # PyTorch order: the file's, reversed
    type: int
    offset: int  # from the begin of the data


class _Reader:
    """Walks through the header. Raises struct.error, or OverflowError, where the file ends too early."""

    def __init__(self, data: npt.NDArray[np.uint8], with_vocabulary: bool) -> None:
        self.data = data.data  # a memoryview: slices of it are cheap
        self.position = 0
        self.with_vocabulary = with_vocabulary

    def number(self, format: struct.Struct) -> Any:
        value = format.unpack_from(self.data, self.position)[0]
        self.position += format.size
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, position, length_at, texts = self.data, self.position, _U64.unpack_from, []
        for _ in range(count):
            (length,) = length_at(data, position)
            end = position + 8 + length
            texts.append(str(data[position + 8 : end], "utf-8", "surrogateescape"))
            position = end
        self.position = position
        if position > len(data):
            raise struct.error("a string goes beyond the end")
        return texts

    def skip_strings(self, count: int) -> list[str]:
        data, position, length_at = self.data, self.position, _U64.unpack_from
        for _ in range(count):
            position += 8 + length_at(data, position)[0]
        self.position = position
        return []

    def value(self) -> Any:
        kind = self.number(_U32)
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number(_U32), self.number(_U64))
        return self.number(_scalar(kind))

    def array(self, kind: int, count: int) -> list[str] | npt.NDArray[Any]:
        if kind == _STRING:
            return self.strings(count) if self.with_vocabulary else self.skip_strings(count)
        dtype = np.dtype(_scalar(kind).format)
        begin, self.position = self.position, self.position + count * dtype.itemsize
        if self.position > len(self.data):
            raise struct.error("an array goes beyond the end")
        return np.frombuffer(self.data[begin : self.position], dtype)


def _scalar(kind: int) -> struct.Struct:
    if kind not in _SCALARS:
        raise CheckpointError(f"metadata has a value of type {kind}; known: 0 to 12, and no arrays of arrays")
    return _SCALARS[kind]


def _read_header(
    path: Path, *, with_vocabulary: bool
) -> tuple[npt.NDArray[np.uint8], dict[str, Any], list[_TensorInfo], int]:
    """The file's bytes, its metadata, its list of tensors, and where their data begins.

    Without the vocabulary, arrays of strings come out empty, five times as fast.
    """
    data = map_file(path)
    if data[:4].tobytes() != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file")
    reader = _Reader(data, with_vocabulary)
    reader.position = 4
    try:
        version = reader.number(_U32)
        if version not in (2, 3):
            raise CheckpointError(f"GGUF version {version}; octavo reads 2 and 3, little endian")
        num_tensors, num_keys = reader.number(_U64), reader.number(_U64)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = reader.string()
            metadata[key] = reader.value()
        infos = []
        for _ in range(num_tensors):
            name, num_dims = reader.string(), reader.number(_U32)
            shape = tuple(reader.number(_U64) for _ in range(num_dims))[::-1]
            infos.append(_TensorInfo(name, shape, reader.number(_U32), reader.number(_U64)))
    except (struct.error, OverflowError) as error:
        raise CheckpointError(f"{path}: the file is cut short in its header, at byte {reader.position}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}; it must be a positive whole number")
    return data, metadata, infos, -(-reader.position // alignment) * alignment


def read_metadata(path: Path) -> dict[str, Any]:
    """Key -> number, string, boolean, list[str] or NumPy array, as in the file. Raises CheckpointError.

    Strings that are not UTF-8 keep their bytes as surrogate escapes.
    """
    return _read_header(path, with_vocabulary=True)[1]


def open_gguf(path: Path) -> Checkpoint:
    """Raises CheckpointError naming the file and the architecture, tensor or type that cannot be used."""
    data, metadata, infos, begin_of_data = _read_header(path, with_vocabulary=False)
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(f"{path}: GGUF architecture {architecture!r} is not known; known: {known}")
    tensors = {info.name: _source(path, data, info, begin_of_data) for info in infos}
    config = _Translation(path, architecture, metadata, tensors).config()
    named = {
        _hf_name(name): _in_hf_order(source, config) for name, source in tensors.items() if name != "rope_freqs.weight"
    }
    return Checkpoint(path, "gguf", config, {}, named)


def _source(path: Path, data: npt.NDArray[np.uint8], info: _TensorInfo, begin_of_data: int) -> TensorSource:
    type = _TENSOR_TYPES.get(info.type, f"number {info.type}")
    if type not in BLOCKS:
        raise CheckpointError(f"{path}: {info.name} has type {type}; octavo reads {', '.join(BLOCKS)}")
    begin = begin_of_data + info.offset
    try:
        end = begin + num_bytes(type, info.shape)
    except ValueError as error:
        raise CheckpointError(f"{path}: {info.name}: {error}") from error
    if end > len(data):
        raise CheckpointError(f"{path}: the file is cut short: {info.name} ends at byte {end} of {len(data)}")
    return TensorSource(info.name, data[begin:end], type, info.shape)


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; names without a counterpart stay."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else name
    part, _, kind = name.rpartition(".")
    return f"{_NAMES[part]}.{kind}" if part in _NAMES else name


def _in_hf_order(source: TensorSource, config: dict[str, Any]) -> TensorSource:
    """The tensor under its Hugging Face name. llama.cpp turns neighbouring columns (2i, 2i + 1) of a head, and its
    converter moves the rows of q and k so; Hugging Face turns (i, i + rotary_dim / 2)."""
    name, rows = _hf_name(source.name), source.row_order
    if ".q_proj." in name or ".k_proj." in name:
        head_dim: int = config["head_dim"]
        rows = _row_order(
            source.shape[0], head_dim, round(head_dim * config["rope_parameters"]["partial_rotary_factor"])
        )
    return TensorSource(name, source.data, source.type, source.shape, rows)


def _row_order(num_rows: int, head_dim: int, rotary_dim: int) -> Int32Array:
    turned = np.arange(rotary_dim).reshape(-1, 2).T.reshape(-1)  # 0 2 4 … 1 3 5 …
    head = np.concatenate([turned, np.arange(rotary_dim, head_dim)])
    starts = np.arange(0, num_rows, head_dim)
    order: Int32Array = (starts[:, None] + head[None, :]).reshape(-1).astype(np.int32)
    return order


class _Translation:
    """Metadata in config.json's words."""

    def __init__(
        self, path: Path, architecture: str, metadata: dict[str, Any], tensors: dict[str, TensorSource]
    ) -> None:
        self.path, self.architecture, self.metadata, self.tensors = path, architecture, metadata, tensors

    def config(self) -> dict[str, Any]:
        if self.get("expert_count"):
            raise CheckpointError(f"{self.path}: mixtures of experts are not known to octavo")
        hidden_size, num_heads = self.need("embedding_length"), self.need("attention.head_count")
        head_dim = self.get("attention.key_length") or hidden_size // num_heads
        config = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "vocab_size": self.embedding_rows(),
            "hidden_size": hidden_size,
            "intermediate_size": self.need("feed_forward_length"),
            "num_hidden_layers": self.need("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.get("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "rms_norm_eps": self.need("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self.need("context_length"),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in self.tensors,
            "rope_parameters": self.rope(head_dim),
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.end_tokens(),
        }
        return config

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.path}: the metadata key {self.architecture}.{key} is missing")
        return value

    def embedding_rows(self) -> int:
        if "token_embd.weight" not in self.tensors:
            raise CheckpointError(f"{self.path}: the tensor token_embd.weight is missing")
        return self.tensors["token_embd.weight"].shape[0]

    def end_tokens(self) -> int | list[int] | None:
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = [self.metadata.get(f"tokenizer.ggml.{key}") for key in keys]
        known = list(dict.fromkeys(id for id in ids if id is not None))
        return known[0] if len(known) == 1 else known or None

    def rope(self, head_dim: int) -> dict[str, Any]:
        context = self.need("context_length")
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": self.get("rope.freq_base", 10000.0),
            "partial_rotary_factor": self.get("rope.dimension_count", head_dim) / head_dim,
        }
        scaling = self.get("rope.scaling.type", "linear" if self.get("rope.scale_linear") else "none")
        if scaling not in ("none", "linear", "yarn"):
            raise CheckpointError(f"{self.path}: rope scaling {scaling!r} is not known; known: none, linear, yarn")
        factor = self.get("rope.scaling.factor") or self.get("rope.scale_linear") or 1.0
        if factor != 1.0 and scaling != "none":
            rope |= {"rope_type": scaling, "factor": factor}
        if rope["rope_type"] == "yarn":
            rope["original_max_position_embeddings"] = self.get("rope.scaling.original_context_length", context)
            for name in ("beta_fast", "beta_slow"):
                rope[name] = self.get(f"rope.scaling.yarn_{name}")
            weight = self.get("rope.scaling.attn_factor", 1.0)
            rope["attention_factor"] = weight * (1.0 + 0.1 * float(np.log(factor)))
        if "rope_freqs.weight" in self.tensors:
            rope |= self.divisors(rope["rope_type"], context)
        return rope

    def divisors(self, rope_type: str, context: int) -> dict[str, Any]:
        """`rope_freqs.weight`, one divisor per pair, is how a GGUF spells Llama 3's scaling: longrope with one set."""
        if rope_type != "default":
            raise CheckpointError(f"{self.path}: rope_freqs.weight together with rope scaling {rope_type!r}")
        source = self.tensors["rope_freqs.weight"]
        if source.type != "F32":
            raise CheckpointError(f"{self.path}: rope_freqs.weight has type {source.type}; it must be F32")
        values = np.frombuffer(source.data.tobytes(), "<f4").tolist()
        return {
            "rope_type": "longrope",
            "long_factor": values,
            "short_factor": values,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }

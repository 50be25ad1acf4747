"""What a model is, as numbers: read from a Hugging Face config.json (a GGUF is translated to one before).

Owns the meaning of the config's keys, old and new spellings. Knows no tensors and no files; `rope.py` turns RopeConfig
into a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_ROPE_SPELLINGS = {"su": "longrope"}  # the first Phi-3 checkpoints
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("long_factor", "short_factor"),
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions. Fields that the type does not use stay at their defaults."""

    type: str
    theta: float
    rotary_dim: int  # the first columns of a head that turn
    original_max_position_embeddings: int
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    attention_factor: float | None = None
    long_factor: tuple[float, ...] = ()  # [rotary_dim / 2] each
    short_factor: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None  # tokens that the model looks back; None: all
    rope: RopeConfig

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read config.json's dict. Raises CheckpointError naming the key that is missing or cannot be served."""
        architecture = (config.get("architectures") or [None])[0]
        if not isinstance(architecture, str):
            raise CheckpointError("config.json: architectures is missing; it must name the model's class")
        activation = config.get("hidden_act") or "silu"
        if activation not in ("silu", "swish"):
            raise CheckpointError(
                f"config.json: hidden_act is {activation!r}; {architecture} is served with 'silu' only"
            )
        hidden_size = _count(config, "hidden_size")
        num_heads = _count(config, "num_attention_heads")
        num_kv_heads = _count(config, "num_key_value_heads", num_heads)
        head_dim = _count(config, "head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads is {num_heads}; it must be a multiple of "
                f"num_key_value_heads, {num_kv_heads}"
            )
        return cls(
            architecture=architecture,
            vocab_size=_count(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(config, "intermediate_size"),
            num_layers=_count(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            max_position_embeddings=_count(config, "max_position_embeddings", 2048),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            sliding_window=_sliding_window(config, architecture),
            rope=_read_rope(config, head_dim),
        )

    def check_max_model_len(self, max_model_len: int) -> None:
        """Refuse a length at which the model would need a sliding window, which octavo does not have."""
        if self.sliding_window is not None and self.sliding_window < max_model_len:
            raise CheckpointError(
                f"sliding_window is {self.sliding_window} tokens, less than max_model_len, {max_model_len}; windows "
                f"are not supported: set max_model_len to at most {self.sliding_window}"
            )


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}; it must be a positive whole number")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CheckpointError(f"config.json: {key} is {value!r}; it must be a number")
    return float(value)


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    """The window in effect. `layer_types` beats `sliding_window`; Llama has none, whatever its config says."""
    window = config.get("sliding_window")
    layer_types = config.get("layer_types")
    if layer_types is not None:
        unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
        if unknown:
            raise CheckpointError(
                f"config.json: layer_types has {unknown[0]!r}; known: full_attention, sliding_attention"
            )
        if "sliding_attention" not in layer_types:
            return None
    elif architecture == "LlamaForCausalLM" or config.get("use_sliding_window") is False:
        return None
    return None if window is None else _count(config, "sliding_window")


def _read_rope(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """`rope_parameters` (new) or `rope_theta` and `rope_scaling` (old), as transformers reads them."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = _ROPE_SPELLINGS.get(kind, kind)
    if kind not in ROPE_TYPES or any(isinstance(value, dict) for value in rope.values()):
        shown = kind if kind not in ROPE_TYPES else "one for each layer type"
        raise CheckpointError(f"config.json: rope type {shown!r} is not known; known: {', '.join(ROPE_TYPES)}")
    for key in ("rope_theta", "partial_rotary_factor"):
        rope.setdefault(key, config.get(key))
    for key in _NEEDED.get(kind, ()):
        if rope.get(key) is None:
            raise CheckpointError(f"config.json: rope type {kind!r} needs {key}, which is missing")
    max_positions = _count(config, "max_position_embeddings", 2048)
    # A top-level value is the trained length and comes first (Phi-3 writes it there).
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    rotary_dim = int(head_dim * _number(rope, "partial_rotary_factor", 1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(f"config.json: {rotary_dim} columns of a head would turn; it must be even and at least 2")
    return RopeConfig(
        type=kind,
        theta=_number(rope, "rope_theta", 10000.0),
        rotary_dim=rotary_dim,
        original_max_position_embeddings=int(original or max_positions),
        factor=_scaling_factor(rope, kind, max_positions, original),
        low_freq_factor=_number(rope, "low_freq_factor", 1.0),
        high_freq_factor=_number(rope, "high_freq_factor", 4.0),
        beta_fast=_number(rope, "beta_fast", 32.0) or 32.0,
        beta_slow=_number(rope, "beta_slow", 1.0) or 1.0,
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=rope.get("attention_factor"),
        long_factor=_per_pair(rope, "long_factor", rotary_dim),
        short_factor=_per_pair(rope, "short_factor", rotary_dim),
    )


def _scaling_factor(rope: Mapping[str, Any], kind: str, max_positions: int, original: int | None) -> float | None:
    if rope.get("factor") is not None:
        return _number(rope, "factor")
    if kind in ("yarn", "longrope"):  # by how much the checkpoint was stretched beyond its first length
        return max_positions / (original or max_positions)
    return None


def _per_pair(rope: Mapping[str, Any], key: str, rotary_dim: int) -> tuple[float, ...]:
    values = tuple(rope.get(key) or ())
    if values and len(values) != rotary_dim // 2:
        raise CheckpointError(
            f"config.json: {key} has {len(values)} values; a head has {rotary_dim // 2} pairs to turn"
        )
    return tuple(float(value) for value in values)

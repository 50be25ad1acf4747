"""The Llama architecture: Llama 1 to 3, SmolLM, Mistral without a window, and all that follow it.

Written once for every device: the forward calls ops and nothing else. What a tensor is, only the ops know.
Source: "LLaMA" (arXiv 2302.13971), grouped-query attention (2305.13245).

Shapes: T tokens in the step, L rows of logits, H = num_heads * head_dim, G = num_kv_heads * head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from octavo.models.config import ModelConfig
from octavo.models.weights import MatrixWeight, VectorWeight, Weight
from octavo.ops.api import KVCache, Matrix, Ops, Tensor, Vector


@dataclass(slots=True, frozen=True)
class LlamaLayer:
    attention_norm: Vector  # [hidden]
    qkv: Matrix  # [H + 2G, hidden]
    attention_out: Matrix  # [hidden, H]
    mlp_norm: Vector  # [hidden]
    gate_up: Matrix  # [2 * intermediate, hidden]
    down: Matrix  # [hidden, intermediate]


class Llama:
    WEIGHTS: ClassVar[dict[str, Weight]] = {
        "embed": MatrixWeight({"model.embed_tokens": "vocab_size"}, "hidden_size"),
        "norm": VectorWeight("model.norm", "hidden_size"),
        "lm_head": MatrixWeight({"lm_head": "vocab_size"}, "hidden_size", tied_to="embed"),
    }
    LAYER_PREFIX = "model.layers.{layer}."
    LAYER_WEIGHTS: ClassVar[dict[str, Weight]] = {
        "attention_norm": VectorWeight("input_layernorm", "hidden_size"),
        "qkv": MatrixWeight(
            {"self_attn.q_proj": "q_size", "self_attn.k_proj": "kv_size", "self_attn.v_proj": "kv_size"},
            "hidden_size",
            bias="attention_bias",
        ),
        "attention_out": MatrixWeight({"self_attn.o_proj": "hidden_size"}, "q_size", bias="attention_bias"),
        "mlp_norm": VectorWeight("post_attention_layernorm", "hidden_size"),
        "gate_up": MatrixWeight(
            {"mlp.gate_proj": "intermediate_size", "mlp.up_proj": "intermediate_size"}, "hidden_size", bias="mlp_bias"
        ),
        "down": MatrixWeight({"mlp.down_proj": "hidden_size"}, "intermediate_size", bias="mlp_bias"),
    }

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        layers: Sequence[Mapping[str, Any]],
        rope_table: Tensor,
    ) -> None:
        """`weights` and each of `layers` hold the backend's matrices and vectors by the names of the tables above;
        `rope_table` is float32 [max_model_len, rotary_dim]."""
        self.config = config
        self.embed: Matrix = weights["embed"]  # [vocab, hidden]
        self.norm: Vector = weights["norm"]  # [hidden]
        self.lm_head: Matrix = weights["lm_head"]  # [vocab, hidden]
        self.layers = [LlamaLayer(**layer) for layer in layers]
        self.rope_table = rope_table

    def forward(self, ops: Ops, batch: Any, kv_caches: Sequence[KVCache]) -> Tensor:
        """A step's tokens through all layers: float32 [T, hidden]; each layer's cache gains their K and V."""
        x = ops.embedding(self.embed, batch.token_ids)  # [T, hidden], the residual stream
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            x = ops.add(x, self._attention(ops, layer, x, batch, cache))
            x = ops.add(x, self._mlp(ops, layer, x))
        return x

    def _attention(self, ops: Ops, layer: LlamaLayer, x: Tensor, batch: Any, cache: KVCache) -> Tensor:
        c = self.config
        h = ops.rms_norm(x, layer.attention_norm, c.rms_norm_eps)
        q, k, v = ops.split(ops.linear(h, layer.qkv), (c.q_size, c.kv_size, c.kv_size))  # [T, H], [T, G], [T, G]
        q = ops.rope(q, batch.positions, self.rope_table, c.head_dim)
        k = ops.rope(k, batch.positions, self.rope_table, c.head_dim)
        ops.write_kv(k, v, cache, batch)
        h = ops.attention(q, cache, batch, c.head_dim**-0.5)  # [T, H]
        return ops.linear(h, layer.attention_out)

    def _mlp(self, ops: Ops, layer: LlamaLayer, x: Tensor) -> Tensor:
        h = ops.rms_norm(x, layer.mlp_norm, self.config.rms_norm_eps)
        h = ops.silu_mul(ops.linear(h, layer.gate_up))  # [T, intermediate]
        return ops.linear(h, layer.down)

    def final_states(self, ops: Ops, hidden: Tensor) -> Tensor:
        """float32 [n, hidden]: rows of what forward returned, after the last norm."""
        return ops.rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def logits(self, ops: Ops, hidden: Tensor, batch: Any) -> Tensor:
        """float32 [L, vocab] for the rows in batch.logit_rows of `hidden`, what forward returned."""
        return ops.linear(self.final_states(ops, ops.take_rows(hidden, batch.logit_rows)), self.lm_head)

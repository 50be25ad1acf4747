"""Engines with quantised weights: what the options make of a checkpoint, the logits of the NumPy reference, and the
same bytes in any company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.cli.main import main
from octavo.ops import isa
from octavo.ops.api import Float32Array
from octavo.quant.formats import choose_formats
from support.checkpoints import tiny_llama, write_gguf
from support.engines import all_logits, make_engine, make_request, run_requests
from support.logits import reference_logits

TOKENS = np.random.default_rng(7).integers(0, 379, 40).tolist()
# Checkpoint and options. Q4_K and Q6_K have blocks of 256 values along K; the types of q, k and v differ.
QUANTISED: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("bfloat16", {"quantization": "int8"}),
    "int4": ("bfloat16", {"quantization": "int4"}),
    "gguf": ("mixed.gguf", {}),
}
ACTIVATIONS = ("bfloat16", "int8")
ALL = [*((name, activations) for name in QUANTISED for activations in ACTIVATIONS), ("int8", "int16")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints: `float32` and `bfloat16` folders, `mixed.gguf` and `half.gguf`."""
    folder = tmp_path_factory.mktemp("models")
    for dtype in ("float32", "bfloat16"):
        tiny_llama(folder / dtype, dtype=dtype, hidden=256, heads=4, kv_heads=2)
    types = {"token_embd": "Q8_0", "attn_v": "Q6_K", "attn_": "Q4_K", "ffn_down": "Q5_0", "ffn_": "Q4_1"}
    write_gguf(folder / "mixed.gguf", folder / "float32", types)
    write_gguf(folder / "half.gguf", folder / "float32", "F16")
    return folder


@pytest.mark.parametrize(("name", "activations"), ALL)
def test_logits_are_those_of_the_reference(models: Path, name: str, activations: str) -> None:
    """Where two sums differ in their last place, an activation may be rounded to the next code, and attention carries
    that to the rows behind: four first rows in five agree to float32 roundings, the others to those of codes. The
    codes of int16 are so close to each other that most first rows do not, and so fine that it does little."""
    checkpoint, options = QUANTISED[name]
    variant = isa.available()[0]
    formats = choose_formats(
        options.get("quantization"), activations, "bfloat16", has_blocks=name == "gguf", variant=variant
    )
    engine = make_engine(models / checkpoint, activation_dtype=activations, **options)

    def differences(tokens: list[int]) -> Float32Array:
        expected = reference_logits(models / checkpoint, tokens, "bfloat16", formats=formats, variant=variant)
        return np.abs(all_logits(engine, tokens) - expected)

    if activations != "int16":
        assert sum(differences([token]).max() < 1e-5 for token in TOKENS[:12]) >= 5
    # The logits spread by 2.
    assert differences(TOKENS).mean(axis=1).max() < (0.005 if activations == "int16" else 0.05)


@pytest.mark.parametrize(("name", "activations"), ALL)
def test_a_request_does_not_see_its_company(models: Path, name: str, activations: str) -> None:
    checkpoint, options = QUANTISED[name]
    ways: list[dict[str, Any]] = [
        {"enable_prefix_caching": False},
        {"num_threads": 1, "max_num_batched_tokens": 17},
        {"enforce_eager": True},
        {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 40},
    ]
    answers = []
    for way in ways:
        engine = make_engine(models / checkpoint, activation_dtype=activations, **options, **way)
        for others in (0, 6):
            crowd = [request(f"{others}.{i}", 85 - 11 * i, i) for i in range(others + 1)]
            answers.append(run_requests(engine, crowd)[0])
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("variant", isa.available())
def test_every_variant_is_exact(models: Path, variant: str, activations: str) -> None:
    options = {"isa": variant, "activation_dtype": activations}
    alone = run_requests(make_engine(models / "mixed.gguf", num_threads=1, **options), [request("alone", 85, 0)])
    engine = make_engine(models / "mixed.gguf", max_num_batched_tokens=33, **options)
    crowd = [request(str(i), 85 - 7 * i, i) for i in range(8)]
    assert run_requests(engine, crowd)[0] == alone[0]


def request(name: str, num_tokens: int, seed: int) -> Any:
    tokens = [3 + (i * 29 if i < 40 else i * 31 + seed) % 370 for i in range(num_tokens)]
    return make_request(name, tokens, seed, max_tokens=20, temperature=1.0, logprobs=3, ignore_eos=True)


def test_any_float_checkpoint_can_be_quantised(models: Path) -> None:
    for checkpoint in ("float32", "bfloat16", "half.gguf"):
        engine = make_engine(models / checkpoint, quantization="int8")
        assert engine.info.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("checkpoint", "options", "message"),
    [
        ("mixed.gguf", "--quantization int8", "the checkpoint is quantised already; leave the option out"),
        ("bfloat16", "--quantization int4 --dtype float32", "quantised weights need dtype auto or bfloat16"),
        ("bfloat16", "--activation-dtype int8", "the weights are bfloat16; allowed: auto, bfloat16"),
        ("half.gguf", "--activation-dtype int8", "the weights are bfloat16; allowed: auto, bfloat16"),
        ("float32", "--activation-dtype bfloat16", "the weights are float32; allowed: auto"),
        ("mixed.gguf", "--dtype float32 --activation-dtype int8", "the weights are float32; allowed: auto"),
        ("mixed.gguf", "--activation-dtype int16", "which goes with quantization 'int8' alone"),
        ("bfloat16", "--quantization awq", "quantization is 'awq'; allowed: int8, int4"),
    ],
)
def test_contradictions_end_in_one_line(
    models: Path, checkpoint: str, options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(models / checkpoint), *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
